"""The tokens that a tree of some size can hold, against the first ranks of every position."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ddtree.tree import MarginalScorer, build_from_scorer, rank_children, useful_marginals


def check_same(logits, budget):
    """The tree of the useful tokens is that of the `budget` first of each position."""
    ranked = [table.numpy() for table in rank_children(logits.log_softmax(-1), budget)]
    tables = useful_marginals(logits.clone(), budget), ranked
    useful, ranked = (build_from_scorer(MarginalScorer(*table, ranked=True), budget, anchor=3) for table in tables)
    for name in ("token_ids", "parents", "depths", "subtree_ends", "log_probs"):
        assert torch.equal(getattr(useful, name), getattr(ranked, name)), name


@given(
    st.integers(0, 2**32), st.integers(1, 20), st.integers(1, 700), st.integers(1, 90), st.floats(0.1, 12),
    st.booleans(), st.booleans(), st.sampled_from([torch.float32, torch.float64]),
)  # fmt: skip
@settings(deadline=None, max_examples=300)
def test_the_tree_is_that_of_all_ranks(seed, depth, vocab, budget, scale, tied, masked, dtype):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(depth, vocab, generator=generator, dtype=dtype)
    if tied:
        logits = logits.round()
    if masked:
        hidden = torch.rand(depth, vocab, generator=generator) < 0.9
        hidden[:, seed % vocab] = False
        logits[hidden] = -math.inf
    check_same(logits, budget)


@pytest.mark.parametrize("vocab", [5000, 2**16 + 100])
@pytest.mark.parametrize("budget", [1, 15, 63, 511])
def test_large_vocabularies_that_end_amid_a_block(vocab, budget):
    logits = 3 * torch.randn(15, vocab, generator=torch.Generator().manual_seed(budget))
    logits[:5, 17] += 16
    logits[2, -1] += 20
    check_same(logits, budget)


def test_probable_tokens_that_share_a_block():
    """The bound is loose then, as the best of each block are few of the best."""
    logits = torch.randn(4, 4096, generator=torch.Generator().manual_seed(0))
    logits[:, 64:128] += 12
    check_same(logits, 63)
    values, _ = useful_marginals(logits, 63)
    assert values.shape[1] <= 63


def test_equal_probabilities_rank_by_the_lower_id():
    _, ids = useful_marginals(torch.zeros(3, 1000), 10)
    assert ids[0].tolist() == list(range(10))
    check_same(torch.zeros(3, 1000), 10)


def test_few_tokens_are_left():
    logits = 3 * torch.randn(15, 50_000, generator=torch.Generator().manual_seed(0))
    logits[:, 7] += 14
    values, ids = useful_marginals(logits, 63)
    assert values.shape == ids.shape
    assert (values > -math.inf).sum() < 200


@pytest.mark.parametrize("rows", [(0,), (3,), (0, 1, 2, 3)])
@pytest.mark.parametrize("vocab", [20, 500])
def test_nan_is_refused_wherever_it_is(rows, vocab):
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(0))
    logits[list(rows), 1] = math.nan
    with pytest.raises(ValueError, match="NaN"):
        MarginalScorer(*useful_marginals(logits, 7), ranked=True)


def test_half_precision():
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(0)).bfloat16()
    check_same(logits.float(), 20)
    kept = logits.clone()
    for table, expected in zip(useful_marginals(logits, 20), useful_marginals(logits.float(), 20), strict=True):
        assert (table == expected).all()
    assert torch.equal(logits, kept)


@pytest.mark.parametrize(("likely", "budget", "reached"), [(0.5, 7, 7), (0.999, 7, 7), (0.999, 40, 30)])
def test_positions_that_no_node_reaches_are_not_looked_at(likely, budget, reached):
    """With one token of probability `likely` at each of 30 positions."""
    logits = torch.zeros(30, 1000)
    logits[:, 5] = math.log(likely / (1 - likely) * 999)
    kept = logits.clone()
    values, _ = useful_marginals(logits, budget)
    assert len(values) == reached
    assert torch.equal(logits[8:], kept[8:]) == (reached < 8)
    check_same(kept, budget)


def test_log_probabilities_take_the_memory_of_the_logits():
    logits = 5 * torch.randn(15, 9000, generator=torch.Generator().manual_seed(0))
    expected = logits.log_softmax(-1)
    useful_marginals(logits, 511)
    assert torch.equal(logits, expected)
