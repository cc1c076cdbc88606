"""The short causal convolution over a draft tree: each node convolves itself and the tokens before it on its path."""

import torch
from transformers.activations import ACT2FN

from hf_ddtree.round import TreeRound


def tree_convolution(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    tree: TreeRound,
) -> torch.Tensor:
    """A depthwise convolution over the ancestors of each node, then the activation.

    The taps of a node come from the tree and, where its path is shorter than the kernel, from the prefix. They are
    added up in fp32 (fp64 for fp64 weights) and rounded once, as a convolution over a row of tokens does it: sums of
    bf16 numbers would differ. Rows of channels are gathered tap by tap, which reads memory in order.

    Args:
        inputs (`torch.Tensor` of shape `(batch, channels, kernel + nodes)`): the prefix's last rows, then the nodes'.
        weight (`torch.Tensor` of shape `(channels, kernel)`): oldest tap first.
        bias (`torch.Tensor` of shape `(channels,)`, *optional*): added before the activation.
        activation (`str`, *optional*): its name in Transformers.
        tree (`TreeRound`): the tree.

    Returns:
        `torch.Tensor` of shape `(batch, channels, nodes)`, in the dtype of `inputs`.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    rows = inputs.transpose(1, 2).to(weight.dtype).to(wide).contiguous()
    columns = weight.T.to(wide)
    taps = tree.taps(len(columns)).to(inputs.device)
    output = torch.zeros((), dtype=wide, device=inputs.device) if bias is None else bias.to(wide)
    for column, tap in zip(columns, taps.T, strict=True):
        output = output + rows.index_select(1, tap) * column
    output = output.to(weight.dtype)
    if activation is not None:
        output = ACT2FN[activation](output)
    return output.to(inputs.dtype).transpose(1, 2)
