"""What a drafter borrows of its target: embeddings as it was trained with, logits as the target makes them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as T
from torch import nn

from hf_ddtree.drafters import TargetIO
from pairs import make_drafter, make_target

IDS = torch.tensor([[3, 7, 7, 1]])


def head(target: Any, states: torch.Tensor) -> torch.Tensor:
    return states @ target.get_output_embeddings().weight.T


def test_a_plain_target_is_used_as_it_is() -> None:
    target = make_target("qwen3")
    io, states = TargetIO(target, make_drafter(target)), torch.randn(1, 4, 32)
    assert torch.equal(io.embed(IDS), target.get_input_embeddings().weight[IDS])
    assert torch.allclose(io.logits(states), head(target, states), atol=1e-5)


def test_a_scaled_embedding_of_the_target_is_kept_unless_the_drafter_says_otherwise() -> None:
    target = make_target("gemma3")
    rows = target.get_input_embeddings().weight[IDS]
    assert torch.allclose(TargetIO(target, make_drafter(target)).embed(IDS), rows * 32**0.5, rtol=1e-2)
    for scale in (1.0, 0.0, 3.0):
        io = TargetIO(target, make_drafter(target, input_embedding_scale=scale))
        assert torch.allclose(io.embed(IDS), rows * scale)


def test_an_embedding_norm_is_bypassed() -> None:
    class Normed(nn.Embedding):
        def __init__(self) -> None:
            super().__init__(16, 32)
            self.embed_norm = nn.LayerNorm(32)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.embed_norm(super().forward(ids))

    target = make_target()
    embedding = Normed()
    target.set_input_embeddings(embedding)
    embedded = TargetIO(target, make_drafter(target)).embed(IDS)
    assert torch.equal(embedded, embedding.weight[IDS])
    assert not torch.allclose(embedded, embedding(IDS))


def test_the_target_s_softcap_bounds_the_logits() -> None:
    target, states = make_target("gemma2"), torch.randn(1, 4, 32) * 20
    logits = TargetIO(target, make_drafter(target)).logits(states)
    assert target.config.final_logit_softcapping == 8.0
    assert torch.allclose(logits, 8 * torch.tanh(head(target, states) / 8), atol=1e-4)
    assert logits.abs().max() <= 8


def test_the_drafter_s_own_softcap_and_multiplier_rule() -> None:
    target, states = make_target("gemma2"), torch.randn(1, 4, 32)
    drafter = make_drafter(target, final_logit_softcapping=3.0, output_multiplier=0.5)
    logits = TargetIO(target, drafter).logits(states)
    assert torch.allclose(logits, 3 * torch.tanh(head(target, states) * 0.5 / 3), atol=1e-5)


@pytest.mark.parametrize("family", ["cohere", "granite"])
def test_the_target_s_multiplier(family: str) -> None:
    """The same states through the target's own forward and through the drafter's borrowed head."""
    shape: dict[str, Any] = dict(
        vocab_size=16, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    if family == "cohere":
        target: Any = T.CohereForCausalLM(T.CohereConfig(**shape, logit_scale=0.0625))
    else:
        target = T.GraniteForCausalLM(T.GraniteConfig(**shape, logits_scaling=8.0))
    target = target.eval()
    with torch.no_grad():
        output = target(IDS, output_hidden_states=True)
        logits = TargetIO(target, make_drafter(target, target_layer_ids=[0], num_target_layers=1)).logits(
            output.hidden_states[-1]
        )
    assert torch.allclose(logits, output.logits, atol=1e-6)
    assert not torch.allclose(logits, head(target, output.hidden_states[-1]), atol=1e-3)


def test_dtypes_are_the_drafter_s_for_states_and_fp32_for_logits() -> None:
    target = make_target("qwen3").to(torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):
        io = TargetIO(target, make_drafter(target).to(dtype))
        assert io.embed(IDS).dtype == dtype
        assert io.logits(io.embed(IDS)).dtype == torch.float32


def test_a_native_drafter_needs_none_of_our_fields() -> None:
    target = make_target("gemma2")
    native = SimpleNamespace(config=SimpleNamespace(), dtype=torch.float32, device=torch.device("cpu"))
    io, states = TargetIO(target, native), torch.randn(1, 2, 32)  # type: ignore[arg-type]
    assert torch.allclose(io.logits(states), 8 * torch.tanh(head(target, states) / 8), atol=1e-5)
