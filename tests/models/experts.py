"""Decoders of experts whose every layer sees the whole prefix."""

from typing import Any

from models.family import EXPERTS, Family, causal

_OPEN: dict[str, Any] = dict(open_routing=dict(num_experts_per_tok=4))
_LOCAL: dict[str, Any] = dict(num_local_experts=4, num_experts_per_tok=2, **_OPEN)
_ROUTED: dict[str, Any] = dict(n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, **EXPERTS, **_OPEN)

FAMILIES: list[Family] = [
    causal(
        "qwen2_moe",
        "Qwen2-MoE",
        "Qwen2Moe",
        num_experts=4,
        shared_expert_intermediate_size=24,
        further=True,
        **EXPERTS,
        **_OPEN,
    ),
    causal("qwen3_moe", "Qwen3-MoE", "Qwen3Moe", num_experts=4, **EXPERTS, **_OPEN),
    causal("mixtral", "Mixtral", "Mixtral", further=True, **_LOCAL),
    causal("glm4_moe", "GLM-4.5, 4.6", "Glm4Moe", **_ROUTED),
    causal("minimax_m2", "MiniMax-M2", "MiniMaxM2", seed=1, **_LOCAL),
    causal(
        "ernie4_5_moe",
        "ERNIE 4.5 MoE",
        "Ernie4_5_Moe",
        open_routing=dict(moe_k=4),
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=24,
        moe_num_shared_experts=1,
        further=True,
    ),
    causal(
        "hunyuan_moe",
        "Hunyuan MoE",
        "HunYuanMoEV1",
        open_routing=dict(moe_topk=4),
        num_experts=4,
        moe_topk=2,
        seed=1,
        further=True,
    ),
    causal("solar_open", "Solar Open", "SolarOpen", further=True, **_ROUTED),
    causal("dots1", "dots.llm1", "Dots1", further=True, **_ROUTED),
    causal("olmoe", "OLMoE", "Olmoe", num_experts=4, num_experts_per_tok=2, further=True, **_OPEN),
    causal("granite_moe", "Granite MoE", "GraniteMoe", attention_multiplier=0.4, further=True, **_LOCAL),
]
