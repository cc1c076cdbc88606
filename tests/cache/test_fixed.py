"""Sliding layers of one shape under any sequence of operations hold what the library's own hold, in place."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.cache_utils import StaticSlidingWindowLayer

from cache.rows import assert_equal_static
from cache.test_static import LENGTH, ROOM, Pair, operations
from hf_ddtree.cache.fixed import FixedSlidingTreeLayer
from hf_ddtree.cache.path import KeptPath
from hf_ddtree.cache.static import StaticSlidingTreeLayer

WINDOWS = [2, 3, 8, 200]


class FixedPair(Pair):
    def append(self, length: int) -> None:
        if self.used + length > self.length:
            return
        rows = self.rows(length)
        for got, expected in zip(self.ours.update(*rows), self.theirs.update(*rows), strict=True):
            # Slots behind the tokens are free, and may hold nodes that were dropped.
            used = min(self.used, expected.shape[-2]) if self.used <= self.theirs.max_cache_len else None
            assert got.shape == expected.shape and torch.equal(got[:, :, :used], expected[:, :, :used])


def make_pair(window: int, used: int = 0) -> Pair:
    pair = FixedPair(window)
    source, rows = StaticSlidingWindowLayer(LENGTH, window), pair.rows(used)
    if used:
        pair.theirs.update(*rows)
        source.update(*rows)
    pair.ours = FixedSlidingTreeLayer.adopt(source, ROOM)
    return pair


@given(window=st.sampled_from(WINDOWS), steps=st.lists(operations, max_size=14))
def test_any_sequence_of_operations(window: int, steps: list[Any]) -> None:
    pair = make_pair(window)
    for name, *arguments in steps:
        getattr(pair, name)(*arguments)
        assert_equal_static(pair.ours, pair.theirs)


@pytest.mark.parametrize("window", WINDOWS)
def test_rounds_have_one_shape_and_the_same_tensors(window: int) -> None:
    pair = make_pair(window, used=5)
    held = set()
    for turn in range(LENGTH):
        pair.round(ROOM + 1, chosen=turn * 37 % 512 if pair.used < LENGTH - 9 else 0, keep=turn % 5 != 0)
        assert_equal_static(pair.ours, pair.theirs)
        pair.ours.begin()
        shown = pair.ours.update(*pair.rows(ROOM + 1))
        assert pair.ours.get_mask_sizes(ROOM + 1)[0] == shown[0].shape[-2] == min(window, LENGTH) + ROOM + 1
        held.add((shown[0].data_ptr(), shown[1].data_ptr(), pair.ours.keys.data_ptr(), pair.ours._first.data_ptr()))
        pair.ours.rollback()
    assert pair.used == LENGTH and len(held) == 1


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("used", [0, 7, 40])
def test_adopting_keeps_the_rows(window: int, used: int) -> None:
    pair = make_pair(window, used)
    for other in (StaticSlidingTreeLayer, FixedSlidingTreeLayer):
        assert_equal_static(pair.ours, pair.theirs)
        for chosen in (3, 42, 21):
            pair.round(7, chosen)
            pair.append(2)
            assert_equal_static(pair.ours, pair.theirs)
        if other is StaticSlidingTreeLayer:
            # As if an uncompiled call had come between two compiled ones.
            pair.ours = other.adopt(pair.ours, ROOM)


def test_room_is_made_once() -> None:
    layer = make_pair(8, used=20).ours
    assert FixedSlidingTreeLayer.adopt(layer, ROOM) is layer
    assert FixedSlidingTreeLayer.adopt(layer, 3) is layer
    larger = FixedSlidingTreeLayer.adopt(layer, ROOM + 1)
    assert larger.nodes == ROOM + 2 and torch.equal(larger.keys, layer.keys)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_commit_may_be_repeated_after_an_interrupt(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, real = make_pair(window, used=11), FixedSlidingTreeLayer._end_round
    rows, path = pair.rows(6), torch.tensor([0, 2, 5])
    pair.ours.begin()
    pair.ours.update(*rows)

    def interrupted(layer: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FixedSlidingTreeLayer, "_end_round", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pair.ours.commit(KeptPath(path))
    monkeypatch.setattr(FixedSlidingTreeLayer, "_end_round", real)
    pair.ours.commit(KeptPath(path))
    for node in path.tolist():
        pair.theirs.update(*(t[:, :, [node]] for t in rows))
    assert_equal_static(pair.ours, pair.theirs)


def test_a_reset_layer_begins_anew() -> None:
    pair = make_pair(8, used=20)
    pair.round(5, chosen=9)
    pair.ours.reset()
    pair.theirs.reset()
    pair.append(3)
    pair.round(5, chosen=9)
    assert_equal_static(pair.ours, pair.theirs)


def test_tensors_of_inference_mode_are_left_behind() -> None:
    with torch.inference_mode():
        pair = make_pair(8, used=9)
        pair.round(5, chosen=21)
    with torch.no_grad():
        pair.ours = FixedSlidingTreeLayer.adopt(pair.ours, ROOM)
        for name in ("keys", "values", "cumulative_length"):
            setattr(pair.theirs, name, getattr(pair.theirs, name).clone())
        pair.round(5, chosen=21)
        pair.append(2)
        assert_equal_static(pair.ours, pair.theirs)
