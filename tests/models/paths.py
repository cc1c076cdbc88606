"""Recurrent layers that have no rule for trees, and read each path of one by itself."""

from typing import Any

from models.family import EXPERTS, FULL, SLIDING, Family, causal

LINEAR, CONV, HYBRID = "linear_attention", "conv", "hybrid"

_ROUTES = frozenset({"attention", "paths"})
_OPEN: dict[str, Any] = dict(open_routing=dict(num_experts_per_tok=4))
_MAMBA2: dict[str, Any] = dict(
    mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=2, mamba_d_conv=4, mamba_chunk_size=8
)
_MAMBA1: dict[str, Any] = dict(mamba_d_state=4, mamba_dt_rank=4)
# No bound on time steps: a scan over several tokens would keep to it, while decoding does not.
_UNBOUNDED: dict[str, Any] = dict(time_step_min=1e-12)
_LATENT: dict[str, Any] = dict(
    kv_lora_rank=16, q_lora_rank=None, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=4
)

FAMILIES: list[Family] = [
    causal("bamba", "Bamba", "Bamba", routes=_ROUTES, attn_layer_indices=[0, 1, 3], **_MAMBA2),
    # A mixer and attention side by side in each layer.
    causal(
        "falcon_h1",
        "Falcon-H1",
        "FalconH1",
        routes=_ROUTES,
        further=True,
        seed=1,
        mamba_d_ssm=64,
        ssm_out_multiplier=0.5,
        attention_out_multiplier=2.0,
        ssm_multipliers=[1.0, 0.5, 0.8, 1.2, 0.7],
        mlp_multipliers=[1.0, 0.5],
        **_MAMBA2,
    ),
    # Attention has no position embeddings.
    causal(
        "granite_moe_hybrid",
        "Granite 4 hybrid",
        "GraniteMoeHybrid",
        routes=_ROUTES,
        further=True,
        layer_types=[FULL, FULL, LINEAR, FULL],
        shared_intermediate_size=24,
        num_local_experts=4,
        num_experts_per_tok=2,
        **_OPEN,
        **_MAMBA2,
    ),
    # Each layer is one block: a mixer, attention, an MLP or experts.
    causal(
        "nemotron_h",
        "Nemotron-H",
        "NemotronH",
        routes=_ROUTES,
        further=True,
        seed=2,
        layers_block_type=["mamba", "attention", "moe", "mamba", "mlp", "attention"],
        ssm_state_size=8,
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=2,
        chunk_size=8,
        n_routed_experts=4,
        moe_shared_expert_intermediate_size=24,
        **EXPERTS,
        **_OPEN,
        **_UNBOUNDED,
    ),
    causal(
        "jamba",
        "Jamba",
        "Jamba",
        routes=_ROUTES,
        further=True,
        num_experts=4,
        num_experts_per_tok=2,
        attn_layer_period=2,
        attn_layer_offset=0,
        **_OPEN,
        **_MAMBA1,
    ),
    # A short convolution, and no recurrence.
    causal("lfm2", "LFM2", "Lfm2", routes=_ROUTES, layer_types=[FULL, FULL, CONV, FULL]),
    causal(
        "lfm2_moe",
        "LFM2-MoE",
        "Lfm2Moe",
        routes=_ROUTES,
        further=True,
        layer_types=[FULL, FULL, CONV, FULL],
        num_experts=4,
        num_dense_layers=1,
        **EXPERTS,
        **_OPEN,
    ),
    causal(
        "lfm3", "LFM3", "Lfm3", routes=_ROUTES, further=True, layer_types=[CONV, FULL, CONV, SLIDING], sliding_window=6
    ),
    # Delta rules with a decay of each channel.
    causal(
        "kimi_linear",
        "Kimi Linear",
        "KimiLinear",
        routes=_ROUTES,
        seed=3,
        layer_types=[FULL, LINEAR, FULL, LINEAR],
        linear_head_dim=8,
        linear_num_heads=2,
        num_local_experts=4,
        **EXPERTS,
        **_OPEN,
        **_LATENT,
    ),
    causal(
        "bailing_hybrid",
        "Ling 2.5 hybrid",
        "BailingHybrid",
        routes=_ROUTES,
        further=True,
        seed=2,
        layer_types=[LINEAR, FULL, LINEAR, LINEAR],
        num_local_experts=4,
        n_group=2,
        topk_group=2,
        **EXPERTS,
        **_OPEN,
        **_LATENT,
    ),
]

# Not in the matrix: a token's choice among experts, or residuals that grow from layer to layer, make their own
# arithmetic too coarse in low precision to tell a wrong tree by it.
COARSE: list[Family] = [
    # One block of attention is shared by all layers that attend.
    causal(
        "zamba",
        "Zamba",
        "Zamba",
        routes=_ROUTES,
        num_key_value_heads=4,
        attention_head_dim=16,
        n_mamba_heads=2,
        layers_block_type=[LINEAR, HYBRID, LINEAR, HYBRID],
        **_MAMBA1,
    ),
    causal(
        "zamba2",
        "Zamba2",
        "Zamba2",
        routes=_ROUTES,
        num_key_value_heads=4,
        mamba_d_state=8,
        n_mamba_heads=4,
        mamba_ngroups=2,
        chunk_size=8,
        layers_block_type=[LINEAR, HYBRID, LINEAR, HYBRID],
        **_UNBOUNDED,
    ),
    # Attention whose queries and keys a convolution has mixed, and half of whose values come a token late.
    causal(
        "zaya",
        "ZAYA",
        "Zaya",
        routes=_ROUTES,
        num_experts=4,
        num_experts_per_tok=1,
        moe_intermediate_size=24,
        router_hidden_size=16,
    ),
]
