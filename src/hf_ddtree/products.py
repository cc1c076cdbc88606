"""fp32 products on a CPU: by oneDNN where it is faster than the BLAS that PyTorch's own operators call."""

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

#: oneDNN takes this much less time where PyTorch's MKL leaves AVX-512 unused, as on AMD's CPUs: half. Less of a gain
#: is not worth another order of summation.
WORTHWHILE = 0.8

#: Multiplications and weights below which the call itself costs what it saves: one row of a small weight, which the
#: caches may still hold.
LEAST_PRODUCT, LEAST_WEIGHT = 1 << 22, 1 << 18

#: Weights of a whole model that caches may hold from one forward to the next, so that any of them counts as small.
CACHED_WEIGHTS = 1 << 23

#: Weights of a linear layer below which even the question is not worth asking.
LEAST_LAYER = 1 << 17

# 16 MiB, as weights that are read from memory: in the caches the gap is smaller, and on some CPUs right at the bar.
_ROWS, _INNER, _COLUMNS, _TRIALS = 16, 512, 8192, 6


def linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """What [`torch.nn.functional.linear`] gives, by oneDNN; without a gradient.

    Args:
        states (`torch.Tensor` of shape `(..., inner)`): fp32, on the CPU.
        weight (`torch.Tensor` of shape `(columns, inner)`): fp32, of any strides.
        bias (`torch.Tensor` of shape `(columns,)`, *optional*): fp32.
    """
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(states, weight, bias, "none", [], "")
    return result


def pays(rows: int, inner: int, columns: int) -> bool:
    """Whether a product of `(rows, inner)` and `(inner, columns)` is worth taking from PyTorch's operators."""
    return rows >= fewest_rows(inner, columns) and available() and is_faster()


def fewest_rows(inner: int, columns: int, cached: bool = False) -> int:
    """From how many rows on a product with a weight of `(inner, columns)` is large enough.

    Args:
        cached (`bool`, *optional*, defaults to `False`): whether the caches hold the weight, whatever its size.
    """
    weight = inner * columns
    return 1 if weight >= LEAST_WEIGHT and not cached else -(-LEAST_PRODUCT // max(weight, 1))


def available() -> bool:
    """Whether this PyTorch has oneDNN, and `torch.backends.mkldnn.flags(enabled=False)` has not turned it off."""
    return torch.backends.mkldnn.is_available() and bool(torch._C._get_mkldnn_enabled())


@lru_cache(maxsize=1)
def is_faster() -> bool:
    """Whether oneDNN takes [`WORTHWHILE`] of the time; measured once a process, in some 20 milliseconds."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    states, weight = torch.zeros(_ROWS, _INNER), torch.zeros(_COLUMNS, _INNER)
    with torch.no_grad():
        usual, other = _fastest(F.linear, linear, (states, weight))
    return other < WORTHWHILE * usual


def _fastest(usual: Callable[..., Any], other: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[float, float]:
    """Seconds of the fastest call of each, called in turn, so that a busy machine slows both."""
    seconds = {usual: float("inf"), other: float("inf")}
    for _ in range(_TRIALS):
        for function in seconds:
            started = time.perf_counter()
            function(*arguments)
            seconds[function] = min(seconds[function], time.perf_counter() - started)
    return seconds[usual], seconds[other]
