"""DFlash's pass written out from its definition, in float64 and without a cache: one head, one slot at a time."""

import math
from typing import Any

import torch

HALF_TURN_MARGIN = (32.0, 1.0)  # YaRN's beta_fast and beta_slow


def rms_norm(states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return states / (states.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def inverse_frequencies(raw: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """Rotary frequencies, and the factor on sines and cosines (YaRN, arXiv 2309.00071, sections 3.2 and 3.4)."""
    dim, theta, scaling = raw["head_dim"], raw["rope_theta"], raw.get("rope_scaling")
    inverse = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if not scaling:
        return inverse, 1.0
    assert scaling["rope_type"] == "yarn"
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

    def turns_at(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = math.floor(turns_at(HALF_TURN_MARGIN[0])), math.ceil(turns_at(HALF_TURN_MARGIN[1]))
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    return inverse / factor * ramp + inverse * (1 - ramp), 0.1 * math.log(factor) + 1.0


def rotate(states: torch.Tensor, positions: torch.Tensor, raw: dict[str, Any]) -> torch.Tensor:
    """`(length, heads, head_dim)` states, first half of a head paired with its second half."""
    inverse, scale = inverse_frequencies(raw)
    angles = positions.double()[:, None, None] * inverse
    first, second = states.chunk(2, dim=-1)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def sees(query: int, key: int, context: int, causal: bool, window: int | None) -> bool:
    """Whether the slot at sequence position `query` reads `key`; keys before `context` are the context's."""
    if causal and key >= context and key > query:
        return False
    return window is None or abs(query - key) < window


def draft(
    raw: dict[str, Any],
    weights: dict[str, torch.Tensor],
    taps: torch.Tensor,
    noise: torch.Tensor,
    causal: list[bool],
    first_position: int = 0,
) -> torch.Tensor:
    """Final states of the block's slots.

    Args:
        raw: a z-lab `config.json` with `rope_theta` and `rope_scaling`.
        weights: its tensors.
        taps: `(context, taps * hidden)` states of the whole context.
        noise: `(slots, hidden)` embeddings of the anchor and the masks.
        causal: for each layer, whether slots see only earlier slots.
        first_position: position of the first context token.
    """
    weights = {key: value.double() for key, value in weights.items()}
    eps, head_dim = raw["rms_norm_eps"], raw["head_dim"]
    groups = raw["num_attention_heads"] // raw["num_key_value_heads"]
    context = rms_norm(taps.double() @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    length, slots = len(context), len(noise)
    positions = torch.arange(first_position, first_position + length + slots)
    states = noise.double()
    for index in range(raw["num_hidden_layers"]):
        prefix = f"layers.{index}."

        def project(name: str, inputs: torch.Tensor, prefix: str = prefix) -> torch.Tensor:
            output = inputs @ weights[f"{prefix}self_attn.{name}.weight"].T
            return output + weights.get(f"{prefix}self_attn.{name}.bias", 0.0)

        sliding = raw["layer_types"][index] == "sliding_attention"
        window = raw["sliding_window"] if sliding else None
        normed = rms_norm(states, weights[prefix + "input_layernorm.weight"], eps)
        sources = torch.cat([context, normed])
        query = project("q_proj", normed).view(slots, -1, head_dim)
        key = project("k_proj", sources).view(length + slots, -1, head_dim)
        value = project("v_proj", sources).view(length + slots, -1, head_dim)
        query = rotate(rms_norm(query, weights[prefix + "self_attn.q_norm.weight"], eps), positions[length:], raw)
        key = rotate(rms_norm(key, weights[prefix + "self_attn.k_norm.weight"], eps), positions, raw)
        rows = []
        for slot in range(slots):
            seen = [k for k in range(length + slots) if sees(length + slot, k, length, causal[index], window)]
            heads = []
            for head in range(query.shape[1]):
                scores = key[seen, head // groups] @ query[slot, head] / math.sqrt(head_dim)
                heads.append(scores.softmax(-1) @ value[seen, head // groups])
            rows.append(torch.cat(heads))
        states = states + project("o_proj", torch.stack(rows))
        normed = rms_norm(states, weights[prefix + "post_attention_layernorm.weight"], eps)
        gate = torch.nn.functional.silu(normed @ weights[prefix + "mlp.gate_proj.weight"].T)
        up = normed @ weights[prefix + "mlp.up_proj.weight"].T
        states = states + (gate * up) @ weights[prefix + "mlp.down_proj.weight"].T
    return rms_norm(states, weights["norm.weight"], eps)
