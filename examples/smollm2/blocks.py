"""The drafter's inputs for many anchors of several texts at once, and its logits over some of the vocabulary."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

import recipe  # noqa: F401  (finds the modules of demo_pair)
from block_attention import NAME
from dataset import Text
from hf_ddtree.drafters import DFlashModel
from recipe import BLOCK, MASK_ID, NO_LABEL

# Contexts are padded to multiples of this, which leaves few shapes to compile for.
STEP = 64


@dataclass(frozen=True)
class Blocks:
    """What a pass over some texts needs, with several blocks each; a slot sees its block and all before its anchor.

    slots `(rows, anchors * BLOCK)` token ids, taps `(rows, context, width)`, position_ids, visible `(rows, 1,
    anchors, context)`, labels `(rows, anchors, BLOCK - 1)` with -100 beyond the text's end.
    """

    slots: torch.Tensor
    taps: torch.Tensor
    position_ids: torch.Tensor
    visible: torch.Tensor
    labels: torch.Tensor

    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.slots, self.taps, self.position_ids, self.visible


def make_blocks(texts: list[Text], anchors: np.ndarray) -> Blocks:
    """`anchors` of shape `(rows, anchors)` are indices into each text."""
    rows, count = anchors.shape
    context = -(-max(map(len, texts)) // STEP) * STEP
    tokens = np.full((rows, context + BLOCK), NO_LABEL, dtype=np.int64)
    taps = np.zeros((rows, context, texts[0].taps.shape[1]), dtype=np.float16)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text.tokens
        taps[row, : len(text)] = text.taps
    places = (anchors[:, :, None] + np.arange(BLOCK)).reshape(rows, -1)
    blocks = np.take_along_axis(tokens, places, axis=1).reshape(rows, count, BLOCK)
    slots = np.full_like(blocks, MASK_ID)
    slots[:, :, 0] = blocks[:, :, 0]
    return Blocks(
        slots=torch.from_numpy(slots.reshape(rows, -1)),
        taps=torch.from_numpy(taps),
        position_ids=torch.cat([torch.arange(context).expand(rows, -1), torch.from_numpy(places)], dim=1),
        visible=(torch.arange(context) < torch.from_numpy(anchors)[:, :, None])[:, None],
        labels=torch.from_numpy(blocks[:, :, 1:]),
    )


def drafted_states(
    drafter: DFlashModel,
    embedding: torch.Tensor,
    slots: torch.Tensor,
    taps: torch.Tensor,
    position_ids: torch.Tensor,
    visible: torch.Tensor,
) -> torch.Tensor:
    """Final states of the slots that draft, `(rows * anchors, BLOCK - 1, hidden)`."""
    drafter.config._attn_implementation = NAME
    states = drafter(
        noise_embeds=F.embedding(slots, embedding),
        context_hidden_states=taps.float(),
        attention_mask=visible,
        position_ids=position_ids,
    ).last_hidden_state
    return states.view(-1, BLOCK, states.shape[-1])[:, 1:]
