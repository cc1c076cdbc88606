"""The tree's convolution gives each node what a convolution over the prefix and its path gives."""

import pytest
import torch
import torch.nn.functional as F

from attention.trees import chain, random_tree, round_of
from hf_ddtree.linear_attention.convolution import tree_convolution
from hf_ddtree.linear_attention.naive import naive_convolution

CHANNELS = 5


def problem(nodes: int, kernel: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return normal(1, CHANNELS, kernel + nodes), normal(CHANNELS, kernel), normal(CHANNELS)


@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("nodes", [1, 2, 9, 33])
@pytest.mark.parametrize("with_bias", [True, False])
def test_each_node_is_its_path(nodes: int, kernel: int, with_bias: bool) -> None:
    """Kernels longer and shorter than paths are."""
    tree = random_tree(nodes, seed=nodes + kernel)
    inputs, weight, bias = problem(nodes, kernel, seed=kernel)
    given = bias if with_bias else None
    output = tree_convolution(inputs, weight, given, None, round_of(tree))
    assert output.shape == (1, CHANNELS, nodes)
    for node in range(nodes):
        expected = naive_convolution(inputs, weight, given, tree.path(node))
        assert torch.allclose(output[..., node], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_chain_is_the_librarys_row(dtype: torch.dtype, activation: str | None) -> None:
    """In half precision bit for bit: the sum is rounded once, and then the activation."""
    inputs, weight, bias = problem(9, 4, seed=1, dtype=dtype)
    output = tree_convolution(inputs, weight, bias, activation, round_of(chain(9)))
    expected = F.conv1d(inputs, weight.unsqueeze(1), bias, groups=CHANNELS)[..., 1:]
    expected = F.silu(expected) if activation else expected
    assert output.dtype == dtype
    if dtype in (torch.float32, torch.float64):
        assert torch.allclose(output, expected, rtol=0, atol=1e-6)
    else:
        assert torch.equal(output, expected)


def test_taps_are_the_last_tokens_of_each_path() -> None:
    tree = random_tree(31, seed=4)
    for width in (1, 3, 4, 9):
        taps = round_of(tree).taps(width)
        for node in range(31):
            rows = [*range(width), *(width + other for other in tree.path(node))]
            assert taps[node].tolist() == rows[-width:]


def test_parents_come_from_the_subtrees() -> None:
    tree = random_tree(31, seed=4)
    assert round_of(tree).parents.tolist() == tree.parents.clamp(min=0).tolist()
