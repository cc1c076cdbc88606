"""Families whose recurrent layers read a tree path by path: nodes, committed states, whole generates."""

from typing import Any

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from transformers import DynamicCache

import hf_ddtree
from attention.trees import random_tree
from hf_ddtree import DDTreeCache
from hf_ddtree.compat import CACHE_NAME
from hf_ddtree.linear_attention import expansion
from hf_ddtree.tree import DraftTree
from linear_attention.expanded import (
    EXPANDED,
    hooks_of,
    make_expanded,
    mixers_of,
    sequence_of,
    states_of,
    tokens,
)
from models.sequence import Sequence
from pairs import VOCABULARY, check_threads, make_drafter, plain, prompt, tree

NEW = 24


def drafter_for(target: Any) -> Any:
    layers = target.config.num_hidden_layers
    return make_drafter(target, num_target_layers=layers, target_layer_ids=[0, 2, layers - 1]).to(target.dtype)


def logits_of_paths(sequence: Sequence, draft: DraftTree) -> torch.Tensor:
    """As `sequence.expected`, for models that give logits in fp32 too."""
    rows = [sequence.plain(sequence.ids + draft.token_ids[draft.path(node)].tolist()) for node in range(len(draft))]
    return torch.stack([row[-1] for row in rows])


def check_rounds(sequence: Sequence, tolerance: float = 1e-3) -> None:
    """Each round commits a path that ends somewhere else: the root alone, a leaf, an inner node."""
    for turn in range(3):
        draft = random_tree(14, seed=turn, anchor=tokens(1, seed=turn)[0], vocabulary=VOCABULARY)
        logits, expected = sequence.round(draft), logits_of_paths(sequence, draft)
        assert (logits - expected).abs().amax(dim=-1).median() < tolerance
        if sequence.model.dtype != torch.bfloat16:
            assert torch.allclose(logits, expected, atol=tolerance)
        # The control: a node's logits are not those of another node.
        assert (logits - expected.roll(1, 0)).abs().amax(dim=-1).median() > 3 * tolerance
        sequence.commit(draft, draft.path((0, 13, 6)[turn]))
    fresh = sequence_of(sequence.model, sequence.ids[sequence.padding :], sequence.padding)
    for ours, theirs in zip(states_of(sequence.cache), states_of(fresh.cache), strict=True):
        scale = theirs.float().abs().max().clamp_min(1)
        assert (ours - theirs).float().abs().mean() / scale < tolerance


