"""Both builders against an enumeration of every path, on marginals and on path-conditioned scorers."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ddtree.tree import (
    DraftTree,
    Expansion,
    MarginalScorer,
    build_draft_tree,
    build_from_scorer,
    build_from_top,
    compiled,
    marginals,
    rank_children,
)
from hf_ddtree.tree.costs import costs_of
from hf_ddtree.tree.marginals import PYTHON_BUDGET
from hf_ddtree.tree.thresholds import threshold_by_heap, threshold_by_level


@pytest.fixture(scope="module", params=["arrays", "interpreted", "compiled"], autouse=True)
def marginals_by(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each way of building from marginals; the one that numba compiles is read by Python too, whose errors show."""
    if request.param == "compiled" and not compiled.INSTALLED:
        pytest.skip("numba is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "INSTALLED", request.param != "arrays")
        if compiled.INSTALLED:
            patch.setattr(marginals, "PYTHON_BUDGET", 0)
        if request.param == "interpreted":
            patch.setattr(compiled, "machine_code", lambda: (compiled.threshold_of, compiled.write_preorder))
        yield


FIELDS = ("token_ids", "parents", "depths", "subtree_ends", "log_probs")
steady = settings(derandomize=True, deadline=None, max_examples=80)


def assert_same(first: DraftTree, second: DraftTree) -> None:
    for name in FIELDS:
        a, b = getattr(first, name), getattr(second, name)
        assert a.dtype == b.dtype and torch.equal(a, b), name


def token_paths(tree: DraftTree) -> list[tuple[int, ...]]:
    return [tuple(tree.token_ids[tree.path(node)[1:]].tolist()) for node in range(1, len(tree))]


def enumerate_paths(children, depth: int, budget: int, max_branching: int | None = None) -> list[tuple[int, ...]]:
    """Token paths of the `budget` best of all paths, in preorder; `children(path)` gives log-probs by token."""
    found = []

    def visit(path, ranks, score):
        if len(path) == depth:
            return
        log_probs = children(path)
        by_rank = sorted(range(len(log_probs)), key=lambda token: (-log_probs[token], token))
        for rank, token in enumerate(by_rank[:max_branching]):
            if log_probs[token] > -math.inf:
                # The grid the builders state: multiples of 2**-36 nats.
                total = score + round(log_probs[token] * 2**36) / 2**36
                found.append((-total, (*ranks, rank), (*path, token)))
                visit((*path, token), (*ranks, rank), total)

    visit((), (), 0.0)
    best = sorted(found)[:budget]
    return [path for _, _, path in sorted(best, key=lambda node: node[1])]


@st.composite
def log_prob_tables(draw, max_depth=4, max_vocab=5):
    """Coarse (full of ties), normalised or masked tables of shape (depth, vocab)."""
    depth = draw(st.integers(1, max_depth))
    vocab = draw(st.integers(1, max_vocab))
    levels = draw(st.lists(st.integers(-6, 0), min_size=depth * vocab, max_size=depth * vocab))
    table = torch.tensor(levels, dtype=torch.float64).reshape(depth, vocab) / 2
    if draw(st.booleans()):
        table = table.log_softmax(-1)
    if draw(st.booleans()):
        hidden = draw(st.lists(st.booleans(), min_size=depth * vocab, max_size=depth * vocab))
        table = table.masked_fill(torch.tensor(hidden).reshape(depth, vocab), -math.inf)
    return table


@steady
@given(log_prob_tables(), st.integers(0, 40), st.none() | st.integers(1, 6))
def test_marginals_give_the_enumerated_tree(table, budget, max_branching):
    expected = enumerate_paths(lambda path: table[len(path)].tolist(), len(table), budget, max_branching)
    fast = build_draft_tree(table, budget, max_branching=max_branching, anchor=7)
    fast.validate()
    assert token_paths(fast) == expected
    assert_same(fast, build_draft_tree(table, budget, max_branching=max_branching, anchor=7, builder="heap"))


@steady
@given(log_prob_tables(max_depth=6, max_vocab=9), st.integers(PYTHON_BUDGET + 1, 300))
def test_large_budgets_on_small_tables_give_the_heap_tree(table, budget):
    fast = build_draft_tree(table, budget)
    fast.validate()
    assert_same(fast, build_draft_tree(table, budget, builder="heap"))


class WithoutShortcut:
    """Marginals that do not look like it, so that the level-wise builder takes its general way."""

    def __init__(self, inner: MarginalScorer) -> None:
        self.inner = inner
        self.depth = inner.depth
        self.expand = inner.expand


@steady
@given(log_prob_tables(max_depth=5, max_vocab=8), st.integers(1, 200))
def test_the_general_way_agrees_with_the_shortcut(table, budget):
    values, ids = rank_children(table, budget)
    scorer = MarginalScorer(values.numpy(), ids.numpy())
    assert_same(build_from_scorer(scorer, budget), build_from_scorer(WithoutShortcut(scorer), budget))


@steady
@given(log_prob_tables(max_depth=5, max_vocab=8), st.integers(1, 60))
def test_both_thresholds_agree(table, budget):
    values, _ = rank_children(table.clamp(min=-50), budget)
    costs = costs_of(values.numpy())
    expected = threshold_by_heap(costs.tolist(), budget)
    assert threshold_by_level(costs, budget) == expected
    threshold, ties, nodes = compiled.threshold_of(costs, budget)
    assert (threshold, ties) == expected
    assert nodes == min(budget, sum(costs.shape[1] ** (depth + 1) for depth in range(len(costs))))


@steady
@given(log_prob_tables(max_depth=5, max_vocab=8), st.integers(0, 200), st.integers(0, 200))
def test_smaller_budgets_nest_and_equal_a_cut(table, one, other):
    small, large = sorted((one, other))
    tree = build_draft_tree(table, large)
    part = build_draft_tree(table, small)
    assert set(token_paths(part)) <= set(token_paths(tree))
    assert_same(tree.cut(small), part)


class MarkovScorer:
    """log p(child | parent's token, depth) from a table of shape (depth, vocab + 1, vocab); the last row for -1."""

    def __init__(self, log_probs: torch.Tensor) -> None:
        self.log_probs = log_probs
        self.depth = len(log_probs)

    def expand(self, depth, tokens, node_state, width):
        assert node_state is None
        return Expansion(*rank_children(self.log_probs[depth][tokens], width), None)


class RecurrentScorer:
    """log p(child | whole path): the state sums a random vector for each token read, turned at each step."""

    def __init__(self, depth: int, vocab: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.depth = depth
        self.embed = torch.randn(vocab + 1, 6, generator=generator, dtype=torch.float64)
        self.turn = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64)).Q
        self.head = torch.randn(6, vocab, generator=generator, dtype=torch.float64)

    def expand(self, depth, tokens, node_state, width):
        assert (node_state is None) == (depth == 0)
        carried = 0.0 if node_state is None else (node_state[:, :, None] * self.turn).sum(1)
        state = self.embed[tokens] + carried
        # Sums over a fixed axis, not a matmul: the bits must not depend on the number of parents.
        logits = (state[:, :, None] * self.head).sum(1)
        return Expansion(*rank_children(logits.log_softmax(-1), width), state)


