"""Layers with recurrent states: a round and a commit leave what plain decoding of the path leaves."""

import copy
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionLayer

from cache.recurrent_rows import CHANNELS, KERNEL, KINDS, Halving, Tokens, assert_equal, states, twins
from hf_ddtree.cache import DDTreeCache, adopt, check, mixers
from hf_ddtree.cache.path import KeptPath
from hf_ddtree.cache.recurrent import TreeRecurrentLayer, saved_states
from hf_ddtree.round import CURRENT_ROUND, MixerKind, TreeRound

PATHS = [[0, 2, 5], [0], [0, 1, 2, 3, 4, 5], [0, 4]]


@pytest.mark.parametrize("prefix", [1, 3, 9])
@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("kind", list(KINDS))
def test_rounds_equal_plain_decoding(kind: str, replayed: bool, prefix: int) -> None:
    ours, theirs = twins(kind, prefix)
    tensors = states(ours)
    for turn, path in enumerate(PATHS):
        before = [state.clone() for state in tensors]
        ours.begin()
        assert ours.record_past
        Tokens(6, seed=9 + turn).as_tree(ours, replayed)
        assert all(map(torch.equal, tensors, before))
        ours.commit(KeptPath(torch.tensor(path)))
        Tokens(6, seed=9 + turn).read(theirs, path)
        assert_equal(ours, theirs)
        # A captured graph knows states by their address.
        assert all(a is b for a, b in zip(states(ours), tensors, strict=True))
        # Outside of rounds the layer is its parent.
        for layer in (ours, theirs):
            Tokens(2, seed=turn).read(layer, [0, 1])
        assert_equal(ours, theirs)


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_rollback_leaves_no_trace(kind: str, replayed: bool) -> None:
    ours, theirs = twins(kind)
    ours.begin()
    Tokens(6, seed=3).as_tree(ours, replayed)
    ours.rollback()
    assert_equal(ours, theirs)
    ours.begin()
    ours.commit(KeptPath(torch.tensor([0])))
    assert_equal(ours, theirs)


@pytest.mark.parametrize("replayed", [[False, False], [True, True], [False, True]])
def test_several_states_in_a_layer(replayed: list[bool]) -> None:
    """Of which some may be replayed and others not."""
    ours, theirs = twins("recurrent", number_of_states=2)
    nodes = [Tokens(6, seed=5), Tokens(6, seed=6)]
    ours.begin()
    if all(replayed):
        ours.pend(lambda path, scratch: [nodes[index].read(scratch, path.tolist(), index) for index in (0, 1)])
    else:
        for index in (0, 1):
            nodes[index].as_tree(ours, replayed[index], index)
    ours.commit(KeptPath(torch.tensor([0, 3])))
    for index in (0, 1):
        nodes[index].read(theirs, [0, 3], index)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("kind", list(KINDS))
def test_adopting_shares_states_and_leaves_the_layer_as_it_was(kind: str) -> None:
    _, theirs = twins(kind)
    reference = copy.deepcopy(theirs)
    ours = KINDS[kind][0].adopt(theirs)
    assert isinstance(ours, type(theirs))
    assert all(a is b for a, b in zip(states(ours), states(theirs), strict=True))
    assert_equal(ours, reference)
    ours.reset()
    assert theirs.has_previous_state == reference.has_previous_state
    empty = KINDS[kind][0].adopt(KINDS[kind][1](**KINDS[kind][2]))
    assert not empty.holds_states
    for layer in (empty, fresh := KINDS[kind][1](**KINDS[kind][2])):
        Tokens(5, seed=1).read(layer, [0, 1, 2, 3, 4])
    assert_equal(empty, fresh)


@pytest.mark.parametrize("prefix", [1, 9])
def test_a_recorded_past_is_cut_to_the_kernel(prefix: int) -> None:
    recorded, theirs = LinearAttentionLayer(), LinearAttentionLayer()
    recorded.activate_past_recording()
    for layer in (recorded, theirs):
        Tokens(prefix, seed=1).read(layer, list(range(prefix)))
    assert recorded.conv_states[0].shape[-1] == (prefix if prefix > KERNEL else 1)
    ours = TreeRecurrentLayer.adopt(recorded)
    ours.begin()
    Tokens(6, seed=2).as_tree(ours)
    ours.commit(KeptPath(torch.tensor([0, 3])))
    Tokens(6, seed=2).read(theirs, [0, 3])
    assert_equal(ours, theirs)