CASES = [(family, torch.float32) for family in EXPANDED] + [
    (family, dtype) for family in ("bamba", "falcon_h1", "lfm2", "jamba") for dtype in (torch.float64, torch.bfloat16)
]


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_each_node_is_its_path(family: str, dtype: torch.dtype) -> None:
    # Scans, steps, norms and softmaxes are in fp32 whatever the model's dtype; logits are of size 3.
    check_rounds(sequence_of(make_expanded(family, dtype), tokens(15)), 0.3 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("prefix", [1, 2, 3])
@pytest.mark.parametrize("family", ["bamba", "falcon_h1", "lfm2", "jamba", "kimi_linear"])
def test_prefixes_shorter_than_the_convolution(family: str, prefix: int) -> None:
    check_rounds(sequence_of(make_expanded(family), tokens(prefix)))


@pytest.mark.parametrize("family", ["bamba", "falcon_h1", "lfm2", "jamba", "kimi_linear"])
def test_left_padding(family: str) -> None:
    model = make_expanded(family)
    draft = random_tree(14, seed=3, vocabulary=VOCABULARY)
    padded, bare = sequence_of(model, tokens(8), padding=5), sequence_of(model, tokens(8))
    assert torch.allclose(padded.round(draft), bare.round(draft), atol=1e-3)
    padded.cache.rollback()
    check_rounds(padded)


def check_generate(family: str, length: int = 11, **kwargs: Any) -> None:
    target = make_expanded(family)
    expected = plain(target, prompt(length), max_new_tokens=NEW, **kwargs)
    with hf_ddtree.record() as stats:
        output = tree(target, drafter_for(target), prompt(length), max_new_tokens=NEW, budget=24, **kwargs)
    assert torch.equal(output, expected)
    assert stats.rounds > 5
    assert stats.routes["paths"] == len(mixers_of(target))
    assert set(stats.routes) == {"attention", "paths"}


@pytest.mark.parametrize(("family", "seed"), [(family, i % 2) for i, family in enumerate(EXPANDED)])
def test_greedy_or_sampled(family: str, seed: int) -> None:
    check_generate(family, do_sample=bool(seed), seed=seed)


@pytest.mark.parametrize("seed", [0, 1])
def test_greedy_and_sampled(seed: int) -> None:
    check_generate("nemotron_h", do_sample=bool(seed), seed=seed)


@pytest.mark.parametrize("length", [1, 2, 4])
def test_short_prompts(length: int) -> None:
    check_generate("falcon_h1", length)


def test_trees_are_accepted_and_rejected() -> None:
    lengths = []
    for family in ("granite_moe_hybrid", "jamba", "lfm2"):
        target = make_expanded(family)
        output = tree(target, drafter_for(target), prompt(), max_new_tokens=60, return_dict_in_generate=True)
        lengths += output.speculation.acceptance_lengths
    assert min(lengths) == 1
    assert max(lengths) > 2


@pytest.mark.parametrize("kind", [DynamicCache, DDTreeCache])
@pytest.mark.parametrize("family", ["falcon_h1", "lfm2"])
def test_the_cache_goes_on_in_either_way(family: str, kind: Any) -> None:
    target = make_expanded(family)
    ours, theirs = kind(config=target.config), DynamicCache(config=target.config)
    expected = plain(target, prompt(), max_new_tokens=12, **{CACHE_NAME: theirs})
    output = tree(target, drafter_for(target), prompt(), max_new_tokens=12, **{CACHE_NAME: ours})
    for further in range(2):
        assert torch.equal(output, expected)
        for a, b in zip(states_of(ours), states_of(theirs), strict=True):
            assert torch.allclose(a, b, atol=1e-3)
        ids = torch.cat([expected, prompt(4, seed=further)], dim=1)
        expected = plain(target, ids, max_new_tokens=12, **{CACHE_NAME: theirs})
        output = tree(target, drafter_for(target), ids, max_new_tokens=12, **{CACHE_NAME: ours})


def test_an_interrupt_in_a_mixer_leaves_the_committed_states() -> None:
    """In calls of the tree's forward, and in those that read the accepted path once more."""
    target = make_expanded("bamba")
    drafter, text = drafter_for(target), plain(target, prompt(), max_new_tokens=NEW)
    tree(target, drafter, prompt(), max_new_tokens=2)
    before, mixer = hooks_of(target), mixers_of(target)[0]
    forward, in_a_forward = mixer.forward, set()
    for after in range(12, 18):
        calls, cache = iter(range(10_000)), DDTreeCache(config=target.config)

        def failing(*args: Any, calls: Any = calls, after: int = after, **kwargs: Any) -> Any:
            if next(calls) == after:
                in_a_forward.add(expansion._FORWARD.get() is not None)
                raise KeyboardInterrupt
            return forward(*args, **kwargs)

        mixer.forward = failing
        with pytest.raises(KeyboardInterrupt):
            tree(target, drafter, prompt(), max_new_tokens=NEW, **{CACHE_NAME: cache})
        mixer.forward = forward
        assert hooks_of(target) == before
        seen = cache.get_seq_length()
        assert seen > prompt().shape[1]
        fresh = DynamicCache(config=target.config)
        with torch.no_grad():
            target(text[:, :seen], **{CACHE_NAME: fresh})
        for a, b in zip(states_of(cache), states_of(fresh), strict=True):
            assert torch.allclose(a, b, atol=1e-3)
    assert in_a_forward == {True, False}


def test_threads_on_one_model() -> None:
    target = make_expanded("bamba")
    drafter = drafter_for(target)
    check_threads(target, drafter, NEW)
    assert all(counts == (0, 0) for counts in hooks_of(target).values())


def dispatched(target: Any) -> None:
    dispatch_model(target, device_map={"": "cpu"}, force_hooks=True)


def offloaded(target: Any) -> None:
    """Weights of a mixer come for its forward and go again: it runs through accelerate's hooks or not at all."""
    for mixer in mixers_of(target):
        cpu_offload(mixer, execution_device=torch.device("cpu"))
    assert all(weight.device.type == "meta" for weight in mixers_of(target)[0].parameters())


@pytest.mark.parametrize("prepare", [dispatched, offloaded])
@pytest.mark.parametrize("family", ["bamba", "lfm2"])
def test_under_accelerates_hooks(family: str, prepare: Any) -> None:
    target = make_expanded(family)
    drafter, expected = drafter_for(target), plain(target, prompt(), max_new_tokens=NEW)
    prepare(target)
    assert torch.equal(tree(target, drafter, prompt(), max_new_tokens=NEW), expected)
