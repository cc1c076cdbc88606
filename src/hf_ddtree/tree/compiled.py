"""The tree of independent marginals by machine code, where numba is installed."""

from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from hf_ddtree.tree.draft_tree import DraftTree

INSTALLED = find_spec("numba") is not None


def build_compiled(
    costs: np.ndarray, token_ids: np.ndarray, budget: int, anchor: int, exact_limit: float
) -> DraftTree | None:
    """
    What [`build_from_marginals`] gives; needs numba.

    The first call of an installation compiles for some seconds. Numba keeps the machine code on disk, in a folder of
    its own if the package's cannot be written.

    Args:
        costs (`np.ndarray` of shape `(depth, width)`): Ascending, the first of each row finite, at least one of each.
        token_ids (`np.ndarray` of shape `(depth, width)`): The tokens they belong to.
        budget (`int`): Number of nodes, at least 1, the root not counted.
        anchor (`int`): Token of the root.
        exact_limit (`float`): A costliest node beyond it gives `None`.
    """
    threshold, write = machine_code()
    # One layout of arrays is one compilation.
    costs, token_ids = np.ascontiguousarray(costs), np.ascontiguousarray(token_ids)
    limit, ties, count = threshold(costs, budget)
    if limit > exact_limit:
        return None
    nodes = np.empty((4, count + 1), dtype=np.int64)
    log_probs = np.empty(count + 1)
    write(costs, token_ids, limit, ties, anchor, nodes, log_probs)
    tokens, parents, depths, ends = torch.from_numpy(nodes)
    return DraftTree(
        token_ids=tokens, parents=parents, depths=depths, subtree_ends=ends, log_probs=torch.from_numpy(log_probs)
    )


@lru_cache(maxsize=1)
def machine_code() -> tuple[Callable[..., Any], Callable[..., Any]]:
    import numba

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            result: Callable[..., Any] = numba.njit(cache=True)(function)
        except RuntimeError:
            # No folder can be written, neither the package's nor the user's.
            result = numba.njit(function)
        return result

    return compiled(threshold_of), compiled(write_preorder)


def threshold_of(costs: np.ndarray, budget: int) -> tuple[float, int, int]:
    """
    [`threshold_by_heap`] in a form that compiles: the last node's cost, how many share it, how many nodes.

    The heap is binary, in four arrays: a path's cost, the depth and rank of its last token, and the cost before that.
    """
    depth_count, width = costs.shape
    heap = np.empty(budget + 2)
    depths = np.empty(budget + 2, dtype=np.int64)
    ranks = np.empty(budget + 2, dtype=np.int64)
    bases = np.empty(budget + 2)
    heap[0], depths[0], ranks[0], bases[0] = costs[0, 0], 0, 0, 0.0
    size, found, ties, last = 1, 0, 0, -1.0
    while size > 0 and found < budget:
        cost, depth, rank, base = heap[0], depths[0], ranks[0], bases[0]
        found += 1
        ties = ties + 1 if cost == last else 1
        last = cost
        # The next sibling takes the place of the path, or the heap's last path does.
        sibling = base + costs[depth, rank + 1] if rank + 1 < width else np.inf
        if sibling < np.inf:
            moved, moved_depth, moved_rank, moved_base = sibling, depth, rank + 1, base
        else:
            size -= 1
            moved, moved_depth, moved_rank, moved_base = heap[size], depths[size], ranks[size], bases[size]
        hole = 0
        while 2 * hole + 1 < size:
            child = 2 * hole + 1
            if child + 1 < size and heap[child + 1] < heap[child]:
                child += 1
            if heap[child] >= moved:
                break
            heap[hole], depths[hole], ranks[hole], bases[hole] = heap[child], depths[child], ranks[child], bases[child]
            hole = child
        if size > 0:
            heap[hole], depths[hole], ranks[hole], bases[hole] = moved, moved_depth, moved_rank, moved_base
        if depth + 1 < depth_count:
            first = cost + costs[depth + 1, 0]
            hole = size
            size += 1
            while hole > 0 and heap[(hole - 1) // 2] > first:
                above = (hole - 1) // 2
                heap[hole], depths[hole], ranks[hole], bases[hole] = (
                    heap[above],
                    depths[above],
                    ranks[above],
                    bases[above],
                )
                hole = above
            heap[hole], depths[hole], ranks[hole], bases[hole] = first, depth + 1, 0, cost
    return last, ties, found


def write_preorder(
    costs: np.ndarray,
    token_ids: np.ndarray,
    threshold: float,
    ties: int,
    anchor: int,
    nodes: np.ndarray,
    log_probs: np.ndarray,
) -> None:
    """
    Every path below the threshold and the first `ties` at it, depth first.

    Args:
        nodes (`np.ndarray` of shape `(4, nodes)`): Filled with tokens, parents, depths and subtree ends.
        log_probs (`np.ndarray` of shape `(nodes,)`): Filled with the paths' log-probabilities.
    """
    depth_count, width = costs.shape
    tokens, parents, depths, ends = nodes[0], nodes[1], nodes[2], nodes[3]
    tokens[0], parents[0], depths[0], log_probs[0] = anchor, -1, 0, 0.0
    # The path being written: its nodes, their costs, and the next child of each.
    path = np.zeros(depth_count + 1, dtype=np.int64)
    bases = np.zeros(depth_count + 1)
    ranks = np.zeros(depth_count + 1, dtype=np.int64)
    count, depth = 1, 0
    while depth >= 0:
        rank = ranks[depth]
        cost = bases[depth] + costs[depth, rank] if depth < depth_count and rank < width else np.inf
        if cost > threshold or (cost == threshold and ties == 0):
            ends[path[depth]] = count
            depth -= 1
            continue
        if cost == threshold:
            ties -= 1
        ranks[depth] = rank + 1
        tokens[count], parents[count], log_probs[count] = token_ids[depth, rank], path[depth], 0.0 - cost
        depth += 1
        depths[count] = depth
        path[depth], bases[depth], ranks[depth] = count, cost, 0
        count += 1
