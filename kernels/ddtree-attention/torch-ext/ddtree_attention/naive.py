"""Tree attention written out densely in float64: what the kernel is tested against."""

import torch

from .tree import TreeTables


def naive_tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tree: TreeTables,
    prefix: torch.Tensor,
    start: torch.Tensor | None = None,
    nodes: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As [`tree_attention`], one node at a time; only slots that a node may read are looked at.

    Returns:
        `torch.Tensor` of shape `(batch, nodes, heads, value_dim)` in float64, zero where a tree has no node.
    """
    batch, heads, width, key_dim = query.shape
    group = heads // key.shape[1]
    scale = key_dim**-0.5 if scale is None else scale
    output = torch.zeros(batch, width, heads, value.shape[-1], dtype=torch.float64)
    for b in range(batch):
        before, first = int(prefix[b]), int(start[b]) if start is not None else 0
        keys, values = key[b].double(), value[b].double()
        for node in range(int(nodes[b]) if nodes is not None else width):
            path = [other for other in tree.ancestors[b, node].tolist() if other >= 0] + [node]
            slots = torch.tensor([*range(first, before), *(before + other for other in path)])
            positions = torch.tensor([*range(first, before), *range(before, before + len(path))])
            if window is not None:
                slots = slots[positions > positions[-1] - window]
            seen_keys, seen_values = (states[:, slots].repeat_interleave(group, 0) for states in (keys, values))
            scores = (seen_keys @ query[b, :, node, :, None].double())[..., 0] * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[:, None].double()], dim=-1)
            weights = scores.softmax(dim=-1)[:, None, : len(slots)]
            output[b, node] = (weights @ seen_values)[:, 0]
    return output
