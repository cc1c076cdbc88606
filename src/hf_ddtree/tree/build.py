"""From a drafter's output to a draft tree: checking, reducing to what the budget can use, choosing a builder."""

from collections.abc import Callable

import numpy as np
import torch

from hf_ddtree.tree.device import build_as_on_device
from hf_ddtree.tree.draft_tree import NO_ANCHOR, DraftTree
from hf_ddtree.tree.heap import build_with_heap
from hf_ddtree.tree.levelwise import build_level_wise
from hf_ddtree.tree.ranking import log_probs_at, rank_children
from hf_ddtree.tree.scoring import MarginalScorer, Scorer

Builder = Callable[[Scorer, int, int, int], DraftTree]

BUILDERS: dict[str, Builder] = {
    "levelwise": build_level_wise,
    "heap": build_with_heap,
    "device": build_as_on_device,
}


def build_draft_tree(
    log_probs: torch.Tensor,
    budget: int,
    *,
    max_branching: int | None = None,
    builder: str = "levelwise",
    anchor: int | None = None,
) -> DraftTree:
    """
    The `budget` most probable paths under independent per-position distributions (DDTree, hf.co/papers/2604.12989).

    Nodes are taken by falling path log-probability, equal ones by their rank tuple in lexicographic order (tokens of
    equal log-probability rank by their id). A node of log-probability `-inf` is never taken, so the tree is smaller
    than the budget when possible paths run out. A smaller budget gives a subset of the nodes.

    Args:
        log_probs (`torch.Tensor` of shape `(depth, vocab)`):
            Natural log-probabilities of each draft position, any float dtype, any device, rows in any order.
        budget (`int`): Number of nodes, the root not counted; 0 gives the root alone.
        max_branching (`int`, *optional*): Use only this many tokens a position; 1 gives the most probable chain.
        builder (`str`, *optional*, defaults to `"levelwise"`):
            `"levelwise"`, the fast one, `"heap"`, the paper's Algorithm 1, or `"device"`, what runs on accelerators
            ([`DeviceBuilder`]), for marginals alone; all give the same tree.
        anchor (`int`, *optional*): Token id of the root; -1 stands there when it is not given.

    Raises:
        `ValueError`: on a wrong shape, NaN, values above 0, a negative budget, a `max_branching` below 1, an unknown
            builder.
        `TypeError`: when a count is not an `int`, or `log_probs` not a float tensor.
    """
    width = _check_width(budget, max_branching)
    _check_table(log_probs, "vocab")
    if budget == 0 or len(log_probs) == 0:
        return _root_alone(builder, anchor)
    top_log_probs, top_token_ids = rank_children(log_probs.detach(), width)
    return build_from_top(top_log_probs, top_token_ids, budget, max_branching=width, builder=builder, anchor=anchor)


def build_from_top(
    top_log_probs: torch.Tensor | np.ndarray,
    top_token_ids: torch.Tensor | np.ndarray,
    budget: int,
    *,
    max_branching: int | None = None,
    builder: str = "levelwise",
    anchor: int | None = None,
) -> DraftTree:
    """
    [`build_draft_tree`] from the most probable tokens of each position, as [`top_marginals`] gives them.

    Equal log-probabilities rank as they stand in the table. A table of `min(budget, vocab)` columns holds all that the
    budget can use.

    Args:
        top_log_probs (`torch.Tensor` or `np.ndarray` of shape `(depth, width)`):
            Natural log-probabilities, normalised over the whole vocabulary, each row sorted descending.
        top_token_ids (`torch.Tensor` or `np.ndarray` of shape `(depth, width)`): The tokens they belong to.
        budget (`int`): See [`build_draft_tree`], as for `max_branching`, `builder` and `anchor`.

    Raises:
        `ValueError`: as [`build_draft_tree`], and when the shapes differ or a row is not sorted.
        `TypeError`: as [`build_draft_tree`].
    """
    width = _check_width(budget, max_branching)
    _check_table(top_log_probs, "width")
    if top_log_probs.shape != top_token_ids.shape:
        raise ValueError(
            f"top_log_probs has shape {tuple(top_log_probs.shape)}, top_token_ids {tuple(top_token_ids.shape)}: "
            "each log-probability needs the token it belongs to."
        )
    if budget == 0 or len(top_log_probs) == 0:
        return _root_alone(builder, anchor)
    scorer = MarginalScorer(_to_numpy(top_log_probs[:, :width]), _to_numpy(top_token_ids[:, :width]))
    return build_from_scorer(scorer, budget, max_branching=max_branching, builder=builder, anchor=anchor)


