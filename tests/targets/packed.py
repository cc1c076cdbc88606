"""Layers that hold weights as quantisation packages do: codes of another dtype and shape, or no `weight` at all."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class PackedLinear(nn.Module):
    """A linear layer of signed 4-bit codes, two a byte in a `weight` of half the width, with one scale a row."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        scale = linear.weight.abs().amax(dim=1, keepdim=True) / 7
        codes = (linear.weight / scale).round().to(torch.int8) + 8
        self.weight = nn.Parameter((codes[:, ::2] * 16 + codes[:, 1::2]).to(torch.uint8), requires_grad=False)
        self.register_buffer("scale", scale)

    def whole(self) -> torch.Tensor:
        codes = torch.stack([self.weight // 16, self.weight % 16], dim=-1).flatten(1).to(self.scale.dtype)
        return (codes - 8) * self.scale

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        assert states.dtype == self.scale.dtype, "states are given in the target's dtype, not in that of the codes"
        return F.linear(states, self.whole())


class PackedEmbedding(nn.Module):
    """An embedding of 8-bit codes that are no attribute named `weight`; `embed_scale` as Gemma's embeddings have."""

    def __init__(self, embedding: nn.Embedding):
        super().__init__()
        self.num_embeddings, self.embedding_dim = embedding.weight.shape
        self.register_buffer("scale", embedding.weight.abs().amax(dim=1, keepdim=True) / 127)
        self.register_buffer("codes", (embedding.weight / self.scale).round().to(torch.int8))
        self.embed_scale: Any = getattr(embedding, "embed_scale", 1.0)

    def whole(self) -> torch.Tensor:
        return self.codes.to(self.scale.dtype) * self.scale

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.whole()) * self.embed_scale


def pack(target: Any) -> None:
    """Packs the target's embedding and head."""
    with torch.no_grad():
        target.set_input_embeddings(PackedEmbedding(target.get_input_embeddings()))
        target.set_output_embeddings(PackedLinear(target.get_output_embeddings()))


def unpack(target: Any) -> None:
    """Ordinary layers with the values that the packed ones have."""
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    whole = nn.Embedding.from_pretrained(embedding.whole())
    target.set_input_embeddings(whole)
    linear = nn.Linear(head.in_features, head.out_features, bias=False)
    linear.weight = nn.Parameter(head.whole())
    target.set_output_embeddings(linear)
