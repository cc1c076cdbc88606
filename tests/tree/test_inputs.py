"""Ranking of logits, and what the builders refuse."""

import math
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_ddtree.tree import (
    Expansion,
    MarginalScorer,
    build_draft_tree,
    build_from_scorer,
    build_from_top,
    rank_children,
    ranking,
    top_marginals,
)
from hf_ddtree.tree.ranking import BLOCK, _lowest_ids, chooser, highest


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.integers(-2, 2), min_size=24, max_size=24), st.integers(1, 9))
def test_equal_scores_rank_by_the_lower_id(levels, width):
    scores = torch.tensor(levels, dtype=torch.float32).reshape(3, 8)
    values, ids = rank_children(scores, width)
    for row, row_values, row_ids in zip(scores.tolist(), values.tolist(), ids.tolist(), strict=True):
        expected = sorted(range(8), key=lambda token: (-row[token], token))[:width]
        assert row_ids == expected
        assert row_values == [row[token] for token in expected]
    # What accelerators run instead chooses the same ids.
    ranked = scores.topk(min(width, 8), dim=-1).values
    lowest = _lowest_ids(scores, ranked[:, -1:], ranked)
    assert torch.equal(torch.where(ranked == ranked[:, -1:], lowest, ids), ids)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 9), st.sampled_from([0, 1, 37]))
def test_the_highest_are_found_by_blocks_of_their_maxima(seed, levels, count, rest):
    with patch.object(ranking, "LEAST", 0):
        check_the_highest(seed, levels, count, rest)


def check_the_highest(seed, levels, count, rest):
    generator = torch.Generator().manual_seed(seed)
    # Few levels give ties across blocks, and a row apart from the others' memory.
    scores = torch.randint(0, 10**levels, (4, 40 * BLOCK + rest), generator=generator).float()[::2]
    values, ids = highest(scores, count)
    assert torch.equal(values, scores.topk(count, dim=-1).values)
    assert torch.equal(scores.gather(-1, ids), values)
    assert all(len(set(row)) == count for row in ids.tolist())
    ranked, chosen = rank_children(scores, count)
    for row, row_values, row_ids in zip(scores.tolist(), ranked.tolist(), chosen.tolist(), strict=True):
        assert row_ids == sorted(range(len(row)), key=lambda token: (-row[token], token))[:count]
        assert row_values == [row[token] for token in row_ids]


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.integers(0, 2**32), st.integers(0, 3), st.sampled_from([1, BLOCK, 3 * BLOCK, 3 * BLOCK + 5]), st.booleans())
def test_the_first_of_the_highest(seed, levels, vocabulary, broken):
    scores = torch.randint(0, 10**levels, (vocabulary,), generator=torch.Generator().manual_seed(seed)).float()
    scores[seed % vocabulary] = math.nan if broken else -math.inf
    other = torch.zeros(vocabulary)
    assert chooser(torch.stack([other, scores]))(1) == int(scores.argmax())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_top_marginals_normalise_over_the_whole_vocabulary(dtype):
    logits = (4 * torch.randn(5, 200, generator=torch.Generator().manual_seed(1))).to(dtype)
    log_probs, ids = top_marginals(logits, 16)
    assert log_probs.dtype == torch.float32 and ids.dtype == torch.long and log_probs.shape == ids.shape == (5, 16)
    expected = logits.double().log_softmax(-1).gather(-1, ids)
    torch.testing.assert_close(log_probs.double(), expected, atol=2e-6, rtol=1e-6)
    tree = build_from_top(log_probs, ids, 16)
    assert torch.equal(tree.token_ids, build_draft_tree(logits.double().log_softmax(-1), 16).token_ids)


