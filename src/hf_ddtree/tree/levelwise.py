"""The fast exact builder: a whole level of the tree at a time."""

import numpy as np
import torch

from hf_ddtree.tree.draft_tree import DraftTree
from hf_ddtree.tree.levels import Levels
from hf_ddtree.tree.marginals import build_from_marginals
from hf_ddtree.tree.scoring import MarginalScorer, Scorer, expand_costs
from hf_ddtree.tree.thresholds import UNBOUNDED


def build_level_wise(scorer: Scorer, budget: int, width: int, anchor: int) -> DraftTree:
    """
    The tree of [`build_with_heap`], node for node, with one scorer call a level.

    Call N the `budget` first nodes by (falling log-probability, rank tuple in lexicographic order). An ancestor comes
    before its descendants in that order, so a node of N has its parent in N. Keep at each level the `budget` first
    children of the nodes kept at the level above: by induction every node of N is kept, since fewer than `budget`
    nodes come before it, and N is the `budget` first of all nodes kept. Nothing is assumed of the scorer beyond
    log-probabilities of at most 0; marginals, which share their rows within a level, take a shorter way.

    Args:
        scorer ([`Scorer`]): Ranks continuations.
        budget (`int`): Number of nodes, the root not counted.
        width (`int`): Number of children a node may have.
        anchor (`int`): Token of the root.

    Raises:
        `ValueError`: when the scorer's log-probabilities are NaN, unsorted or above 0.
    """
    if isinstance(scorer, MarginalScorer):
        tree = build_from_marginals(scorer.costs[:, :width], scorer.token_ids[:, :width], budget, anchor)
        if tree is not None:
            return tree
    levels = Levels(anchor)
    level_costs, level_tokens = levels.costs[0], levels.tokens[0]
    states: torch.Tensor | None = None
    cheapest = np.empty(0)
    limit = UNBOUNDED
    for depth in range(min(scorer.depth, budget)):
        table, ids, states = expand_costs(scorer, depth, torch.from_numpy(level_tokens), states, width)
        table = level_costs[:, None] + table
        # Row-major order of (parent, rank) is the lexicographic order of rank tuples.
        chosen = np.flatnonzero(table <= limit)
        if len(chosen) > budget:
            chosen = chosen[np.sort(np.argsort(table.ravel()[chosen], kind="stable")[:budget])]
        if len(chosen) == 0:
            break
        # No node costlier than the budget-th cheapest so far can be in the tree, nor be a parent of one.
        cheapest = np.sort(np.concatenate((cheapest, table.ravel()[chosen])))[:budget]
        limit = cheapest[-1] if len(cheapest) == budget else UNBOUNDED
        chosen = chosen[table.ravel()[chosen] <= limit]
        parents = chosen // table.shape[1]
        starts = parents.searchsorted(np.arange(len(level_costs) + 1))
        level_costs, level_tokens = table.ravel()[chosen], ids.ravel()[chosen]
        states = None if states is None else states[torch.from_numpy(parents).to(states.device)]
        levels.add(parents, starts, level_costs, level_tokens)
    return levels.to_tree(budget)
