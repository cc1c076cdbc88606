"""Weights laid out once for the CPU's matrix kernels, so that a forward over few rows costs little more than one row.

A product of a few rows spends its time reading the weights, in an order that suits the kernel badly unless they are
reordered first. oneDNN does that once here; `torch.compile` with `freezing` has the same idea.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
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


class _Pack:
    """A packed weight, and what tells in less than a microsecond whether the weight is still the one that was packed.

    PyTorch counts changes in place, but not those through `.data`, by which PEFT merges adapters: two of the numbers
    are compared too.
    """

    def __init__(self, weight: torch.Tensor):
        weight = weight.detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        self.version = _version(weight)
        # This view also keeps the memory, so that no other weight comes to lie at its address.
        self.numbers = weight.view(-1).view(torch.int32 if weight.dtype == torch.float32 else torch.int16).numpy()
        self.places = len(self.numbers) // 2, len(self.numbers) - 1
        self.sample = [self.numbers.item(place) for place in self.places]

    def fits(self, weight: torch.Tensor) -> bool:
        """Whether `weight`, which lies where the packed one did, has its numbers."""
        return _version(weight) == self.version and [self.numbers.item(at) for at in self.places] == self.sample


def _version(weight: torch.Tensor) -> int:
    return 0 if weight.is_inference() else weight._version


_lock = threading.Lock()
# id of a layer -> [the layer, how many contexts hold it]
_held: dict[int, list[Any]] = {}
# address of a held layer's weight -> its pack
_packs: dict[int, _Pack] = {}


def forward(layer: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """Stands in for the `forward` of a linear layer; see [`packed_weights`]. In a copy of the model it is as before.

    The plain product is taken where a gradient is recorded, under autocast, and for a weight that is not packed.
    """
    weight, bias = layer.weight, layer.bias
    if (
        input.dtype != weight.dtype
        or (torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad))
        or torch.is_autocast_enabled("cpu")
        or input.numel() == 0
        or input.device.type != "cpu"
    ):
        return F.linear(input, weight, bias)
    if torch.compiler.is_compiling():
        # A graph holds the question, not the packed weight.
        return torch.ops.hf_ddtree.packed_linear(input, weight, bias)
    return product(input, weight, bias)


def product(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The linear layer's output by the packed weight, or by the plain one where there is none."""
    pack = _packs.get(weight.data_ptr())
    if pack is None or not pack.fits(weight):
        pack = _pack(weight)
    if pack is None:
        return F.linear(input, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(input, pack.packed, bias, "none", [], "")


_library = torch.library.Library("hf_ddtree", "DEF")
_library.define("packed_linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor")
_library.impl("packed_linear", product, "CPU")


@torch.library.register_fake("hf_ddtree::packed_linear")
def _(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


def _pack(weight: torch.Tensor) -> _Pack | None:
    """Packs the weight of a held layer as it is now; `None` for any other."""
    with _lock:
        address = weight.data_ptr()
        if not any(layer.weight.data_ptr() == address and packable(layer) for layer, _ in _held.values()):
            return None
        _packs[address] = pack = _Pack(weight)
        _drop_packs()
        return pack


def _drop_packs() -> None:
    addresses = {layer.weight.data_ptr() for layer, _ in _held.values()}
    for address in [address for address in _packs if address not in addresses]:
        del _packs[address]


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
    taken: list[nn.Linear] = []
    try:
        for layer in linear:
            if packable(layer) and _take(layer):
                taken.append(layer)
        if not taken:
            raise ValueError(_nothing_to_pack(models, linear))
        weights = {layer.weight.data_ptr(): layer.weight for layer in taken}
        for weight in weights.values():
            _pack(weight)
        size = sum(weight.numel() * weight.element_size() for weight in weights.values())
        yield PackedWeights(len(taken), len(linear) - len(taken), size)
    finally:
        with _lock:
            for layer in taken:
                _give_back(layer)
            _drop_packs()


def _take(layer: nn.Linear) -> bool:
    """Whether the layer is held now; one that a hook runs, which may bring its weights, is left alone."""
    with _lock:
        if id(layer) not in _held and "forward" in vars(layer):
            return False
        _held.setdefault(id(layer), [layer, 0])[1] += 1
        if "forward" not in vars(layer):
            layer.forward = MethodType(forward, layer)  # type: ignore[method-assign]
        return True


def _give_back(layer: nn.Linear) -> None:
    entry = _held[id(layer)]
    entry[1] -= 1
    if entry[1] == 0:
        del _held[id(layer)]
        # What was put over ours inside goes on to call it, and finds the plain product.
        if getattr(vars(layer).get("forward"), "__func__", None) is forward:
            del layer.forward


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