@steady
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4), st.integers(0, 60), st.booleans())
def test_a_markov_scorer_gives_the_enumerated_tree(seed, depth, vocab, budget, coarse):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(depth, vocab + 1, vocab, generator=generator, dtype=torch.float64)
    table = -logits.abs().round() if coarse else logits.log_softmax(-1)
    scorer = MarkovScorer(table)
    fast = build_from_scorer(scorer, budget, anchor=0)
    fast.validate()

    def children(path):
        return table[len(path), path[-1] if path else 0].tolist()

    assert token_paths(fast) == enumerate_paths(children, depth, budget)
    assert_same(fast, build_from_scorer(scorer, budget, anchor=0, builder="heap"))


@steady
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4), st.integers(0, 60))
def test_a_recurrent_scorer_gives_the_enumerated_tree(seed, depth, vocab, budget):
    scorer = RecurrentScorer(depth, vocab, seed)
    fast = build_from_scorer(scorer, budget, anchor=vocab)
    fast.validate()

    def children(path):
        state = None
        for level, token in enumerate((vocab, *path)):
            expansion = scorer.expand(level, torch.tensor([token]), state, vocab)
            state = expansion.states
        by_token = expansion.log_probs.new_empty(vocab)
        by_token[expansion.token_ids[0]] = expansion.log_probs[0]
        return by_token.tolist()

    assert token_paths(fast) == enumerate_paths(children, depth, budget)
    assert_same(fast, build_from_scorer(scorer, budget, anchor=vocab, builder="heap"))


