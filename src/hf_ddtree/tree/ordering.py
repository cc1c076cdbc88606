"""Numbering nodes in depth-first preorder, and cutting a numbered tree to its best nodes, without loops over nodes."""

from collections.abc import Sequence

import numpy as np


def preorder_of_levels(
    parents: Sequence[np.ndarray], starts: Sequence[np.ndarray]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """
    Numbers the nodes of a tree given level by level, level 0 being the root alone.

    Args:
        parents (sequence of `np.ndarray`):
            `parents[d][i]` is the index, within level d, of the parent of node i of level d + 1. Nodes of a level are
            in lexicographic order of their rank tuples, so each array is non-decreasing.
        starts (sequence of `np.ndarray`):
            `starts[d][i]` is how many nodes of level d + 1 hang below the first i nodes of level d, i up to its size.

    Returns:
        For each level from 0 on, every node's preorder number and one past the last number of its subtree.
    """
    counting = np.arange(2 + max(map(len, parents), default=0))
    # before[i] = how many nodes of this level and deeper ones are, or hang below, the first i nodes of this level.
    before = counting[: 1 + (len(parents[-1]) if parents else 1)]
    below: list[np.ndarray] = []
    sizes_upward = [before]
    for level_starts in reversed(starts):
        before_children = before[level_starts]
        before = counting[: len(level_starts)] + before_children
        below.append(before_children)
        sizes_upward.append(before)
    sizes_upward.reverse()
    below.reverse()
    positions = [np.zeros(1, dtype=np.int64)]
    for level_parents, before_children, before in zip(parents, below, sizes_upward[1:], strict=True):
        offsets = positions[-1] + 1 - before_children[:-1]
        positions.append(offsets[level_parents] + before[:-1])
    ends = [level + (before[1:] - before[:-1]) for level, before in zip(positions, sizes_upward, strict=True)]
    return positions, ends


def best_nodes(costs: np.ndarray, budget: int) -> np.ndarray:
    """
    The root and the `budget` cheapest other nodes of a preorder-numbered tree, ascending, ties to the lower number.

    The result is closed under taking parents: a parent costs no more than its child and has a lower number.
    """
    keep = np.argsort(costs, kind="stable")[: budget + 1]
    keep.sort()
    return keep


def renumber(keep: np.ndarray, parents: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Parents and subtree ends of the nodes `keep`, ascending, in the numbering left once the others are dropped."""
    new_parents = keep.searchsorted(parents[keep])
    new_parents[0] = -1
    return new_parents, keep.searchsorted(ends[keep])
