"""The cache as a whole: lazily made layers, adopting, what it refuses, copies."""

import copy
import pickle
from typing import Any

import pytest
import torch
from transformers import Qwen3NextConfig, StaticCache
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionAndFullAttentionLayer,
)

from cache.rows import Rows, append_one_by_one, assert_equal
from hf_ddtree.cache import DDTreeCache, adopt, adopt_static, check
from hf_ddtree.cache.layers import GrowingLayer, GrowingSlidingLayer
from pairs import make_target

# Moved after copies of its rows were taken, and moved by one operation.
PATHS = [[0, 2, 3], [0, 4, 5]]


def fill(cache: Any, layers: int, length: int, rows: Rows | None = None) -> None:
    rows = rows or Rows()
    for index in range(layers):
        cache.update(*rows(length), index)


def tree_round(cache: Any, reference: Any) -> None:
    """Rounds on ours, plain decoding of their paths on the reference."""
    for path in PATHS:
        one_round(cache, reference, path)


def one_round(cache: Any, reference: Any, path: list[int]) -> None:
    trees = [Rows()(6) for _ in reference.layers]
    cache.begin()
    for index, rows in enumerate(trees):
        cache.update(*rows, index)
    cache.prune(torch.tensor(path))
    for layer, rows in zip(reference.layers, trees, strict=True):
        append_one_by_one(layer, rows, path)


def assert_same(cache: Any, reference: Any) -> None:
    assert len(cache.layers) == len(reference.layers)
    assert cache.get_seq_length() == reference.get_seq_length()
    for ours, theirs in zip(cache.layers, reference.layers, strict=True):
        assert_equal(ours, theirs)


def test_layers_are_made_when_first_used() -> None:
    cache, reference = DDTreeCache(), DynamicCache()
    assert cache.layers == []
    for each in (cache, reference):
        fill(each, 3, 5)
    assert [type(layer) for layer in cache.layers] == [GrowingLayer] * 3
    tree_round(cache, reference)
    assert_same(cache, reference)


def test_the_first_use_may_be_a_tree() -> None:
    cache, reference = DDTreeCache(config=make_target("qwen3_sliding").config), DynamicCache()
    reference.layers = [DynamicSlidingWindowLayer(6) if layer.is_sliding else DynamicLayer() for layer in cache.layers]
    tree_round(cache, reference)
    assert_same(cache, reference)


def test_sliding_layers_come_from_the_configuration() -> None:
    config = make_target("qwen3_sliding").config
    cache = DDTreeCache(config=config)
    assert [type(layer) for layer in cache.layers] == [GrowingSlidingLayer, GrowingLayer] * 2
    assert cache.layers[0].sliding_window == config.sliding_window
    assert cache.is_sliding == [True, False, True, False]
    assert not cache.is_compileable


def test_data_given_at_the_start_is_kept() -> None:
    data = [Rows()(7), Rows()(7)]
    cache, reference = DDTreeCache(data), DynamicCache(data)
    tree_round(cache, reference)
    assert_same(cache, reference)


@pytest.mark.parametrize("lazy", [False, True])
def test_adopting_keeps_the_object_and_its_rows(lazy: bool) -> None:
    config = None if lazy else make_target("qwen3_sliding").config
    cache, reference = DynamicCache(config=config), DynamicCache(config=config)
    for each in (cache, reference):
        fill(each, 4, 11)
    layers = cache.layers
    adopt(cache)
    assert cache.layers is layers
    assert {type(layer) for layer in layers} <= {GrowingLayer, GrowingSlidingLayer}
    assert_same(cache, reference)
    adopted = list(layers)
    adopt(cache)
    assert all(a is b for a, b in zip(cache.layers, adopted, strict=True))
    for each in (cache, reference):
        fill(each, 4, 2)
    assert_same(cache, reference)


def test_adopting_an_empty_cache_makes_its_later_layers_ours() -> None:
    cache = DynamicCache()
    adopt(cache)
    fill(cache, 2, 3)
    assert [type(layer) for layer in cache.layers] == [GrowingLayer] * 2


def test_over_takes_the_layers() -> None:
    cache, reference = (DynamicCache(config=make_target("qwen3_sliding").config) for _ in range(2))
    for each in (cache, reference):
        fill(each, 4, 11)
    over = DDTreeCache.over(cache)
    assert isinstance(over, DDTreeCache)
    assert over.layers is cache.layers
    adopt(over)
    tree_round(over, reference)
    assert_same(over, reference)


def test_over_a_cache_that_makes_layers_lazily() -> None:
    over = DDTreeCache.over(DynamicCache())
    fill(over, 2, 3)
    adopt(over)
    assert [type(layer) for layer in over.layers] == [GrowingLayer] * 2


def test_rollback_returns_to_the_round_s_start() -> None:
    config = make_target("qwen3_sliding").config
    cache, reference = DDTreeCache(config=config), DynamicCache(config=config)
    for each in (cache, reference):
        fill(each, 4, 11)
    for _ in range(3):
        cache.begin()
        fill(cache, 4, 6)
        assert cache.get_seq_length() == 17
        cache.rollback()
        assert_same(cache, reference)
    tree_round(cache, reference)
    assert_same(cache, reference)


