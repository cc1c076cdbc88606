"""What the expansion does to a mixer's calls: rows of paths and of levels, bounded memory, hooks, other threads."""

import threading
from typing import Any

import pytest
import torch

from attention.trees import random_tree
from hf_ddtree.compat import CACHE_NAME, recurrent_mixers, scans_as_it_steps
from hf_ddtree.linear_attention import expansion
from hf_ddtree.linear_attention.expansion import PathExpansion
from hf_ddtree.linear_attention.switch import Route, routes
from hf_ddtree.round import CURRENT_ROUND, MixerKind, TreeRound
from hf_ddtree.tree import DraftTree
from linear_attention.expanded import (
    EXPANDED,
    hooks_of,
    layers_of,
    make_expanded,
    mixers_of,
    sequence_of,
    states_of,
    tokens,
)
from models import delta
from pairs import VOCABULARY, make_target

# Scans and steps of these families are in fp32 whatever the model's dtype.
TOLERANCE = 1e-4


def draft(seed: int = 1, nodes: int = 17) -> DraftTree:
    return random_tree(nodes, seed=seed, anchor=tokens(1, seed=seed)[0], vocabulary=VOCABULARY)


class Recorded:
    """A mixer's forward as accelerate replaces it, on the instance; it notes the rows and tokens of each call."""

    def __init__(self, mixer: Any):
        self.forward, self.shapes = mixer.forward, []
        mixer.forward = self

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.shapes.append(tuple(hidden_states.shape[:2]))
        return self.forward(hidden_states, *args, **kwargs)


@pytest.mark.parametrize("family", list(EXPANDED))
def test_mixers_are_the_layers_that_hold_states(family: str) -> None:
    model = make_expanded(family)
    layers = sequence_of(model, tokens(5)).cache.layers
    held = [index for index, layer in enumerate(layers) if getattr(layer, "holds_states", False)]
    assert held
    assert sorted(recurrent_mixers(model)) == held


def test_mixers_of_other_models() -> None:
    assert recurrent_mixers(make_target("qwen3")) == {}
    for family in delta.FAMILIES:
        if family.present:
            model = family.build()
            linear = [i for i, kind in enumerate(model.config.layer_types) if kind == "linear_attention"]
            assert {index: len(mixers) for index, mixers in recurrent_mixers(model).items()} == dict.fromkeys(
                linear, 1
            )
            assert set(routes(model).values()) == {Route.DELTA_RULE}


@pytest.mark.parametrize("family", list(EXPANDED))
def test_a_round_only_reads_the_committed_states(family: str) -> None:
    sequence = sequence_of(make_expanded(family), tokens(9))
    held = states_of(sequence.cache)
    before = [state.clone() for state in held]
    logits = sequence.round(draft()).clone()
    assert all(map(torch.equal, held, before))
    sequence.cache.rollback()
    assert all(a is b for a, b in zip(states_of(sequence.cache), held, strict=True))
    assert all(map(torch.equal, held, before))
    # So the same round may be read again.
    assert torch.allclose(sequence.round(draft()), logits, atol=TOLERANCE)
    # The control: it is these states that the tree is read from.
    sequence.cache.rollback()
    for state in held:
        state.zero_()
    assert (sequence.round(draft()) - logits).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("family", ["bamba", "lfm2", "jamba", "kimi_linear"])
def test_parts_of_a_tree_give_what_the_whole_gives(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = sequence_of(make_expanded(family), tokens(9))
    recorded = Recorded(mixers_of(sequence.model)[0])
    tree = draft(nodes=40)
    whole = sequence.round(tree).clone()
    leaves = sum(int(end) == node + 1 for node, end in enumerate(tree.subtree_ends))
    levels = int(tree.depths.max()) + 1
    if family == "lfm2":
        assert recorded.shapes == [(leaves, levels)]
    else:
        assert [tokens for _, tokens in recorded.shapes] == [1] * levels
        # Each node once.
        assert sum(rows for rows, _ in recorded.shapes) == len(tree)
    for at_once in (1, 3):
        sequence.cache.rollback()
        layer = layers_of(sequence.cache)[0]
        monkeypatch.setattr(expansion, "BYTES_AT_ONCE", bytes_for(at_once, recorded, layer, levels, sequence.model))
        recorded.shapes.clear()
        assert torch.allclose(sequence.round(tree), whole, atol=TOLERANCE)
        assert max(rows for rows, _ in recorded.shapes) == at_once
    sequence.commit(tree, tree.path(len(tree) - 1))


def bytes_for(leaves: int, recorded: Recorded, layer: Any, levels: int, model: Any) -> int:
    """What the documented estimate gives for so many leaves."""
    states = [*layer.conv_states.values(), *layer.recurrent_states.values()]
    state = sum(state.nbytes for state in states if state is not None)
    token = 16 * model.config.hidden_size * 4
    return leaves * (levels * (state + token) if recorded.shapes[0][1] > 1 else 3 * state + token)


@pytest.mark.parametrize("family", list(EXPANDED))
def test_rows_and_levels_agree_where_a_scan_is_steps(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = sequence_of(make_expanded(family), tokens(9))
    tree = draft()
    path = tree.path(len(tree) - 1)
    by_level = sequence.round(tree).clone()
    sequence.cache.rollback()
    monkeypatch.setattr(expansion, "by_level", lambda *_: False)
    difference = (sequence.round(tree) - by_level).abs().max()
    if family in ("jamba", "zamba"):
        # Mamba-1's scan does not know what was before.
        assert difference > 0.1
        assert not any(map(scans_as_it_steps, mixers_of(sequence.model)))
        return
    assert difference < 1e-3
    sequence.commit(tree, path)
    fresh = sequence_of(sequence.model, sequence.ids)
    for ours, theirs in zip(states_of(sequence.cache), states_of(fresh.cache), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-3)


def test_where_a_scan_is_not_what_decoding_does_a_tree_is() -> None:
    """Nemotron-H's scan bounds time steps, its single step does not: each node gets what decoding gives."""
    model = make_expanded("nemotron_h", time_step_min=0.5, time_step_max=0.6)
    assert not any(map(scans_as_it_steps, mixers_of(model)))
    assert all(map(scans_as_it_steps, mixers_of(make_expanded("bamba"))))
    sequence, tree = sequence_of(model, tokens(9)), draft()
    logits = sequence.round(tree)
    assert (logits - sequence.expected(tree)).abs().max() > 1e-2
    path = tree.path(int(tree.depths.argmax()))
    sequence.cache.rollback()
    for node in path:
        one = random_tree(1, seed=0, anchor=int(tree.token_ids[node]))
        assert torch.allclose(sequence.round(one)[0], logits[node], atol=TOLERANCE)
        sequence.commit(one, [0])


def test_other_hooks_of_a_mixer_see_nodes_once() -> None:
    sequence = sequence_of(make_expanded("bamba"), tokens(9))
    mixer, tree, seen = mixers_of(sequence.model)[0], draft(), []
    mixer.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["hidden_states"]), with_kwargs=True)
    mixer.register_forward_hook(lambda _, args, output: seen.append(output))
    before = hooks_of(sequence.model)
    sequence.round(tree)
    assert [value.shape for value in seen] == [(1, len(tree), sequence.model.config.hidden_size)] * 2
    sequence.commit(tree, [0])
    assert len(seen) == 2
    assert hooks_of(sequence.model) == before


