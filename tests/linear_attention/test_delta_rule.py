"""The tree's gated delta rule gives each node what the recurrence along its path gives."""

from typing import Any

import pytest
import torch

from attention.trees import ancestors, chain, random_tree, round_of
from hf_ddtree.linear_attention.delta_rule import tree_gated_delta_rule
from hf_ddtree.linear_attention.naive import naive_gated_delta_rule
from hf_ddtree.tree import DraftTree

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}


def inputs(
    nodes: int, seed: int = 0, key_heads: int = 2, groups: int = 2, dtype: torch.dtype = torch.float64
) -> dict[str, Any]:
    """Decays between almost none and `e^-5` a token, and corrections of any strength up to an overshoot."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    heads = key_heads * groups
    return {
        "query": normal(1, nodes, key_heads, 8).to(dtype),
        "key": normal(1, nodes, key_heads, 8).to(dtype),
        "value": normal(1, nodes, heads, 6).to(dtype),
        "g": -torch.rand(1, nodes, heads, generator=generator, dtype=torch.float64).pow(3) * 5,
        "beta": 2 * normal(1, nodes, heads).sigmoid().to(dtype),
        "state": normal(1, heads, 8, 6),
    }


def check(tree: DraftTree, given: dict[str, Any], normalise: bool = True) -> None:
    tolerance = TOLERANCE[given["query"].dtype]
    before = given["state"].clone()
    output, pending = tree_gated_delta_rule(**given, visible=round_of(tree).visible, normalise=normalise)
    assert output.dtype == given["query"].dtype
    for node in range(len(tree)):
        path = tree.path(node)
        expected, state = naive_gated_delta_rule(**given, path=path, normalise=normalise)
        scale = expected.abs().max().clamp_min(1)
        assert torch.isfinite(output).all()
        assert (output[:, node] - expected).abs().max() <= tolerance * scale
        after = pending.state_after(torch.tensor(path), given["state"])
        assert after.dtype == given["state"].dtype
        assert (after - state).abs().max() <= tolerance * state.abs().max().clamp_min(1)
    assert torch.equal(given["state"], before)


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 16, 17, 33, 64, 70])
def test_each_node_is_its_path(nodes: int) -> None:
    check(random_tree(nodes, seed=nodes, max_depth=9), inputs(nodes, seed=nodes))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("normalise", [True, False])
def test_heads_and_dtypes(dtype: torch.dtype, groups: int, normalise: bool) -> None:
    given = inputs(11, seed=3, groups=groups, dtype=dtype)
    if not normalise:
        given["key"] = torch.nn.functional.normalize(given["key"].float(), dim=-1).to(dtype)
    if dtype != torch.float64:
        # As models give them: in fp32, whatever their dtype.
        given["g"], given["state"] = given["g"].float(), given["state"].float()
    check(random_tree(11, seed=5), given, normalise)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("decay", [0.0, -1e-6, -30.0, -1e4, float("-inf")])
def test_extreme_decays(dtype: torch.dtype, decay: float) -> None:
    """One branch forgets everything, and its siblings' differences of sums are then large and positive."""
    given = inputs(21, seed=2, dtype=dtype)
    given["g"][:, 4:9] = decay
    given["g"][:, 15] = decay
    check(random_tree(21, seed=8), given)


def test_a_chain_of_every_depth() -> None:
    for dtype in (torch.float64, torch.float32):
        check(chain(70), inputs(70, seed=4, dtype=dtype))


def test_a_node_reads_nothing_of_other_branches() -> None:
    tree, given = random_tree(15, seed=6), inputs(15)
    visible = round_of(tree).visible
    output, _ = tree_gated_delta_rule(**given, visible=visible)
    for node, seen in enumerate(ancestors(tree)):
        hidden = [other for other in range(15) if other not in seen]
        changed = {name: value.clone() for name, value in given.items()}
        for name in ("query", "key", "value"):
            changed[name][:, hidden] = 9.0
        other, _ = tree_gated_delta_rule(**changed, visible=visible)
        assert torch.allclose(output[:, node], other[:, node])


@pytest.mark.parametrize("nodes", [1, 20, 61])
def test_what_is_kept_until_the_commit(nodes: int) -> None:
    """As the documentation states it, and nothing that is hidden behind a view."""
    given = inputs(nodes, dtype=torch.float32)
    given["g"], given["state"] = given["g"].float(), given["state"].float()
    _, pending = tree_gated_delta_rule(**given, visible=round_of(random_tree(nodes, seed=1)).visible)
    kept = [pending.keys, pending.corrections, pending.sums]
    key_heads, key_dim, heads, value_dim = 2, 8, 4, 6
    expected = 4 * nodes * (key_heads * key_dim + heads * value_dim + heads)
    assert sum(tensor.untyped_storage().nbytes() for tensor in kept) == expected
