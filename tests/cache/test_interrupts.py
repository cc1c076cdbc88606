"""A round cut short at any line, as by Ctrl-C, is ended by what the generation loop does on an exception."""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from transformers import cache_utils

from cache.rows import Rows, append_one_by_one, assert_equal, assert_equal_static, static_twins, twins
from hf_ddtree.cache import DDTreeCache, restored_on_error
from hf_ddtree.cache import buffers as buffers_module
from hf_ddtree.cache import ddtree_cache as cache_module
from hf_ddtree.cache import layers as layers_module
from hf_ddtree.cache import path as path_module
from hf_ddtree.cache import recurrent as recurrent_module
from hf_ddtree.cache import static as static_module
from hf_ddtree.cache.buffers import Buffers
from hf_ddtree.cache.layers import GrowingLayer
from hf_ddtree.cache.static import StaticTreeLayer

WINDOWS = [None, 6, None, 3]
STATIC_WINDOWS = [None, 6, None, 40]
# Moved after copies of its rows were taken; moved by one operation; where it belongs.
PATHS = [[0, 2, 5], [0, 4, 5, 6], [0, 1]]
OURS = (buffers_module, cache_module, layers_module, path_module, recurrent_module, static_module)
MODULES = {module.__file__ for module in (*OURS, cache_utils)}


@contextmanager
def interrupt_at(line: int) -> Iterator[None]:
    """Raises `KeyboardInterrupt` before the n-th line executed in the modules of cache layers, the library's too."""
    left = line

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in MODULES:
            return None
        if event == "line":
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
            left -= 1
        return trace

    # Coverage traces too.
    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(previous)


class Caches:
    """Layers of every kind in one cache, and the library's own layers beside them."""

    def __init__(self, path: list[int] = PATHS[0], prefix: int = 9):
        self.path = path
        pairs = [
            *(twins(window) for window in WINDOWS),
            *(static_twins(window, length=400, room=7) for window in STATIC_WINDOWS),
        ]
        self.theirs, self.rows = [theirs for _, theirs in pairs], Rows()
        self.cache = DDTreeCache()
        self.cache.layers = [ours for ours, _ in pairs]
        for layer in (*self.cache.layers, *self.theirs):
            layer.update(*Rows()(prefix))
        self.round()

    def round(self) -> None:
        self.cache.begin()
        self.forward()
        self.cache.prune(torch.tensor(self.path))
        self.plain()

    def forward(self) -> None:
        self.tree = [self.rows(7) for _ in self.theirs]
        for layer, rows in zip(self.cache.layers, self.tree, strict=True):
            layer.update(*rows)

    def plain(self) -> None:
        for layer, rows in zip(self.theirs, self.tree, strict=True):
            append_one_by_one(layer, rows, self.path)

    def check(self) -> None:
        for ours, theirs in zip(self.cache.layers, self.theirs, strict=True):
            (assert_equal_static if hasattr(theirs, "max_cache_len") else assert_equal)(ours, theirs)


def lines_of(action: Callable[[], None]) -> int:
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in MODULES:
            return None
        count += event == "line"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(previous)
    assert count
    return count


def committing(caches: Caches) -> Callable[[], None]:
    caches.cache.begin()
    caches.forward()
    return lambda: caches.cache.prune(torch.tensor(caches.path))


@pytest.mark.parametrize("path", PATHS)
def test_a_commit_is_finished_by_committing_again(path: list[int]) -> None:
    for line in range(lines_of(committing(Caches(path)))):
        caches = Caches(path)
        commit = committing(caches)
        with pytest.raises(KeyboardInterrupt), interrupt_at(line):
            commit()
        caches.cache.prune(torch.tensor(caches.path))
        caches.plain()
        caches.check()
        caches.round()
        caches.check()


def forwarding(caches: Caches) -> Callable[[], None]:
    def act() -> None:
        caches.cache.begin()
        caches.forward()

    return act


@pytest.mark.parametrize("full", [False, True])
def test_a_forward_is_undone_by_rolling_back(full: bool) -> None:
    """With room left in the buffers, and with every buffer used up, so that the forward moves its rows."""

    def fresh() -> Caches:
        caches = Caches()
        while full and room(caches) >= 7:
            caches.round()
        return caches

    def room(caches: Caches) -> int:
        return min(layer._buffers.capacity - layer._end for layer in caches.cache.layers if hasattr(layer, "_end"))

    start = fresh()
    for line in range(lines_of(forwarding(fresh()))):
        caches = copy.deepcopy(start)
        with pytest.raises(KeyboardInterrupt), interrupt_at(line):
            forwarding(caches)()
        caches.cache.rollback()
        caches.check()
        caches.round()
        caches.check()


def test_a_rollback_is_finished_by_rolling_back_again() -> None:
    def rolling(caches: Caches) -> Callable[[], None]:
        committing(caches)
        return caches.cache.rollback

    for line in range(lines_of(rolling(Caches()))):
        caches = Caches()
        rollback = rolling(caches)
        with pytest.raises(KeyboardInterrupt), interrupt_at(line):
            rollback()
        caches.cache.rollback()
        caches.check()
        caches.round()
        caches.check()


def prefilling(caches: Caches) -> Callable[[], None]:
    caches.tree = [caches.rows(3) for _ in caches.theirs]

    def act() -> None:
        with restored_on_error(caches.cache):
            for layer, rows in zip(caches.cache.layers, caches.tree, strict=True):
                layer.update(*rows)

    return act


def test_a_prefill_of_a_further_turn_is_as_if_it_had_not_been() -> None:
    for line in range(lines_of(prefilling(Caches()))):
        caches = Caches()
        prefill = prefilling(caches)
        # The restoring itself is no line of these modules.
        with pytest.raises(KeyboardInterrupt), interrupt_at(line):
            prefill()
        caches.check()
        prefill()
        for layer, rows in zip(caches.theirs, caches.tree, strict=True):
            layer.update(*rows)
        caches.check()
        caches.round()
        caches.check()


def test_a_write_that_fails_between_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    caches, write, calls = Caches(), Buffers.write, []

    def failing(buffers: Buffers, at: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        calls.append(at)
        if len(calls) == 2:
            buffers.keys.narrow(-2, at, keys.shape[-2]).copy_(keys)
            raise MemoryError
        write(buffers, at, keys, values)

    commit = committing(caches)
    monkeypatch.setattr(Buffers, "write", failing)
    with pytest.raises(MemoryError):
        commit()
    commit()
    caches.plain()
    caches.check()


def test_the_interrupts_reach_a_half_moved_path() -> None:
    """The control of the tests above: some line leaves a layer whose keys are moved and whose values are not."""
    torn = [0, 0]
    for line in range(lines_of(committing(Caches()))):
        caches = Caches()
        commit = committing(caches)
        with pytest.raises(KeyboardInterrupt), interrupt_at(line):
            commit()
        growing, static = caches.cache.layers[0], caches.cache.layers[len(WINDOWS)]
        assert isinstance(growing, GrowingLayer)
        assert isinstance(static, StaticTreeLayer)
        held = [
            list(growing._buffers.view(13, 14)),
            [static.keys[:, :, 13:14], static.values[:, :, 13:14]],
        ]
        for kind, index in enumerate((0, len(WINDOWS))):
            (keys, values), rows = held[kind], caches.tree[index]
            torn[kind] += torch.equal(keys, rows[0][:, :, 2:3]) and not torch.equal(values, rows[1][:, :, 2:3])
    assert all(torn)
