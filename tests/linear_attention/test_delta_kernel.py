"""The Triton kernel as a route of the tree's gated delta rule: when it is taken, and whole models through it."""

from typing import Any

import pytest
import torch

from attention.trees import random_tree, round_of
from hf_ddtree.cache import DDTreeCache
from hf_ddtree.compat import CACHE_NAME, decoder_layers
from hf_ddtree.generation.verification import TreeVerifier
from hf_ddtree.linear_attention.delta_rule import tree_gated_delta_rule
from hf_ddtree.linear_attention.kernel import takes_kernel
from hf_ddtree.round import TapCollector, TreeRound
from linear_attention.hybrids import HYBRIDS, make_hybrid
from pairs import VOCABULARY

pytest.importorskip("triton")


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("decay", [-0.5, float("-inf")])
def test_as_the_form_in_pytorch(normalise: bool, decay: float) -> None:
    """Outputs, and all that a commit needs."""
    tree = random_tree(50, seed=7)
    generator = torch.Generator().manual_seed(1)
    query, key = torch.randn(2, 1, 50, 2, 24, generator=generator) / 5
    value = torch.randn(1, 50, 4, 40, generator=generator)
    g = -torch.rand(1, 50, 4, generator=generator)
    g[:, 3:9] = decay
    beta = torch.rand(1, 50, 4, generator=generator)
    state = torch.randn(1, 4, 24, 40, generator=generator)
    arguments = (query, key, value, g, beta, state, round_of(tree).visible, normalise)
    output, pending = tree_gated_delta_rule(*arguments, subtree_ends=tree.subtree_ends)
    expected, others = tree_gated_delta_rule(*arguments)
    assert torch.allclose(output, expected, rtol=1e-5, atol=1e-5)
    assert torch.allclose(pending.corrections, others.corrections, rtol=1e-5, atol=1e-5)
    assert torch.equal(pending.keys, others.keys) and torch.equal(pending.sums, others.sums)
    path = torch.tensor(tree.path(49))
    assert torch.allclose(pending.state_after(path, state), others.state_after(path, state), rtol=1e-5, atol=1e-5)


def test_a_whole_model() -> None:
    """A tiny Qwen3.5 in bf16: every layer by a kernel, logits as by PyTorch's forms."""
    model, ids = make_hybrid(torch.bfloat16), torch.tensor([HYBRIDS["qwen3_5"].tokens(20)])
    tree = random_tree(37, seed=5, vocabulary=VOCABULARY)

    def logits(attention_route: str) -> tuple[torch.Tensor, dict[str, int]]:
        cache = DDTreeCache(config=model.config)
        verify = TreeVerifier(model, TapCollector(decoder_layers(model), []), attention_route)
        with torch.no_grad():
            model(ids, **{CACHE_NAME: cache})
            cache.begin()
            positions = torch.tensor([[ids.shape[1]]])
            kwargs: dict[str, Any] = {CACHE_NAME: cache, "position_ids": positions, "use_cache": True}
            return verify(tree, kwargs).logits[0].float(), dict(verify.attention_routes)

    (found, routes), (expected, others) = logits("kernel"), logits("torch")
    assert routes == {"kernel": 2, "gated delta rule kernel": 2}
    assert not any("kernel" in name for name in others)
    assert ((found - expected).abs().mean(-1) / expected.std(-1)).median() < 0.06
    # The control: a node's logits are not those of another node.
    assert ((found - expected.roll(1, 0)).abs().mean(-1) / expected.std(-1)).median() > 0.3


def test_when_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(route: str, nodes: int, device: str, dtype: torch.dtype = torch.bfloat16) -> tuple[bool, dict[str, int]]:
        key = torch.empty(1, nodes, 1, 8, dtype=dtype, device=device)
        tree = TreeRound(torch.zeros(nodes), torch.zeros(nodes), route)
        return takes_kernel(tree, key, key, key[:, 0]), dict(tree.routes)

    assert taken("torch", 300, "meta") == taken("auto", 300, "cpu") == (False, {})
    assert taken("kernel", 3, "cpu") == (True, {"gated delta rule kernel": 1})
    monkeypatch.setattr("ddtree_attention.delta.unavailable_device", lambda _: None)
    assert taken("auto", 256, "meta") == (True, {"gated delta rule kernel": 1})
    assert taken("auto", 255, "meta") == (False, {"gated delta rule (fewer than 256 nodes)": 1})
    in_fp64 = {"gated delta rule (a delta rule in float64)": 1}
    assert taken("auto", 300, "meta", torch.float64) == (False, in_fp64)
    with pytest.raises(ValueError, match="do not serve a delta rule in float64"):
        taken("kernel", 300, "cpu", torch.float64)
