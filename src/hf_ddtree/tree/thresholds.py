"""The cost of a budget's last node under marginals, found from costs alone."""

import heapq
from bisect import bisect_left
from functools import lru_cache

import numpy as np

UNBOUNDED = float(np.finfo(np.float64).max)


def threshold_by_heap(rows: list[list[float]], budget: int) -> tuple[float, int]:
    """
    The highest of the `budget` lowest path costs, and how many of these equal it, by best-first search without paths.

    When there are fewer than `budget` possible paths, all of them count.

    Args:
        rows (`list[list[float]]`): Ascending costs of each position's tokens, the first of each finite.
        budget (`int`): At least 1.
    """
    width, last = len(rows[0]), len(rows) - 1
    firsts = [row[0] for row in rows]
    found: list[float] = []
    heap = [(firsts[0], 0, 0, 0.0)]
    while heap and len(found) < budget:
        cost, depth, rank, base = heap[0]
        found.append(cost)
        rank += 1
        sibling = base + rows[depth][rank] if rank < width else UNBOUNDED
        if sibling < UNBOUNDED:
            heapq.heapreplace(heap, (sibling, depth, rank, base))
        else:
            heapq.heappop(heap)
        if depth < last:
            heapq.heappush(heap, (cost + firsts[depth + 1], depth + 1, 0, cost))
    return found[-1], len(found) - bisect_left(found, found[-1])


def threshold_by_level(costs: np.ndarray, budget: int) -> tuple[float, int]:
    """
    What [`threshold_by_heap`] gives, a level at a time.

    With a level's costs sorted, the child of rank r of its node i (both from 0) costs at least as much as the first
    i+1 nodes and their first r+1 children each, itself included: only pairs with (i+1)(r+2) <= budget can matter.

    Args:
        costs (`np.ndarray` of shape `(depth, width)`): Ascending rows, the first of each finite.
        budget (`int`): At least 1.
    """
    pair_parents, pair_ranks, pair_counts = _useful_pairs(budget, costs.shape[1])
    cheapest = costs[0, : int(costs[0].searchsorted(np.inf))][:budget]
    level = cheapest[: budget // 2]
    limit = cheapest[-1] if len(cheapest) == budget else UNBOUNDED
    for row in costs[1:]:
        useful_parents = level.searchsorted(limit - row[0], side="right")
        if useful_parents == 0:
            break
        pairs = pair_counts[useful_parents]
        level = level.take(pair_parents[:pairs])
        level += row.take(pair_ranks[:pairs])
        level = _lowest(level.compress(level <= limit), budget)
        cheapest = _lowest(np.concatenate((cheapest, level)), budget)
        if len(cheapest) == budget:
            limit = cheapest[-1]
        level.sort()
        level = level[: budget // 2]
    threshold = cheapest.max()
    return float(threshold), int(np.count_nonzero(cheapest == threshold))


def _lowest(values: np.ndarray, count: int) -> np.ndarray:
    """The `count` lowest of an array this function may reorder, the highest of them last."""
    if len(values) >= count:
        values.partition(count - 1)
    return values[:count]


@lru_cache(maxsize=32)
def _useful_pairs(budget: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pairs (i, r) with (i+1)(r+2) <= budget and r < width, by parent, and how many the first i parents have."""
    useful = budget // 2
    per_parent = np.minimum(budget // np.arange(1, useful + 1) - 1, width)
    counts = np.concatenate(([0], np.cumsum(per_parent)))
    parents = np.repeat(np.arange(useful), per_parent)
    return parents, np.arange(len(parents)) - counts[parents], counts
