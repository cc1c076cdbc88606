"""Layers under any sequence of operations hold what the library's own layers hold after plain decoding."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from cache.rows import Rows, append_one_by_one, assert_equal, twins
from hf_ddtree.cache.layers import SPARE_ROWS, GrowingLayer, GrowingSlidingLayer
from hf_ddtree.cache.path import KeptPath

WINDOWS = [None, 2, 3, 8]


class Pair:
    """Ours and theirs, driven by the same operations."""

    def __init__(self, window: int | None):
        self.ours, self.theirs = twins(window)
        self.window, self.rows, self.batch = window, Rows(), 1

    def append(self, length: int) -> None:
        rows = self.rows(length, self.batch)
        for got, expected in zip(self.ours.update(*rows), self.theirs.update(*rows), strict=True):
            assert torch.equal(got, expected)

    def round(self, nodes: int, chosen: int, keep: bool = True) -> None:
        """A tree of `nodes` rows of which the root and those in the bits of `chosen` are kept.

        The root's own bit says whether they are moved before the commit, as a cache moves them in all its layers.
        """
        rows = self.rows(nodes, self.batch)
        path = [0] + [node for node in range(1, nodes) if chosen >> node & 1]
        before = [t.clone() for t in (self.theirs.keys, self.theirs.values)] if self.theirs.get_seq_length() else None
        expected_keys = self.theirs.get_mask_sizes(nodes)[0]
        self.ours.begin()
        got = self.ours.update(*rows)
        assert got[0].shape[-2] == expected_keys
        for i in range(2):
            assert torch.equal(got[i][:, :, -nodes:], rows[i])
            if before is not None:
                assert torch.equal(got[i][:, :, :-nodes], before[i])
        assert self.ours.get_seq_length() == self.theirs.get_seq_length() + nodes
        if keep:
            kept = KeptPath(torch.tensor(path))
            if chosen & 1:
                kept.move([self.ours])
            self.ours.commit(kept)
            append_one_by_one(self.theirs, rows, path)
        else:
            self.ours.rollback()

    def crop(self, count: int) -> None:
        # The library's own layers cannot be cropped while empty, nor a sliding one once it is full.
        if 0 < self.theirs.get_seq_length() < (self.window or 10**9):
            for layer in (self.ours, self.theirs):
                layer.crop(-count)

    def reset(self) -> None:
        self.batch = 1
        for layer in (self.ours, self.theirs):
            layer.reset()

    def on_batch(self, operation: str) -> None:
        if not self.theirs.get_seq_length():
            return
        arguments: dict[str, Any] = {
            "batch_repeat_interleave": 2,
            "batch_select_indices": torch.tensor([self.batch - 1]),
            "reorder_cache": torch.arange(self.batch).flip(0),
        }
        for layer in (self.ours, self.theirs):
            getattr(layer, operation)(arguments[operation])
        self.batch = self.theirs.keys.shape[0]


operations = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 12)),
    st.tuples(st.just("round"), st.integers(1, 9), st.integers(0, 511), st.booleans()),
    st.tuples(st.just("round"), st.integers(1, 9), st.integers(0, 511)),
    st.tuples(st.just("crop"), st.integers(0, 6)),
    st.tuples(st.just("reset")),
    st.tuples(
        st.just("on_batch"), st.sampled_from(["reorder_cache", "batch_select_indices", "batch_repeat_interleave"])
    ),
)


@given(window=st.sampled_from(WINDOWS), steps=st.lists(operations, max_size=14))
def test_any_sequence_of_operations(window: int | None, steps: list[Any]) -> None:
    pair = Pair(window)
    for name, *arguments in steps:
        if name == "on_batch" and arguments == ["batch_repeat_interleave"] and pair.batch > 4:
            continue
        getattr(pair, name)(*arguments)
        assert_equal(pair.ours, pair.theirs)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("start", [0, 1, 40])
def test_many_rounds_over_the_end_of_the_buffer(window: int | None, start: int) -> None:
    pair = Pair(window)
    if start:
        pair.append(start)
    for turn in range(150):
        pair.round(7, chosen=turn * 37 % 128, keep=turn % 5 != 0)
        assert_equal(pair.ours, pair.theirs)
    assert pair.theirs.get_seq_length() > SPARE_ROWS + start


def buffers_of(layer: Any, rounds: int, nodes: int, kept: int) -> list[torch.Tensor]:
    """The distinct storages, held alive so that no address is used twice."""
    held: list[torch.Tensor] = []
    rows = Rows()
    for _ in range(rounds):
        layer.begin()
        layer.update(*rows(nodes))
        layer.commit(KeptPath(torch.arange(nodes - kept, nodes)))
        if not held or held[-1].untyped_storage().data_ptr() != layer.keys.untyped_storage().data_ptr():
            held.append(layer.keys)
    return held


def test_a_full_layer_grows_logarithmically() -> None:
    layer = GrowingLayer()
    layer.update(*Rows()(700))
    held = buffers_of(layer, rounds=600, nodes=9, kept=5)
    assert layer.get_seq_length() == 700 + 3000
    # By 256 rows a time up to 2048, then by an eighth.
    assert len(held) <= 11


def test_a_sliding_layer_moves_its_window_rarely_and_stays_small() -> None:
    layer = GrowingSlidingLayer(sliding_window=16)
    layer.update(*Rows()(700))
    held = buffers_of(layer, rounds=600, nodes=9, kept=5)
    assert layer.get_seq_length() == 700 + 3000
    assert len(held) <= 3000 // (SPARE_ROWS - 9) + 2
    row_bytes = 2 * layer.keys[..., :1, :].numel() * layer.keys.element_size()
    assert max(view.untyped_storage().nbytes() for view in held) <= (15 + 9 + SPARE_ROWS) * row_bytes


def test_plain_decoding_does_not_copy_the_context() -> None:
    layer, rows = GrowingLayer(), Rows()
    layer.update(*rows(50))
    address = layer.keys.data_ptr()
    for _ in range(SPARE_ROWS - 1):
        layer.update(*rows(1))
    assert layer.keys.data_ptr() == address
    layer.crop(-20)
    layer.update(*rows(7))
    assert layer.keys.data_ptr() == address


@pytest.mark.parametrize("window", WINDOWS)
def test_rows_handed_out_before_a_round_keep_their_values(window: int | None) -> None:
    """Rounds write behind what a caller holds, never into it."""
    pair = Pair(window)
    pair.append(11)
    pair.round(3, chosen=7)
    held = pair.ours.keys, pair.ours.keys.clone()
    for _ in range(20):
        pair.round(6, chosen=42)
    assert torch.equal(*held)


@pytest.mark.parametrize("window", WINDOWS)
def test_adopting_leaves_the_layer_as_it_was(window: int | None) -> None:
    pair = Pair(window)
    pair.append(11)
    before = pair.theirs.keys.clone(), pair.theirs.values.clone()
    adopted = type(pair.ours).adopt(pair.theirs)
    assert_equal(adopted, pair.theirs)
    adopted.begin()
    adopted.update(*pair.rows(4))
    adopted.commit(KeptPath(torch.tensor([0, 2])))
    assert torch.equal(pair.theirs.keys, before[0])
    assert torch.equal(pair.theirs.values, before[1])
    assert pair.theirs.get_seq_length() == 11
    assert adopted.get_seq_length() == 13


@pytest.mark.parametrize("kind", [DynamicLayer, lambda: DynamicSlidingWindowLayer(sliding_window=4)])
def test_adopting_an_empty_layer(kind: Any) -> None:
    theirs = kind()
    ours = (GrowingSlidingLayer if theirs.is_sliding else GrowingLayer).adopt(theirs)
    rows = Rows()(3)
    ours.begin()
    ours.update(*rows)
    ours.commit(KeptPath(torch.tensor([0, 2])))
    append_one_by_one(theirs, rows, [0, 2])
    assert_equal(ours, theirs)


@pytest.mark.parametrize("window", WINDOWS)
def test_ending_a_round_that_is_not_open_changes_nothing(window: int | None) -> None:
    pair = Pair(window)
    pair.append(9)
    pair.ours.commit(KeptPath(torch.tensor([0])))
    pair.ours.rollback()
    pair.ours.begin()
    pair.ours.commit(KeptPath(torch.tensor([0])))
    assert_equal(pair.ours, pair.theirs)
    pair.append(2)
    assert_equal(pair.ours, pair.theirs)


def test_rows_that_are_replaced_within_a_round() -> None:
    """What a round asked of a layer at its start holds for its own rows only."""
    pair = Pair(None)
    pair.append(9)
    pair.ours.begin()
    pair.ours.keys, pair.ours.values = -pair.ours.keys, -pair.ours.values
    pair.theirs.keys, pair.theirs.values = -pair.theirs.keys, -pair.theirs.values
    pair.append(3)
    assert_equal(pair.ours, pair.theirs)


@pytest.mark.parametrize("window", WINDOWS)
def test_keys_and_values_of_different_widths(window: int | None) -> None:
    ours, theirs = twins(window)
    keys, values = torch.randn(1, 2, 9, 5), torch.randn(1, 2, 9, 3)
    ours.begin()
    ours.update(keys, values)
    ours.commit(KeptPath(torch.tensor([0, 3, 8])))
    for node in (0, 3, 8):
        theirs.update(keys[:, :, node : node + 1], values[:, :, node : node + 1])
    assert_equal(ours, theirs)


@pytest.mark.parametrize("window", WINDOWS)
def test_buffers_of_inference_mode_are_left_behind(window: int | None) -> None:
    """A tensor made in inference mode may not be written outside of it."""
    pair = Pair(window)
    with torch.inference_mode():
        pair.append(9)
        pair.round(5, chosen=21)
    with torch.no_grad():
        pair.round(5, chosen=21)
        pair.append(2)
    with torch.inference_mode():
        pair.round(5, chosen=9)
    assert_equal(pair.ours, pair.theirs)


def test_a_copy_made_in_inference_mode_goes_on_outside_of_it() -> None:
    pair = Pair(None)
    pair.append(9)
    pair.round(5, chosen=21)
    with torch.inference_mode():
        pair.ours = copy.deepcopy(pair.ours)
    with torch.no_grad():
        pair.round(5, chosen=21)
        pair.append(2)
    assert_equal(pair.ours, pair.theirs)


@pytest.mark.parametrize("differentiable", ["keys", "values", "rows before"])
def test_gradients_reach_rows_that_go_through_a_cache(differentiable: str) -> None:
    """Some layers of a model may be trained, or what stands before the prompt."""
    results = []
    for layer in twins(None):
        rows = Rows()
        first, second = (tuple(part.clone() for part in rows(length)) for length in (4, 2))
        leaf = {"keys": second[0], "values": second[1], "rows before": first[1]}[differentiable].requires_grad_()
        layer.update(*first)
        keys, values = layer.update(*second)
        (keys * values).sum().backward()
        results.append((keys.detach(), values.detach(), leaf.grad))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