class Largest(TorchDispatchMode):
    """Numbers in the largest tensor that an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not any(out.alias_info for out in func._schema.returns):
            tensors = [tensor for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)]
            self.numbers = max([self.numbers, *(tensor.numel() for tensor in tensors)])
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_marginals_make_no_second_table_of_the_vocabulary(dtype):
    logits = torch.randn(12, 4000, generator=torch.Generator().manual_seed(1)).to(dtype)
    with Largest() as largest:
        top_marginals(logits, 16)
    assert largest.numbers <= logits.numel() / 2


@pytest.mark.parametrize("strides", ["own", "of more columns"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_logits_that_may_be_overwritten_give_the_same(dtype, strides):
    whole = (4 * torch.randn(9, 5003, generator=torch.Generator().manual_seed(1))).to(dtype)
    whole[2, :7], whole[3, 5] = -math.inf, math.nan
    logits = whole if strides == "own" else whole[:, :4001]
    kept = whole.clone()
    expected, expected_ids = top_marginals(logits, 16)
    assert torch.equal(whole.nan_to_num(), kept.nan_to_num())
    with Largest() as largest:
        log_probs, ids = top_marginals(logits, 16, overwrite=True)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(log_probs.nan_to_num(7), expected.nan_to_num(7))
    assert torch.equal(whole[:, logits.shape[1] :], kept[:, logits.shape[1] :])
    if dtype == torch.float32 and strides == "own":
        # What is taken up besides the logits is what is given back.
        assert largest.numbers <= 9 * 17


def test_top_marginals_of_masked_and_broken_rows():
    logits = torch.tensor([[1.0, -math.inf, 2.0], [-math.inf] * 3, [0.0, math.nan, 1.0], [3e38, -3e38, 0.0]])
    log_probs, ids = top_marginals(logits, 3)
    assert ids[0].tolist() == [2, 0, 1]
    assert log_probs[0].tolist() == pytest.approx([-0.3132617, -1.3132617, -math.inf])
    assert bool(log_probs[1:3].isnan().all())
    assert log_probs[3, 0] == 0 and ids[3].tolist() == [0, 2, 1]
    assert top_marginals(logits[:0], 2)[0].shape == (0, 2)


def test_top_marginals_stop_at_the_vocabulary():
    log_probs, ids = top_marginals(torch.zeros(2, 3), 10)
    assert ids.tolist() == [[0, 1, 2]] * 2
    assert log_probs[0].tolist() == pytest.approx([-math.log(3)] * 3)


@pytest.mark.parametrize(
    ("budget", "error", "message"),
    [
        (-1, ValueError, "budget must be at least 0, got -1"),
        (2.0, TypeError, "budget must be an int of at least 0, got 2.0 of type float"),
        (True, TypeError, "of type bool"),
        (None, TypeError, "of type NoneType"),
    ],
)
def test_a_wrong_budget_is_refused(budget, error, message):
    with pytest.raises(error, match=message):
        build_draft_tree(torch.zeros(2, 1), budget)


def test_wrong_options_are_refused():
    table = torch.zeros(2, 1)
    with pytest.raises(ValueError, match="max_branching must be at least 1, got 0"):
        build_draft_tree(table, 3, max_branching=0)
    with pytest.raises(TypeError, match="max_branching must be an int"):
        build_draft_tree(table, 3, max_branching=1.5)
    for budget in (0, 3):
        with pytest.raises(ValueError, match="unknown builder 'numba': choose one of 'levelwise', 'heap'"):
            build_draft_tree(table, budget, builder="numba")
    with pytest.raises(ValueError, match="k must be at least 1"):
        top_marginals(table, 0)


@pytest.mark.parametrize("shape", [(3,), (1, 3, 4), (3, 0)])
def test_a_wrong_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"shape \(depth, vocab\)"):
        build_draft_tree(torch.zeros(shape), 4)


def test_wrong_types_are_refused():
    with pytest.raises(TypeError, match=r"float dtype, got torch\.int64"):
        build_draft_tree(torch.zeros(2, 3, dtype=torch.long), 4)
    with pytest.raises(TypeError, match="got list"):
        build_draft_tree([[0.0]], 4)
    with pytest.raises(TypeError, match="token_ids must be of an integer dtype"):
        build_from_top(np.zeros((1, 1)), np.zeros((1, 1)), 4)


@pytest.mark.parametrize("builder", ["levelwise", "heap"])
@pytest.mark.parametrize("budget", [2, 300])
def test_nan_is_named(builder, budget):
    table = torch.zeros(3, 4).log_softmax(-1)
    table[1, 2] = math.nan
    with pytest.raises(ValueError, match=r"1 NaN value\(s\), the first in row 1"):
        build_draft_tree(table, budget, builder=builder)
    with pytest.raises(ValueError, match="NaN"):
        build_from_top(*top_marginals(torch.full((2, 4), -math.inf), 3), budget, builder=builder)


def test_tables_that_are_not_log_probs_are_refused():
    with pytest.raises(ValueError, match=r"must be at most 0, got 3: pass log-probabilities .*, not logits"):
        build_draft_tree(torch.tensor([[3.0, 1.0]]), 4)
    with pytest.raises(ValueError, match="sorted from the most probable token down"):
        build_from_top(np.array([[-2.0, -1.0]]), np.array([[0, 1]]), 4)
    with pytest.raises(ValueError, match=r"has shape \(1, 2\), top_token_ids \(1, 3\)"):
        build_from_top(np.zeros((1, 2)), np.zeros((1, 3), dtype=int), 4)
    # Rounding in a half-precision softmax may leave a log-probability just above 0: it counts as 0.
    assert build_draft_tree(torch.tensor([[1e-6, -1.0]]), 1).log_probs.tolist() == [0.0, 0.0]


def test_a_scorer_with_wrong_shapes_is_refused():
    class Careless:
        depth = 2

        def expand(self, depth, tokens, node_state, width):
            return Expansion(torch.zeros(1), torch.zeros(1, dtype=torch.long), None)

    with pytest.raises(ValueError, match=r"Careless.expand got 1 parents and returned log_probs of shape \(1,\)"):
        build_from_scorer(Careless(), 3)


def test_marginals_need_a_column():
    with pytest.raises(ValueError, match=r"MarginalScorer got log_probs of shape \(2, 0\)"):
        MarginalScorer(np.zeros((2, 0)), np.zeros((2, 0), dtype=int))


def test_tables_may_be_int32_or_half():
    scorer = MarginalScorer(np.zeros((2, 1)), np.array([[3], [4]], dtype=np.int32))
    assert build_from_scorer(scorer, 9).token_ids.dtype == torch.long
    half = torch.tensor([[-0.5, -1.5]], dtype=torch.bfloat16)
    assert build_from_top(half, torch.tensor([[8, 2]]), 9).token_ids.tolist() == [-1, 8, 2]


@pytest.mark.parametrize("builder", ["levelwise", "heap"])
@pytest.mark.parametrize("budget", [5, 200])
def test_a_tree_is_on_the_host_whatever_the_default_device(builder, budget):
    scorer = MarginalScorer(np.log([[0.6, 0.3], [0.5, 0.4]]), np.array([[1, 2], [3, 4]]))
    with torch.device("meta"):
        tree = build_from_scorer(scorer, budget, builder=builder, anchor=1)
        cut = tree.cut(2)
    tree.validate()
    assert cut.token_ids.tolist() == [1, 1, 3]
