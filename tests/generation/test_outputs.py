"""Scores, logits, hidden states, attentions, cache, streamer and statistics are those of `generate`."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import hf_ddtree
from hf_ddtree import DDTreeCache, DDTreeConfig
from hf_ddtree.compat import CACHE_NAME
from hf_ddtree.generation.output import STAGES
from models.zoo import ALL
from pairs import FAMILIES, make_drafter, make_target, plain, prompt, tree

NEW = 30


class Tape:
    """A streamer that remembers each call."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.shapes: list[tuple[int, ...]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.calls.append(value.flatten().tolist())
        self.shapes.append(tuple(value.shape))

    def end(self) -> None:
        self.ended += 1


@pytest.fixture(scope="module", params=list(FAMILIES))
def outputs(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    target = make_target(request.param, implementation="eager")
    kwargs: dict[str, Any] = dict(
        max_new_tokens=NEW,
        repetition_penalty=1.2,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        output_hidden_states=True,
        output_attentions=True,
    )
    return plain(target, prompt(), **kwargs), tree(target, make_drafter(target), prompt(), **kwargs)


@pytest.mark.parametrize("name", ["scores", "logits"])
def test_scores_and_logits(outputs: tuple[Any, Any], name: str) -> None:
    expected, output = outputs
    assert torch.equal(output.sequences, expected.sequences)
    assert len(output[name]) == len(expected[name]) == NEW
    for ours, theirs in zip(output[name], expected[name], strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["hidden_states", "attentions"])
def test_layer_outputs(outputs: tuple[Any, Any], name: str) -> None:
    expected, output = outputs
    assert len(output[name]) == len(expected[name]) == NEW
    for ours, theirs in zip(output[name], expected[name], strict=True):
        assert len(ours) == len(theirs)
        for our_layer, their_layer in zip(ours, theirs, strict=True):
            torch.testing.assert_close(our_layer, their_layer, atol=5e-5, rtol=1e-4)


def test_cache_equals_plain_decoding(outputs: tuple[Any, Any]) -> None:
    expected, output = (out[CACHE_NAME] for out in outputs)
    assert isinstance(output, DDTreeCache)
    assert output.get_seq_length() == expected.get_seq_length()
    for ours, theirs in zip(output.layers, expected.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(ours.values, theirs.values, atol=2e-5, rtol=1e-4)
        assert ours.get_mask_sizes(1) == theirs.get_mask_sizes(1)


@pytest.mark.parametrize(
    "kwargs", [{}, {"do_sample": True}, {"eos_token_id": [5, 9]}], ids=["greedy", "sample", "end"]
)
def test_streamer_sees_what_generate_streams(kwargs: dict[str, Any]) -> None:
    target = make_target()
    expected, tape = Tape(), Tape()
    plain(target, prompt(), max_new_tokens=NEW, streamer=expected, **kwargs)
    tree(target, make_drafter(target), prompt(), max_new_tokens=NEW, streamer=tape, **kwargs)
    assert tape.calls == expected.calls
    assert tape.shapes == expected.shapes
    assert tape.ended == expected.ended == 1


def test_statistics() -> None:
    target = make_target()
    output = tree(
        target, make_drafter(target), prompt(), max_new_tokens=NEW, return_dict_in_generate=True, output_trees=True
    )
    stats = output.speculation
    assert sum(stats.acceptance_lengths) == NEW - 1
    assert stats.rounds == len(stats.acceptance_lengths) == len(stats.trees)
    assert stats.mean_acceptance_length == pytest.approx((NEW - 1) / stats.rounds)
    assert sum(stats.acceptance_histogram.values()) == stats.rounds
    assert sum(k * n for k, n in stats.acceptance_histogram.items()) == NEW - 1 - stats.rounds
    assert stats.nodes_verified == sum(len(verified.tree) - 1 for verified in stats.trees)
    assert stats.draft_acceptance_rate == pytest.approx((NEW - 1 - stats.rounds) / stats.nodes_verified)
    assert set(stats.seconds) == set(STAGES)
    assert all(seconds > 0 for seconds in stats.seconds.values())
    assert stats.prefill_seconds > 0
    assert stats.routes == {"attention": 4}
    position = prompt().shape[1]
    for verified in stats.trees:
        tokens = verified.tree.token_ids[verified.path].tolist()
        assert tokens == output.sequences[0, position : position + len(tokens)].tolist()
        position += len(tokens)


@pytest.mark.parametrize("family", ["gemma4_shared", "gemma3n"])
def test_layers_that_share_keys_and_values_are_counted(family: str) -> None:
    target = make_target(ALL[family].build)
    drafter = make_drafter(target, num_target_layers=6)
    output = tree(target, drafter, prompt(), max_new_tokens=NEW, return_dict_in_generate=True)
    assert output.speculation.routes == {"attention": 6}
    assert sum(output.speculation.attention_routes.values()) % 6 == 0


def test_record_adds_up_generates() -> None:
    target = make_target()
    drafter = make_drafter(target)
    with hf_ddtree.record() as stats:
        tree(target, drafter, prompt(), max_new_tokens=NEW)
        first = stats.rounds
        tree(target, drafter, prompt(seed=9), max_new_tokens=NEW)
    assert 0 < first < stats.rounds
    assert sum(stats.acceptance_lengths) == 2 * (NEW - 1)
    tree(target, drafter, prompt(), max_new_tokens=NEW)
    assert sum(stats.acceptance_lengths) == 2 * (NEW - 1)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_sliding", "gpt_oss"])
@pytest.mark.parametrize("whole_sequence", [True, False], ids=["whole_ids", "new_ids_only"])
def test_a_conversation_continues_from_the_returned_cache(family: str, whole_sequence: bool) -> None:
    target = make_target(family)
    drafter = make_drafter(target)
    kwargs: dict[str, Any] = dict(max_new_tokens=NEW, return_dict_in_generate=True)
    caches = {"plain": None, "tree": None}
    turns = {}
    for name, run in (("plain", plain), ("tree", lambda model, *a, **k: tree(model, drafter, *a, **k))):
        first = run(target, prompt(), **kwargs)
        following = torch.cat([first.sequences, prompt(4, seed=8)], dim=1)
        mask = torch.ones_like(following)
        ids = following if whole_sequence else following[:, first[CACHE_NAME].get_seq_length() :]
        caches[name] = first[CACHE_NAME]
        turns[name] = run(target, ids, attention_mask=mask, **{CACHE_NAME: first[CACHE_NAME]}, **kwargs)
    assert torch.equal(turns["tree"].sequences, turns["plain"].sequences)
    assert turns["tree"][CACHE_NAME] is caches["tree"]
    assert caches["tree"].drafter_context.length == caches["tree"].get_seq_length()


def test_a_users_cache_stays_the_same_object() -> None:
    target = make_target("qwen3_sliding")
    cache = DynamicCache(config=target.config)
    output = tree(
        target, make_drafter(target), prompt(), max_new_tokens=NEW, return_dict_in_generate=True, **{CACHE_NAME: cache}
    )
    assert output[CACHE_NAME] is cache
    assert cache.get_seq_length() == output.sequences.shape[1] - 1
    extended = torch.cat([output.sequences, prompt(3)], dim=1)
    expected = plain(target, extended, max_new_tokens=NEW)
    # Plain decoding goes on from a cache that trees were pruned in.
    assert torch.equal(plain(target, extended, max_new_tokens=NEW, **{CACHE_NAME: cache}), expected)


def test_plain_config_with_a_drafter_runs_the_tree() -> None:
    target = make_target()
    with hf_ddtree.record() as stats:
        output = target.generate(prompt(), assistant_model=make_drafter(target), max_new_tokens=NEW, do_sample=False)
    assert stats.rounds > 0
    assert torch.equal(output, plain(target, prompt(), max_new_tokens=NEW))


def test_a_config_attached_to_the_model_runs_the_tree() -> None:
    target = make_target()
    expected = plain(target, prompt(), max_new_tokens=NEW)
    target.generation_config = DDTreeConfig(budget=7, pad_token_id=0, max_new_tokens=NEW)
    with hf_ddtree.record() as stats:
        output = target.generate(prompt(), assistant_model=make_drafter(target))
    assert stats.rounds > 0
    assert stats.nodes_verified <= 7 * stats.rounds
    assert torch.equal(output, expected)
