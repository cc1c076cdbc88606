"""Calibration finds the true rates from walks, whatever size the trees were cut to."""

import math

import numpy as np
import pytest
import torch

from hf_ddtree.generation import calibration
from hf_ddtree.generation.calibration import Calibration, expected_tokens
from hf_ddtree.generation.cost_model import SIZES
from hf_ddtree.tree import DraftTree, build_draft_tree

from .rounds import DEPTH, Drafter, walked


def taught(drafter: Drafter, nodes: int, drafted: int = 63, rounds: int = 1500) -> Calibration:
    calibration, tree = Calibration(DEPTH), drafter.tree(drafted)
    verified = tree.cut(nodes)
    for _ in range(rounds):
        calibration.observe(tree, walked(verified, drafter.tokens()))
    return calibration


@pytest.mark.parametrize("nodes", [1, 7, 63])
@pytest.mark.parametrize("sure, truth", [(0.6, 0.6), (0.8, 0.4), (0.3, 0.7)])
def test_factors_converge_to_the_true_rates(nodes: int, sure: float, truth: float) -> None:
    drafter = Drafter(sure, truth)
    first = taught(drafter, nodes).factors[0]
    assert first[0, 1] == pytest.approx(truth / sure, rel=0.1)
    assert first[1, 1] == pytest.approx((1 - truth) / (1 - drafter.shares[0]), rel=0.25)


@pytest.mark.parametrize("nodes", [3, 15, 63])
def test_expectations_hold_however_small_the_trees_were(nodes: int) -> None:
    """The mean of what walks give is what the calibrated tree promises, also of somewhat larger ones."""
    drafter = Drafter(0.8, 0.5)
    calibration = taught(drafter, nodes)
    tree = drafter.tree(63)
    promised = expected_tokens(tree, calibration.probabilities(tree), SIZES)
    said = expected_tokens(tree, np.exp(tree.log_probs.numpy()), SIZES)
    for index, size in enumerate(SIZES[1:7], 1):
        if size > 4 * nodes + 3:
            break
        cut = tree.cut(size)
        given = sum(len(walked(cut, drafter.tokens())) for _ in range(1500)) / 1500
        assert promised[index] == pytest.approx(given, rel=0.1)
        assert size < 3 or said[index] > 1.25 * given


def test_positions_off_the_spine_have_factors_of_their_own() -> None:
    """After a second choice nothing comes true, as marginals do not know what came before."""
    drafter, calibration = Drafter(0.6), Calibration(DEPTH)
    tree = drafter.tree(63)
    for _ in range(2000):
        tokens = drafter.tokens()
        off = next((place for place, token in enumerate(tokens) if token), len(tokens))
        calibration.observe(tree, walked(tree, [*tokens[: off + 1], 39]))
    assert calibration.factors[1, 0, 1] == pytest.approx(1.0, abs=0.1)
    assert calibration.factors[1, 0, 0] < 0.1


def test_untaught_it_leaves_probabilities_as_they_are() -> None:
    tree = Drafter(0.5).tree(100)
    assert Calibration(DEPTH).probabilities(tree) == pytest.approx(np.exp(tree.log_probs.numpy()))


def test_large_trees_are_priced_as_small_ones_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Level by level with arrays what plain Python gives node by node."""
    drafter = Drafter(0.7, 0.5)
    taught_before, tree = taught(drafter, 15, rounds=40), drafter.tree(500)
    by_level = taught_before.probabilities(tree)
    monkeypatch.setattr(calibration, "PYTHON_NODES", len(tree))
    assert taught_before.probabilities(tree) == pytest.approx(by_level, rel=1e-12)
    assert len(set(by_level)) > 50


def test_a_few_walks_are_enough_to_distrust_all_depths() -> None:
    """A drafter that is sure and wrong is found out in three rounds, also where no walk has been."""
    drafter = Drafter(0.95, 0.0)
    tree = drafter.tree(15)
    before = expected_tokens(tree, Calibration(DEPTH).probabilities(tree), SIZES)[-1]
    after = expected_tokens(tree, taught(drafter, 15, 15, rounds=3).probabilities(tree), SIZES)[-1]
    assert before > 6 and after < 1.7


def test_probabilities_of_a_path_conditioned_tree() -> None:
    """Ratios of the nodes' own log-probabilities, so a child's factor multiplies what its parent has left."""
    tree = DraftTree(
        token_ids=torch.tensor([0, 5, 7, 6]),
        parents=torch.tensor([-1, 0, 1, 0]),
        depths=torch.tensor([0, 1, 2, 1]),
        subtree_ends=torch.tensor([4, 3, 3, 4]),
        log_probs=torch.tensor([0.0, math.log(0.6), math.log(0.3), math.log(0.2)], dtype=torch.float64),
    )
    calibration = Calibration(2)
    for tokens in ([5, 9], [5, 9], [5, 9], [6]):
        calibration.observe(tree, tokens)
    found, factors = calibration.probabilities(tree), calibration.factors
    assert found[1] == pytest.approx(0.6 * factors[0, 0, 1])
    assert found[2] == pytest.approx(found[1] * 0.5 * factors[1, 0, 1])
    assert factors[1, 0, 1] < factors[0, 0, 1]


def test_expected_tokens_stop_where_the_nodes_do() -> None:
    tree = build_draft_tree(torch.tensor([[0.6, 0.4]]).log(), 9)
    found = expected_tokens(tree, np.exp(tree.log_probs.numpy()), SIZES)
    assert found == pytest.approx([1.0, 1.6, 2.0])
    assert expected_tokens(DraftTree.root_only(), np.ones(1), SIZES) == [1.0]
