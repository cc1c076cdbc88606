"""Of a drafter's marginals the tokens that a tree of some size can hold, found without a top-k of any position."""

from typing import Any

import numpy as np
import torch

from hf_ddtree.tree.ranking import NUMPY_TOO, rank_children

#: Log-probabilities of a block, which is looked at as one by its highest, and of one in rows of `LONG` or more.
BLOCK, LONG_BLOCK, LONG = 64, 128, 2**16
#: Positions that are normalised and looked at together: small trees do not reach as far as the second such span.
SPAN = 8
#: What a path may cost above the bound, in parts of it, so that float32's sums over hundreds of positions lose none.
SLACK = 1e-4


def useful_marginals(logits: torch.Tensor, budget: int) -> tuple[np.ndarray, np.ndarray]:
    """
    The tokens of each position that are in some path as cheap as those of the tree, as [`MarginalScorer`] takes them.

    A node costs (minus its log-probability) at least what its token costs behind the most probable tokens of the
    positions before, and that is the cost of a path itself. The tree's last node costs no more than the dearest of any
    `budget` paths, for which those serve that end in the best token of a block. So a token whose path costs more than
    that is in no tree; the ones left are the first ranks of each position, and few. They give the tree of the `budget`
    first of each ([`rank_children`]), for which all positions would be searched.

    Args:
        logits (`torch.Tensor` of shape `(depth, vocab)`): unprocessed, not empty, on a CPU, any float dtype.
            Float32 and float64 ones give their memory to the log-probabilities.
        budget (`int`): nodes of the tree, at least 1, the root not counted.

    Returns:
        Log-probabilities and token ids (int64), arrays of shape `(reached, width)`, without the positions that no node
        of the tree reaches: rows in descending order, equal ones by the lower id, `-inf` behind the last useful token.
        NaN stays in the rows that have it.
    """
    logits = logits.detach() if logits.dtype in NUMPY_TOO else logits.detach().float()
    found = _within_bound(logits, budget)
    if found is None:
        log_probs, token_ids = rank_children(logits, budget)
        return log_probs.numpy(), token_ids.numpy()
    rows, values, ids = found
    order = np.lexsort((ids, -values, rows))
    rows, values, ids = rows[order], values[order], ids[order]
    ranks = np.arange(len(rows)) - rows.searchsorted(rows)
    if len(rows) > budget:
        kept = ranks < budget
        rows, ranks, values, ids = rows[kept], ranks[kept], values[kept], ids[kept]
    shape = int(rows[-1]) + 1, int(ranks.max()) + 1
    top_log_probs, top_ids = np.full(shape, -np.inf, values.dtype), np.zeros(shape, np.int64)
    top_log_probs[rows, ranks], top_ids[rows, ranks] = values, ids
    return top_log_probs, top_ids


def _within_bound(logits: torch.Tensor, budget: int) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Positions, log-probabilities and ids of the useful tokens, in any order; `None`, with all of `logits` made
    log-probabilities, where there is no bound: too few paths are possible, or some are NaN.
    """
    depth, vocab = logits.shape
    size = BLOCK if vocab < LONG else LONG_BLOCK
    table: Any = logits.numpy()
    heads = np.empty((depth, -(-vocab // size)), table.dtype)
    for first in range(0, depth, SPAN):
        looked = min(first + SPAN, depth)
        span = logits[first:looked]
        _write_heads(torch.log_softmax(span, -1, out=span), size, heads[first:looked])
        best = heads[:looked].max(1)
        chain = -best.cumsum()
        before = (chain + best)[:, None]
        paths = before - heads[:looked]
        bound = np.partition(paths, budget - 1, axis=None)[budget - 1] if paths.size >= budget else np.inf
        bound += SLACK * (1 + bound)
        if chain[-1] > bound:
            break
    if np.isnan(chain[-1]) or bound == np.inf:
        return None
    rows, block = (paths <= bound).nonzero()
    ids = block[:, None] * size + np.arange(size)
    # The last block may be shorter than the others.
    values = table[rows[:, None], np.minimum(ids, vocab - 1)]
    block, place = ((before[rows] - values <= bound) & (ids < vocab)).nonzero()
    return rows[block], values[block, place], ids[block, place]


def _write_heads(log_probs: torch.Tensor, size: int, heads: np.ndarray) -> None:
    """The highest of each block of `size`, `(rows, blocks)`."""
    vocab = log_probs.shape[-1]
    whole = vocab - vocab % size
    if whole > 0:
        heads[:, : whole // size] = log_probs[:, :whole].unflatten(-1, (-1, size)).amax(-1).numpy()
    if whole < vocab:
        heads[:, -1] = log_probs[:, whole:].amax(-1).numpy()
