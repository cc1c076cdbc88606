"""A tree held level by level, as level-wise builders make it."""

import numpy as np
import torch

from hf_ddtree.tree.draft_tree import DraftTree
from hf_ddtree.tree.ordering import best_nodes, preorder_of_levels, renumber


class Levels:
    """
    The levels of a growing tree, each in lexicographic order of rank tuples.

    Args:
        anchor (`int`): Token of the root, which is level 0.
    """

    def __init__(self, anchor: int) -> None:
        self.parents: list[np.ndarray] = []
        self.starts: list[np.ndarray] = []
        self.costs = [np.zeros(1)]
        self.tokens = [np.array([anchor])]

    def add(self, parents: np.ndarray, starts: np.ndarray, costs: np.ndarray, tokens: np.ndarray) -> None:
        """Adds the next level; `parents` and `starts` as in [`preorder_of_levels`]."""
        self.parents.append(parents)
        self.starts.append(starts)
        self.costs.append(costs)
        self.tokens.append(tokens)

    def to_tree(self, budget: int) -> DraftTree:
        """The `budget` first nodes by (cost, rank tuple) and the root, in depth-first preorder."""
        level_positions, level_ends = preorder_of_levels(self.parents, self.starts)
        positions = np.concatenate(level_positions)
        order = np.empty_like(positions)
        order[positions] = np.arange(len(positions))
        parents = np.concatenate([[-1], *map(np.take, level_positions, self.parents)])[order]
        depths = np.arange(len(self.costs)).repeat([len(level) for level in self.costs])[order]
        costs = np.concatenate(self.costs)[order]
        tokens = np.concatenate(self.tokens)[order]
        ends = np.concatenate(level_ends)[order]
        if len(order) > budget + 1:
            keep = best_nodes(costs, budget)
            parents, ends = renumber(keep, parents, ends)
            depths, costs, tokens = depths[keep], costs[keep], tokens[keep]
        return DraftTree(
            token_ids=torch.from_numpy(tokens),
            parents=torch.from_numpy(parents),
            depths=torch.from_numpy(depths),
            subtree_ends=torch.from_numpy(ends),
            log_probs=torch.from_numpy(0.0 - costs),
        )
