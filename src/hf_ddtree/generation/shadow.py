"""A second view of a model for compiling: the same weights, with the tapped layers' outputs handed out."""

from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_ddtree.compat import decoder_layers
from hf_ddtree.round import TapCollector

# What the model keeps of its own compiled call, which would hold the model itself.
_LEFT_OUT = ("_compiled_call", "_last_compile_config")


class Shadow:
    """The modules from a model down to its decoder layers once more; everything inside of a layer is shared.

    A graph neither follows hooks that come and go nor reads a collector of the current context. So the hooks that hand
    out tapped states are here, those of collectors are not, and the model is left as it is.

    Args:
        model (`PreTrainedModel`): the model.
        taps (`TapCollector`): which layers' outputs are wanted, in which order.
    """

    def __init__(self, model: PreTrainedModel, taps: TapCollector):
        layers = decoder_layers(model)
        name = next(name for name, module in model.named_modules() if module is layers)
        self.layer_ids, self.stream = list(dict.fromkeys(taps.layer_ids)), taps.stream
        #: The tapped states of the forward that runs, in the order of the layers; empty outside of one.
        self.states: list[torch.Tensor] = []
        self._copies: dict[str, nn.Module] = {}
        for path in [*_prefixes(name), *(f"{name}.{index}" for index in range(len(layers)))]:
            self._copies[path] = object.__new__(type(model.get_submodule(path)))
        self._tapped = {f"{name}.{layer_id}" for layer_id in self.layer_ids}
        self.follow(model)

    @property
    def model(self) -> nn.Module:
        """What to call in place of the model."""
        return self._copies[""]

    def follow(self, model: PreTrainedModel) -> None:
        """Takes over what has changed of the model's own modules, and touches nothing else."""
        for path, copy in self._copies.items():
            module = model.get_submodule(path)
            state = {key: value for key, value in vars(module).items() if not _holds(value, module, key)}
            mine = vars(copy)
            state["_modules"] = _followed(mine.get("_modules", {}), self._children(path, module))
            hooks = {key: hook for key, hook in module._forward_hooks.items() if not TapCollector.is_own(hook)}
            if path in self._tapped:
                hooks[-1] = mine["_forward_hooks"].get(-1) if "_forward_hooks" in mine else self._hook()
            state["_forward_hooks"] = _followed(mine.get("_forward_hooks", OrderedDict()), hooks)
            _followed(mine, state)

    def _children(self, path: str, module: nn.Module) -> dict[str, Any]:
        prefix = f"{path}." if path else ""
        return {name: self._copies.get(prefix + name, child) for name, child in module._modules.items()}

    def _hook(self) -> Any:
        states, stream = self.states, self.stream

        def hand_out(_module: nn.Module, _inputs: Any, output: Any) -> None:
            state = output[0] if isinstance(output, tuple) else output
            states.append(state if stream is None else state[stream])

        return hand_out


def runs_by_itself(model: PreTrainedModel) -> bool:
    """Whether the modules down to the decoder layers run their own code, not that of a hook which moves weights."""
    layers = decoder_layers(model)
    name = next(name for name, module in model.named_modules() if module is layers)
    modules = [*(model.get_submodule(path) for path in _prefixes(name)), *layers]
    return not any("forward" in vars(module) or hasattr(module, "_hf_hook") for module in modules)


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return ["", *(".".join(parts[: end + 1]) for end in range(len(parts)))]


def _holds(value: Any, module: nn.Module, key: str) -> bool:
    return key in _LEFT_OUT or getattr(value, "__self__", None) is module


def _followed(mine: Any, wanted: Any) -> Any:
    """`mine` with the entries of `wanted`, changed only where they differ: a graph may depend on them."""
    for key in [key for key in mine if key not in wanted]:
        del mine[key]
    for key, value in wanted.items():
        if key not in mine or mine[key] is not value:
            mine[key] = value
    return mine
