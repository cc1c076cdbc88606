"""Grouped-query attention of a tree without copying keys and values once per query head."""

import torch
import torch.nn.functional as F

from hf_ddtree.round import TreeRound


def packed_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    tree: TreeRound,
) -> torch.Tensor:
    """Scaled dot-product attention with the query heads of a key-value group laid out as further rows.

    Shapes as in [`ddtree_attention`]; the result is `(batch, nodes, heads, value_dim)`. On a CPU this runs
    about twice as fast as repeating the keys and values, which a mask otherwise forces the library to do.
    """
    batch, heads, nodes, head_dim = query.shape
    groups = heads // key.shape[1]
    if groups > 1:
        query = query.reshape(batch, key.shape[1], groups * nodes, head_dim)
        mask = tree.packed_mask(mask, groups) if mask is not None else None
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(batch, heads, nodes, value.shape[-1]).transpose(1, 2).contiguous()
