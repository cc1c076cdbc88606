"""Decoders that add learned embeddings of positions to the tokens'."""

from typing import Any

import transformers

from models.family import VOCABULARY, Family, causal

_GPT: dict[str, Any] = dict(
    n_embd=32, n_layer=4, n_head=4, n_inner=48, n_positions=512, bos_token_id=1, eos_token_id=None
)


def _gpt2(**overrides: Any) -> Any:
    config = transformers.GPT2Config(**{**_GPT, "vocab_size": VOCABULARY, **overrides})
    return transformers.GPT2LMHeadModel(config)


FAMILIES: list[Family] = [
    Family("gpt2", "GPT-2", "GPT2LMHeadModel", _gpt2, seed=2),
    causal("gpt_bigcode", "StarCoder", "GPTBigCode", further=True, **_GPT),
    causal("opt", "OPT", "OPT", ffn_dim=48, word_embed_proj_dim=32, further=True),
]
