"""Hybrids of attention and Gated DeltaNet layers, which read a tree by the gated delta rule's own form for trees."""

import dataclasses
import math
from typing import Any

import torch

from models.family import EXPERTS, FULL, SLIDING, Family, causal

LINEAR = "linear_attention"
ROUTES = frozenset({"attention", "gated delta rule"})

DELTA: dict[str, Any] = dict(
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
    linear_conv_kernel_dim=4,
    layer_types=[LINEAR, FULL, LINEAR, FULL],
)
_ROTARY: dict[str, Any] = dict(
    rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=1.0)
)
_EXPERTS: dict[str, Any] = dict(num_experts=4, shared_expert_intermediate_size=24, **EXPERTS)
_OPEN: dict[str, Any] = dict(open_routing=dict(num_experts_per_tok=4))


def remembering(family: Family) -> Family:
    """The family with decays from slow to fast, for most heads of a new model forget a token at once."""

    def build(**overrides: Any) -> Any:
        model = family.build(**overrides)
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.data.copy_(torch.linspace(math.log(0.01), math.log(2.0), len(parameter)))
        return model

    return dataclasses.replace(family, build=build, fp64_error=1e-3)


FAMILIES: list[Family] = [
    remembering(family)
    for family in (
        causal("qwen3_next", "Qwen3-Next", "Qwen3Next", routes=ROUTES, **_OPEN, **_EXPERTS, **_ROTARY, **DELTA),
        causal("qwen3_5", "Qwen3.5", "Qwen3_5", "Qwen3_5TextConfig", routes=ROUTES, **_ROTARY, **DELTA),
        causal(
            "qwen3_5_moe",
            "Qwen3.5-MoE",
            "Qwen3_5Moe",
            "Qwen3_5MoeTextConfig",
            routes=ROUTES,
            further=True,
            **_OPEN,
            **_EXPERTS,
            **_ROTARY,
            **DELTA,
        ),
        # Corrections may overshoot.
        causal(
            "olmo_hybrid", "OLMo Hybrid", "OlmoHybrid", routes=ROUTES, seed=2, linear_allow_neg_eigval=True, **DELTA
        ),
        # Only sliding layers have positions.
        causal(
            "lara_mini",
            "Lara Mini",
            "LaraMini",
            routes=ROUTES,
            seed=2,
            further=True,
            num_experts=4,
            sliding_window=6,
            **_OPEN,
            **EXPERTS,
            **{**DELTA, "layer_types": [LINEAR, SLIDING, LINEAR, FULL]},
        ),
    )
]
