"""Path-conditioned scores against their definitions, and the trees that both builders make of them."""

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from drafters.checkpoints import BLOCK, HIDDEN, VOCABULARY, write
from drafters.heads import layouts
from drafters.heads.reference import markov_log_probs, selector_log_probs
from hf_ddtree import DFlashModel
from hf_ddtree.drafters.heads import MarkovScorer, path_scorer, scorers
from hf_ddtree.tree import DraftTree, Scorer, build_from_scorer

KINDS = ("vanilla", "gated", "rnn", "selector")
DEPTH, ANCHOR = 3, 7

Children = Callable[[tuple[int, ...]], torch.Tensor]


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def load(kind: str) -> tuple[DFlashModel, dict[str, torch.Tensor]]:
        raw, weights = layouts.dflash2() if kind == "selector" else layouts.deepspec(kind)
        folder = write(tmp_path_factory.mktemp(kind), raw, weights)
        return DFlashModel.from_pretrained(folder, dtype=torch.float64), weights

    return load


def outputs(seed: int, vocabulary: int = VOCABULARY, depth: int = DEPTH) -> tuple[torch.Tensor, torch.Tensor]:
    """A pass's states and logits; not what these states give, which no scorer can tell."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(depth, HIDDEN, generator=generator, dtype=torch.float64)
    return states, 2 * torch.randn(depth, vocabulary, generator=generator, dtype=torch.float64)


def children_of(kind: str, weights: dict[str, torch.Tensor], states: torch.Tensor, logits: torch.Tensor) -> Children:
    @functools.cache
    def children(path: tuple[int, ...]) -> torch.Tensor:
        if kind == "selector":
            return selector_log_probs(weights, layouts.TOP_K, [ANCHOR, *path], states, logits)
        heads = {key: value for key, value in weights.items() if key.startswith("markov_head.")}
        return markov_log_probs(heads, kind, [ANCHOR, *path], states, logits)

    return children


def paths_of(tree: DraftTree) -> dict[tuple[int, ...], float]:
    paths = [tuple(tree.token_ids[tree.path(node)[1:]].tolist()) for node in range(1, len(tree))]
    return dict(zip(paths, tree.log_probs[1:].tolist(), strict=True))


def assert_same(first: DraftTree, second: DraftTree) -> None:
    for name in ("token_ids", "parents", "depths", "subtree_ends"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name
    assert (first.log_probs - second.log_probs).abs().max() < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_the_tree_holds_the_most_probable_of_all_paths(drafters: Any, kind: str) -> None:
    drafter, weights = drafters(kind)
    states, logits = outputs(seed=1)
    children = children_of(kind, weights, states, logits)
    every: dict[tuple[int, ...], float] = {(): 0.0}
    level: list[tuple[int, ...]] = [()]
    for _ in range(DEPTH):
        level = [(*path, token) for path in level for token in range(VOCABULARY)]
        every |= {path: every[path[:-1]] + float(children(path[:-1])[path[-1]]) for path in level}
    del every[()]
    best = sorted((path for path in every if every[path] > -math.inf), key=every.__getitem__, reverse=True)
    for budget in (1, 6, 40, 200):
        found = paths_of(build_from_scorer(path_scorer(drafter, states, logits), budget, anchor=ANCHOR))
        expected = best[:budget]
        assert found.keys() == set(expected)
        assert max(abs(found[path] - every[path]) for path in expected) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_branching", [None, 1, 3])
def test_both_builders_make_the_same_tree(drafters: Any, kind: str, max_branching: int | None) -> None:
    drafter, _ = drafters(kind)
    for seed, budget in ((2, 5), (3, 40), (4, 150)):
        scorer = path_scorer(drafter, *outputs(seed, depth=BLOCK))
        fast, plain = (
            build_from_scorer(scorer, budget, max_branching=max_branching, builder=builder, anchor=ANCHOR)
            for builder in ("levelwise", "heap")
        )
        fast.validate()
        assert_same(fast, plain)


@pytest.mark.parametrize("kind", KINDS)
def test_one_child_a_node_is_the_producers_greedy_draft(drafters: Any, kind: str) -> None:
    drafter, weights = drafters(kind)
    states, logits = outputs(seed=5)
    children = children_of(kind, weights, states, logits)
    walked: list[int] = []
    for _ in range(DEPTH):
        walked.append(int(children(tuple(walked)).argmax()))
    chain = build_from_scorer(path_scorer(drafter, states, logits), DEPTH, max_branching=1, anchor=ANCHOR)
    assert chain.token_ids.tolist() == [ANCHOR, *walked]


@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_parents_children_make_up_the_whole_vocabulary(drafters: Any, kind: str) -> None:
    drafter, _ = drafters(kind)
    scorer = path_scorer(drafter, *outputs(seed=6))
    expansion = scorer.expand(0, torch.tensor([ANCHOR]), None, VOCABULARY)
    assert torch.allclose(expansion.log_probs.exp().sum(-1), torch.ones(1, dtype=torch.float64))
    assert (expansion.states is not None) == (kind == "rnn")


def test_candidates_share_what_they_have_without_the_selector(drafters: Any) -> None:
    drafter, _ = drafters("selector")
    states, logits = outputs(seed=6)
    parents = torch.tensor([ANCHOR, 3, 4])
    expansion = path_scorer(drafter, states, logits).expand(1, parents, None, VOCABULARY)
    assert expansion.token_ids.shape == (3, layouts.TOP_K)
    top = logits[1].topk(layouts.TOP_K).indices
    assert all(set(row.tolist()) == set(top.tolist()) for row in expansion.token_ids)
    share = logits[1].softmax(-1)[top].sum()
    assert torch.allclose(expansion.log_probs.exp().sum(-1), share.expand(3))


@pytest.mark.parametrize("kind", KINDS[:3])
def test_parents_in_pieces_are_scored_alike(drafters: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, _ = drafters(kind)
    scorer = path_scorer(drafter, *outputs(seed=7, depth=BLOCK))
    whole = build_from_scorer(scorer, 60, anchor=ANCHOR)
    monkeypatch.setattr(scorers, "MAX_SCORES", 3 * VOCABULARY)
    assert_same(whole, build_from_scorer(scorer, 60, anchor=ANCHOR))


@pytest.mark.parametrize("kind", KINDS)
def test_a_bf16_drafter_scores_in_fp32(drafters: Any, kind: str) -> None:
    drafter, weights = drafters(kind)
    states, logits = (tensor.bfloat16() for tensor in outputs(seed=11))
    half = copy.deepcopy(drafter).bfloat16()
    tree = build_from_scorer(path_scorer(half, states, logits.float()), 40, anchor=ANCHOR)
    rounded = {key: value.bfloat16().double() for key, value in weights.items()}
    children = children_of(kind, rounded, states.double(), logits.double())
    for path, log_prob in paths_of(tree).items():
        expected = sum(float(children(path[:slot])[token]) for slot, token in enumerate(path))
        assert abs(log_prob - expected) < 0.05 * len(path)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_scores_rank_by_the_lower_token(drafters: Any, kind: str) -> None:
    drafter, _ = drafters(kind)
    states, logits = torch.zeros(2, HIDDEN, dtype=torch.float64), torch.zeros(2, VOCABULARY, dtype=torch.float64)
    # A token beyond every table brings no bias.
    expansion = path_scorer(drafter, states, logits).expand(0, torch.tensor([VOCABULARY + 5]), None, 4)
    if kind in ("vanilla", "gated", "selector"):
        assert expansion.token_ids.tolist() == [[0, 1, 2, 3]]
    assert torch.isfinite(expansion.log_probs).all()


def test_the_targets_padding_is_never_drafted(drafters: Any) -> None:
    for kind in ("vanilla", "selector"):
        drafter, _ = drafters(kind)
        states, logits = outputs(seed=8, vocabulary=VOCABULARY + 8)
        padded = path_scorer(drafter, states, logits)
        cut = path_scorer(drafter, states, logits[:, :VOCABULARY])
        first, second = (build_from_scorer(scorer, 100, anchor=VOCABULARY + 3) for scorer in (padded, cut))
        assert_same(first, second)
        assert int(first.token_ids[1:].max()) < VOCABULARY


def test_a_reduced_vocabulary_drafts_the_targets_tokens(drafters: Any) -> None:
    drafter, weights = drafters("gated")
    states, logits = outputs(seed=9, vocabulary=6)
    head = drafter.markov_head
    rows = head.markov_w2.weight.data
    reduced = type(head)(drafter.config).double()
    reduced.load_state_dict(head.state_dict())
    reduced.markov_w2 = torch.nn.Linear(layouts.RANK, 6, bias=False).double()
    reduced.markov_w2.weight.data = rows[:6].clone()
    token_map = torch.tensor([1, 2, 5, 8, 11, 15])
    tree = build_from_scorer(MarkovScorer(reduced, states, logits, token_map), 30, anchor=ANCHOR)
    heads = {key: value for key, value in weights.items() if key.startswith("markov_head.")}
    heads["markov_head.markov_w2.weight"] = heads["markov_head.markov_w2.weight"][:6]
    for path, log_prob in paths_of(tree).items():
        expected = 0.0
        for slot, token in enumerate(path):
            given = markov_log_probs(heads, "gated", [ANCHOR, *path[:slot]], states, logits)
            expected += float(given[token_map.tolist().index(token)])
        assert abs(log_prob - expected) < 1e-9


@pytest.mark.parametrize("kind", KINDS[:3])
def test_nodes_of_low_confidence_get_no_children(drafters: Any, kind: str) -> None:
    drafter, weights = drafters(kind)
    states, logits = outputs(seed=10, depth=BLOCK)
    weight, bias = (weights[f"confidence_head.proj.{name}"].double() for name in ("weight", "bias"))

    def confidence(path: list[int]) -> float:
        embedded = weights["markov_head.markov_w1.weight"][path[-1]].double()
        return float((weight[0] @ torch.cat([states[len(path) - 1], embedded]) + bias[0]).sigmoid())

    whole = build_from_scorer(path_scorer(drafter, states, logits), 80, anchor=ANCHOR)
    config = drafter.config
    # Between two values, so that rounding decides nothing.
    values = sorted({round(confidence([ANCHOR, *path]), 9) for path in paths_of(whole) if len(path) < BLOCK})
    middle = len(values) // 2
    threshold = (values[middle - 1] + values[middle]) / 2
    config.confidence_threshold = threshold
    try:
        scorer: Scorer = path_scorer(drafter, states, logits)
        ended = build_from_scorer(scorer, 80, anchor=ANCHOR)
        assert_same(ended, build_from_scorer(scorer, 80, anchor=ANCHOR, builder="heap"))
        config.confidence_threshold = 0.9999999
        assert build_from_scorer(path_scorer(drafter, states, logits), 80, anchor=ANCHOR).num_drafted == 0
    finally:
        config.confidence_threshold = None
    parents = {path[:-1] for path in paths_of(ended)}
    assert parents
    assert all(confidence([ANCHOR, *path]) >= threshold for path in parents)
    assert paths_of(ended).keys() != paths_of(whole).keys()
