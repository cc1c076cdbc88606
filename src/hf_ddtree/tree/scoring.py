"""Scorers: what a builder asks of a drafter's head, path-conditioned or not."""

from typing import NamedTuple, Protocol

import numpy as np
import torch

from hf_ddtree.tree.costs import costs_of


class Expansion(NamedTuple):
    """
    The children a scorer offers for a batch of parents.

    Args:
        log_probs (`torch.Tensor` of shape `(parents, width)`):
            log p(child | parent, depth) in nats, normalised per parent over the whole vocabulary, each row sorted from
            the most probable down. `-inf` marks a child that must not be drafted.
        token_ids (`torch.LongTensor` of shape `(parents, width)`):
            The children's tokens, ties by the lower id ([`rank_children`] does this).
        states (`torch.Tensor` of shape `(parents, ...)`, *optional*):
            What the scorer wants back when it is asked about these parents' children: one row a parent, for instance a
            recurrent state that has read the parent's token.
    """

    log_probs: torch.Tensor
    token_ids: torch.Tensor
    states: torch.Tensor | None


class Scorer(Protocol):
    """
    Ranks the continuations of draft-tree nodes.

    A Markov head needs only `tokens`; a recurrent head reads `tokens` into `node_state` and returns the new states;
    independent per-position marginals ([`MarginalScorer`]) need neither.
    """

    @property
    def depth(self) -> int:
        """`int`: number of positions the drafter proposes, which bounds the tree's depth."""
        ...

    def expand(self, depth: int, tokens: torch.Tensor, node_state: torch.Tensor | None, width: int) -> Expansion:
        """
        Ranks the children of parents that share a depth.

        Args:
            depth (`int`): The parents' depth, 0 for the root; the children stand at draft position `depth + 1`.
            tokens (`torch.LongTensor` of shape `(parents,)`): The parents' tokens; the anchor's for the root, or -1.
            node_state (`torch.Tensor` of shape `(parents, ...)`, *optional*):
                For each parent, the row of `states` that came with it; `None` for the root.
            width (`int`): The builder uses at most this many children a parent; more are allowed and ignored.
        """
        ...


class MarginalScorer:
    """
    The trivial scorer: a child's log-probability depends on its depth alone, as in DDTree (hf.co/papers/2604.12989).

    Args:
        log_probs (`np.ndarray` of shape `(depth, width)`): Natural log-probabilities, rows sorted descending.
        token_ids (`np.ndarray` of shape `(depth, width)`): The tokens they belong to.
        ranked (`bool`, *optional*, defaults to `False`): See [`costs_of`].

    Raises:
        `ValueError`: as [`costs_of`], or on shapes that differ or have no column.
        `TypeError`: when `token_ids` are not integers.
    """

    def __init__(self, log_probs: np.ndarray, token_ids: np.ndarray, ranked: bool = False) -> None:
        if log_probs.shape != token_ids.shape or log_probs.ndim != 2 or log_probs.shape[1] == 0:
            raise ValueError(
                f"MarginalScorer got log_probs of shape {log_probs.shape} and token_ids of shape {token_ids.shape}: "
                "both must be (depth, width) with width at least 1."
            )
        if token_ids.dtype.kind not in "iu":
            raise TypeError(f"token_ids must be of an integer dtype, got {token_ids.dtype}.")
        self.costs = costs_of(log_probs, ranked)
        self.token_ids = token_ids.astype(np.int64, copy=False)

    @property
    def depth(self) -> int:
        return self.costs.shape[0]

    def expand(self, depth: int, tokens: torch.Tensor, node_state: torch.Tensor | None, width: int) -> Expansion:
        shape = (len(tokens), min(width, self.costs.shape[1]))
        log_probs = torch.from_numpy(-self.costs[depth, :width])
        token_ids = torch.from_numpy(self.token_ids[depth, :width])
        return Expansion(log_probs.expand(shape), token_ids.expand(shape), None)


def expand_costs(
    scorer: Scorer, depth: int, tokens: torch.Tensor, node_state: torch.Tensor | None, width: int
) -> tuple[np.ndarray, np.ndarray, torch.Tensor | None]:
    """
    One call of a scorer, checked and brought to the host: costs and token ids of shape `(parents, width)`, and states.

    Raises:
        `ValueError`: as [`costs_of`], or when the scorer's shapes do not fit its parents.
    """
    log_probs, token_ids, states = scorer.expand(depth, tokens, node_state, width)
    if log_probs.shape != token_ids.shape or log_probs.dim() != 2 or log_probs.shape[0] != len(tokens):
        raise ValueError(
            f"{type(scorer).__name__}.expand got {len(tokens)} parents and returned log_probs of shape "
            f"{tuple(log_probs.shape)} with token_ids of shape {tuple(token_ids.shape)}: both must be "
            f"({len(tokens)}, width)."
        )
    costs = costs_of(log_probs[:, :width].detach().double().cpu().numpy())
    return costs, token_ids[:, :width].long().cpu().numpy(), states
