"""The level-wise builder's short way for marginals: find the cost of the last node, then write what costs no more."""

from bisect import bisect_left, bisect_right

import numpy as np
import torch

from hf_ddtree.integers import long_tensor
from hf_ddtree.tree import compiled
from hf_ddtree.tree.costs import EXACT_LIMIT
from hf_ddtree.tree.draft_tree import DraftTree
from hf_ddtree.tree.levels import Levels
from hf_ddtree.tree.thresholds import threshold_by_heap, threshold_by_level

# Measured behind a model's forward: up to this budget plain Python finishes before array operations have paid for
# their calls, and is so fast that loading numba, which takes a second, would not pay.
PYTHON_BUDGET = 96


def build_from_marginals(costs: np.ndarray, token_ids: np.ndarray, budget: int, anchor: int) -> DraftTree | None:
    """
    The tree of [`build_with_heap`], node for node, from independent per-position distributions.

    The tree is every path that costs less than its costliest node, plus as many paths of exactly that cost as the
    budget has room for, first in preorder. So costs alone give the threshold, and ties are settled while writing.

    Args:
        costs (`np.ndarray` of shape `(depth, width)`): From [`costs_of`], at least one row and one column.
        token_ids (`np.ndarray` of shape `(depth, width)`): The tokens they belong to.
        budget (`int`): Number of nodes, at least 1, the root not counted.
        anchor (`int`): Token of the root.

    Returns:
        [`DraftTree`], or `None` when its costliest node lies beyond 2**16 nats, where sums are no longer exact.
    """
    costs = costs[:budget, :budget]
    # Below a level whose best token is impossible there is nothing.
    possible = costs[:, 0] < np.inf
    if not possible.all():
        costs = costs[: int(possible.argmin())]
    if len(costs) == 0:
        return Levels(anchor).to_tree(budget)
    if budget <= PYTHON_BUDGET:
        rows = costs.tolist()
        threshold, ties = threshold_by_heap(rows, budget)
        if threshold <= EXACT_LIMIT:
            return _in_preorder(rows, token_ids.tolist(), threshold, ties, anchor)
    elif compiled.INSTALLED:
        return compiled.build_compiled(costs, token_ids, budget, anchor, EXACT_LIMIT)
    else:
        threshold, ties = threshold_by_level(costs, budget)
        if threshold <= EXACT_LIMIT:
            return _by_level(costs, token_ids, threshold, ties, budget, anchor)
    return None


def _by_level(
    costs: np.ndarray, token_ids: np.ndarray, threshold: float, ties: int, budget: int, anchor: int
) -> DraftTree:
    """Every path up to the threshold, level by level; the last step drops the ties that are too many."""
    levels = Levels(anchor)
    level = levels.costs[0]
    for row, row_ids in zip(costs, token_ids, strict=False):
        room = threshold - level
        children = row.searchsorted(room, side="right")
        starts = np.concatenate(([0], children.cumsum()))
        if starts[-1] > budget:
            children = _without_late_ties(children, row.searchsorted(room), ties)
            starts = np.concatenate(([0], children.cumsum()))
        if starts[-1] == 0:
            break
        parents = np.arange(len(level)).repeat(children)
        ranks = np.arange(len(parents)) - starts[parents]
        level = level[parents] + row[ranks]
        levels.add(parents, starts, level, row_ids[ranks])
    return levels.to_tree(budget)


def _without_late_ties(children: np.ndarray, cheaper: np.ndarray, ties: int) -> np.ndarray:
    """Keeps a level's first `ties` children at the threshold: a flat table could have billions of them."""
    tied = children - cheaper
    earlier = tied.cumsum() - tied
    return cheaper + np.clip(ties - earlier, 0, tied)


def _in_preorder(rows: list[list[float]], ids: list[list[int]], threshold: float, ties: int, anchor: int) -> DraftTree:
    """Every path below the threshold and the first `ties` at it, written depth first."""
    tokens, parents, depths, ends, log_probs = [anchor], [-1], [0], [0], [0.0]
    next_firsts = [row[0] for row in rows[1:]] + [np.inf]

    def write_below(parent: int, base: float, depth: int) -> None:
        nonlocal ties
        row, row_ids = rows[depth], ids[depth]
        room = threshold - base
        inner = bisect_right(row, room - next_firsts[depth])
        stop = bisect_right(row, room, inner)
        depth += 1
        for rank in range(inner):
            cost = base + row[rank]
            if cost == threshold:
                if ties == 0:
                    return
                ties -= 1
            node = len(parents)
            tokens.append(row_ids[rank])
            parents.append(parent)
            depths.append(depth)
            log_probs.append(0.0 - cost)
            ends.append(0)
            write_below(node, cost, depth)
            ends[node] = len(parents)
        if stop == inner:
            return
        # The other children have none of their own, so they are written at once.
        if row[stop - 1] == room:
            cheaper = bisect_left(row, room, inner, stop)
            stop = min(stop, cheaper + ties)
            ties -= stop - cheaper
        tokens.extend(row_ids[inner:stop])
        parents.extend([parent] * (stop - inner))
        depths.extend([depth] * (stop - inner))
        log_probs.extend([0.0 - (base + cost) for cost in row[inner:stop]])
        ends.extend(range(len(ends) + 1, len(parents) + 1))

    write_below(0, 0.0, 0)
    ends[0] = len(ends)
    columns = long_tensor((tokens, parents, depths, ends))
    return DraftTree(columns[0], columns[1], columns[2], columns[3], torch.from_numpy(np.array(log_probs)))
