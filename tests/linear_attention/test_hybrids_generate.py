"""Hybrids with Gated DeltaNet layers: whole generates give the text of plain decoding."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList

import hf_ddtree
from hf_ddtree import DDTreeCache
from hf_ddtree.cache.recurrent import TreeRecurrentLayer
from hf_ddtree.compat import CACHE_NAME
from linear_attention.hybrids import make_hybrid
from pairs import check_threads, make_drafter, plain, prompt, tree

NEW = 40


def states_of(cache: Any) -> list[torch.Tensor]:
    return [
        state
        for layer in cache.layers
        if hasattr(layer, "conv_states")
        for states in (layer.conv_states, layer.recurrent_states)
        for state in states.values()
    ]


@pytest.mark.parametrize(("length", "do_sample"), [(1, False), (2, True), (3, False), (11, True)])
def test_prompts_shorter_and_longer_than_the_convolution(length: int, do_sample: bool) -> None:
    target = make_hybrid()
    wanted = dict(max_new_tokens=NEW, do_sample=do_sample)
    expected = plain(target, prompt(length), **wanted)
    with hf_ddtree.record() as stats:
        output = tree(target, make_drafter(target), prompt(length), **wanted)
    assert torch.equal(output, expected)
    # Trees were accepted and rejected.
    assert 1.2 < stats.mean_acceptance_length < 6
    assert stats.rounds > 8
    assert stats.routes == {"attention": 2, "gated delta rule": 2}


@pytest.mark.parametrize(
    "settings",
    [dict(use_cache=True, repetition_penalty=1.3), dict(prefill_chunk_size=4), dict(budget=0), dict(budget=3)],
    ids=str,
)
def test_settings(settings: dict[str, Any]) -> None:
    target = make_hybrid()
    expected = plain(target, prompt(), max_new_tokens=NEW, **{k: v for k, v in settings.items() if k != "budget"})
    assert torch.equal(tree(target, make_drafter(target), prompt(), max_new_tokens=NEW, **settings), expected)


def test_left_padding() -> None:
    target = make_hybrid()
    ids = torch.cat([torch.zeros(1, 5, dtype=torch.long), prompt()], dim=1)
    mask = (torch.arange(ids.shape[1]) >= 5).long()[None]
    expected = plain(target, ids, max_new_tokens=NEW, attention_mask=mask)
    output = tree(target, make_drafter(target), ids, max_new_tokens=NEW, attention_mask=mask)
    assert torch.equal(output, expected)
    assert torch.equal(output[:, 5:], plain(target, prompt(), max_new_tokens=NEW))


def test_scores_and_hidden_states() -> None:
    target = make_hybrid()
    wanted = dict(max_new_tokens=NEW, return_dict_in_generate=True, output_scores=True, output_hidden_states=True)
    expected = plain(target, prompt(), **wanted)
    output = tree(target, make_drafter(target), prompt(), **wanted)
    assert torch.equal(output.sequences, expected.sequences)
    for ours, theirs in zip(output.scores, expected.scores, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-3)
    for ours, theirs in zip(output.hidden_states, expected.hidden_states, strict=True):
        assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", [DynamicCache, DDTreeCache])
def test_the_cache_goes_on_in_either_way(kind: Any) -> None:
    """A user's cache that trees have filled equals one of plain decoding, and both kinds of decoding continue it."""
    target = make_hybrid()
    drafter = make_drafter(target)
    ours, theirs = kind(config=target.config), DynamicCache(config=target.config)
    expected = plain(target, prompt(), max_new_tokens=12, **{CACHE_NAME: theirs})
    output = tree(target, drafter, prompt(), max_new_tokens=12, **{CACHE_NAME: ours})
    for further in range(3):
        assert torch.equal(output, expected)
        assert sum(isinstance(layer, TreeRecurrentLayer) for layer in ours.layers) == 2
        assert ours.get_seq_length() == theirs.get_seq_length()
        for a, b in zip(states_of(ours), states_of(theirs), strict=True):
            assert torch.allclose(a, b, atol=1e-4)
        ids = torch.cat([expected, prompt(4, seed=further)], dim=1)
        expected = plain(target, ids, max_new_tokens=12, **{CACHE_NAME: theirs})
        if further == 1:
            output = plain(target, ids, max_new_tokens=12, **{CACHE_NAME: ours})
        else:
            output = tree(target, drafter, ids, max_new_tokens=12, **{CACHE_NAME: ours})


class Interrupt(LogitsProcessor):
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 9:
            raise KeyboardInterrupt
        return scores


def test_an_interrupted_generate_leaves_the_committed_states() -> None:
    target = make_hybrid()
    cache = DDTreeCache(config=target.config)
    with pytest.raises(KeyboardInterrupt):
        processors = LogitsProcessorList([Interrupt()])
        tree(
            target, make_drafter(target), prompt(), max_new_tokens=NEW, logits_processor=lambda: processors,
            **{CACHE_NAME: cache},
        )  # fmt: skip
    text = plain(target, prompt(), max_new_tokens=NEW)
    seen = cache.get_seq_length()
    assert seen > prompt().shape[1]
    fresh = DynamicCache(config=target.config)
    with torch.no_grad():
        target(text[:, :seen], **{CACHE_NAME: fresh})
    for a, b in zip(states_of(cache), states_of(fresh), strict=True):
        assert torch.allclose(a, b, atol=1e-4)


class Failing(torch.nn.Module):
    def forward(self, *_: Any, **__: Any) -> Any:
        raise MemoryError


@pytest.mark.parametrize("kind", [DynamicCache, DDTreeCache])
def test_a_failed_prefill_leaves_a_continued_caches_states(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_hybrid()
    drafter = make_drafter(target)
    # So that the self-test is over, and only the prefill can fail.
    tree(target, drafter, prompt(), max_new_tokens=2)
    cache = kind(config=target.config)
    text = plain(target, prompt(), max_new_tokens=6, **{CACHE_NAME: cache})
    before = [state.clone() for state in states_of(cache)]
    held = states_of(cache)
    ids = torch.cat([text, prompt(4)], dim=1)
    with monkeypatch.context() as patch:
        patch.setitem(target.model.layers._modules, "3", Failing())
        with pytest.raises(MemoryError):
            tree(target, drafter, ids, max_new_tokens=3, **{CACHE_NAME: cache})
    assert all(map(torch.equal, states_of(cache), before))
    assert all(a is b for a, b in zip(states_of(cache), held, strict=True))


def test_two_threads_on_one_model() -> None:
    target = make_hybrid()
    drafter = make_drafter(target)
    check_threads(target, drafter, NEW)