def test_a_state_that_ignored_the_tree_is_refused() -> None:
    ours, _ = twins("recurrent")
    ours.begin()
    with pytest.raises(ValueError, match=r"row of tokens.*assistant_model"):
        ours.update_recurrent_state(torch.zeros(1, CHANNELS))


def test_a_round_needs_a_prefix() -> None:
    layer = TreeRecurrentLayer()
    layer.begin()
    with pytest.raises(RuntimeError, match="prefix"):
        layer.update_conv_state(torch.zeros(1, CHANNELS, 2), conv_kernel_size=KERNEL)
    with pytest.raises(RuntimeError, match="prefix"):
        layer.update_recurrent_state(Halving(torch.zeros(1, CHANNELS, 2)))


@pytest.mark.parametrize("kind", ["with_attention", "with_sliding"])
def test_states_cannot_be_cropped_as_rows_can(kind: str) -> None:
    ours, theirs = twins(kind)
    with pytest.raises(RuntimeError, match="past"):
        ours.crop(-2)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("kind", list(KINDS))
def test_saved_states_come_back_in_their_tensors(kind: str) -> None:
    ours, theirs = twins(kind)
    tensors, copies = states(ours), [state.clone() for state in states(ours)]
    restore = saved_states(ours)
    Tokens(3, seed=7).read(ours, [0, 1, 2])
    assert not all(map(torch.equal, states(ours), copies))
    restore()
    assert all(map(torch.equal, states(ours), copies))
    assert all(a is b for a, b in zip(states(ours), tensors, strict=True))
    empty = KINDS[kind][1](**KINDS[kind][2])
    restore = saved_states(empty)
    Tokens(3, seed=7).read(empty, [0, 1, 2])
    restore()
    assert states(empty) == [None, None]
    assert not any(empty.has_previous_state.values())
    assert theirs.has_previous_state == {0: True}


def cache_of(*kinds: str) -> Any:
    cache = DDTreeCache()
    cache.layers = [twins(kind)[1] for kind in kinds]
    return cache


def test_a_cache_adopts_every_kind() -> None:
    cache = cache_of(*KINDS)
    cache.layers += [DynamicLayer(), LinearAttentionLayer()]
    check(cache)
    adopt(cache)
    check(cache)
    assert [type(layer) for layer in cache.layers[:3]] == [ours for ours, _, _ in KINDS.values()]
    # A layer that has read nothing is no mixer: on some releases layers of experts alone have one.
    attention, recurrent = MixerKind.ATTENTION, MixerKind.RECURRENT
    assert mixers(cache) == {
        (0, recurrent),
        (1, recurrent),
        (1, attention),
        (2, recurrent),
        (2, attention),
        (3, attention),
    }
    assert not cache.is_compileable


def test_compileable_as_the_parent_is_outside_of_rounds() -> None:
    """A static cache shows a mask to forwards of one token only if all of its layers are compileable."""
    layer = TreeRecurrentLayer()
    assert layer.is_compileable
    layer.begin()
    layer.rollback()
    assert layer.is_compileable


def test_layers_made_later_are_ours() -> None:
    cache = DynamicCache()
    cache.layer_class_to_replicate = LinearAttentionLayer
    adopt(cache)
    assert cache.layer_class_to_replicate is TreeRecurrentLayer


def test_the_cache_notes_which_layer_has_read_the_tree() -> None:
    cache = cache_of("recurrent", "recurrent")
    adopt(cache)
    cache.begin()
    tree = TreeRound(torch.tensor([0, 1]), torch.tensor([2, 2]))
    token = CURRENT_ROUND.set(tree)
    try:
        cache.update_recurrent_state(Halving(torch.ones(1, CHANNELS, 2)), 1)
    finally:
        CURRENT_ROUND.reset(token)
    assert tree.mixed == {(1, MixerKind.RECURRENT)}
    assert cache.layers[1].record_past
    cache.prune(torch.tensor([0]))
    assert not cache.layers[1].record_past
