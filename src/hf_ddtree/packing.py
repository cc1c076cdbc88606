"""Weights laid out once for the CPU's matrix kernels, so that a forward over few rows costs little more than one row.

A product of a few rows spends its time reading the weights, in an order that suits the kernel badly unless they are
reordered first. oneDNN does that once here; `torch.compile` with `freezing` has the same idea.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

# The layout is chosen for so many rows; others are served by it as well as by one of their own.
ROWS = 16


@dataclass(frozen=True)
class PackedWeights:
    """What [`packed_weights`] has packed.

    Args:
        layers (`int`): linear layers with packed weights.
        left (`int`): linear layers left as they are: quantised, offloaded, or of a dtype that is not served.
        bytes (`int`): memory that the packed copies take, beside the weights themselves.
    """

    layers: int
    left: int
    bytes: int


class _PackedForward:
    """Stands in for the `forward` of one linear layer; see [`packed_weights`].

    The plain forward is taken where a gradient is recorded, under autocast, while compiling, and for a weight that
    may not be packed any more. A weight that was changed is packed again.
    """

    def __init__(self, layer: nn.Linear):
        self.layer = layer
        self.open = True
        self._seen: _Seen | None = None
        self._packed: torch.Tensor | None = None

    def __reduce__(self) -> Any:
        # A copy of the model has packed weights of its own, made when it is first used.
        return _PackedForward, (self.layer,)

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self.layer.weight, self.layer.bias
        plain = (
            torch.compiler.is_compiling()
            or input.dtype != weight.dtype
            or (torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad))
            or torch.is_autocast_enabled("cpu")
            or input.numel() == 0
            or input.device.type != "cpu"
        )
        packed = None if plain else self.packed()
        if packed is None:
            return F.linear(input, weight, bias)
        return torch.ops.mkldnn._linear_pointwise(input, packed, bias, "none", [], "")

    def packed(self) -> torch.Tensor | None:
        """The layer's weight as it is now, packed; `None` if it cannot be."""
        seen, packed = self._seen, self._packed
        if packed is None or seen is None or not seen.unchanged(self.layer.weight):
            seen = packed = None
            if self.open and packable(self.layer):
                weight = self.layer.weight.detach()
                seen, packed = _Seen(weight), torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
            self._seen, self._packed = seen, packed
        return packed

    def close(self) -> None:
        self.open, self._seen, self._packed = False, None, None


class _Seen:
    """Tells whether a weight is the one that was packed, in less than a microsecond.

    PyTorch counts changes in place, but not those through `.data`, by which PEFT merges adapters: two of the numbers
    are compared too.
    """

    def __init__(self, weight: torch.Tensor):
        self.version, self.address = _version(weight), weight.data_ptr()
        self.numbers = weight.view(-1).view(torch.int32 if weight.dtype == torch.float32 else torch.int16).numpy()
        self.places = len(self.numbers) // 2, len(self.numbers) - 1
        self.sample = [self.numbers.item(place) for place in self.places]

    def unchanged(self, weight: torch.Tensor) -> bool:
        return (
            weight.data_ptr() == self.address
            and _version(weight) == self.version
            and [self.numbers.item(place) for place in self.places] == self.sample
        )


def _version(weight: torch.Tensor) -> int:
    return 0 if weight.is_inference() else weight._version


def packable(layer: nn.Module) -> bool:
    """Whether the layer is a plain linear layer whose weight oneDNN can lay out on this machine."""
    if type(layer) is not nn.Linear or type(layer.weight) not in (nn.Parameter, torch.Tensor):
        return False
    weight = layer.weight
    return weight.device.type == "cpu" and weight.numel() > 0 and weight.is_contiguous() and _served(weight.dtype)


def _served(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    ops = torch.ops.mkldnn
    return (
        dtype == torch.float32
        or (dtype == torch.bfloat16 and ops._is_mkldnn_bf16_supported())
        or (dtype == torch.float16 and ops._is_mkldnn_fp16_supported())
    )


_lock = threading.Lock()
# id of a layer -> [its forward with packed weights, how many contexts hold it]
_held: dict[int, list[Any]] = {}


@contextmanager
def packed_weights(*models: nn.Module) -> Iterator[PackedWeights]:
    r"""
    Inside, the linear layers of `models` run with weights that were reordered for the CPU (fp32, bf16, fp16).

    ```python
    with hf_ddtree.packed_weights(model, drafter):
        output = model.generate(**inputs, assistant_model=drafter, generation_config=DDTreeConfig(budget=15))
    ```

    It serves every forward of these models, with trees or without. The weights stay where they are and a packed copy
    lies beside each, which takes as much memory again. Results are those of another matrix kernel: equal up to the
    rounding of sums. When the last context of a model ends, by an error too, its layers are as they were.

    A weight that an optimizer, `load_state_dict` or the merging of an adapter changes inside is packed again. A change
    of single numbers through `.data` is not noticed.

    Args:
        models (`nn.Module`): such as the target and its drafter; layers that they share are packed once.

    Returns:
        [`PackedWeights`], as the value of `with`.

    Raises:
        ValueError: if no linear layer can be packed; the message says why.
    """
    modules = {id(module): module for model in models for module in model.modules()}
    linear = [module for module in modules.values() if isinstance(module, nn.Linear)]
    taken: list[tuple[nn.Linear, list[Any]]] = []
    try:
        for layer in linear:
            if packable(layer):
                _take(layer, taken)
        if not taken:
            raise ValueError(_nothing_to_pack(models, linear))
        weights = [layer.weight for layer, _ in taken]
        size = sum(weight.numel() * weight.element_size() for weight in weights)
        yield PackedWeights(len(taken), len(linear) - len(taken), size)
    finally:
        with _lock:
            for layer, entry in taken:
                entry[1] -= 1
                if entry[1] == 0:
                    _give_back(layer, entry[0])


def _take(layer: nn.Linear, taken: list[Any]) -> None:
    with _lock:
        entry = _held.get(id(layer))
        if entry is None:
            if "forward" in vars(layer):
                # A hook that brings the weights has its own way to run the layer.
                return
            entry = [_PackedForward(layer), 0]
            entry[0].packed()
            _held[id(layer)] = entry
        entry[1] += 1
        taken.append((layer, entry))
        layer.forward = entry[0]  # type: ignore[method-assign]


def _give_back(layer: nn.Linear, forward: _PackedForward) -> None:
    # What was put over ours inside goes on to call it, and finds the plain forward.
    if vars(layer).get("forward") is forward:
        del layer.forward
    forward.close()
    _held.pop(id(layer), None)


def _nothing_to_pack(models: tuple[nn.Module, ...], linear: list[nn.Linear]) -> str:
    names = ", ".join(type(model).__name__ for model in models) or "no model"
    if linear and not torch.backends.mkldnn.is_available():
        return f"`packed_weights` needs oneDNN, which this build of PyTorch ({torch.__version__}) does not have."
    weights = [layer.weight for layer in linear]
    found = sorted({f"{type(weight).__name__} {weight.dtype} on {weight.device}" for weight in weights})
    return (
        f"`packed_weights` found nothing to pack in {names}: it takes linear layers with plain weights of fp32, or of "
        f"bf16 or fp16 where the CPU computes in them, on the CPU, but found {', '.join(found) or 'none'}. Generate "
        "without it."
    )
