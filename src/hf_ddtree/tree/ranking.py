"""The most probable tokens of each draft position, ties settled, and what their logits are as log-probabilities."""

from collections.abc import Callable
from typing import Any

import torch

#: Scores of a block, which is looked at as one by its highest.
BLOCK = 64
#: Blocks pay in rows of this many times the scores that are taken up in the end, and from this many scores on.
PAYS, LEAST = 2, 2**19
#: Dtypes of scores that NumPy has too, whose calls on small tables take a third of PyTorch's time.
NUMPY_TOO = (torch.float32, torch.float64)
#: Rows whose log-probabilities are written at once on a CPU: enough for its threads, and for few calls.
ROWS = 4


def rank_children(scores: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The `width` highest scores of each row and their ids, in descending order, equal scores by the lower id.

    `torch.topk` promises nothing about equal scores, neither which ones it returns nor in what order. So the ids at
    the edge of the cut are chosen again: on the CPU in the rows that have a tie there, on accelerators in all rows by
    a running count, so as not to wait for the device.

    Args:
        scores (`torch.Tensor` of shape `(rows, vocab)`): Logits or log-probabilities, any float dtype, any device.
        width (`int`): Number of tokens to return, cut to the vocabulary.

    Returns:
        Two tensors of shape `(rows, min(width, vocab))` on the device of `scores`: the scores, and the ids (long).
    """
    vocab, on_cpu = scores.shape[-1], scores.device.type == "cpu"
    width = min(width, vocab)
    values, ids = highest(scores, min(width + 1, vocab))
    if on_cpu and not _has_ties(values):
        return values[:, :width], ids[:, :width]
    if width < vocab:
        edge, beyond = values[:, width - 1 : width], values[:, width:]
        values, ids = values[:, :width], ids[:, :width]
        if on_cpu:
            for row in (edge == beyond).flatten().nonzero().flatten().tolist():
                first = int((values[row] > edge[row]).sum())
                ids[row, first:] = (scores[row] == edge[row]).nonzero().flatten()[: width - first]
        else:
            ids = torch.where(values == edge, _lowest_ids(scores, edge, values), ids)
    ids, by_id = ids.sort(dim=-1)
    values, by_value = values.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, by_value)


def _has_ties(values: torch.Tensor) -> bool:
    """Whether some row of sorted values on the CPU has the same twice."""
    table: Any = values.detach().numpy() if values.dtype in NUMPY_TOO else values
    return bool((table[:, 1:] == table[:, :-1]).any())


def highest(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    `scores.topk(count)` of each row, where equal scores may be chosen otherwise; of many on a CPU in a third of the
    time.

    The `count` blocks with the highest maxima hold `count` scores that no score outside of them exceeds: each such
    score is at most its block's maximum, and that at most the `count` maxima that were chosen.

    Args:
        scores (`torch.Tensor` of shape `(rows, vocab)`)
        count (`int`): at most the vocabulary.

    Returns:
        Two tensors of shape `(rows, count)`: the scores, descending, and their ids.
    """
    rows, vocab = scores.shape
    if scores.device.type != "cpu" or vocab < PAYS * BLOCK * count or scores.numel() < LEAST:
        values, ids = scores.topk(count, dim=-1)
        return values, ids
    whole = vocab - vocab % BLOCK
    blocks = scores[:, :whole].unflatten(-1, (-1, BLOCK))
    chosen = blocks.amax(-1).topk(count, dim=-1, sorted=False).indices
    candidates = blocks.gather(1, chosen[..., None].expand(-1, -1, BLOCK)).flatten(1)
    # What is left over at the end stands for one more block.
    if whole < vocab:
        candidates = torch.cat([candidates, scores[:, whole:]], dim=-1)
        chosen = torch.cat([chosen, chosen.new_full((rows, 1), whole // BLOCK)], dim=-1)
    values, places = candidates.topk(count, dim=-1)
    return values, chosen.gather(-1, places // BLOCK) * BLOCK + places % BLOCK


def chooser(scores: torch.Tensor) -> Callable[[int], int]:
    """
    A function from a row to the first of its highest scores, as `int(scores[row].argmax())` gives it.

    Args:
        scores (`torch.Tensor` of shape `(rows, vocab)`): on a CPU, where NumPy searches in a tenth of the time.
    """
    table: Any = scores.detach().numpy() if scores.dtype in NUMPY_TOO else scores
    return lambda row: int(table[row].argmax())


def log_probs_at(logits: torch.Tensor, ids: torch.Tensor, overwrite: bool = False) -> torch.Tensor:
    """
    `logits.log_softmax(-1)` at `ids`, of which a few rows at a time are written.

    Args:
        logits (`torch.Tensor` of shape `(rows, vocab)`): any float dtype.
        ids (`torch.LongTensor` of shape `(rows, width)`)
        overwrite (`bool`, *optional*, defaults to `False`):
            Whether the log-probabilities may take the place of float32 or float64 `logits`, which is the fastest.

    Returns:
        `torch.Tensor` of shape `(rows, width)`: float64 for float64 logits, else float32.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if overwrite and logits.dtype == dtype:
        # Each row is read to its end before a number of it is written.
        return torch.log_softmax(logits, -1, out=logits).gather(-1, ids)
    rows = ROWS if logits.device.type == "cpu" else 1
    parts = [
        part.log_softmax(-1, dtype=dtype).gather(-1, wanted)
        for part, wanted in zip(logits.split(rows), ids.split(rows), strict=True)
    ]
    return torch.cat(parts)


def _lowest_ids(scores: torch.Tensor, edge: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Puts the lowest ids whose score equals `edge` in the slots after those of higher scores."""
    rows, width = values.shape
    tied = scores == edge
    slot = (values > edge).sum(-1, keepdim=True) + tied.cumsum(-1) - 1
    slot = torch.where(tied, slot, width).clamp_(max=width)
    ids = torch.arange(scores.shape[-1], device=scores.device).expand_as(scores)
    return ids.new_zeros(rows, width + 1).scatter_(-1, slot, ids)[:, :width]
