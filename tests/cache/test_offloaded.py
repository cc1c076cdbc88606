"""Layers whose rows move between host and device: each move is to other memory here, as it is with a GPU."""

import gc
import weakref
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, StaticCache, StaticLayer

from cache.rows import Rows, append_one_by_one, assert_equal, assert_equal_static, static_twins, twins
from hf_ddtree.cache import DDTreeCache, adopt, adopt_static, begin, check, prune, rollback
from hf_ddtree.cache.buffers import Buffers
from hf_ddtree.cache.layers import GrowingLayer, GrowingSlidingLayer
from hf_ddtree.cache.path import KeptPath
from hf_ddtree.cache.static import StaticTreeLayer
from pairs import make_target
from streams import Stream, stand_in

WINDOWS = [None, 3, 8]
# Equal in kind and unlike in name, so that rows on the host count as offloaded.
ELSEWHERE = torch.device("cpu", 0)


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every move is a copy, and the device asked for is noted."""
    asked: list[Any] = []
    on = Buffers.on

    def copying(buffers: Buffers, device: Any) -> Buffers:
        asked.append(device)
        moved = on(buffers, device)
        return Buffers(moved.keys, moved.values, moved.capacity)

    monkeypatch.setattr(Buffers, "on", copying)
    return asked


@pytest.mark.parametrize("window", WINDOWS)
def test_a_layer_that_moves_between_all_steps(window: int | None, moves: list[Any]) -> None:
    ours, theirs = twins(window)
    rows = Rows()
    prefix = rows(11)
    for layer in (ours, theirs):
        layer.update(*prefix)
    ours.device = ELSEWHERE
    for turn in range(60):
        tree, path = rows(7), [0, 2, 5][: turn % 3 + 1]
        ours.offload()
        ours.prefetch()
        ours.begin()
        keys, values = ours.update(*tree)
        ours.offload()
        # What attention reads stays as it was.
        assert torch.equal(keys[:, :, -7:], tree[0])
        assert torch.equal(values[:, :, -7:], tree[1])
        if turn % 4 == 0:
            ours.rollback()
        else:
            ours.commit(KeptPath(torch.tensor(path)))
            append_one_by_one(theirs, tree, path)
        assert_equal(ours, theirs)
    ours.offload()
    ours.prefetch()
    assert_equal(ours, theirs)
    assert {str(device) for device in moves} == {"cpu", "cpu:0"}


@pytest.mark.parametrize("window", WINDOWS)
def test_an_update_brings_offloaded_rows_back(window: int | None, moves: list[Any]) -> None:
    """An error between two layers leaves a round with rows on the host."""
    ours, theirs = twins(window)
    rows = Rows()
    for length in (11, 3):
        appended = rows(length)
        for layer in (ours, theirs):
            layer.update(*appended)
    ours.device = ELSEWHERE
    ours.begin()
    ours.update(*rows(7))
    ours.offload()
    ours.rollback()
    tree = rows(7)
    moves.clear()
    ours.begin()
    capacity = ours._buffers.capacity
    ours.update(*tree)
    assert moves == [ELSEWHERE]
    assert ours._buffers.capacity == capacity, "the room that comes back is used"
    ours.commit(KeptPath(torch.tensor([0, 3])))
    append_one_by_one(theirs, tree, [0, 3])
    assert_equal(ours, theirs)


def test_offloading_frees_the_device_s_memory(moves: list[Any]) -> None:
    layer, rows = GrowingLayer(), Rows()
    layer.update(*rows(50))
    layer.begin()
    layer.update(*rows(7))
    layer.commit(KeptPath(torch.tensor([0, 2])))
    assert layer._buffers is not None
    held = [weakref.ref(storage) for storage in layer._buffers.storages]
    layer.offload()
    gc.collect()
    assert [reference() for reference in held] == [None]
    assert layer.keys is not None
    assert layer.keys.untyped_storage().data_ptr() == layer._buffers.storages[0].untyped_storage().data_ptr()


def test_moving_does_not_copy_the_context_a_second_time(moves: list[Any]) -> None:
    """The room moves with the rows, so that a round after a move writes in place."""
    layer, rows = GrowingLayer(), Rows()
    layer.update(*rows(50))
    layer.offload()
    layer.prefetch()
    address = layer.keys.data_ptr()
    layer.begin()
    layer.update(*rows(7))
    layer.commit(KeptPath(torch.tensor([0, 2])))
    assert layer.keys.data_ptr() == address


@pytest.mark.parametrize("source", [DynamicLayer(), DynamicSlidingWindowLayer(sliding_window=4)])
def test_adopting_an_offloaded_layer_keeps_its_device(source: Any) -> None:
    source.update(*Rows()(9))
    source.device = ELSEWHERE
    adopted = (GrowingSlidingLayer if source.is_sliding else GrowingLayer).adopt(source)
    assert adopted.device == ELSEWHERE
    assert_equal(adopted, source)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_static_layer_that_moves(window: int | None) -> None:
    ours, theirs = static_twins(window, 60, 7)
    rows = Rows()
    prefix = rows(11)
    for layer in (ours, theirs):
        layer.update(*prefix)
    for path in ([0, 2, 5], [0], [0, 1], [0, 6]):
        tree = rows(7)
        ours.begin()
        ours.update(*tree)
        ours.offload()
        ours.keys, ours.values = ours.keys.clone(), ours.values.clone()
        ours.commit(KeptPath(torch.tensor(path)))
        append_one_by_one(theirs, tree, path)
        assert_equal_static(ours, theirs)
        ours.prefetch()
    ours = type(ours).adopt(ours, 9)
    assert ours.device == theirs.device
    assert_equal_static(ours, theirs)


def test_a_static_layer_on_the_host_keeps_its_device() -> None:
    source = StaticLayer(20)
    source.update(*Rows()(9))
    source.device = ELSEWHERE
    adopted = StaticTreeLayer.adopt(source, 7)
    assert adopted.device == ELSEWHERE
    assert_equal_static(adopted, source)


def test_buffers_on_another_device() -> None:
    buffers = Buffers(*Rows()(9), capacity=20)
    moved = buffers.on("meta")
    assert (moved.device.type, moved.values.device.type, moved.capacity) == ("meta", "meta", 20)
    assert buffers.device.type == "cpu"


@pytest.mark.parametrize("kind", ["dynamic", "lazy", "ours", "static"])
def test_a_whole_cache(kind: str, monkeypatch: pytest.MonkeyPatch, moves: list[Any]) -> None:
    stand_in(monkeypatch)
    config = make_target("qwen3_sliding").config
    if kind == "static":
        cache: Any = StaticCache(config=config, max_cache_len=40, offloading=True)
        reference: Any = StaticCache(config=config, max_cache_len=40)
        adopt_static(cache, room=7)
    else:
        own = DDTreeCache if kind == "ours" else DynamicCache
        cache = own(config=None if kind == "lazy" else config, offloading=True)
        reference = DynamicCache(config=None if kind == "lazy" else config)
    rows = [Rows()(9) for _ in range(4)]
    for each in (cache, reference):
        for index, prefix in enumerate(rows):
            each.update(*prefix, index)
    check(cache)
    adopt(cache)
    if kind == "dynamic":
        cache = DDTreeCache.over(cache)
        assert cache.offloading
    entered = Stream.entered
    for keep in (True, False, True):
        begin(cache)
        for index, tree in enumerate(rows):
            cache.update(*tree, index)
        if not keep:
            rollback(cache)
            continue
        prune(cache, torch.tensor([0, 4, 6]))
        for layer, tree in zip(reference.layers, rows, strict=True):
            append_one_by_one(layer, tree, [0, 4, 6])
    for layer, expected in zip(cache.layers, reference.layers, strict=True):
        (assert_equal_static if kind == "static" else assert_equal)(layer, expected)
    assert Stream.entered == entered + 12
    assert (len(moves) >= 12) == (kind != "static")