def test_check_accepts_what_can_be_rolled_back() -> None:
    config = make_target("qwen3_sliding").config
    for cache in (DynamicCache(), DynamicCache(config=config), DDTreeCache(), DDTreeCache(config=config)):
        check(cache)


def test_check_accepts_other_kinds() -> None:
    config = make_target("qwen3_sliding").config
    offloaded = DynamicCache(config=config)
    offloaded.offloading = True
    static = StaticCache(config=config, max_cache_len=32)
    recurrent = Qwen3NextConfig(num_hidden_layers=4, hidden_size=32, num_attention_heads=4, num_key_value_heads=2)
    for cache in (offloaded, static, DynamicCache(config=recurrent), Cache(layers=[DynamicLayer()])):
        check(cache)
        adopt(cache)
        adopt_static(cache, room=8)
        check(cache)


def test_check_refuses_other_caches_by_name() -> None:
    with pytest.raises(ValueError, match=r"EncoderDecoderCache.*cache_implementation"):
        check(EncoderDecoderCache(DynamicCache(), DynamicCache()))
    with pytest.raises(ValueError, match="no cache"):
        check(None)


@pytest.mark.parametrize("method", ["update", "get_mask_sizes", "get_seq_length", "get_query_offset"])
@pytest.mark.parametrize("base", [DynamicCache, DDTreeCache])
def test_check_refuses_caches_that_are_read_in_another_way(base: Any, method: str) -> None:
    own = type("Own", (base,), {method: lambda self, *args: getattr(base, method)(self, *args)})
    check(type("Same", (base,), {"__doc__": "Changes nothing."})())
    with pytest.raises(ValueError, match=rf"Own.*`{method}`.*cache_implementation"):
        check(own())


def test_check_refuses_other_layers_by_name() -> None:
    class Int4QuantizedLayer(DynamicLayer):
        """A subclass keeps its rows in its own way, so being a `DynamicLayer` is not enough."""

    quantised = DynamicCache()
    quantised.layers = [DynamicLayer(), Int4QuantizedLayer()]
    with pytest.raises(ValueError, match=r"Int4QuantizedLayer.*assistant_model"):
        check(quantised)
    with pytest.raises(ValueError, match="Int4QuantizedLayer"):
        check(Cache(layer_class_to_replicate=Int4QuantizedLayer))


def test_check_refuses_offloading_recurrent_states_with_keys() -> None:
    cache = DynamicCache()
    cache.layers = [LinearAttentionAndFullAttentionLayer()]
    check(cache)
    cache.offloading = True
    with pytest.raises(ValueError, match=r"DynamicCache.*offloaded"):
        check(cache)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copy_goes_its_own_way(duplicate: Any) -> None:
    config = make_target("qwen3_sliding").config
    cache, reference = DDTreeCache(config=config), DynamicCache(config=config)
    for each in (cache, reference):
        fill(each, 4, 11)
    tree_round(cache, reference)
    copied, copied_reference = duplicate(cache), copy.deepcopy(reference)
    assert isinstance(copied, DDTreeCache)
    assert_same(copied, reference)
    tree_round(copied, copied_reference)
    assert_same(copied, copied_reference)
    assert_same(cache, reference)
    tree_round(cache, reference)
    assert_same(cache, reference)
    assert_same(copied, copied_reference)


def test_a_copy_s_rounds_stay_in_its_own_buffer() -> None:
    cache = DDTreeCache()
    fill(cache, 1, 11)
    copied = copy.deepcopy(cache)
    assert copied.layers[0].keys.data_ptr() != cache.layers[0].keys.data_ptr()
    address = copied.layers[0].keys.data_ptr()
    copied.begin()
    fill(copied, 1, 6)
    copied.prune(torch.tensor(PATHS[0]))
    assert copied.layers[0].keys.data_ptr() == address


def test_rows_without_a_batch() -> None:
    cache, reference = DDTreeCache(), DynamicCache()
    for length in (5, 1, 3):
        rows = Rows()(length)
        for each in (cache, reference):
            each.update(rows[0][0], rows[1][0], 0)
    assert torch.equal(cache.layers[0].keys, reference.layers[0].keys)
    assert torch.equal(cache.layers[0].values, reference.layers[0].values)


def test_the_rows_of_all_layers_are_moved_by_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    operations, copy_all = [], torch._foreach_copy_

    def counting(targets: Any, sources: Any) -> None:
        operations.append(len(targets))
        copy_all(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", counting)
    cache, reference = DDTreeCache(), DynamicCache()
    for each in (cache, reference):
        fill(each, 3, 5)
    one_round(cache, reference, [0, 4, 5])
    assert operations == [3]
    assert_same(cache, reference)


def test_a_forward_that_the_user_has_compiled_fills_it() -> None:
    cache, reference, rows = DDTreeCache(), DynamicCache(), Rows()
    update = torch.compile(lambda keys, values: cache.update(keys, values, 0), backend="aot_eager")
    for length in (5, 1, 1):
        keys, values = rows(length)
        with torch.no_grad():
            shown = update(keys, values)
        assert all(map(torch.equal, shown, reference.update(keys, values, 0)))
    assert_same(cache, reference)
