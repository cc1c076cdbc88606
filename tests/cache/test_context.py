"""The drafter's cache: the context's keys and values only, whatever a pass appends."""

import copy
import gc
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from cache.rows import Rows, assert_equal
from hf_ddtree.cache import DDTreeCache, DrafterContext
from pairs import make_drafter, make_target


def drafter(**overrides: Any) -> Any:
    return make_drafter(make_target(), **overrides)


def mixed() -> Any:
    return drafter(layer_types=["sliding_attention", "full_attention"], sliding_window=5)


def test_a_pass_keeps_the_context_and_drops_the_slots() -> None:
    model = mixed()
    context, references = DrafterContext(model), [DynamicSlidingWindowLayer(5), DynamicLayer()]
    rows = Rows()
    for new in (9, 1, 3, 2, 6):
        context.unread(torch.zeros(1, new, 96))
        assert context.read().shape[1] == new
        context.begin(new)
        for index, reference in enumerate(references):
            appended = rows(new + 6)
            got = context.cache.update(*appended, index)
            expected = reference.update(*(t[:, :, :new] for t in appended))
            assert torch.equal(got[0][:, :, :-6], expected[0])
            assert torch.equal(got[0][:, :, -6:], appended[0][:, :, new:])
        context.commit(new)
        for layer, reference in zip(context.cache.layers, references, strict=True):
            assert_equal(layer, reference)
        with pytest.raises(RuntimeError, match="nothing to read"):
            context.read()
    assert context.position == context.length == 21


def test_unread_taps_add_up_and_count() -> None:
    context = DrafterContext(drafter())
    taps = torch.randn(1, 5, 96)
    context.unread(taps[:, :2])
    context.unread(taps[:, 2:])
    assert torch.equal(context.read(), taps)
    assert (context.position, context.length) == (0, 5)


def test_a_failed_pass_can_be_repeated() -> None:
    context = DrafterContext(mixed())
    context.unread(torch.zeros(1, 4, 96))
    context.begin(4)
    for index in range(2):
        context.cache.update(*Rows()(10), index)
    context.rollback()
    assert context.cache.get_seq_length() == 0
    assert context.read().shape[1] == 4
    context.begin(4)
    for index in range(2):
        context.cache.update(*Rows()(10), index)
    context.commit(4)
    assert context.cache.get_seq_length() == context.position == 4


def test_it_belongs_to_one_drafter_and_does_not_keep_it_alive() -> None:
    model, other = drafter(), drafter()
    context = DrafterContext(model)
    assert context.belongs_to(model)
    assert not context.belongs_to(other)
    del model
    gc.collect()
    assert context._drafter() is None
    assert not context.belongs_to(other)


def test_a_copied_cache_has_no_context() -> None:
    cache = DDTreeCache()
    cache.drafter_context = DrafterContext(drafter())
    assert copy.deepcopy(cache).drafter_context is None
    assert cache.drafter_context is not None
