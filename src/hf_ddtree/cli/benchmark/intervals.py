"""Medians and bootstrap intervals over prompts."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hf_ddtree.cli.benchmark.extra import needs

RESAMPLES = 9999


class Estimate(NamedTuple):
    """A figure and its 95% interval, which fewer than two prompts do not have."""

    value: float
    low: float | None
    high: float | None


def _ratio_of_medians(above: Any, below: Any, axis: int = -1) -> Any:
    return np.median(above, axis=axis) / np.median(below, axis=axis)


def _ratio_of_sums(above: Any, below: Any, axis: int = -1) -> Any:
    return np.sum(above, axis=axis) / np.sum(below, axis=axis)


def ratio_of_medians(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """Median over median of values paired by prompt."""
    return _estimate(_ratio_of_medians, above, below)


def ratio_of_sums(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """Sum over sum of values paired by prompt."""
    return _estimate(_ratio_of_sums, above, below)


def _estimate(statistic: Callable[..., Any], *samples: Sequence[float]) -> Estimate:
    """The interval is the percentile bootstrap's: whole prompts are drawn again, with a fixed seed."""
    value = float(statistic(*(np.asarray(sample, dtype=float) for sample in samples)))
    if len(samples[0]) < 2:
        return Estimate(value, None, None)
    result = needs("scipy.stats").bootstrap(
        samples,
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    low, high = result.confidence_interval
    return Estimate(value, float(low), float(high))
