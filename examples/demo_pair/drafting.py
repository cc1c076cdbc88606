"""The recipe's drafter: its configuration, how it starts from the target, and its inputs for many anchors at once."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from transformers import Qwen3ForCausalLM

import block_attention
from dataset import LONGEST, TAPS, Text
from hf_ddtree.drafters import DFlashConfig, DFlashModel

BLOCK, LAYERS, MASK_ID, NO_LABEL = 12, 4, 1, -100


def build_drafter(target: Qwen3ForCausalLM) -> DFlashModel:
    """A drafter whose layers start as the target's last ones, reading the mean of the two last taps."""
    config = target.config
    first = config.num_hidden_layers - LAYERS
    drafter = DFlashModel(
        DFlashConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=LAYERS,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters=config.rope_parameters,
            block_size=BLOCK,
            mask_token_id=MASK_ID,
            target_layer_ids=TAPS,
            num_target_layers=config.num_hidden_layers,
        )
    )
    with torch.no_grad():
        for index, layer in enumerate(drafter.layers):
            layer.load_state_dict(target.model.layers[first + index].state_dict())
        drafter.norm.weight.copy_(target.model.norm.weight)
        # The context skips the layers' own input norms, so its norm starts as their mean.
        norms = [weight for name, weight in drafter.named_parameters() if name.endswith("input_layernorm.weight")]
        drafter.hidden_norm.weight.copy_(torch.stack(norms).mean(0))
        width = config.hidden_size
        drafter.fc.weight.normal_(std=0.002)
        drafter.fc.weight[:, -2 * width :] += 0.5 * torch.eye(width).repeat(1, 2)
    return drafter


@dataclass(frozen=True)
class Blocks:
    """What a pass over some texts needs, with several blocks each; a slot sees its block and all before its anchor.

    slots `(rows, anchors * BLOCK)` token ids, taps `(rows, LONGEST, width)`, position_ids, visible `(rows, 1,
    anchors, LONGEST)`, labels `(rows, anchors, BLOCK - 1)` with -100 beyond the text's end.
    """

    slots: torch.Tensor
    taps: torch.Tensor
    position_ids: torch.Tensor
    visible: torch.Tensor
    labels: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.slots, self.taps, self.position_ids, self.visible, self.labels


def make_blocks(texts: list[Text], anchors: np.ndarray) -> Blocks:
    """`anchors` of shape `(rows, anchors)` are indices into each text."""
    rows, count = anchors.shape
    tokens = np.full((rows, LONGEST + BLOCK), NO_LABEL, dtype=np.int64)
    taps = np.zeros((rows, LONGEST, texts[0].taps.shape[1]), dtype=np.float16)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text.tokens
        taps[row, : len(text)] = text.taps
    places = (anchors[:, :, None] + np.arange(BLOCK)).reshape(rows, -1)
    blocks = np.take_along_axis(tokens, places, axis=1).reshape(rows, count, BLOCK)
    slots = np.full_like(blocks, MASK_ID)
    slots[:, :, 0] = blocks[:, :, 0]

    return Blocks(
        slots=torch.from_numpy(slots.reshape(rows, -1)),
        taps=torch.from_numpy(taps).float(),
        position_ids=torch.cat([torch.arange(LONGEST).expand(rows, -1), torch.from_numpy(places)], dim=1),
        visible=(torch.arange(LONGEST) < torch.from_numpy(anchors)[:, :, None])[:, None],
        labels=torch.from_numpy(blocks[:, :, 1:]),
    )


def draft(
    drafter: DFlashModel, embedding: torch.Tensor, slots: torch.Tensor, taps: torch.Tensor, *rest: torch.Tensor
) -> torch.Tensor:
    """Logits of the drafted slots, `(rows * anchors, BLOCK - 1, vocabulary)`; `rest` as in [`Blocks`]."""
    position_ids, visible = rest
    drafter.config._attn_implementation = block_attention.NAME
    states = drafter(
        noise_embeds=F.embedding(slots, embedding),
        context_hidden_states=taps,
        attention_mask=visible,
        position_ids=position_ids,
    ).last_hidden_state
    states = states.view(-1, BLOCK, states.shape[-1])[:, 1:]
    return F.linear(states, embedding)
