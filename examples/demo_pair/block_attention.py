"""Attention of many blocks over one shared context, for training.

With a mask over all slots, most of the work would be spent on pairs of slots from different blocks, which never see
each other. Here a block attends to the context and to itself only, as it does when the drafter runs.
"""

from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import AttentionInterface

NAME = "demo_pair_blocks"


def attend_blocks(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """
    Args:
        query (`torch.Tensor` of shape `(rows, heads, blocks * size, head_dim)`): the slots of all blocks.
        key (`torch.Tensor` of shape `(rows, kv_heads, context + blocks * size, head_dim)`): context, then slots.
        attention_mask (`torch.BoolTensor` of shape `(rows, 1, blocks, context)`): the context each block sees.
    """
    rows, heads, slots, width = query.shape
    kv_heads, (blocks, context) = key.shape[1], attention_mask.shape[2:]
    groups, size = heads // kv_heads, slots // blocks
    batch, each = rows * kv_heads, groups * size
    query = (query * scaling).view(rows, kv_heads, groups, blocks, size, width).transpose(2, 3)

    context_key, own_key = key.reshape(batch, -1, width).split([context, slots], dim=1)
    context_value, own_value = value.reshape(batch, -1, width).split([context, slots], dim=1)
    to_context = query.reshape(batch, blocks * each, width) @ context_key.mT
    to_context = to_context.view(rows, kv_heads, blocks, each, context).float()
    to_context = to_context.masked_fill(~attention_mask[:, :, :, None], -1e9)
    to_own = query.reshape(batch * blocks, each, width) @ own_key.reshape(batch * blocks, size, width).mT
    scores = torch.cat([to_context, to_own.view(rows, kv_heads, blocks, each, size).float()], dim=-1)

    on_context, on_own = scores.softmax(-1).to(value.dtype).split([context, size], dim=-1)
    mixed = (on_context.reshape(batch, blocks * each, context) @ context_value).view(batch * blocks, each, width)
    mixed = mixed + on_own.reshape(batch * blocks, each, size) @ own_value.reshape(batch * blocks, size, width)
    mixed = mixed.view(rows, kv_heads, blocks, groups, size, width)
    return mixed.permute(0, 2, 4, 1, 3, 5).reshape(rows, slots, heads, width), None


AttentionInterface.register(NAME, attend_blocks)
