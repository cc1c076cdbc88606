"""Costs: minus log-probabilities on a grid fine enough to ignore and coarse enough to add exactly."""

import numpy as np

# Multiples of 2**-36 nats below 2**17 fit in the 53 bits of a float64, so their sums carry no rounding error.
GRID = 2.0**36
EXACT_LIMIT = 2.0**16
POSITIVE_TOLERANCE = 1e-3


def costs_of(log_probs: np.ndarray, ranked: bool = False) -> np.ndarray:
    """
    Checks rows of log-probabilities and returns their costs, in nats.

    A cost is `-log_prob` rounded to a multiple of 2**-36 nats (1.5e-11). Path costs below 2**16 nats are then exact in
    float64 whatever the order of summation, so two builders that add differently still agree on every comparison.

    Args:
        log_probs (`np.ndarray` of shape `(rows, width)`):
            Natural log-probabilities, each row sorted from the most probable down. `-inf` marks an impossible token.
        ranked (`bool`, *optional*, defaults to `False`):
            Whether they come from [`top_marginals`]: of float32, sorted, and NaN in a whole row or not at all.

    Returns:
        `np.ndarray` of shape `(rows, width)`, float64: ascending, `inf` for impossible tokens.

    Raises:
        `ValueError`: on NaN, on a row that is not sorted, or on a value above 0.
    """
    log_probs = np.asarray(log_probs, dtype=np.float64)
    if log_probs.size == 0:
        return np.zeros_like(log_probs)
    highest = log_probs[:, 0].max()
    # Both comparisons are false for NaN, so one pass finds every fault.
    if not highest <= POSITIVE_TOLERANCE or not (ranked or (log_probs[:, :-1] >= log_probs[:, 1:]).all()):
        _raise_fault(log_probs)
    if ranked:
        costs = log_probs * -GRID
    else:
        with np.errstate(over="ignore"):
            costs = log_probs * -GRID
    np.rint(costs, out=costs)
    costs *= 1.0 / GRID
    if highest > 0:
        np.maximum(costs, 0.0, out=costs)
    return costs


def _raise_fault(log_probs: np.ndarray) -> None:
    nan = np.argwhere(np.isnan(log_probs))
    if len(nan):
        row, rank = nan[0]
        raise ValueError(
            f"log_probs holds {len(nan)} NaN value(s), the first in row {row} at rank {rank}: a tree cannot be ranked "
            "by NaN. Check the drafter's logits (a row that is entirely -inf gives NaN too)."
        )
    highest = log_probs[:, 0].max()
    if highest > POSITIVE_TOLERANCE:
        raise ValueError(
            f"log_probs must be at most 0, got {highest:g}: pass log-probabilities "
            "(`torch.log_softmax(logits, -1)` or `top_marginals(logits, k)`), not logits."
        )
    raise ValueError(
        "each row of log_probs must be sorted from the most probable token down: pass `torch.sort(descending=True)` "
        "values, or use `build_draft_tree`, which sorts."
    )
