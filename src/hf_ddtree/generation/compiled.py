"""The target's forward over a tree, compiled: one graph for each number of rows, kept with the model."""

import inspect
import itertools
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from hf_ddtree.attention import ATTEND, compiled_attention
from hf_ddtree.compat import CACHE_NAME, asks_to_compile, is_never_compiled
from hf_ddtree.generation.ranks import Ranks
from hf_ddtree.generation.shadow import Shadow, runs_by_itself
from hf_ddtree.round import TapCollector

logger = logging.get_logger(__name__)

_graphs: "weakref.WeakKeyDictionary[PreTrainedModel, dict[Any, _Graphs]]" = weakref.WeakKeyDictionary()
_serial = itertools.count()


class _Graphs:
    """The compiled forwards of one model for one setting, by the number of rows."""

    def __init__(self, model: PreTrainedModel, taps: TapCollector, settings: dict[str, Any]):
        self.shadow, self.settings = Shadow(model, taps), settings
        self.steps: dict[int, Callable[..., Any]] = {}
        self.lock = threading.Lock()

    def __call__(self, inputs: dict[str, Any]) -> tuple[Any, list[torch.Tensor]]:
        rows, states = inputs["input_ids"].shape[1], self.shadow.states
        # One thread at a time: where a forward cannot be a graph, its hooks write to one list.
        with self.lock:
            if rows not in self.steps:
                self.steps[rows] = torch.compile(_own(tree_forward, rows), **self.settings)
            try:
                return self.steps[rows](self.shadow.model, states, inputs)
            finally:
                del states[:]


def tree_forward(model: Any, states: list[torch.Tensor], inputs: dict[str, Any]) -> tuple[Any, list[torch.Tensor]]:
    """What is compiled: the outputs of a model and the states that its hooks put into `states`."""
    del states[:]
    outputs = model(**inputs, return_dict=True)
    tapped = list(states)
    del states[:]
    return outputs, tapped


def _own(function: Any, rows: int) -> Any:
    """A copy of a function that shares no compiled code with others, nor the sizes that those have seen."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{rows}_{next(_serial)}")
    return types.FunctionType(code, function.__globals__, code.co_name)


class CompiledForward:
    """Runs the target on trees of one size each, compiled as plain `generate` compiles its decoding forward.

    Args:
        target (`PreTrainedModel`): the model that verifies.
        taps (`TapCollector`): told the tapped states, which the graph returns.
        generation_config (`GenerationConfig`): of the call; its `compile_config` says how to compile.
    """

    def __init__(self, target: PreTrainedModel, taps: TapCollector, generation_config: GenerationConfig):
        self.target, self.taps = target, taps
        self.settings = generation_config.compile_config.to_dict()
        self.route, attend = compiled_attention(target)
        # A forward that takes no further arguments is left in several graphs, between which layers see the tree.
        parameters = inspect.signature(type(target).forward).parameters.values()
        takes_more = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        self.more = {ATTEND: attend} if takes_more else {}
        self._graphs: _Graphs | None = None
        # Compiling starts with the first round; a setting that PyTorch does not take is told before.
        torch.compile(tree_forward, **self.settings)

    def __call__(self, inputs: dict[str, Any]) -> Any:
        """The target's outputs for `inputs`, whose masks are made; the states reach the collector."""
        if self._graphs is None:
            self._graphs = self._graphs_for(inputs)
        outputs, states = self._graphs({**inputs, **self.more})
        # Hooks fire from the first layer to the last; a drafter may name its taps in another order.
        self.taps.put(dict(zip(sorted(self._graphs.shadow.layer_ids), states, strict=True)))
        return self._lasting(outputs)

    def _graphs_for(self, inputs: dict[str, Any]) -> _Graphs:
        """Those that the model has already, or none yet; after the prefill, which may have put hooks on the model."""
        asked = tuple(bool(inputs.get(name)) for name in ("output_hidden_states", "output_attentions"))
        key = (repr(sorted(self.settings.items(), key=str)), tuple(self.taps.layer_ids), self.taps.stream, asked)
        known = _graphs.setdefault(self.target, {})
        if key not in known:
            known[key] = _Graphs(self.target, self.taps, self.settings)
        known[key].shadow.follow(self.target)
        return known[key]

    def _lasting(self, outputs: Any) -> Any:
        """The outputs with copies of what is kept beyond the round: a CUDA graph writes over its outputs."""
        for name in ("hidden_states", "attentions"):
            kept = outputs.get(name)
            if kept is not None and self.target.device.type != "cpu":
                outputs[name] = tree_map_only(torch.Tensor, torch.clone, kept)
        return outputs


def compiled_forward(
    target: PreTrainedModel,
    taps: TapCollector,
    ranks: Ranks,
    recurrent: bool,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    attention_route: str,
) -> CompiledForward | None:
    """The compiled forward that a call asks for; `None` if it runs uncompiled.

    A static cache and a `compile_config` ask for it, unless `disable_compile` is set. Plain `generate` compiles a
    static cache on an accelerator without a config as well. Where only trees cannot be compiled, a warning says why,
    once.

    Args:
        target, taps, ranks, generation_config, model_kwargs: of the call.
        recurrent (`bool`): whether layers of the target keep recurrent states.
        attention_route (`str`): as in [`DDTreeConfig`].

    Raises:
        ValueError: if compiling for a CPU would fail for want of a C++ compiler, or would freeze the cache.
    """
    if not asks_to_compile(target, model_kwargs, generation_config):
        return None
    reason = None
    if recurrent:
        reason = "its recurrent layers read trees by code that is not compiled"
    elif model_kwargs[CACHE_NAME].offloading:
        reason = "the cache is offloaded"
    elif ranks.gathering or ranks.group is not None:
        reason = "its weights are spread over processes"
    elif attention_route == "kernel":
        reason = "`attention_route='kernel'` asks for the Triton kernel, which a compiled forward does not take"
    elif is_never_compiled(target):
        reason = "Transformers does not compile this model either"
    elif not runs_by_itself(target):
        reason = "hooks run its layers, such as those that spread a model over devices"
    if reason is not None:
        logger.warning_once(f"Trees are verified uncompiled by {type(target).__name__}: {reason}.")
        return None
    check_compiler(target, generation_config)
    return CompiledForward(target, taps, generation_config)


def check_compiler(target: PreTrainedModel, generation_config: GenerationConfig) -> None:
    """Raises `ValueError` if PyTorch's default compiler would freeze the cache, or finds no C++ compiler for a CPU."""
    config = generation_config.compile_config
    if config is not None and config.backend != "inductor":
        return
    import torch._inductor.config

    options = (config.options if config is not None else None) or {}
    if options.get("freezing", torch._inductor.config.freezing):
        raise ValueError(
            "A compiled forward of a static cache cannot be had with inductor's `freezing`, which takes the cache for "
            "a constant: set `torch._inductor.config.freezing = False` or drop it from `CompileConfig(options=...)`. "
            "On a CPU `hf_ddtree.packed_weights` packs the weights, of a compiled forward too."
        )
    if target.device.type != "cpu":
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ValueError(
            "`compile_config` asks for a compiled forward, which on a CPU needs a C++ compiler, and PyTorch finds "
            "none: install g++ or clang++, or leave `compile_config` unset to generate uncompiled. "
            "`hf_ddtree.packed_weights` speeds up small trees without one."
        ) from error
