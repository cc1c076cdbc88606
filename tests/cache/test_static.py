"""Layers of fixed length under any sequence of operations hold what the library's own hold after plain decoding."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import StaticCache
from transformers.cache_utils import DynamicCache, StaticLayer, StaticSlidingWindowLayer

from cache.rows import HEAD_DIM, HEADS, Rows, append_one_by_one, assert_equal_static, static_twins
from hf_ddtree.cache import adopt_static, begin, fixed_length, prune, rollback
from hf_ddtree.cache.path import KeptPath
from hf_ddtree.cache.static import StaticSlidingTreeLayer, StaticTreeLayer
from pairs import make_target

# Tokens that a layer holds, and nodes of the largest tree. The windows are smaller and larger than the length.
LENGTH, ROOM = 90, 8
WINDOWS = [None, 2, 3, 8, 200]


class Pair:
    """Ours and theirs, driven by the same operations."""

    def __init__(self, window: int | None, length: int = LENGTH, room: int = ROOM):
        self.ours, self.theirs = static_twins(window, length, room)
        self.window, self.length, self.rows = window, length, Rows()

    @property
    def used(self) -> int:
        return int(self.theirs.get_seq_length())

    def append(self, length: int) -> None:
        if self.used + length > self.length:
            return
        rows = self.rows(length)
        for got, expected in zip(self.ours.update(*rows), self.theirs.update(*rows), strict=True):
            if self.window is None:
                got, expected = got[:, :, : self.used], expected[:, :, : self.used]
            assert torch.equal(got, expected)

    def round(self, nodes: int, chosen: int, keep: bool = True) -> None:
        """A tree of `nodes` rows of which the root and those in the bits of `chosen` are kept."""
        path = [0] + [node for node in range(1, nodes) if chosen >> node & 1]
        if self.used + len(path) > self.length:
            return
        rows, before = self.rows(nodes), self.used
        self.ours.begin()
        length, first = self.ours.get_mask_sizes(nodes)
        got = self.ours.update(*rows)
        assert got[0].shape[-2] == got[1].shape[-2] == length
        assert int(self.ours.get_seq_length()) == before + nodes
        for index in range(2):
            assert torch.equal(got[index][:, :, before - first : before - first + nodes], rows[index])
            if before:
                held = (self.theirs.keys, self.theirs.values)[index][:, :, : min(before, self.theirs.max_cache_len)]
                assert torch.equal(got[index][:, :, : before - first], held[:, :, held.shape[-2] - before + first :])
        if keep:
            self.ours.commit(KeptPath(torch.tensor(path)))
            append_one_by_one(self.theirs, rows, path)
        else:
            self.ours.rollback()


operations = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 12)),
    st.tuples(st.just("round"), st.integers(1, 9), st.integers(0, 511), st.booleans()),
    st.tuples(st.just("round"), st.integers(1, 9), st.integers(0, 511)),
)


@given(window=st.sampled_from(WINDOWS), steps=st.lists(operations, max_size=14))
def test_any_sequence_of_operations(window: int | None, steps: list[Any]) -> None:
    pair = Pair(window)
    for name, *arguments in steps:
        getattr(pair, name)(*arguments)
        assert_equal_static(pair.ours, pair.theirs)


@pytest.mark.parametrize("window", WINDOWS)
def test_rounds_up_to_the_last_slot(window: int | None) -> None:
    """The largest tree fits behind all tokens but the one that is never read and the root."""
    pair = Pair(window)
    pair.append(5)
    addresses = pair.ours.keys.data_ptr(), pair.ours.values.data_ptr(), pair.ours.cumulative_length.data_ptr()
    for turn in range(LENGTH):
        pair.round(ROOM + 1, chosen=turn * 37 % 512 if pair.used < LENGTH - 9 else 0, keep=turn % 5 != 0)
        assert_equal_static(pair.ours, pair.theirs)
    assert pair.used == LENGTH
    held = pair.ours.keys.data_ptr(), pair.ours.values.data_ptr(), pair.ours.cumulative_length.data_ptr()
    assert held == addresses


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("used", [0, 7, 40])
def test_adopting_keeps_the_rows(window: int | None, used: int) -> None:
    pair = Pair(window)
    if window is None:
        source: Any = StaticLayer(LENGTH)
    else:
        source = StaticSlidingWindowLayer(LENGTH, window)
    if used:
        rows = pair.rows(used)
        pair.theirs.update(*rows)
        source.update(*rows)
    pair.ours = (StaticTreeLayer if window is None else StaticSlidingTreeLayer).adopt(source, ROOM)
    assert_equal_static(pair.ours, pair.theirs)
    for chosen in (3, 42, 21):
        pair.round(7, chosen)
        pair.append(2)
        assert_equal_static(pair.ours, pair.theirs)


def test_room_is_made_once() -> None:
    layer = StaticTreeLayer.adopt(StaticLayer(20), 8)
    layer.update(*Rows()(6))
    assert StaticTreeLayer.adopt(layer, 8) is layer
    assert StaticTreeLayer.adopt(layer, 3) is layer
    larger = StaticTreeLayer.adopt(layer, 9)
    assert (larger.max_cache_len, larger.room, layer.max_cache_len) == (29, 9, 28)
    assert larger.keys is not None
    assert larger.keys.shape == (1, HEADS, 29, HEAD_DIM)
    assert torch.equal(larger.keys[:, :, :20], layer.keys[:, :, :20])


@pytest.mark.parametrize("window", WINDOWS)
def test_ending_a_round_that_is_not_open_changes_nothing(window: int | None) -> None:
    pair = Pair(window)
    pair.append(9)
    for path in ([0], [0, 2]):
        pair.ours.commit(KeptPath(torch.tensor(path)))
        pair.ours.rollback()
        pair.ours.begin()
        pair.ours.commit(KeptPath(torch.tensor(path)))
        assert_equal_static(pair.ours, pair.theirs)
    pair.append(2)
    assert_equal_static(pair.ours, pair.theirs)


@pytest.mark.parametrize("window", WINDOWS)
def test_the_first_use_may_be_a_tree(window: int | None) -> None:
    pair = Pair(window)
    pair.round(5, chosen=21, keep=False)
    pair.round(5, chosen=21)
    assert_equal_static(pair.ours, pair.theirs)


@pytest.mark.parametrize("window", WINDOWS)
def test_keys_and_values_of_different_widths(window: int | None) -> None:
    ours, theirs = static_twins(window, LENGTH, ROOM)
    rows = torch.randn(1, 2, 9, 5), torch.randn(1, 2, 9, 3)
    ours.begin()
    ours.update(*rows)
    ours.commit(KeptPath(torch.tensor([0, 3, 8])))
    append_one_by_one(theirs, rows, [0, 3, 8])
    assert_equal_static(ours, theirs)


@pytest.mark.parametrize("window", WINDOWS)
def test_tensors_of_inference_mode_are_left_behind(window: int | None) -> None:
    pair = Pair(window)
    with torch.inference_mode():
        pair.append(9)
        pair.round(5, chosen=21)
    with torch.no_grad():
        pair.ours = type(pair.ours).adopt(pair.ours, ROOM)
        pair.theirs.keys, pair.theirs.values = pair.theirs.keys.clone(), pair.theirs.values.clone()
        pair.theirs.cumulative_length = pair.theirs.cumulative_length.clone()
        pair.round(5, chosen=21)
        pair.append(2)
        assert_equal_static(pair.ours, pair.theirs)


def test_a_tree_s_update_is_compiled_once() -> None:
    """Whatever the number of tokens: shapes do not depend on it, and nothing is read back from the device."""
    layer, rows, graphs = StaticTreeLayer(40, 8), Rows(), []
    layer.update(*rows(4))

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    update = torch.compile(lambda *rows: layer.update(*rows), backend=counting, fullgraph=True)
    pair = Pair(None, length=40)
    pair.ours = layer
    pair.theirs.update(*Rows()(4))
    for path in ([0, 2, 3], [0], [0, 1, 2, 5]):
        tree = rows(6)
        layer.begin()
        update(*tree)
        layer.commit(KeptPath(torch.tensor(path)))
        append_one_by_one(pair.theirs, tree, path)
        assert_equal_static(layer, pair.theirs)
    assert len(graphs) == 1


@pytest.mark.parametrize("family", ["llama", "qwen3_sliding", "mistral"])
def test_a_whole_cache(family: str) -> None:
    config = make_target(family).config
    ours, theirs = StaticCache(config=config, max_cache_len=30), StaticCache(config=config, max_cache_len=30)
    layers = ours.layers
    adopt_static(ours, room=8)
    assert ours.layers is layers
    assert {type(layer) for layer in layers} <= {StaticTreeLayer, StaticSlidingTreeLayer}
    assert ours.is_compileable
    rows = [Rows()(9) for _ in layers]
    for cache in (ours, theirs):
        for index, prefix in enumerate(rows):
            cache.update(*prefix, index)
    for keep in (False, True, True):
        begin(ours)
        for index, tree in enumerate(rows):
            ours.update(*tree, index)
        if not keep:
            rollback(ours)
            continue
        prune(ours, torch.tensor([0, 4, 7]))
        for layer, tree in zip(theirs.layers, rows, strict=True):
            append_one_by_one(layer, tree, [0, 4, 7])
    for layer, expected in zip(ours.layers, theirs.layers, strict=True):
        assert_equal_static(layer, expected)
    assert int(ours.get_seq_length()) == 15


def test_how_many_tokens_fit() -> None:
    full = StaticCache(config=make_target("llama").config, max_cache_len=30)
    sliding, short = (StaticCache(config=make_target("mistral").config, max_cache_len=length) for length in (30, 5))
    for _ in range(2):
        assert fixed_length(full, None) == 30
        assert fixed_length(sliding, window=7) is None
        assert fixed_length(short, window=7) == 5
        # Room for trees is no room for tokens.
        for cache in (full, sliding, short):
            adopt_static(cache, room=8)
    assert fixed_length(DynamicCache(config=make_target("mistral").config), window=7) is None
