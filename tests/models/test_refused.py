"""Models that a tree cannot be verified with exactly are refused by name, before their first token."""

from typing import Any

import pytest
import torch
import transformers

from models.family import Family, causal
from models.generating import GREEDY, drafter_for, run
from models.nodes import node_errors
from models.zoo import ALL

_DYNAMIC: dict[str, Any] = dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)


def _bloom(**overrides: Any) -> Any:
    config = transformers.BloomConfig(vocab_size=16, hidden_size=32, n_layer=4, n_head=4, pad_token_id=0)
    return transformers.BloomForCausalLM(config)


def _mpt(**overrides: Any) -> Any:
    config = transformers.MptConfig(
        vocab_size=16, d_model=32, n_layers=4, n_heads=4, expansion_ratio=2, max_seq_len=64
    )
    return transformers.MptForCausalLM(config)


def _llama4(**overrides: Any) -> Any:
    return ALL["llama4"].build(floor_scale=4, attn_scale=1.0)


REFUSED: list[tuple[Family, str]] = [
    (
        Family("llama4_tuned", "Llama 4 past its floor scale", "Llama4ForCausalLM", _llama4),
        "Llama4ForCausalLM scales attention by the cache's length from 4 tokens on.*: lower `max_new_tokens`",
    ),
    (Family("bloom", "Bloom", "BloomForCausalLM", _bloom), "BloomForCausalLM does not take `position_ids`"),
    (Family("mpt", "MPT", "MptForCausalLM", _mpt), "MptForCausalLM does not take `position_ids`"),
    (causal("falcon_alibi", "Falcon with ALiBi", "Falcon", alibi=True), "FalconForCausalLM uses ALiBi"),
    (
        causal("falcon", "Falcon", "Falcon", alibi=False, new_decoder_architecture=True),
        "None of the layers of FalconForCausalLM reads tokens through Transformers' attention interface",
    ),
    (
        causal("dynamic", "Llama with dynamic RoPE", "Llama", rope_parameters=_DYNAMIC),
        "LlamaForCausalLM uses dynamic RoPE",
    ),
]


@pytest.mark.parametrize(("family", "message"), REFUSED, ids=[family.name for family, _ in REFUSED])
def test_refused_by_name(family: Family, message: str) -> None:
    model = family.make()
    drafter, prompt = drafter_for(model), family.prompt(9)
    forwards: list[int] = []
    model.register_forward_pre_hook(lambda *args: forwards.append(1))
    with pytest.raises(ValueError, match=message):
        run(family, model, prompt, drafter, **GREEDY)
    assert not forwards, "the target has read nothing"
    assert run(family, model, prompt, max_new_tokens=3, **GREEDY).sequences.shape[1] == len(prompt) + 3


def test_what_the_refusal_of_temperature_tuning_prevents() -> None:
    """Its scale is by slot of the cache: past the first step of the scale, trees would be wrong."""
    family, _ = REFUSED[0]
    errors = node_errors(family, family.make(torch.float64), family.prompt(9), trees=(42,))
    assert errors.worst > 0.01, errors
