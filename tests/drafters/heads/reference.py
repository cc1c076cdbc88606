"""The heads and DFlash2's layers written out from their definitions in float64: one path, one slot, one channel."""

import math
from typing import Any

import torch

from drafters.reference import rms_norm, rotate, sees

Weights = dict[str, torch.Tensor]


def markov_bias(weights: Weights, kind: str, path: list[int], states: torch.Tensor, slot: int) -> torch.Tensor:
    """The bias at `slot` after the tokens of `path`, the anchor first and `slot + 1` of them."""
    weights = {key.removeprefix("markov_head."): value.double() for key, value in weights.items()}
    w1, w2 = weights["markov_w1.weight"], weights["markov_w2.weight"]
    if kind == "vanilla":
        return w2 @ w1[path[slot]]
    if kind == "gated":
        embedded = w1[path[slot]]
        gate = weights["gate_proj.weight"] @ torch.cat([states[slot], embedded]) + weights["gate_proj.bias"]
        return w2 @ (gate.sigmoid() * embedded)
    rank = w1.shape[1]
    state = torch.zeros(rank, dtype=torch.float64)
    for step in range(slot + 1):
        inputs = torch.cat([state, w1[path[step]], states[step]])
        joint = weights["joint_proj.weight"] @ inputs + weights["joint_proj.bias"]
        gate, candidate, output = joint[:rank].sigmoid(), joint[rank : 2 * rank].tanh(), joint[2 * rank :].tanh()
        state = gate * state + (1 - gate) * candidate
    return w2 @ output


def markov_log_probs(
    weights: Weights, kind: str, path: list[int], states: torch.Tensor, logits: torch.Tensor
) -> torch.Tensor:
    """log p(token | path) over the whole vocabulary."""
    slot = len(path) - 1
    return (logits[slot] + markov_bias(weights, kind, path, states, slot)).log_softmax(-1)


def selector_log_probs(
    weights: Weights, top_k: int, path: list[int], states: torch.Tensor, logits: torch.Tensor
) -> torch.Tensor:
    """log p(token | path): the candidates share what they have without the selector, by its scores; others: -inf."""
    predecessor, successor, projection = (
        weights[f"candidate_selector.{name}"].double()
        for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
    )
    slot, parent = len(path) - 1, path[-1]
    unary = logits[slot]
    ranked = sorted(range(len(unary)), key=lambda token: (-float(unary[token]), token))
    scores = {}
    for token in ranked[:top_k]:
        hidden = projection @ states[slot]
        transition = sum(float(predecessor[parent, r] * hidden[r] * successor[token, r]) for r in range(len(hidden)))
        scores[token] = float(unary[token]) + transition
    total = sum(math.exp(score) for score in scores.values())
    share = float(unary.softmax(-1)[list(scores)].sum())
    result = torch.full_like(unary, -math.inf)
    for token, score in scores.items():
        result[token] = math.log(math.exp(score) / total * share)
    return result


def convolve(base: torch.Tensor, dynamic: torch.Tensor, states: torch.Tensor, group: int) -> torch.Tensor:
    """`base` is (taps, channels), `dynamic` (slots, taps, groups), `states` (slots, channels)."""
    result = torch.zeros_like(states)
    for slot in range(states.shape[0]):
        for channel in range(states.shape[1]):
            for tap in range(base.shape[0]):
                if slot - tap >= 0:
                    weight = base[tap, channel] + dynamic[slot, tap, channel // group]
                    result[slot, channel] += weight * states[slot - tap, channel]
    return result


def dflash2_pass(
    raw: dict[str, Any], weights: Weights, taps: torch.Tensor, noise: torch.Tensor, causal: list[bool]
) -> torch.Tensor:
    """Final states of the slots, without a cache; arguments as those of `drafters.reference.draft`."""
    weights = {key: value.double() for key, value in weights.items()}
    eps, head_dim, group = raw["rms_norm_eps"], raw["head_dim"], raw["dflash_config"]["conv_group_size"]
    context = rms_norm(taps.double() @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    length, slots = len(context), len(noise)
    positions = torch.arange(length + slots)
    groups = raw["num_attention_heads"] // raw["num_key_value_heads"]
    states = noise.double()

    def around(prefix: str, inputs: torch.Tensor, sublayer: Any) -> torch.Tensor:
        base = weights[prefix + "base_kernel"]
        dynamic = (inputs @ weights[prefix + "kernel_projection.weight"].T).view(slots, 2, base.shape[1], -1)
        return convolve(base[1], dynamic[:, 1], sublayer(convolve(base[0], dynamic[:, 0], inputs, group)), group)

    for index in range(raw["num_hidden_layers"]):
        prefix = f"layers.{index}."
        sliding = raw["layer_types"][index] == "sliding_attention"
        window = raw["sliding_window"] if sliding else None

        def attend(
            inputs: torch.Tensor, prefix: str = prefix, index: int = index, window: int | None = window
        ) -> torch.Tensor:
            own = prefix + "self_attn."
            sources = torch.cat([context, inputs])
            query = (inputs @ weights[own + "q_proj.weight"].T).view(slots, -1, head_dim)
            key = (sources @ weights[own + "k_proj.weight"].T).view(length + slots, -1, head_dim)
            value = (sources @ weights[own + "v_proj.weight"].T).view(length + slots, -1, head_dim)
            query = rotate(rms_norm(query, weights[own + "q_norm.weight"], eps), positions[length:], raw)
            key = rotate(rms_norm(key, weights[own + "k_norm.weight"], eps), positions, raw)
            output = torch.zeros_like(query)
            for slot in range(slots):
                seen = [k for k in range(length + slots) if sees(length + slot, k, length, causal[index], window)]
                for head in range(query.shape[1]):
                    scores = key[seen, head // groups] @ query[slot, head] / math.sqrt(head_dim)
                    output[slot, head] = scores.softmax(-1) @ value[seen, head // groups]
            return output.flatten(1) @ weights[own + "o_proj.weight"].T

        def mlp(inputs: torch.Tensor, prefix: str = prefix + "mlp.") -> torch.Tensor:
            gate, up = (inputs @ weights[f"{prefix}{name}_proj.weight"].T for name in ("gate", "up"))
            return (gate * gate.sigmoid() * up) @ weights[prefix + "down_proj.weight"].T

        normed = rms_norm(states, weights[prefix + "input_layernorm.weight"], eps)
        states = states + around(prefix + "attention_conv.", normed, attend)
        normed = rms_norm(states, weights[prefix + "post_attention_layernorm.weight"], eps)
        states = states + around(prefix + "mlp_conv.", normed, mlp)
    return rms_norm(states, weights["norm.weight"], eps)
