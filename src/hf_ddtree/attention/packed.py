"""Grouped-query attention of a tree without copying keys and values once per query head."""

from typing import Any

import torch
import torch.nn.functional as F

from hf_ddtree import products
from hf_ddtree.round import TreeRound

# Arguments of an attention function that this route knows nothing of.
_UNKNOWN = ("softcap", "s_aux", "position_bias")


def serves(mask: torch.Tensor | None, kwargs: dict[str, Any]) -> bool:
    """Whether [`packed_sdpa`] gives what the library's SDPA would.

    Args:
        mask (`torch.Tensor`, *optional*): the layer's. A model may have put its own for each head over the tree's.
        kwargs (`dict`): what the layer passes beside the arguments of [`ddtree_attention`].
    """
    return (mask is None or mask.shape[1] == 1) and all(kwargs.get(name) is None for name in _UNKNOWN)


def packed_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    tree: TreeRound | None,
) -> torch.Tensor:
    """Scaled dot-product attention with the query heads of a key-value group laid out as further rows.

    Shapes as in [`ddtree_attention`]; the result is `(batch, nodes, heads, value_dim)`. On a CPU this runs
    about twice as fast as repeating the keys and values, which a mask otherwise forces the library to do, and in fp32
    twice as fast again where [`products`] pay.

    Args:
        tree (`TreeRound`, *optional*): keeps the repeated mask for the round's other layers. A compiled forward, which
            finds what is computed twice by itself, has none.
    """
    batch, heads, nodes, head_dim = query.shape
    groups = heads // key.shape[1]
    if groups > 1:
        query = query.reshape(batch, key.shape[1], groups * nodes, head_dim)
        if mask is not None:
            mask = tree.packed_mask(mask, groups) if tree is not None else mask.repeat(1, 1, groups, 1)
    if _by_products(query, key, value):
        output = attention_by_products(query, key, value, mask, head_dim**-0.5 if scaling is None else scaling)
    else:
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(batch, heads, nodes, value.shape[-1]).transpose(1, 2).contiguous()


def attention_by_products(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Scaled dot-product attention in fp32, one head after the other.

    Args:
        query (`torch.Tensor` of shape `(batch, heads, rows, head_dim)`): as many heads as keys and values have.
        key (`torch.Tensor` of shape `(batch, heads, slots, head_dim)`)
        value (`torch.Tensor` of shape `(batch, heads, slots, value_dim)`)
        mask (`torch.Tensor` of shape `(batch or 1, 1, rows, slots)`, *optional*): booleans, or numbers to add.
        scaling (`float`): of the scores.

    Returns:
        `torch.Tensor` of shape `(batch, heads, rows, value_dim)`.
    """
    output = torch.empty(*query.shape[:-1], value.shape[-1])
    query, lowest = query * scaling, torch.finfo(query.dtype).min
    for row in range(query.shape[0]):
        hidden = None if mask is None else mask[row % mask.shape[0], 0]
        for head in range(query.shape[1]):
            scores = products.linear(query[row, head], key[row, head])
            if hidden is not None:
                scores = scores.add_(hidden) if hidden.is_floating_point() else scores.masked_fill_(~hidden, lowest)
            output[row, head] = products.linear(
                torch.softmax(scores, dim=-1, out=scores), value[row, head].transpose(0, 1)
            )
    return output


def _by_products(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether each head's two products are worth computing apart from one another; with a gradient they are not."""
    if torch.compiler.is_compiling():
        return False
    plain = all(type(states) is torch.Tensor and states.dtype is torch.float32 for states in (query, key, value))
    if not plain or query.device.type != "cpu" or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return False
    work = query.shape[2] * key.shape[2] * min(key.shape[3], value.shape[3])
    return work >= products.LEAST_PRODUCT and products.pays(query.shape[2], key.shape[2], key.shape[3])
