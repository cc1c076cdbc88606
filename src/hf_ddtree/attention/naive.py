"""Tree attention written out in float64: the reference that the routes are tested against."""

import torch


def naive_tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention, one query head at a time.

    Args:
        query (`torch.Tensor` of shape `(batch, heads, nodes, head_dim)`): queries of the nodes.
        key, value (`torch.Tensor` of shape `(batch, key_value_heads, keys, head_dim)`): of the prefix, then the nodes.
        visible (`torch.Tensor` of shape `(batch, 1, nodes, keys)`): booleans, whether a node sees a key.
        scaling (`float`): factor on the dot products.
        softcap (`float`, *optional*): bound of the scores, applied before the mask.
        sinks (`torch.Tensor` of shape `(heads,)`, *optional*): scores that take weight and add nothing.

    Returns:
        `torch.Tensor` of shape `(batch, nodes, heads, value_dim)` in float64.
    """
    heads = query.shape[1]
    group = heads // key.shape[1]
    outputs = []
    for head in range(heads):
        keys, values = key[:, head // group].double(), value[:, head // group].double()
        scores = query[:, head].double() @ keys.mT * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible[:, 0], float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks[head].double().expand(*scores.shape[:-1], 1)], dim=-1)
            outputs.append(scores.softmax(dim=-1)[..., :-1] @ values)
        else:
            outputs.append(scores.softmax(dim=-1) @ values)
    return torch.stack(outputs, dim=2)
