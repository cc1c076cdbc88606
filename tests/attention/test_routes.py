"""The packed and the eager route give the written-out attention of a tree."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from attention.trees import Problem, random_problem, round_of
from hf_ddtree import products
from hf_ddtree.attention import ddtree_attention
from hf_ddtree.attention.naive import naive_tree_attention
from hf_ddtree.attention.packed import packed_sdpa
from hf_ddtree.compat import ALL_ATTENTION_FUNCTIONS
from hf_ddtree.round import CURRENT_ROUND

SCALING = 0.31
# (nodes, prefix, padding)
SIZES = [(1, 0, 0), (2, 0, 0), (7, 1, 0), (13, 50, 0), (17, 5, 3), (33, 23, 9), (65, 50, 49)]


def layer(cls: type[nn.Module], implementation: str, groups: int) -> Any:
    """An attention layer without weights: the routes read its class, configuration and group size only."""
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    module.config = SimpleNamespace(_attn_implementation=implementation)
    module.num_key_value_groups = groups
    return module.eval()


def attend(module: Any, problem: Problem, **kwargs: Any) -> Any:
    token = CURRENT_ROUND.set(round_of(problem.tree))
    try:
        return ddtree_attention(
            module, problem.query, problem.key, problem.value, problem.additive, scaling=SCALING, **kwargs
        )
    finally:
        CURRENT_ROUND.reset(token)


def naive(problem: Problem, **kwargs: Any) -> torch.Tensor:
    return naive_tree_attention(problem.query, problem.key, problem.value, problem.visible, SCALING, **kwargs)


def test_the_reference_is_attention_over_the_path() -> None:
    """Each node of the reference equals plain softmax attention over exactly the rows of its prefix and path."""
    problem = random_problem(11, 4, seed=5, groups=3, padding=1)
    output = naive(problem)
    for node in range(11):
        rows = [1, 2, 3] + [4 + other for other in problem.tree.path(node)]
        for head in range(6):
            scores = problem.key[0, head // 3, rows] @ problem.query[0, head, node] * SCALING
            weights = scores.exp() / scores.exp().sum()
            assert torch.allclose(output[0, node, head], weights @ problem.value[0, head // 3, rows], atol=1e-12)


@pytest.mark.parametrize("groups", [1, 3, 5])
@pytest.mark.parametrize("size", SIZES)
def test_packed(size: tuple[int, int, int], groups: int) -> None:
    nodes, prefix, padding = size
    problem = random_problem(nodes, prefix, seed=nodes, groups=groups, padding=padding)
    output, weights = attend(layer(Qwen3Attention, "sdpa", groups), problem)
    assert weights is None
    assert output.is_contiguous()
    assert output.shape == (1, nodes, groups * 2, 8)
    assert torch.allclose(output, naive(problem), atol=1e-12)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("masking", ["additive", "boolean", "none"])
def test_packed_by_products(
    size: tuple[int, int, int], groups: int, masking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large trees in fp32, head by head; here small ones, that any size takes that way."""
    nodes, prefix, padding = size
    problem = random_problem(nodes, prefix, seed=nodes, groups=groups, padding=padding)
    asked: list[int] = []
    monkeypatch.setattr(products, "LEAST_PRODUCT", 0)
    monkeypatch.setattr(products, "pays", lambda rows, inner, columns: asked.append(rows) or True)
    mask = {"additive": problem.additive.float(), "boolean": problem.visible, "none": None}[masking]
    states = [states.float() for states in (problem.query, problem.key, problem.value)]
    with torch.no_grad():
        output = packed_sdpa(*states, mask, SCALING, round_of(problem.tree))
    assert asked == [groups * nodes]
    visible = torch.ones_like(problem.visible) if mask is None else problem.visible
    expected = naive_tree_attention(problem.query, problem.key, problem.value, visible, SCALING)
    assert torch.allclose(output.double(), expected, atol=2e-6)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_packed_in_lower_precision(dtype: torch.dtype, tolerance: float) -> None:
    problem = random_problem(33, 23, seed=1, groups=3)
    low = Problem(problem.tree, *(t.to(dtype) for t in (problem.query, problem.key, problem.value)), problem.visible)
    output = packed_sdpa(low.query, low.key, low.value, low.additive, SCALING, round_of(low.tree))
    assert output.dtype == dtype
    assert (output - naive(low)).abs().max() < tolerance


def test_packed_with_values_of_another_width_and_without_a_mask() -> None:
    problem = random_problem(1, 9, seed=2, groups=3)
    value = torch.randn(1, 2, 10, 5, dtype=torch.float64)
    output = packed_sdpa(problem.query, problem.key, value, None, SCALING, round_of(problem.tree))
    expected = naive_tree_attention(problem.query, problem.key, value, problem.visible, SCALING)
    assert output.shape == (1, 1, 6, 5)
    assert torch.allclose(output, expected, atol=1e-12)


