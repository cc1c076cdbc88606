"""The tables of a tree, and the float64 reference, against parents followed by hand."""

import pytest
import torch

from ddtree_attention import naive_tree_attention, tree_tables
from problems import depths_and_ends, random_parents

pytestmark = pytest.mark.kernels_ci


def path(parents: list[int], node: int) -> list[int]:
    return [] if node < 0 else [*path(parents, parents[node]), node]


@pytest.mark.parametrize("nodes", [1, 2, 3, 17, 64, 130])
def test_ancestors(nodes: int) -> None:
    parents = random_parents(nodes, seed=nodes)
    depths, ends = depths_and_ends(parents)
    tree = tree_tables(torch.tensor(depths), torch.tensor(ends), max(depths) + 2)
    assert all(table.dtype == torch.int32 and table.is_contiguous() for table in tree)
    assert tree.depths.tolist() == [depths] and tree.subtree_ends.tolist() == [ends]
    for node in range(nodes):
        expected = path(parents, node)[:-1]
        assert tree.ancestors[0, node].tolist() == expected + [-1] * (max(depths) + 2 - len(expected))


def test_a_batch_of_trees_of_different_sizes() -> None:
    trees = [depths_and_ends(random_parents(n, seed=n)) for n in (9, 4)]
    padded = [torch.tensor([[*t[part], *[99] * (9 - len(t[part]))] for t in trees]) for part in (0, 1)]
    tree = tree_tables(*padded, max_depth=15)
    for row, (depths, ends) in enumerate(trees):
        alone = tree_tables(torch.tensor(depths), torch.tensor(ends), max_depth=15)
        for table, own in zip(tree, alone, strict=True):
            assert torch.equal(table[row, : len(depths)], own[0])


def test_wrong_tables() -> None:
    with pytest.raises(ValueError, match="both be of shape"):
        tree_tables(torch.zeros(3), torch.zeros(4), 1)
    with pytest.raises(ValueError, match="0 or more, got -1"):
        tree_tables(torch.zeros(1), torch.ones(1), -1)


def test_the_reference_is_masked_attention() -> None:
    """One softmax over everything with the interval test as its mask, windows by depth, sinks as a further column."""
    parents = random_parents(21, seed=3)
    depths, ends = (torch.tensor(numbers) for numbers in depths_and_ends(parents))
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, rows, 8, generator=generator) for heads, rows in ((6, 21), (2, 34), (2, 34))
    )
    sinks = torch.randn(6, generator=generator)
    output = naive_tree_attention(
        query, key, value, tree_tables(depths, ends, 15), torch.tensor([13]), torch.tensor([2]),
        scale=0.3, window=7, softcap=2.0, sinks=sinks,
    )  # fmt: skip
    node, slot = torch.arange(21), torch.arange(13)
    in_tree = (node <= node[:, None]) & (node[:, None] < ends)
    position = torch.cat([slot, 13 + depths])
    visible = torch.cat([(slot >= 2).expand(21, 13), in_tree], dim=1) & (position > (13 + depths)[:, None] - 7)
    scores = query.double()[0] @ key.double()[0].repeat_interleave(3, 0).mT * 0.3
    scores = (2.0 * torch.tanh(scores / 2.0)).masked_fill(~visible, float("-inf"))
    weights = torch.cat([scores, sinks.double()[:, None, None].expand(6, 21, 1)], dim=-1).softmax(-1)[..., :-1]
    expected = weights @ value.double()[0].repeat_interleave(3, 0)
    assert torch.allclose(output[0], expected.transpose(0, 1), atol=1e-12)
