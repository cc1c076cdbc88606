"""Rows whose values tell where they come from, and cache layers beside the library's own."""

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

from hf_ddtree.cache.layers import GrowingLayer, GrowingSlidingLayer
from hf_ddtree.cache.static import StaticSlidingTreeLayer, StaticTreeLayer

HEADS, HEAD_DIM = 2, 3


class Rows:
    """Keys and values in which no number comes twice."""

    def __init__(self) -> None:
        self.drawn = 0

    def __call__(self, length: int, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (batch, HEADS, length, HEAD_DIM)
        size = batch * HEADS * length * HEAD_DIM
        numbers = torch.arange(self.drawn, self.drawn + 2 * size, dtype=torch.float64)
        self.drawn += 2 * size
        return numbers[:size].reshape(shape), numbers[size:].reshape(shape)


def pick(rows: tuple[torch.Tensor, torch.Tensor], path: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return rows[0][:, :, path], rows[1][:, :, path]


def twins(window: int | None) -> tuple[Any, Any]:
    """A layer of ours and the library's own of the same kind."""
    if window is None:
        return GrowingLayer(), DynamicLayer()
    return GrowingSlidingLayer(sliding_window=window), DynamicSlidingWindowLayer(sliding_window=window)


def static_twins(window: int | None, length: int, room: int) -> tuple[Any, Any]:
    """The same for layers that hold `length` tokens, ours with `room` more slots."""
    if window is None:
        return StaticTreeLayer(length, room), StaticLayer(length)
    theirs = StaticSlidingWindowLayer(max_cache_len=length, sliding_window=window)
    return StaticSlidingTreeLayer.adopt(theirs, room), StaticSlidingWindowLayer(length, window)


def append_one_by_one(layer: Any, rows: tuple[torch.Tensor, torch.Tensor], path: list[int]) -> None:
    """What plain decoding of a path does."""
    for node in path:
        layer.update(*pick(rows, [node]))


def assert_equal(ours: Any, theirs: Any) -> None:
    assert ours.get_seq_length() == theirs.get_seq_length()
    for query_length in (1, 5):
        assert ours.get_mask_sizes(query_length) == theirs.get_mask_sizes(query_length)
    assert ours.get_seq_length() == 0 or (ours.keys.shape[-2] > 0) == (theirs.keys.shape[-2] > 0)
    if theirs.get_seq_length():
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)


def assert_equal_static(ours: Any, theirs: Any) -> None:
    """The slots behind the tokens may hold anything, and of a full layer there are more."""
    length = int(theirs.get_seq_length())
    assert int(ours.get_seq_length()) == length
    assert ours.max_cache_len == theirs.max_cache_len + getattr(ours, "room", 0)
    if theirs.is_sliding:
        assert ours.get_mask_sizes(1) == theirs.get_mask_sizes(1)
        assert ours.get_mask_sizes(5) == theirs.get_mask_sizes(5)
    if length:
        rows = min(length, theirs.max_cache_len)
        assert torch.equal(ours.keys[:, :, :rows], theirs.keys[:, :, :rows])
        assert torch.equal(ours.values[:, :, :rows], theirs.values[:, :, :rows])
