"""The target's forward pass for batched greedy decoding: fused projections and a cache allocated once.

Transformers' `DynamicCache` grows by concatenation, which at batch 256 costs more than the model itself.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import Qwen3ForCausalLM


@dataclass
class StaticCache:
    """Keys and values of all layers, `(layers, batch, kv_heads, capacity, head_dim)`, of which `length` are filled."""

    keys: torch.Tensor
    values: torch.Tensor
    length: int = 0

    def keep(self, rows: torch.Tensor) -> None:
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]


class FastTarget:
    """Greedy decoding of a Qwen3 target, with the hidden states its drafter taps.

    Args:
        model (`Qwen3ForCausalLM`): the target, in the precision to decode in.
        taps (`list[int]`): indices of the decoder layers whose output is returned.
    """

    def __init__(self, model: Qwen3ForCausalLM, taps: list[int]):
        config = model.config
        self.model, self.taps, self.eps = model, taps, config.rms_norm_eps
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.qkv, self.gate_up = [], []
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            self.qkv.append(torch.cat([p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)]))
            self.gate_up.append(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        positions = torch.arange(config.max_position_embeddings)[None]
        cos, sin = model.model.rotary_emb(self.qkv[0], positions)
        self.cos, self.sin = cos[0], sin[0]

    def new_cache(self, batch: int, capacity: int) -> StaticCache:
        shape = (len(self.qkv), batch, self.kv_heads, capacity, self.head_dim)
        return StaticCache(torch.empty(shape), torch.empty(shape))

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, cache: StaticCache) -> tuple[torch.Tensor, torch.Tensor]:
        """`(batch, length)` ids to the greedy next ids `(batch,)` and the taps `(batch, length, taps * hidden)`.

        More than one token at once is taken for the prompt, so the cache must then be empty.
        """
        batch, length = token_ids.shape
        start, end = cache.length, cache.length + length
        cos, sin = self.cos[start:end], self.sin[start:end]
        half = self.head_dim // 2

        def norm(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return F.rms_norm(states, (states.shape[-1],), weight, self.eps)

        def rotate(states: torch.Tensor) -> torch.Tensor:
            turned = torch.cat([-states[..., half:], states[..., :half]], dim=-1)
            return states * cos + turned * sin

        hidden = self.model.model.embed_tokens(token_ids)
        tapped = []
        for index, layer in enumerate(self.model.model.layers):
            attention = layer.self_attn
            projected = F.linear(norm(hidden, layer.input_layernorm.weight), self.qkv[index])
            projected = projected.view(batch, length, -1, self.head_dim).transpose(1, 2)
            query, key, value = projected.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
            query = rotate(norm(query, attention.q_norm.weight))
            cache.keys[index, :, :, start:end] = rotate(norm(key, attention.k_norm.weight))
            cache.values[index, :, :, start:end] = value
            mixed = self.attend(query, cache.keys[index, :, :, :end], cache.values[index, :, :, :end])
            hidden = hidden + F.linear(mixed, attention.o_proj.weight)
            gate, up = F.linear(norm(hidden, layer.post_attention_layernorm.weight), self.gate_up[index]).chunk(2, -1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.mlp.down_proj.weight)
            if index in self.taps:
                tapped.append(hidden)
        cache.length = end
        logits = self.model.lm_head(norm(hidden[:, -1], self.model.model.norm.weight))
        return logits.argmax(-1), torch.cat(tapped, dim=-1)

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        batch, _, length, _ = query.shape
        if length > 1:
            mixed = F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)
        else:
            # One query a head: the heads of a group become the rows of one attention, so keys are read once.
            grouped = query.view(batch, self.kv_heads, -1, self.head_dim)
            mixed = F.scaled_dot_product_attention(grouped, keys, values).view(batch, self.heads, 1, self.head_dim)
        return mixed.transpose(1, 2).reshape(batch, length, -1)
