"""The target's forward pass for batched decoding: fused projections, a cache allocated once, padding at the left.

Positions only matter to this target by their distances, so a row padded at the left needs no positions of its own,
only a mask over its padding.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM


@dataclass
class PaddedCache:
    """Keys and values of all layers, `(layers, batch, kv_heads, capacity, head_dim)`, of which `length` are filled.

    `bias` is `(batch, 1, 1, capacity)`: 0 where there is a token, `-inf` in a row's padding.
    """

    keys: torch.Tensor
    values: torch.Tensor
    bias: torch.Tensor
    length: int = 0

    def keep(self, rows: torch.Tensor) -> None:
        self.keys, self.values, self.bias = self.keys[:, rows], self.values[:, rows], self.bias[rows]


class LlamaTarget:
    """
    Args:
        model (`LlamaForCausalLM`): the target, in the precision to decode in.
        taps (`list[int]`): indices of the decoder layers whose output is returned.
    """

    def __init__(self, model: LlamaForCausalLM, taps: list[int]):
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
        cos, sin = model.model.rotary_emb(self.qkv[0], torch.arange(1024)[None])
        self.cos, self.sin = cos[0], sin[0]

    def new_cache(self, padding: torch.Tensor, capacity: int) -> PaddedCache:
        """`padding` of shape `(batch,)`: how many of a row's first columns are no tokens."""
        shape = (len(self.qkv), len(padding), self.kv_heads, capacity, self.head_dim)
        like = self.qkv[0]
        padded = torch.arange(capacity) < padding[:, None]
        bias = like.new_zeros(padded.shape).masked_fill_(padded, -torch.inf)[:, None, None]
        return PaddedCache(like.new_zeros(shape), like.new_zeros(shape), bias)

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, cache: PaddedCache) -> tuple[torch.Tensor, torch.Tensor]:
        """`(batch, length)` ids to the next tokens' logits `(batch, vocabulary)` and the taps `(batch, length, taps *
        hidden)`. More than one token at once is taken for the prompt, so the cache must then be empty."""
        batch, length = token_ids.shape
        start, end = cache.length, cache.length + length
        cos, sin = self.cos[start:end], self.sin[start:end]
        half = self.head_dim // 2

        def norm(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return F.rms_norm(states, (states.shape[-1],), weight, self.eps)

        def rotate(states: torch.Tensor) -> torch.Tensor:
            turned = torch.cat([-states[..., half:], states[..., :half]], dim=-1)
            return states * cos + turned * sin

        bias = cache.bias[..., :end]
        if length > 1:
            ahead = torch.ones(length, length, dtype=torch.bool).triu_(1)
            bias = bias.masked_fill(ahead, -torch.inf)
            # A padded column sees only padding: it looks at itself instead, so that no row of a softmax is empty.
            bias = bias.masked_fill(torch.eye(length, dtype=torch.bool), 0.0)
        hidden = self.model.model.embed_tokens(token_ids)
        tapped = []
        for index, layer in enumerate(self.model.model.layers):
            projected = F.linear(norm(hidden, layer.input_layernorm.weight), self.qkv[index])
            projected = projected.view(batch, length, -1, self.head_dim).transpose(1, 2)
            query, key, value = projected.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
            cache.keys[index, :, :, start:end] = rotate(key)
            cache.values[index, :, :, start:end] = value
            mixed = self.attend(rotate(query), cache.keys[index, :, :, :end], cache.values[index, :, :, :end], bias)
            hidden = hidden + F.linear(mixed, layer.self_attn.o_proj.weight)
            gate, up = F.linear(norm(hidden, layer.post_attention_layernorm.weight), self.gate_up[index]).chunk(2, -1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.mlp.down_proj.weight)
            if index in self.taps:
                tapped.append(hidden)
        cache.length = end
        logits = self.model.lm_head(norm(hidden[:, -1], self.model.model.norm.weight))
        return logits, torch.cat(tapped, dim=-1)

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        batch, _, length, _ = query.shape
        if length > 1:
            mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, enable_gqa=True)
        else:
            # One query a head: the heads of a group become the rows of one attention, so keys are read once.
            grouped = query.view(batch, self.kv_heads, -1, self.head_dim)
            rows = bias.expand(-1, -1, grouped.shape[2], -1)
            mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=rows)
            mixed = mixed.view(batch, self.heads, 1, self.head_dim)
        return mixed.transpose(1, 2).reshape(batch, length, -1)
