"""Nothing is left behind: after errors, Ctrl-C, and between threads that share a model."""

import threading
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList

from hf_ddtree.attention.switch import _held
from hf_ddtree.cache.layers import GrowingLayer
from hf_ddtree.compat import CACHE_NAME
from pairs import FAMILIES, make_drafter, make_target, plain, prompt, tree

NEW = 30


def state_of(model: Any) -> Any:
    """What a generate may touch of a model: hooks of each module, attention implementations, configurations."""
    hooks = {name: len(module._forward_hooks) for name, module in model.named_modules()}
    implementations = {
        name: m.config._attn_implementation for name, m in model.named_modules() if hasattr(m, "config")
    }
    return hooks, implementations, model.config.to_dict(), model.generation_config.to_dict()


class FailAtCall(LogitsProcessor):
    def __init__(self, calls: int, error: type[BaseException]):
        self.calls, self.error = calls, error

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls -= 1
        if self.calls < 0:
            raise self.error("on purpose")
        return scores


def fail_in_forward(module: Any, after: int, error: type[BaseException]) -> Any:
    calls = iter(range(10_000))

    def hook(*args: Any) -> None:
        if next(calls) >= after:
            raise error("on purpose")

    return module.register_forward_pre_hook(hook)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["processor", "target", "drafter"])
@pytest.mark.parametrize("family", ["llama", "qwen3_sliding", "gpt_oss"])
def test_an_interrupted_generate_leaves_no_trace(family: str, place: str, error: type[BaseException]) -> None:
    target = make_target(family)
    drafter = make_drafter(target)
    # The self-test's own forwards are over before the ones that are counted.
    tree(target, drafter, prompt(), max_new_tokens=2)
    before = state_of(target)
    cache = DynamicCache(config=target.config)
    kwargs: dict[str, Any] = {CACHE_NAME: cache, "max_new_tokens": NEW}
    if place == "processor":
        kwargs["logits_processor"] = lambda: LogitsProcessorList([FailAtCall(9, error)])
    else:
        layer = target.model.layers[2] if place == "target" else drafter.layers[1]
        handle = fail_in_forward(layer, 4, error)
    with pytest.raises(error):
        tree(target, drafter, prompt(), **kwargs)
    if place != "processor":
        handle.remove()
    assert state_of(target) == before
    assert not _held
    lengths = {layer.get_seq_length() for layer in cache.layers}
    assert len(lengths) == 1, "the layers hold prefixes of different lengths"
    # What the cache holds is a prefix of the right text: continuing from it gives the uninterrupted output.
    expected = plain(target, prompt(), max_new_tokens=NEW)
    kept = expected[:, : lengths.pop() + 1]
    rest = plain(target, kept, max_new_tokens=NEW - (kept.shape[1] - prompt().shape[1]), **{CACHE_NAME: cache})
    assert torch.equal(rest, expected)
    assert torch.equal(tree(target, drafter, prompt(), max_new_tokens=NEW), expected)


@pytest.mark.parametrize("family", ["llama", "qwen3_sliding"])
def test_an_interrupted_prefill_leaves_the_users_cache(family: str) -> None:
    target = make_target(family)
    drafter = make_drafter(target)
    first = tree(target, drafter, prompt(), max_new_tokens=NEW, return_dict_in_generate=True)
    cache, length = first[CACHE_NAME], first[CACHE_NAME].get_seq_length()
    following = torch.cat([first.sequences, prompt(9, seed=8)], dim=1)
    expected = plain(target, following, max_new_tokens=NEW)
    handle = fail_in_forward(target.model.layers[2], 0, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        tree(target, drafter, following, max_new_tokens=NEW, **{CACHE_NAME: cache})
    handle.remove()
    assert {layer.get_seq_length() for layer in cache.layers} == {length}
    assert torch.equal(tree(target, drafter, following, max_new_tokens=NEW, **{CACHE_NAME: cache}), expected)


def test_an_interrupt_while_committing(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target("qwen3")
    drafter = make_drafter(target)
    cache = DynamicCache(config=target.config)
    commit, calls = GrowingLayer.commit, iter(range(10_000))

    def interrupted(self: GrowingLayer, path: torch.Tensor) -> None:
        # A round commits the drafter's two layers, then the target's four: this is the third round's second of four.
        if next(calls) == 2 * 6 + 2 + 1:
            raise KeyboardInterrupt
        commit(self, path)

    monkeypatch.setattr(GrowingLayer, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tree(target, drafter, prompt(), max_new_tokens=NEW, **{CACHE_NAME: cache})
    assert len({layer.get_seq_length() for layer in cache.layers}) == 1
    assert all(layer._mark is None for layer in cache.layers)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_two_generates_at_once_on_one_model(family: str) -> None:
    target = make_target(family)
    drafter = make_drafter(target)
    prompts = [prompt(seed=seed) for seed in range(4)]
    expected = [plain(target, ids, max_new_tokens=NEW) for ids in prompts]
    results: dict[int, torch.Tensor] = {}
    gate = threading.Barrier(len(prompts))

    def run(index: int) -> None:
        gate.wait()
        for _ in range(2):
            # Half of the threads decode plainly, on the same model, while the others verify trees.
            runner = (
                (lambda ids: plain(target, ids, max_new_tokens=NEW))
                if index % 2
                else (lambda ids: tree(target, drafter, ids, max_new_tokens=NEW))
            )
            results[index] = runner(prompts[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, tokens in enumerate(expected):
        assert torch.equal(results[index], tokens)
    assert not _held
