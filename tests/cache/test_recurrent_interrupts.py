"""A round of layers with recurrent states cut short at any line, and ended as the generation loop does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cache.recurrent_rows import Tokens, assert_equal, states, twins
from cache.test_interrupts import interrupt_at, lines_of
from hf_ddtree.cache import DDTreeCache

PATH = [0, 2, 5]
# Kinds of layers, and whether they read their tokens again at the commit.
LAYERS = [("recurrent", False), ("recurrent", True), ("with_attention", False), ("with_sliding", True)]


class Caches:
    """Every kind of layer, with a rule for trees or replayed, and the library's own beside them."""

    def __init__(self) -> None:
        pairs = [twins(kind, prefix=3) for kind, _ in LAYERS]
        self.theirs = [theirs for _, theirs in pairs]
        self.cache = DDTreeCache()
        self.cache.layers = [ours for ours, _ in pairs]
        self.turn = 0

    def forward(self) -> None:
        self.turn += 1
        for layer, (_, replayed) in zip(self.cache.layers, LAYERS, strict=True):
            Tokens(6, seed=self.turn).as_tree(layer, replayed)

    def begun(self) -> "Caches":
        self.cache.begin()
        self.forward()
        return self

    def plain(self) -> None:
        for layer in self.theirs:
            Tokens(6, seed=self.turn).read(layer, PATH)

    def commit(self) -> None:
        self.cache.prune(torch.tensor(PATH))

    def check(self) -> None:
        for ours, theirs in zip(self.cache.layers, self.theirs, strict=True):
            assert_equal(ours, theirs)

    def check_another_round(self) -> None:
        self.check()
        self.begun().commit()
        self.plain()
        self.check()


def every_line(make: Callable[[], Caches], action: Callable[[Caches], Any]) -> Any:
    """The caches after `action` was interrupted, for each line that it could be interrupted at."""
    first = make()
    for line in range(lines_of(lambda: action(first))):
        caches = make()
        with pytest.raises(KeyboardInterrupt), interrupt_at(line):
            action(caches)
        yield caches


def test_a_commit_is_finished_by_committing_again() -> None:
    half_done = 0
    for caches in every_line(lambda: Caches().begun(), Caches.commit):
        ours = states(caches.cache.layers[0])
        half_done += not torch.equal(ours[0], states(caches.theirs[0])[0]) and caches.cache.layers[0].record_past
        caches.commit()
        caches.plain()
        caches.check_another_round()
    # The control: some line leaves a layer of which one state is moved and the round not over.
    assert half_done


def test_a_forward_is_undone_by_rolling_back() -> None:
    for caches in every_line(Caches, Caches.begun):
        caches.cache.rollback()
        caches.check_another_round()


def test_a_rollback_is_finished_by_rolling_back_again() -> None:
    for caches in every_line(lambda: Caches().begun(), lambda caches: caches.cache.rollback()):
        caches.cache.rollback()
        caches.check_another_round()
