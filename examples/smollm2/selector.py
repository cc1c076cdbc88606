"""DFlash2's candidate selector on top of a plain drafter: how a candidate follows the token before it.

A plain drafter ranks each position's tokens by themselves, so a tree holds paths whose tokens do not go together. The
selector scores the pairs of neighbours among each position's best tokens. It learns beside the drafter and leaves it
as it is: the plain drafter in the same weights stays what it would be without.
"""

import torch
import torch.nn.functional as F

from hf_ddtree.drafters import DFlashModel
from recipe import BLOCK, NO_LABEL

# DFlash2 has convolutions too: a kernel of one slot that begins and stays as the identity.
RANK, TOP, KERNEL, GROUP = 20, 16, 1, 16


def with_selector(drafter: DFlashModel, embedding: torch.Tensor) -> DFlashModel:
    """The same drafter with a selector that changes nothing yet."""
    if drafter.config.selector_rank:
        return drafter
    config = type(drafter.config)(**drafter.config.to_dict())
    config.selector_rank, config.selector_top_k = RANK, TOP
    config.conv_kernel_size, config.conv_group_size = KERNEL, GROUP
    result = DFlashModel(config)
    missing, unexpected = result.load_state_dict(drafter.state_dict(), strict=False)
    assert not unexpected and all("conv" in name or "selector" in name for name in missing)
    with torch.no_grad():
        for name, weight in result.named_parameters():
            if "kernel_projection" in name:
                weight.zero_()
        centred = embedding - embedding.mean(0)
        _, axes = torch.linalg.eigh(centred.mT @ centred)
        codes = centred @ axes[:, -RANK:]
        result.candidate_selector.predecessor_codebook.copy_(codes / codes.std(0) / RANK**0.5)
        result.candidate_selector.successor_codebook.zero_()
        result.candidate_selector.hidden_projection.weight.zero_()
    return result


@torch.no_grad()
def fit_projection(drafter: DFlashModel, states: torch.Tensor) -> None:
    """Makes the projected state 1 on average, where it is still 0: the selector begins as one of pairs alone."""
    weight = drafter.candidate_selector.hidden_projection.weight
    if not weight.any():
        mean = states.float().mean((0, 1))
        weight.copy_((mean / mean.dot(mean)).expand_as(weight))


def selector_losses(
    drafter: DFlashModel, states: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor, blocks: torch.Tensor
) -> torch.Tensor:
    """
    Args:
        states (`torch.Tensor` of shape `(blocks, BLOCK - 1, hidden)`), logits (`(blocks, BLOCK - 1, candidates)`):
            the plain drafter's.
        ids (`torch.Tensor` of shape `(candidates,)`): the tokens of the logits.
        blocks (`torch.Tensor` of shape `(blocks, BLOCK)`): the text, -100 beyond its end.

    Returns:
        Losses of shape `(blocks, BLOCK - 1)`; 0 where the text's token is not among the best.
    """
    selector = drafter.candidate_selector
    unary, places = logits.detach().topk(TOP)
    best = ids[places]
    before, label = blocks[:, : BLOCK - 1], blocks[:, 1:]
    codes = selector.predecessor_codebook[before.clamp(min=0)] * selector.hidden_projection(states.detach().float())
    pairs = (selector.successor_codebook[best] @ codes[..., None])[..., 0]
    hits = best == label[..., None]
    target = torch.where(hits.any(-1) & (label != NO_LABEL), hits.int().argmax(-1), NO_LABEL)
    losses = F.cross_entropy(
        (unary.float() + pairs).flatten(0, 1), target.flatten(), ignore_index=NO_LABEL, reduction="none"
    )
    return losses.view_as(label)