@pytest.mark.parametrize(
    ("depth", "vocab", "budget"),
    [(1, 5000, 4096), (15, 5000, 511), (15, 300, 1023), (63, 97, 64), (63, 33, 512), (7, 4500, 4096), (7, 31, 63)],
)
@pytest.mark.parametrize("spread", [0.3, 3.0, 12.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_size_trees_equal_the_heap(depth, vocab, budget, spread, dtype):
    generator = torch.Generator().manual_seed(depth * vocab + budget)
    logits = (spread * torch.randn(depth, vocab, generator=generator)).to(dtype)
    log_probs = logits.float().log_softmax(-1)
    fast = build_draft_tree(log_probs, budget)
    fast.validate()
    assert fast.num_drafted == budget
    assert_same(fast, build_draft_tree(log_probs, budget, builder="heap"))


@pytest.mark.parametrize("budget", [63, 511])
def test_a_flat_distribution_does_not_blow_up(budget):
    flat = torch.full((15, 3000), -math.log(3000))
    assert_same(build_draft_tree(flat, budget), build_draft_tree(flat, budget, builder="heap"))


@pytest.mark.parametrize("budget", [20, 200])
@pytest.mark.parametrize("scale", [1e4, 1e6, 1e30])
def test_log_probs_beyond_exact_sums_still_agree(budget, scale):
    logits = scale * torch.randn(5, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    table = logits.log_softmax(-1)
    fast = build_draft_tree(table, budget)
    fast.validate()
    assert fast.num_drafted == budget
    assert_same(fast, build_draft_tree(table, budget, builder="heap"))


def test_values_by_hand():
    top = np.log(np.array([[0.6, 0.3, 0.1], [0.5, 0.4, 0.1]]))
    ids = np.array([[10, 11, 12], [20, 21, 22]])
    # Path probabilities: 10 .6, 10-20 .3, 11 .3, 10-21 .24, 11-20 .15, 11-21 .12, 12 .1, ...
    tree = build_from_top(top, ids, 5, anchor=99)
    assert tree.token_ids.tolist() == [99, 10, 20, 21, 11, 20]
    assert tree.parents.tolist() == [-1, 0, 1, 1, 0, 4]
    assert tree.depths.tolist() == [0, 1, 2, 2, 1, 2]
    assert tree.subtree_ends.tolist() == [6, 4, 3, 4, 6, 6]
    assert tree.log_probs.exp().tolist() == pytest.approx([1, 0.6, 0.3, 0.24, 0.3, 0.15])


def test_a_tie_goes_to_the_first_rank_tuple():
    # Both (0, 0) and (1,) have log-prob -1; the rank tuple (0, 0) comes first.
    table = torch.tensor([[-0.5, -1.0], [-0.5, -9.0]])
    assert token_paths(build_draft_tree(table, 2)) == [(0,), (0, 0)]
    # Equal tokens rank by their id.
    assert token_paths(build_draft_tree(torch.full((1, 5), -1.0), 2)) == [(0,), (1,)]


@pytest.mark.parametrize("builder", ["levelwise", "heap"])
def test_an_impossible_node_is_never_drafted(builder):
    table = torch.tensor([[-0.1, -math.inf, -2.0], [-math.inf, -math.inf, -math.inf], [-0.1, -1.0, -2.0]])
    assert token_paths(build_draft_tree(table, 50, builder=builder)) == [(0,), (2,)]
    assert len(build_draft_tree(table[1:], 50, builder=builder)) == 1
    assert len(build_draft_tree(table[1:], 500, builder=builder)) == 1


@pytest.mark.parametrize("builder", ["levelwise", "heap"])
@pytest.mark.parametrize("budget", [4, 7, 200])
def test_one_branch_is_the_greedy_chain(builder, budget):
    table = torch.randn(7, 40, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    chain = build_draft_tree(table, budget, max_branching=1, builder=builder)
    assert chain.token_ids[1:].tolist() == table.argmax(-1)[: min(budget, 7)].tolist()
    assert chain.parents.tolist() == list(range(-1, min(budget, 7)))


@pytest.mark.parametrize("builder", ["levelwise", "heap"])
def test_nothing_to_draft_gives_the_root(builder):
    table = torch.zeros(3, 1)
    assert build_draft_tree(table, 0, builder=builder, anchor=5).token_ids.tolist() == [5]
    assert build_draft_tree(table[:0], 8, builder=builder).token_ids.tolist() == [-1]
    assert build_draft_tree(table, 8, builder=builder).token_ids.tolist() == [-1, 0, 0, 0]
