"""Multi-head latent attention: keys and values are expanded from a compressed row, and differ in size."""

from typing import Any

from models.dense import SCALED_QUERIES
from models.family import EXPERTS, Family, causal

_LATENT: dict[str, Any] = dict(
    num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6
)
_ROUTED: dict[str, Any] = dict(n_routed_experts=4, n_shared_experts=1, **EXPERTS)
_OPEN: dict[str, Any] = dict(num_experts_per_tok=4)
_YARN: dict[str, Any] = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=4.0,
    original_max_position_embeddings=16,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
)

FAMILIES: list[Family] = [
    causal(
        "deepseek_v2",
        "DeepSeek V2",
        "DeepseekV2",
        open_routing=_OPEN,
        first_k_dense_replace=1,
        head_dim=4,
        **_LATENT,
        **_ROUTED,
    ),
    causal(
        "deepseek_v3",
        "DeepSeek V3, R1",
        "DeepseekV3",
        open_routing=dict(topk_group=2, **_OPEN),
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        **_LATENT,
        **_ROUTED,
    ),
    # Kimi K2 runs as DeepSeek V3, with one group of experts.
    causal(
        "kimi_k2",
        "Kimi K2",
        "DeepseekV3",
        open_routing=_OPEN,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        rope_parameters=_YARN,
        **{**_LATENT, "qk_nope_head_dim": 6, "v_head_dim": 11},
        **_ROUTED,
    ),
    causal("glm4_moe_lite", "GLM-4.7-Flash", "Glm4MoeLite", open_routing=_OPEN, further=True, **_LATENT, **_ROUTED),
    causal(
        "mistral4",
        "Mistral 4",
        "Mistral4",
        open_routing=_OPEN,
        rope_parameters=SCALED_QUERIES,
        further=True,
        **_LATENT,
        **_ROUTED,
    ),
    causal("minicpm3", "MiniCPM 3", "MiniCPM3", dim_model_base=32, scale_emb=2, further=True, **_LATENT),
]
