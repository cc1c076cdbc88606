"""The linear layers of a model, computed by oneDNN for the length of a generate where that is faster."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hf_ddtree import products
from hf_ddtree.compat import all_modules

_INSIDE: ContextVar[bool] = ContextVar("ddtree_fast_linear_layers", default=False)
_lock = threading.Lock()
# A layer's id -> how many generates hold it.
_held: dict[int, int] = {}


@contextmanager
def fast_linear_layers(*models: nn.Module) -> Iterator[None]:
    """Inside, this thread's forwards compute the models' plain fp32 linear layers on the CPU by the faster library.

    Layers of another kind, dtype or device, quantised, sharded, adapted or hooked into by their `forward`, stay as
    they are. Other threads are unchanged, and nothing stays on a module afterwards.

    Args:
        models (`nn.Module`): whose layers to serve.
    """
    layers = [layer for model in models for layer in _plain_layers(model)] if products.available() else []
    if layers and not products.is_faster():
        layers = []
    cached = sum(layer.weight.numel() for layer in layers) < products.CACHED_WEIGHTS
    token = _INSIDE.set(True)
    taken = []
    try:
        with _lock:
            for layer in layers:
                _held[id(layer)] = _held.get(id(layer), 0) + 1
                taken.append(layer)
                inner, rows = layer.in_features, products.fewest_rows(layer.in_features, layer.out_features, cached)
                layer.__dict__["forward"] = partial(_forward, layer, inner * rows)
        yield
    finally:
        with _lock:
            for layer in taken:
                _held[id(layer)] -= 1
                if _held[id(layer)] == 0:
                    del _held[id(layer)], layer.__dict__["forward"]
        _INSIDE.reset(token)


def _plain_layers(model: nn.Module) -> list[nn.Linear]:
    """Layers whose arithmetic is `nn.Linear`'s own, over a whole fp32 weight on the CPU that is worth the trouble."""
    return [module for module in all_modules(model) if type(module) is nn.Linear and _is_served(module)]


def _is_served(layer: nn.Linear) -> bool:
    # A weight or a bias that is made anew at each use is no parameter of this name.
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    return (
        "bias" in layer._parameters
        and ("forward" not in layer.__dict__ or id(layer) in _held)
        and weight is not None
        and weight.numel() >= products.LEAST_LAYER
        and _is_plain(weight)
        and (bias is None or _is_plain(bias))
    )


def _is_plain(weight: torch.Tensor) -> bool:
    return type(weight) is nn.Parameter and weight.dtype is torch.float32 and weight.device.type == "cpu"


def _forward(layer: nn.Linear, fewest: int, input: torch.Tensor) -> torch.Tensor:
    # Every layer of every round comes by here, so the questions are few and the quickest first. Attributes that are
    # parameters are found by a search, which takes longer than the rest, so they are asked of their own dictionary.
    parameters: Any = layer._parameters
    weight = parameters.get("weight")
    if weight is None:
        return F.linear(input, layer.weight, layer.bias)
    if input.numel() >= fewest and _INSIDE.get() and _serves(input, weight):
        return products.linear(input, weight, parameters.get("bias"))
    return F.linear(input, weight, parameters.get("bias"))


def _serves(states: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the product is plain and fp32; a weight that is gathered for a forward may be gone here."""
    shape = weight.shape
    return (
        len(shape) == 2
        and states.shape[-1] == shape[1]
        and type(states) is torch.Tensor
        and states.dtype is torch.float32
        and _is_plain(weight)
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )
