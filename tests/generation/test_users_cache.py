"""A cache passed to `generate`: read as plain decoding reads it, left as plain decoding leaves it."""

import copy
from typing import Any

import pytest
import torch
from transformers import StaticCache
from transformers.cache_utils import DynamicCache, StaticLayer

from caches import assert_same_cache, read
from hf_ddtree import DDTreeCache
from hf_ddtree.compat import CACHE_NAME
from pairs import make_drafter, make_target, plain, prompt, tree

NEW = 10
# The window of the second is six tokens.
FAMILIES = ["llama", "qwen3_sliding"]


def dynamic(config: Any) -> Any:
    return DynamicCache(config=config)


def without_config(config: Any) -> Any:
    """Layers that keep all rows, also where the model's window would not."""
    return DynamicCache()


def ours(config: Any) -> Any:
    return DDTreeCache(config=config)


def static(config: Any) -> Any:
    return StaticCache(config=config, max_cache_len=90)


CACHES = [dynamic, without_config, ours, static]


def both(target: Any, caches: list[Any], ids: torch.Tensor, **kwargs: Any) -> Any:
    """Plain decoding with the first cache, a tree with the second; both must leave the same."""
    outputs = []
    for cache, run in zip(caches, (plain, lambda *a, **k: tree(a[0], make_drafter(target), *a[1:], **k)), strict=True):
        arguments = dict(max_new_tokens=NEW, return_dict_in_generate=True, **{CACHE_NAME: cache}, **kwargs)
        outputs.append(run(target, ids, **arguments))
        assert outputs[-1][CACHE_NAME] is cache
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert_same_cache(caches[1], caches[0])
    return outputs


def followed(ids: torch.Tensor, length: int = 3) -> torch.Tensor:
    return torch.cat([ids, prompt(length, seed=8)], dim=1)


@pytest.mark.parametrize(
    ("how", "prefix"), [("empty", 6), ("forward", 5), ("forward", 20), ("chunks", 11), ("generate", 3)]
)
@pytest.mark.parametrize("make", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_continues_as_plain_decoding_does(family: str, make: Any, prefix: int, how: str) -> None:
    target = make_target(family)
    caches = [make(target.config), make(target.config)]
    ids = prompt(prefix)
    for cache in caches:
        if how in ("forward", "chunks"):
            read(target, ids, cache, chunk=1000 if how == "forward" else 2)
        elif how == "generate":
            ids = plain(target, prompt(prefix), max_new_tokens=4, **{CACHE_NAME: cache})
    outputs = both(target, caches, followed(ids), do_sample=how == "chunks")
    # Then plain decoding goes on from either.
    following = followed(outputs[0].sequences)
    texts = [plain(target, following, max_new_tokens=NEW, **{CACHE_NAME: cache}) for cache in caches]
    assert torch.equal(*texts)
    assert_same_cache(caches[1], caches[0])
    # And trees again.
    both(target, caches, followed(texts[0]))


@pytest.mark.parametrize("make", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_new_tokens_alone(family: str, make: Any) -> None:
    """`generate` also takes only what the cache does not hold, with the whole sequence's mask."""
    target = make_target(family)
    caches = [make(target.config), make(target.config)]
    for cache in caches:
        read(target, prompt(9), cache)
    both(target, caches, prompt(4, seed=8), attention_mask=torch.ones(1, 13, dtype=torch.long))


@pytest.mark.parametrize("make", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [8, 5])
def test_a_cache_that_is_not_shorter_than_the_prompt(family: str, length: int, make: Any) -> None:
    """Plain decoding reads tokens again, or fails; so do trees."""
    target = make_target(family)
    outcomes = []
    for run in (plain, lambda *a, **k: tree(a[0], make_drafter(target), *a[1:], **k)):
        cache = make(target.config)
        read(target, prompt(8), cache)
        try:
            outcomes.append(run(target, prompt(length), max_new_tokens=4, **{CACHE_NAME: cache}).tolist())
        except (ValueError, RuntimeError, IndexError) as error:
            outcomes.append(type(error))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("make", [dynamic, ours, static])
def test_a_cache_of_another_batch(make: Any) -> None:
    target = make_target("qwen3_sliding")
    errors = []
    for run in (plain, lambda *a, **k: tree(a[0], make_drafter(target), *a[1:], **k)):
        cache = make(target.config)
        read(target, prompt(8).repeat(2, 1), cache)
        before = copy.deepcopy(cache)
        with pytest.raises((RuntimeError, IndexError)) as error:
            run(target, followed(prompt(8)), max_new_tokens=4, **{CACHE_NAME: cache})
        errors.append((type(error.value), str(error.value)))
    assert errors[0][0] is errors[1][0]
    assert_same_cache(cache, before)


@pytest.mark.parametrize("make", [dynamic, without_config, ours])
def test_cropping_and_reordering_afterwards(make: Any) -> None:
    target = make_target("llama")
    caches = [make(target.config), make(target.config)]
    sequences = both(target, caches, prompt())[0].sequences
    for cache in caches:
        cache.crop(-5)
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.batch_select_indices(torch.tensor([0]))
    assert_same_cache(caches[1], caches[0])
    both(target, caches, followed(sequences[:, :-4]))


@pytest.mark.skipif(not hasattr(StaticLayer, "crop"), reason="this transformers cannot crop a static layer")
def test_cropping_a_static_cache_afterwards() -> None:
    target = make_target("llama")
    caches = [static(target.config), static(target.config)]
    sequences = both(target, caches, prompt())[0].sequences
    for cache in caches:
        cache.crop(-5)
    both(target, caches, followed(sequences[:, :-4]))


@pytest.mark.parametrize("make", CACHES)
def test_a_reset_cache_starts_anew(make: Any) -> None:
    target = make_target("qwen3_sliding")
    caches = [make(target.config), make(target.config)]
    both(target, caches, prompt())
    for cache in caches:
        cache.reset()
    both(target, caches, prompt(7, seed=9))


def test_a_static_cache_keeps_its_length_and_gains_room_once() -> None:
    target = make_target("llama")
    drafter, cache, ids = make_drafter(target), static(target.config), prompt()
    for budget, length in ((20, 110), (12, 110), (25, 115)):
        ids = tree(target, drafter, followed(ids), budget=budget, max_new_tokens=4, **{CACHE_NAME: cache})
        assert cache.get_max_length() == length
    assert isinstance(cache, StaticCache)


@pytest.mark.parametrize("alone", [False, True])
def test_a_static_cache_that_is_too_short(alone: bool) -> None:
    target = make_target("llama")
    cache = StaticCache(config=target.config, max_cache_len=24)
    read(target, prompt(9), cache)
    ids, mask = followed(prompt(9)), torch.ones(1, 12, dtype=torch.long)
    if alone:
        ids = ids[:, 9:]
    drafter = make_drafter(target)
    with pytest.raises(ValueError, match=r"holds 24 tokens, but this call may need 25.*max_cache_len=25"):
        tree(target, drafter, ids, attention_mask=mask, max_new_tokens=14, **{CACHE_NAME: cache})
    assert int(cache.get_seq_length()) == 9
    other = copy.deepcopy(cache)
    kwargs: dict[str, Any] = dict(attention_mask=mask, max_new_tokens=13)
    expected = plain(target, ids, **kwargs, **{CACHE_NAME: other})
    assert torch.equal(tree(target, drafter, ids, **kwargs, **{CACHE_NAME: cache}), expected)


@pytest.mark.parametrize("make", [dynamic, ours, static])
def test_the_drafter_s_context_goes_along(make: Any) -> None:
    """It is kept with the cache, and not used once the rows are no longer those it belongs to."""
    target = make_target("llama")
    drafter, cache = make_drafter(target), make(target.config)

    def run(ids: torch.Tensor) -> tuple[torch.Tensor, Any]:
        sequence = tree(target, drafter, ids, max_new_tokens=8, **{CACHE_NAME: cache})
        return sequence, cache.drafter_context

    sequence, context = run(prompt())
    assert context.length == int(cache.get_seq_length())
    sequence, again = run(followed(sequence))
    assert again is context
    assert context.length == int(cache.get_seq_length())
    sequence = plain(target, followed(sequence), max_new_tokens=3, **{CACHE_NAME: cache})
    _, other = run(followed(sequence))
    assert other is not context


def test_rows_that_were_replaced_are_noticed_in_a_static_cache() -> None:
    """As many tokens as before, in the same tensors, and not the same."""
    target = make_target("llama")
    drafter, cache = make_drafter(target), static(target.config)
    tree(target, drafter, prompt(), max_new_tokens=8, **{CACHE_NAME: cache})
    context, length = cache.drafter_context, int(cache.get_seq_length())
    assert context.continues(cache)
    for layer in cache.layers:
        layer.cumulative_length.sub_(4)
    read(target, prompt(4, seed=9), cache)
    assert int(cache.get_seq_length()) == length
    assert not context.continues(cache)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_static_cache_of_inference_mode(family: str) -> None:
    target = make_target(family)
    drafter, cache = make_drafter(target), static(target.config)
    with torch.inference_mode():
        ids = tree(target, drafter, prompt(), max_new_tokens=NEW, **{CACHE_NAME: cache})
    following = followed(ids)
    kwargs: dict[str, Any] = {"max_new_tokens": NEW, "attention_mask": torch.ones_like(following)}
    outside = tree(target, drafter, following, **{CACHE_NAME: cache}, **kwargs)
    assert torch.equal(outside, plain(target, following, **kwargs))


@pytest.mark.parametrize("make", [dynamic, static])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("forward", range(3))
def test_a_forward_that_fails_half_way(family: str, make: Any, forward: int) -> None:
    """The prefill or a round, in the third layer of four: the cache holds whole rounds, and goes on."""
    target = make_target(family)
    drafter, cache = make_drafter(target), make(target.config)
    tree(target, drafter, prompt(), max_new_tokens=1)
    read(target, prompt(), cache)
    calls = iter(range(10_000))

    def fail(*arguments: Any) -> None:
        if next(calls) == forward:
            raise KeyboardInterrupt

    handle = target.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        tree(target, drafter, followed(prompt()), max_new_tokens=NEW, **{CACHE_NAME: cache})
    handle.remove()
    lengths = {int(layer.get_seq_length()) for layer in cache.layers}
    assert len(lengths) == 1
    whole = plain(target, followed(prompt()), max_new_tokens=NEW)
    kept = lengths.pop()
    assert (kept == 11) == (forward == 0)
    given = max(kept + 1, 14)
    rest = {"max_new_tokens": 14 + NEW - given, "attention_mask": torch.ones(1, given, dtype=torch.long)}
    assert torch.equal(tree(target, drafter, whole[:, :given], **{CACHE_NAME: cache}, **rest), whole)
