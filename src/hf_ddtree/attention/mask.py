"""The tree's attention mask: the library's own mask function at true tree positions, and ancestors only."""

from typing import Any

import torch
from transformers.masking_utils import causal_mask_function, prepare_padding_mask

from hf_ddtree.attention.kept_mask import kept_tree_mask
from hf_ddtree.attention.switch import original_implementation
from hf_ddtree.compat import ALL_MASK_ATTENTION_FUNCTIONS, expand_mask_function
from hf_ddtree.round import CURRENT_ROUND, TreeRound


def ddtree_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Any:
    """The mask registered under `"ddtree"`; without a tree it is the mask of the implementation it stands in for.

    Evaluating `mask_function` at depths instead of slots makes every pattern of the library (windows, chunks) right
    for trees without code of ours for any model.

    Returns:
        `torch.Tensor` of shape `(batch_size, 1, q_length, kv_length)`: additive, 0 where a node sees a key.
    """
    tree = CURRENT_ROUND.get()
    if tree is None:
        mask = ALL_MASK_ATTENTION_FUNCTIONS[original_implementation(kwargs["config"])]
        return mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            dtype=dtype,
            use_vmap=use_vmap,
            device=device,
            **kwargs,
        )
    # The nodes are the last keys, but in a static cache free slots follow, and it says where only in a tensor.
    if isinstance(q_offset, torch.Tensor) or q_offset + q_length != kv_offset + kv_length:
        visible = static_tree_visibility(tree, kv_length, q_offset, kv_offset, mask_function, use_vmap)
        if attention_mask is not None:
            padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
            seen = padding[:, kv_offset : kv_offset + kv_length].to(visible.device, torch.bool)
            visible = visible & seen[:, None, None]
        return _additive(visible, batch_size, dtype, device)
    kept = kept_tree_mask(tree, batch_size, kv_length, kv_offset, mask_function, attention_mask, dtype, device)
    if kept is not None:
        return kept
    visible = tree_visibility(tree, kv_length, q_offset, kv_offset, mask_function, use_vmap)
    if attention_mask is not None:
        prefix = kv_length - q_length
        padding = attention_mask[:, kv_offset : kv_offset + prefix].to(visible.device, torch.bool)
        visible = visible.repeat(batch_size, 1, 1, 1)
        visible[..., :prefix] &= padding[:, None, None]
    return _additive(visible, batch_size, dtype, device)


def _additive(visible: torch.Tensor, batch_size: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    mask.masked_fill_(~visible, torch.finfo(dtype).min)
    return mask.expand(batch_size, -1, -1, -1).to(device)


def tree_visibility(
    tree: TreeRound, kv_length: int, q_offset: int, kv_offset: int, mask_function: Any, use_vmap: bool
) -> torch.Tensor:
    """`(1, 1, nodes, kv_length)` booleans for keys that are `kv_length - nodes` of the prefix, then the nodes."""
    device = tree.depths.device
    positions = tree.depths + q_offset
    prefix = torch.arange(kv_offset, kv_offset + kv_length - len(positions), device=device)
    zero = torch.zeros(1, dtype=torch.long, device=device)
    visible = expand_mask_function(mask_function, use_vmap, zero, zero, positions, torch.cat([prefix, positions]))
    visible = visible.expand(1, 1, len(positions), kv_length).clone()
    visible[..., len(prefix) :] &= tree.visible
    return visible


def static_tree_visibility(
    tree: TreeRound,
    kv_length: int,
    q_offset: int | torch.Tensor,
    kv_offset: int,
    mask_function: Any,
    use_vmap: bool,
) -> torch.Tensor:
    """`(1, 1, nodes, kv_length)` booleans for slots of the prefix, then the nodes, then free ones.

    Where the nodes begin may be known to the device only, so no shape depends on it.
    """
    device, nodes = tree.depths.device, len(tree.depths)
    first = q_offset.to(device) if isinstance(q_offset, torch.Tensor) else q_offset
    positions = tree.depths + first
    slots = torch.arange(kv_offset, kv_offset + kv_length, device=device)
    index = slots - first
    node, is_node = index.clamp(0, nodes - 1), (index >= 0) & (index < nodes)
    keys = torch.where(is_node, positions[node], slots)
    zero = torch.zeros(1, dtype=torch.long, device=device)
    visible = expand_mask_function(mask_function, use_vmap, zero, zero, positions, keys)
    return visible & torch.where(is_node, tree.visible[:, node], index < 0)
