"""Hybrids with Gated DeltaNet layers: a node's logits from the tree's forward are those of its path read in a row."""

import pytest
import torch

from attention.trees import random_tree
from hf_ddtree.cache.recurrent import TreeRecurrentLayer
from hf_ddtree.tree import DraftTree
from linear_attention.hybrids import HYBRIDS, make_hybrid
from models.sequence import Sequence
from pairs import VOCABULARY

HYBRID = HYBRIDS["qwen3_5"]

# The library computes the recurrence of a row in fp32, whatever the model's dtype.
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}


def draft(turn: int, nodes: int = 14) -> DraftTree:
    return random_tree(nodes, seed=turn, anchor=HYBRID.tokens(1, seed=turn)[0], vocabulary=VOCABULARY)


def check_rounds(sequence: Sequence, rounds: int = 3) -> None:
    """Each round commits a path that ends somewhere else: the root alone, a leaf, an inner node."""
    for turn in range(rounds):
        tree = draft(turn)
        logits, expected = sequence.round(tree), sequence.expected(tree)
        differences = (logits - expected).abs().amax(dim=-1).float()
        if sequence.model.dtype in TOLERANCE:
            assert differences.max() < TOLERANCE[sequence.model.dtype]
        else:
            # Logits are of size 3; a router of experts may flip at a node.
            assert differences.median() < 0.1
        # The control: a node's logits are not those of another node.
        assert (logits - expected.roll(1, 0)).abs().amax(dim=-1).median() > 1
        sequence.commit(tree, tree.path((0, 13, 6)[turn]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_each_node_is_its_path(dtype: torch.dtype) -> None:
    check_rounds(Sequence(HYBRID, make_hybrid(dtype), HYBRID.tokens(20)))


@pytest.mark.parametrize("prefix", [1, 2, 3])
def test_prefixes_shorter_than_the_convolution(prefix: int) -> None:
    check_rounds(Sequence(HYBRID, make_hybrid(), HYBRID.tokens(prefix)))


def test_one_node_is_a_plain_forward_and_can_be_undone() -> None:
    sequence = Sequence(HYBRID, make_hybrid(), HYBRID.tokens(9))
    states = [
        {name: dict(getattr(layer, name)) for name in ("conv_states", "recurrent_states")}
        for layer in sequence.cache.layers
        if isinstance(layer, TreeRecurrentLayer)
    ]
    copies = [[state.clone() for group in layer.values() for state in group.values()] for layer in states]
    tree = random_tree(1, seed=0)
    assert torch.allclose(sequence.round(tree), sequence.expected(tree), atol=1e-3)
    sequence.cache.rollback()
    for layer, copy in zip(states, copies, strict=True):
        assert all(map(torch.equal, (state for group in layer.values() for state in group.values()), copy))


@pytest.mark.parametrize("family", list(HYBRIDS))
def test_the_state_of_the_prefix_matters(family: str) -> None:
    """The control of this file: these models' recurrent layers carry what trees are to read."""
    hybrid = HYBRIDS[family]
    sequence = Sequence(hybrid, hybrid.make(), hybrid.tokens(20))
    logits = sequence.round(draft(0)).clone()
    sequence.cache.rollback()
    for layer in sequence.cache.layers:
        if isinstance(layer, TreeRecurrentLayer):
            layer.recurrent_states[0].zero_()
    assert (sequence.round(draft(0)) - logits).abs().max() > 0.5
