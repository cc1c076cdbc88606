"""Recurrent layers token by token in float64: the reference that the tree's forms are tested against."""

from collections.abc import Sequence

import torch


def naive_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    path: Sequence[int],
    normalise: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence of [`tree_gated_delta_rule`] along one path, one token and one head at a time.

    Args:
        query, key, value, g, beta, state, normalise: as there.
        path (`Sequence[int]`): the nodes to read, in order.

    Returns:
        The output at the last node, `(batch, value_heads, value_dim)`, and the state after it, in float64.
    """
    groups = value.shape[2] // key.shape[2]
    query, key, value, g, beta, state = (t.double() for t in (query, key, value, g, beta, state))
    if normalise:
        query, key = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (query, key))
    after, outputs = [], []
    for head in range(value.shape[2]):
        memory = state[:, head]
        for node in path:
            k = key[:, node, head // groups, :, None]
            memory = memory * g[:, node, head, None, None].exp()
            correction = beta[:, node, head, None, None] * (value[:, node, head, None] - k.mT @ memory)
            memory = memory + k @ correction
        q = query[:, path[-1], head // groups, None] / query.shape[-1] ** 0.5
        outputs.append((q @ memory)[:, 0])
        after.append(memory)
    return torch.stack(outputs, dim=1), torch.stack(after, dim=1)


def naive_convolution(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, path: Sequence[int]
) -> torch.Tensor:
    """A depthwise convolution at the last node of a path, tap by tap, without an activation.

    Args:
        inputs, weight, bias: as in [`tree_convolution`].
        path (`Sequence[int]`): the nodes from the root to the one in question.

    Returns:
        `torch.Tensor` of shape `(batch, channels)` in float64.
    """
    kernel = weight.shape[1]
    columns = [*range(kernel), *(kernel + node for node in path)][-kernel:]
    output = torch.zeros(inputs.shape[:2], dtype=torch.float64)
    for tap, column in enumerate(columns):
        output = output + weight[:, tap].double() * inputs[..., column].double()
    return output if bias is None else output + bias.double()
