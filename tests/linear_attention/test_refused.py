"""Models whose states a tree cannot be read from are refused by name before the first token, one of each kind."""

from typing import Any

import pytest
import torch
import transformers as T

from models.family import randomise
from pairs import make_drafter, prompt, tree

_SHAPE: dict[str, Any] = dict(
    vocab_size=16, hidden_size=32, num_hidden_layers=4, pad_token_id=0, bos_token_id=1, eos_token_id=None
)
_HEADS: dict[str, Any] = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
_MAMBA: dict[str, Any] = dict(state_size=4, time_step_rank=4)

NO_POSITIONS = "does not take `position_ids`"
NO_STATES = "keeps states that cannot be moved along an accepted path"
SLOTS = "gives the nodes of a draft tree other logits"

KINDS: dict[str, tuple[Any, str]] = {
    # Nothing but recurrence.
    "Rwkv": (lambda: T.RwkvConfig(**_SHAPE, attention_hidden_size=32, intermediate_size=48), NO_POSITIONS),
    "Mamba": (lambda: T.MambaConfig(**_SHAPE, **_MAMBA), NO_POSITIONS),
    "FalconMamba": (lambda: T.FalconMambaConfig(**_SHAPE, **_MAMBA), NO_POSITIONS),
    "Mamba2": (lambda: T.Mamba2Config(**_SHAPE, num_heads=4, head_dim=16, state_size=8, n_groups=2), NO_POSITIONS),
    "xLSTM": (lambda: T.xLSTMConfig(**_SHAPE, num_heads=4), NO_POSITIONS),
    # States in the modules themselves, or in layers of the cache of their own kind.
    "RecurrentGemma": (
        lambda: T.RecurrentGemmaConfig(
            **_SHAPE,
            intermediate_size=96,
            num_attention_heads=4,
            head_dim=8,
            lru_width=32,
            attention_window_size=8,
            block_types=["recurrent", "attention"],
        ),
        NO_STATES,
    ),
    "DeepseekV4": (lambda: T.DeepseekV4Config(**_SHAPE, num_attention_heads=4), NO_STATES),
    # Convolutions like those that are served, beside biases by the slots of the cache.
    "Inkling": (
        lambda: T.InklingTextConfig(
            **_SHAPE,
            **_HEADS,
            intermediate_size=48,
            moe_intermediate_size=24,
            n_routed_experts=4,
            num_experts_per_tok=2,
            swa_head_dim=8,
            swa_num_attention_heads=4,
            swa_num_key_value_heads=2,
            d_rel=4,
            rel_extent=16,
            sliding_window_size=8,
        ),
        SLOTS,
    ),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_refused_by_name(kind: str) -> None:
    config, message = KINDS[kind]
    torch.manual_seed(0)
    target = getattr(T, f"{kind}ForCausalLM")(config()).eval()
    randomise(target, 0)
    drafter = make_drafter(target)
    streamed: list[int] = []

    class Tape:
        def put(self, value: torch.Tensor) -> None:
            streamed.append(value.numel())

        def end(self) -> None: ...

    with pytest.raises(ValueError, match=f"{kind}ForCausalLM {message}"):
        tree(target, drafter, prompt(), max_new_tokens=8, streamer=Tape())
    # No more than the prompt.
    assert streamed in ([], [prompt().numel()])
