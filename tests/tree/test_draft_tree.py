"""The invariants and the small methods of DraftTree."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ddtree.tree import DraftTree, build_draft_tree


@pytest.fixture
def tree() -> DraftTree:
    """
    The root (9) with children 4 and 5; 4 has children 6, whose child is 8, and 7.
    """
    return DraftTree(
        token_ids=torch.tensor([9, 4, 6, 8, 7, 5]),
        parents=torch.tensor([-1, 0, 1, 2, 1, 0]),
        depths=torch.tensor([0, 1, 2, 3, 2, 1]),
        subtree_ends=torch.tensor([6, 5, 4, 4, 5, 6]),
        log_probs=torch.tensor([0.0, -0.5, -1.0, -2.0, -1.5, -1.0], dtype=torch.float64),
    )


def test_the_small_methods(tree):
    tree.validate()
    assert (len(tree), tree.num_drafted) == (6, 5)
    assert tree.children == [{4: 1, 5: 5}, {6: 2, 7: 4}, {8: 3}, {}, {}, {}]
    assert tree.children is tree.children
    assert tree.path(3) == [0, 1, 2, 3] and tree.path(0) == [0]
    assert tree.most_probable_chain() == [4, 6, 8]
    assert tree.visibility().int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 0, 0, 0, 0, 1],
    ]


def test_a_child_by_its_token(tree):
    for node, children in enumerate(tree.children):
        for token in range(11):
            assert tree.child(node, token) == children.get(token)


def test_with_anchor_leaves_the_original_alone(tree):
    assert tree.with_anchor(3).token_ids.tolist() == [3, 4, 6, 8, 7, 5]
    assert tree.token_ids[0] == 9


def test_cut_keeps_the_best_nodes_and_the_first_of_a_tie(tree):
    # 4 (-0.5) first, then 6 and 5 tie at -1.0 and 6 comes first in preorder.
    small = tree.cut(2)
    small.validate()
    assert small.token_ids.tolist() == [9, 4, 6]
    assert small.subtree_ends.tolist() == [3, 3, 3]
    assert tree.cut(4).token_ids.tolist() == [9, 4, 6, 7, 5]
    assert tree.cut(0).token_ids.tolist() == [9]
    assert tree.cut(5) is tree
    with pytest.raises(ValueError, match="cannot be cut to -1"):
        tree.cut(-1)


def test_a_node_outside_the_tree_has_no_path(tree):
    for node in (-1, 6):
        with pytest.raises(IndexError, match="nodes are 0 to 5"):
            tree.path(node)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 30), st.integers(0, 150))
def test_intervals_are_ancestry(seed, depth, vocab, budget):
    logits = 2 * torch.randn(depth, vocab, generator=torch.Generator().manual_seed(seed))
    tree = build_draft_tree(logits.log_softmax(-1), budget)
    tree.validate()
    visible = torch.zeros(len(tree), len(tree), dtype=torch.bool)
    for node in range(len(tree)):
        visible[node, tree.path(node)] = True
    assert torch.equal(tree.visibility(), visible)
    # An ancestor's number is lower and its log-prob no lower; depth is the number of proper ancestors.
    assert torch.equal(visible.sum(1) - 1, tree.depths)
    assert bool((tree.parents < torch.arange(len(tree))).all())
    assert bool((tree.log_probs[1:] <= tree.log_probs[tree.parents[1:]]).all())
    greedy = logits.argmax(-1).tolist()
    assert tree.most_probable_chain() == greedy[: len(tree.most_probable_chain())]


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("parents", [0, 0, 1, 2, 1, 0], "node 0 must be the root"),
        ("parents", [-1, 0, 1, 1, 1, 0], "node 3 has parent 1"),
        ("depths", [0, 1, 2, 3, 3, 1], "node 4 has depth 3"),
        ("subtree_ends", [6, 5, 4, 5, 5, 6], "node 3 has subtree end 5"),
        ("token_ids", [9, 4, 6, 8, 6, 5], "two siblings"),
        ("log_probs", [0.0, -0.5, -0.4, -2.0, -1.5, -1.0], "node 2 is more probable"),
    ],
)
def test_validate_names_what_is_broken(tree, field, values, message):
    broken = replace(tree, **{field: torch.tensor(values, dtype=getattr(tree, field).dtype)})
    with pytest.raises(ValueError, match=message):
        broken.validate()


def test_shapes_and_types_are_checked(tree):
    with pytest.raises(ValueError, match=r"depths has shape \(5,\), token_ids has \(6,\)"):
        replace(tree, depths=tree.depths[:5])
    with pytest.raises(ValueError, match="with the root"):
        DraftTree(*(torch.zeros(0, dtype=torch.long) for _ in range(5)))
    with pytest.raises(ValueError, match="parents must be a LongTensor"):
        replace(tree, parents=tree.parents.int()).validate()