@pytest.mark.parametrize("call", [0, 1, 4])
def test_an_error_in_a_mixer_leaves_no_trace(call: int) -> None:
    sequence, tree = sequence_of(make_expanded("falcon_h1"), tokens(9)), draft()
    before, states = hooks_of(sequence.model), [state.clone() for state in states_of(sequence.cache)]
    mixer, calls = mixers_of(sequence.model)[1], iter(range(1000))
    forward = mixer.forward

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    mixer.forward = failing
    with pytest.raises(KeyboardInterrupt):
        sequence.round(tree)
    mixer.forward = forward
    assert CURRENT_ROUND.get() is None
    assert hooks_of(sequence.model) == before
    sequence.cache.rollback()
    assert all(map(torch.equal, states_of(sequence.cache), states))
    assert torch.allclose(sequence.round(tree), sequence.expected(tree), atol=1e-3)


def test_an_error_while_committing_leaves_the_states_and_may_be_repeated() -> None:
    sequence, tree = sequence_of(make_expanded("bamba"), tokens(9)), draft()
    states = [state.clone() for state in states_of(sequence.cache)]
    sequence.round(tree)
    path, mixer = tree.path(len(tree) - 1), mixers_of(sequence.model)[0]
    forward, calls = mixer.forward, iter(range(1000))

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    mixer.forward = failing
    with pytest.raises(KeyboardInterrupt):
        sequence.cache.prune(torch.tensor(path))
    assert all(map(torch.equal, states_of(sequence.cache), states))
    mixer.forward = forward
    sequence.commit(tree, path)
    fresh = sequence_of(sequence.model, sequence.ids)
    for ours, theirs in zip(states_of(sequence.cache), states_of(fresh.cache), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-3)


def test_a_forward_elsewhere_is_as_ever() -> None:
    model = make_expanded("bamba")
    ids, outputs = torch.tensor([tokens(7)]), []

    def forward() -> None:
        with torch.no_grad():
            outputs.append(model(ids, use_cache=False).logits)

    forward()
    tree = draft()
    with PathExpansion(mixers_of(model)).tree(TreeRound(tree.depths, tree.subtree_ends)):
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join()
        mixer = mixers_of(model)[0]
        hook = next(reversed(mixer._forward_pre_hooks.values()))

        def as_removed() -> None:
            # As where the flag of keyword arguments is gone already, and the hook still in the list.
            outputs.append(hook(mixer, (ids,)))

        thread = threading.Thread(target=as_removed)
        thread.start()
        thread.join()
    assert torch.equal(outputs[0], outputs[1])
    assert outputs[2] is None


def test_a_mixer_without_a_cache_is_an_error() -> None:
    model, tree = make_expanded("bamba"), draft()
    mixer = mixers_of(model)[0]
    expanded = PathExpansion([mixer]).tree(TreeRound(tree.depths, tree.subtree_ends))
    with pytest.raises(ValueError, match="BambaMixer was called without a cache"), expanded:
        mixer(hidden_states=torch.randn(1, len(tree), model.config.hidden_size))


def test_it_notes_what_has_read_the_tree() -> None:
    sequence, tree = sequence_of(make_expanded("lfm2"), tokens(9)), draft()
    sequence.cache.begin()
    tree_round = TreeRound(tree.depths, tree.subtree_ends)
    positions = (len(sequence.ids) + tree.depths)[None]
    with torch.no_grad(), sequence.verify.reading(tree_round):
        sequence.model(tree.token_ids[None], position_ids=positions, **{CACHE_NAME: sequence.cache})
    read = {index for index, kind in tree_round.mixed if kind is MixerKind.RECURRENT}
    assert read == set(recurrent_mixers(sequence.model))


def test_it_says_once_that_it_is_slower(caplog: pytest.LogCaptureFixture) -> None:
    class LoneMixer(torch.nn.Module):
        layer_idx = 0

    caplog.set_level("WARNING", "hf_ddtree")
    for _ in range(2):
        PathExpansion([LoneMixer(), LoneMixer()])
        PathExpansion([])
    assert caplog.text.count("recurrent layers (LoneMixer) have no rule for draft trees") == 1
