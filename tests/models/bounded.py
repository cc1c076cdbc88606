"""Decoders whose layers, or some of them, see a window or a chunk of the prefix."""

from typing import Any

from models.family import CHUNKED, FULL, MIXED, SLIDING, Family, causal

_SOFTCAPS: dict[str, Any] = dict(
    attn_logit_softcapping=5.0, final_logit_softcapping=8.0, query_pre_attn_scalar=8, seed=1
)
# The last two layers read the keys and values of the two before them.
_SHARED: dict[str, Any] = dict(num_hidden_layers=6, layer_types=[SLIDING, FULL] * 3, num_kv_shared_layers=2)
_PER_LAYER: dict[str, Any] = dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=16)
_GEMMA4: dict[str, Any] = dict(global_head_dim=12, final_logit_softcapping=8.0, **_PER_LAYER)

FAMILIES: list[Family] = [
    causal("mistral", "Mistral", "Mistral", sliding_window=7),
    causal("ministral", "Ministral", "Ministral", further=True, **MIXED),
    causal("qwen2_sliding", "Qwen2 with sliding windows", "Qwen2", use_sliding_window=True, further=True, **MIXED),
    causal("qwen3_sliding", "Qwen3 with sliding windows", "Qwen3", use_sliding_window=True, **MIXED),
    causal("gemma2", "Gemma 2", "Gemma2", **_SOFTCAPS, **MIXED),
    causal("gemma3", "Gemma 3", "Gemma3", "Gemma3TextConfig", query_pre_attn_scalar=8, **MIXED),
    causal(
        "gemma3n",
        "Gemma 3n (shared keys and values)",
        "Gemma3n",
        "Gemma3nTextConfig",
        sliding_window=6,
        laurel_rank=4,
        altup_num_inputs=2,
        seed=6,
        **_SHARED,
        **_PER_LAYER,
    ),
    causal("gemma4", "Gemma 4", "Gemma4", "Gemma4TextConfig", **_GEMMA4, **MIXED),
    causal(
        "gemma4_shared",
        "Gemma 4 (shared keys and values)",
        "Gemma4",
        "Gemma4TextConfig",
        sliding_window=6,
        use_double_wide_mlp=True,
        **_GEMMA4,
        **_SHARED,
    ),
    causal(
        "gemma4_moe",
        "Gemma 4 MoE",
        "Gemma4",
        "Gemma4TextConfig",
        open_routing=dict(top_k_experts=4),
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=24,
        attention_k_eq_v=True,
        seed=2,
        further=True,
        **_GEMMA4,
        **MIXED,
    ),
    causal("cohere2", "Command A, R7B", "Cohere2", logit_scale=0.7, **MIXED),
    causal("exaone4", "EXAONE 4", "Exaone4", **MIXED),
    causal("olmo3", "OLMo 3", "Olmo3", **MIXED),
    causal("starcoder2", "StarCoder2", "Starcoder2", sliding_window=7, seed=1),
    causal("cwm", "Code World Model", "Cwm", further=True, **MIXED),
    causal(
        "modernbert_decoder",
        "ModernBERT decoder",
        "ModernBertDecoder",
        local_attention=12,
        layer_types=[SLIDING, FULL] * 2,
        further=True,
    ),
    causal("vaultgemma", "VaultGemma", "VaultGemma", further=True, **_SOFTCAPS, **MIXED),
    causal(
        "llama4",
        "Llama 4 text (temperature tuning off)",
        "Llama4",
        "Llama4TextConfig",
        window="attention_chunk_size",
        open_routing=dict(num_experts_per_tok=4),
        intermediate_size_mlp=48,
        num_local_experts=4,
        interleave_moe_layer_step=2,
        attention_chunk_size=6,
        no_rope_layers=[1, 1, 0, 1],
        layer_types=[CHUNKED, CHUNKED, FULL, CHUNKED],
        attn_temperature_tuning=False,
        seed=1,
    ),
    causal(
        "gpt_oss",
        "gpt-oss",
        "GptOss",
        open_routing=dict(num_experts_per_tok=4),
        num_local_experts=4,
        num_experts_per_tok=2,
        **MIXED,
    ),
    causal(
        "laguna",
        "Laguna",
        "Laguna",
        open_routing=dict(num_experts_per_tok=4),
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        further=True,
        **MIXED,
    ),
    causal(
        "mimo_v2_flash",
        "MiMo-V2-Flash",
        "MiMoV2Flash",
        open_routing=dict(num_experts_per_tok=4),
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        v_head_dim=6,
        further=True,
        **MIXED,
    ),
]