def build_from_scorer(
    scorer: Scorer,
    budget: int,
    *,
    max_branching: int | None = None,
    builder: str = "levelwise",
    anchor: int | None = None,
) -> DraftTree:
    """
    The `budget` most probable paths under any [`Scorer`], for instance a head conditioned on the path.

    Args:
        scorer ([`Scorer`]): Ranks the continuations of nodes.
        budget (`int`): See [`build_draft_tree`], as for `max_branching`, `builder` and `anchor`.

    Raises:
        `ValueError`: as [`build_draft_tree`], or when the scorer's output does not fit its parents.
        `TypeError`: as [`build_draft_tree`].
    """
    width = _check_width(budget, max_branching)
    build = _builder(builder)
    if budget == 0 or scorer.depth == 0:
        return _root_alone(builder, anchor)
    return build(scorer, budget, width, NO_ANCHOR if anchor is None else anchor)


def top_marginals(logits: torch.Tensor, k: int, overwrite: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The `k` most probable tokens of each draft position, by one top-k and one log-softmax over the vocabulary.

    Equal logits rank by the lower token id, on every device ([`rank_children`]).

    Args:
        logits (`torch.Tensor` of shape `(depth, vocab)`): Unprocessed drafter logits, any float dtype, any device.
        k (`int`): Number of tokens; the budget is enough for [`build_from_top`], and more is of no use to it.
        overwrite (`bool`, *optional*, defaults to `False`):
            Whether `logits` are not needed any more: their memory then takes what is computed.

    Returns:
        Log-probabilities (float32, normalised over the whole vocabulary) and token ids (long), both of shape
        `(depth, min(k, vocab))` on the device of `logits`. A row with NaN logits or without a finite one gives NaN,
        which the builders refuse.

    Raises:
        `ValueError`: on a wrong shape or a `k` below 1.
        `TypeError`: when `k` is not an `int`, or `logits` not a float tensor.
    """
    _check_count("k", k, 1)
    _check_table(logits, "vocab")
    _, token_ids = rank_children(logits, k)
    return log_probs_at(logits, token_ids, overwrite).float(), token_ids


def _check_width(budget: int, max_branching: int | None) -> int:
    """The number of tokens of a position that a tree can use: rank r needs r better siblings in the tree."""
    _check_count("budget", budget, 0)
    if max_branching is None:
        return max(budget, 1)
    _check_count("max_branching", max_branching, 1)
    return max(min(budget, max_branching), 1)


def _check_count(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int of at least {least}, got {value!r} of type {type(value).__name__}.")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}.")


def _check_table(table: torch.Tensor | np.ndarray, second: str) -> None:
    if isinstance(table, torch.Tensor):
        is_float = table.is_floating_point()
    elif isinstance(table, np.ndarray):
        is_float = table.dtype.kind == "f"
    else:
        raise TypeError(f"expected a tensor of log-probabilities or logits, got {type(table).__name__}.")
    if not is_float:
        raise TypeError(f"log-probabilities and logits must be of a float dtype, got {table.dtype}.")
    if table.ndim != 2 or table.shape[1] == 0:
        raise ValueError(
            f"expected one row a draft position, shape (depth, {second}) with {second} at least 1, got "
            f"{tuple(table.shape)}. Take the batch dimension off: a tree belongs to one sequence."
        )


def _builder(name: str) -> Builder:
    if name not in BUILDERS:
        raise ValueError(f"unknown builder {name!r}: choose one of {', '.join(map(repr, BUILDERS))}.")
    return BUILDERS[name]


def _root_alone(builder: str, anchor: int | None) -> DraftTree:
    _builder(builder)
    return DraftTree.root_only(NO_ANCHOR if anchor is None else anchor)


def _to_numpy(table: torch.Tensor | np.ndarray) -> np.ndarray:
    if isinstance(table, np.ndarray):
        return table
    table = table.detach().cpu()
    return (table.float() if table.dtype in (torch.bfloat16, torch.float16) else table).numpy()
