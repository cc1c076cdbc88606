"""What the kernel reads of a tree: small int32 tensors, made once a round and shared by every layer."""

from typing import NamedTuple

import torch


class TreeTables(NamedTuple):
    """A batch of trees in depth-first preorder, as the kernel reads them; rows past a tree's nodes are not read.

    Args:
        depths (`torch.IntTensor` of shape `(batch, nodes)`): of each node, 0 for the root.
        subtree_ends (`torch.IntTensor` of shape `(batch, nodes)`): one past the last node of each node's subtree.
        ancestors (`torch.IntTensor` of shape `(batch, nodes, width)`):
            of each node, from the root down to its parent, then -1. `width` is the depth of the deepest node or more.
    """

    depths: torch.Tensor
    subtree_ends: torch.Tensor
    ancestors: torch.Tensor


def tree_tables(depths: torch.Tensor, subtree_ends: torch.Tensor, max_depth: int) -> TreeTables:
    """The tables of trees whose depths and subtree ends lie on any device, which is not waited for.

    In preorder the ancestor of a node at a smaller depth is the last node before it with that depth.

    Args:
        depths (`torch.Tensor` of shape `(batch, nodes)` or `(nodes,)`): depth of each node, the root's is 0.
        subtree_ends (`torch.Tensor` of the same shape): one past the last node of each node's subtree.
        max_depth (`int`): the depth of the deepest node, or more: the width of the ancestor table.

    Raises:
        ValueError: if the shapes differ or `max_depth` is negative.
    """
    if depths.shape != subtree_ends.shape or depths.dim() not in (1, 2):
        raise ValueError(
            "Depths and subtree ends must both be of shape (nodes,) or (batch, nodes), but have shapes "
            f"{tuple(depths.shape)} and {tuple(subtree_ends.shape)}."
        )
    if max_depth < 0:
        raise ValueError(f"The greatest depth of a tree is 0 or more, got {max_depth}.")
    if depths.dim() == 1:
        depths, subtree_ends = depths[None], subtree_ends[None]
    level = torch.arange(max(max_depth, 1), device=depths.device)
    node = torch.arange(depths.shape[1], device=depths.device)[None, :, None]
    last = torch.where(depths[..., None] == level, node, -1).cummax(dim=1).values
    ancestors = torch.where(level < depths[..., None], last, -1)
    return TreeTables(*(table.to(torch.int32).contiguous() for table in (depths, subtree_ends, ancestors)))