def test_packed_masks_are_kept_apart() -> None:
    """Two layer types of one round have two masks, each repeated once."""
    problem = random_problem(9, 12, seed=3, groups=3)
    narrow = Problem(problem.tree, problem.query, problem.key, problem.value, problem.visible.clone())
    narrow.visible[..., :8] = False
    tree, masks = round_of(problem.tree), (problem.additive, narrow.additive)
    for case, mask in ((problem, masks[0]), (narrow, masks[1]), (problem, masks[0])):
        output = packed_sdpa(case.query, case.key, case.value, mask, SCALING, tree)
        assert torch.allclose(output, naive(case), atol=1e-12)
    assert tree.packed_mask(masks[0], 3) is tree.packed_mask(masks[0], 3)
    assert tree.packed_mask(masks[0], 3).shape[2] == 27


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_unreadable_rows_have_no_influence(implementation: str) -> None:
    """Prefix rows that no node may read can hold anything finite: the output keeps every bit."""
    problem = random_problem(13, 20, seed=4, groups=3, padding=8)
    expected, _ = attend(layer(Qwen3Attention, implementation, 3), problem)
    problem.key[:, :, :8], problem.value[:, :, :8] = 1e6, -1e6
    output, _ = attend(layer(Qwen3Attention, implementation, 3), problem)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_node_does_not_read_the_others(implementation: str) -> None:
    """A huge value of one node reaches its own subtree and no other node."""
    problem = random_problem(17, 5, seed=6, groups=3)
    clean, _ = attend(layer(Qwen3Attention, implementation, 3), problem)
    poisoned = 4
    problem.value[:, :, 5 + poisoned] = torch.finfo(torch.float64).max / 1e3
    output, _ = attend(layer(Qwen3Attention, implementation, 3), problem)
    changed = (output != clean).flatten(2).any(-1)[0]
    subtree = torch.zeros(17, dtype=torch.bool)
    subtree[poisoned : int(problem.tree.subtree_ends[poisoned])] = True
    assert torch.equal(changed, subtree)


@pytest.mark.parametrize("groups", [1, 3, 5])
@pytest.mark.parametrize("size", SIZES)
def test_eager(size: tuple[int, int, int], groups: int) -> None:
    nodes, prefix, padding = size
    problem = random_problem(nodes, prefix, seed=nodes, groups=groups, padding=padding)
    output, weights = attend(layer(Qwen3Attention, "eager", groups), problem)
    assert weights.shape == (1, groups * 2, nodes, prefix + nodes)
    assert not weights[~problem.visible.expand_as(weights)].any()
    # The library's eager softmax is in fp32.
    assert torch.allclose(output, naive(problem), atol=1e-6)


@pytest.mark.parametrize("size", SIZES[2:5])
def test_softcap_and_sinks_on_the_eager_route(size: tuple[int, int, int]) -> None:
    nodes, prefix, padding = size
    problem = random_problem(nodes, prefix, seed=nodes, groups=3, padding=padding)
    capped, _ = attend(layer(Gemma2Attention, "eager", 3), problem, softcap=0.7)
    assert torch.allclose(capped, naive(problem, softcap=0.7), atol=1e-6)
    assert not torch.allclose(capped, naive(problem), atol=1e-3)

    module = layer(GptOssAttention, "eager", 3)
    module.sinks = nn.Parameter(torch.randn(6, dtype=torch.float64))
    sunk, _ = attend(module, problem, s_aux=module.sinks)
    assert torch.allclose(sunk, naive(problem, sinks=module.sinks.detach()), atol=1e-6)
    assert not torch.allclose(sunk, naive(problem), atol=1e-3)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_more_than_packed_knows_goes_to_the_library_s_sdpa(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it ignores a softcap, plain decoding does too, and a tree that honoured it would change the output."""
    problem, calls = random_problem(13, 9, seed=9, groups=3), []

    def sdpa(*args: Any, **kwargs: Any) -> Any:
        calls.append((args[4], kwargs))
        return "output", None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", sdpa)
    module = layer(Gemma2Attention, "sdpa", 3)
    assert attend(module, problem, **{name: None})[0].shape == (1, 13, 6, 8)
    assert calls == []
    assert attend(module, problem, **{name: 0.7}) == ("output", None)
    mask, kwargs = calls[0]
    assert torch.equal(mask, problem.additive)
    assert kwargs == {"scaling": SCALING, "dropout": 0.0, name: 0.7}


def test_without_a_tree_the_own_implementation_gets_every_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a softcap: an own implementation that takes it must not be replaced by the eager function."""
    problem, calls = random_problem(5, 3, seed=7), []

    def own(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return "output", "weights"

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "own", own)
    module = layer(Gemma2Attention, "own", 1)
    given = (module, problem.query, problem.key, problem.value, None)
    assert ddtree_attention(*given, scaling=0.5, dropout=0.0, softcap=2.0, sliding_window=4) == ("output", "weights")
    assert calls == [(given, dict(scaling=0.5, dropout=0.0, softcap=2.0, sliding_window=4))]


def test_a_layer_without_an_eager_function_is_named() -> None:
    class Unknown(nn.Module):
        config = SimpleNamespace(_attn_implementation="eager")

    problem = random_problem(3, 3, seed=8)
    with pytest.raises(ValueError, match=r"Unknown has no eager attention function.*attn_implementation"):
        attend(Unknown(), problem)
