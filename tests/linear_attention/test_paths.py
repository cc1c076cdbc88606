"""Rows and levels of a tree against walking each path by hand."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.trees import random_tree, round_of
from hf_ddtree.linear_attention.paths import Part, Paths
from hf_ddtree.tree import DraftTree

CPU = torch.device("cpu")

trees = st.builds(random_tree, st.integers(1, 60), st.integers(0, 10_000), st.integers(2, 9), st.just(100))
at_once = st.sampled_from([1, 2, 3, 7, 100])


def prefixes_of_rows(part: Part) -> list[list[list[int]]]:
    """What each token of each row of each step has been preceded by, itself included."""
    tokens: list[list[list[int]]] = []
    states: list[list[int]] = [[]]
    for step in part.steps:
        rows = [list(states[origin]) for origin in step.origins.tolist()]
        for row, nodes in zip(rows, step.nodes.tolist(), strict=True):
            read = []
            for node in nodes:
                row.append(node)
                read.append(list(row))
            tokens.append(read)
        states = rows
    return tokens


def check(tree: DraftTree, parts: list[Part]) -> None:
    """Every node is read once, in order, and after its ancestors and nothing else."""
    found = []
    for part in parts:
        tokens = [token for row in prefixes_of_rows(part) for token in row]
        found += [tokens[index] for index in part.read.tolist()]
    assert found == [tree.path(node) for node in range(len(tree))]


@settings(max_examples=25, deadline=None)
@given(trees, at_once)
def test_rows_are_paths(tree: DraftTree, at_once: int) -> None:
    parts = Paths(round_of(tree)).in_rows(at_once, CPU)
    check(tree, parts)
    leaves = sum(int(end) == node + 1 for node, end in enumerate(tree.subtree_ends))
    assert [len(part.steps) for part in parts] == [1] * -(-leaves // at_once)
    assert sum(len(part.steps[0].nodes) for part in parts) == leaves
    assert all(len(part.steps[0].nodes) <= at_once for part in parts)


@settings(max_examples=25, deadline=None)
@given(trees, at_once)
def test_levels_go_on_from_the_parents(tree: DraftTree, at_once: int) -> None:
    parts = Paths(round_of(tree)).in_levels(at_once, CPU)
    check(tree, parts)
    for step in (step for part in parts for step in part.steps):
        assert step.nodes.shape == (len(step.origins), 1)
        assert len(step.nodes) <= at_once
    if at_once == 100:
        # Nothing is read twice.
        assert sum(step.nodes.numel() for step in parts[0].steps) == len(tree)


def test_the_longest_path_and_the_leaves() -> None:
    tree = DraftTree(
        token_ids=torch.tensor([1, 2, 3, 4, 5]),
        parents=torch.tensor([-1, 0, 1, 1, 0]),
        depths=torch.tensor([0, 1, 2, 2, 1]),
        subtree_ends=torch.tensor([5, 4, 3, 4, 5]),
        log_probs=torch.zeros(5),
    )
    paths = Paths(round_of(tree))
    assert paths.longest == 3
    assert paths.leaves == [[0, 1, 2], [0, 1, 3], [0, 4]]
    part, second = paths.in_rows(2, CPU)
    assert part.steps[0].nodes.tolist() == [[0, 1, 2], [0, 1, 3]]
    assert part.read.tolist() == [0, 1, 2, 5]
    assert (second.steps[0].nodes.tolist(), second.read.tolist()) == ([[0, 4]], [1])
