"""What turns tokens into a drafter's inputs and its states into logits: the target's weights, or the drafter's own."""

from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from hf_ddtree.compat import text_config


class TargetIO:
    """Embeds tokens and turns drafter states into logits, with the target's weights or the drafter's own.

    Args:
        target (`PreTrainedModel`): the model whose embedding and head are borrowed; nothing of it is changed.
        drafter (`PreTrainedModel`): the drafter. Its configuration may scale either, or say that it has its own.
    """

    def __init__(self, target: PreTrainedModel, drafter: PreTrainedModel):
        config, target_config = drafter.config, text_config(target)
        own_embedding, own_head = (getattr(config, name, False) for name in ("own_embedding", "own_head"))
        self.embedding = drafter.embed_tokens if own_embedding else target.get_input_embeddings()
        self.head = drafter.lm_head if own_head else target.get_output_embeddings()
        self.dtype, self.device = drafter.dtype, drafter.device
        self.scale = getattr(config, "input_embedding_scale", None)
        self.multiplier = getattr(config, "output_multiplier", None)
        self.softcap = getattr(config, "final_logit_softcapping", None)
        if not own_head:
            self.multiplier = self.multiplier or _target_multiplier(target_config)
            self.softcap = self.softcap or getattr(target_config, "final_logit_softcapping", None)
        self._rows = target.get_input_embeddings().weight.shape[0]
        #: `torch.LongTensor` of shape `(draft_vocab_size,)`, the target's id of each token of [`TargetIO.logits`], or
        #: `None` where these are the target's own ids.
        self.token_map: torch.Tensor | None = None
        if getattr(config, "draft_vocab_size", None) is not None:
            self.token_map = torch.arange(len(drafter.d2t), device=drafter.d2t.device) + drafter.d2t

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`(batch, length)` target ids to `(batch, length, hidden_size)` in the drafter's dtype, on its device."""
        weight = self.embedding.weight
        token_ids = token_ids.to(weight.device)
        if self.scale is not None:
            states = F.embedding(token_ids, weight) * self.scale
        elif getattr(self.embedding, "embed_norm", None) is not None:
            states = F.embedding(token_ids, weight)
        else:
            states = self.embedding(token_ids)
        return states.to(device=self.device, dtype=self.dtype)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """`(batch, length, hidden_size)` to fp32 logits `(batch, length, draft vocabulary)`, scaled and softcapped.

        A head padded beyond the target's vocabulary is cut, so that every id is one the target can embed.
        """
        weight = self.head.weight
        logits = self.head(states.to(device=weight.device, dtype=weight.dtype)).float()
        if self.token_map is None:
            logits = logits[..., : self._rows]
        if self.multiplier is not None:
            logits = logits * self.multiplier
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def _target_multiplier(config: Any) -> float | None:
    """Cohere multiplies its logits by `logit_scale`, Granite divides them by `logits_scaling`."""
    if getattr(config, "logit_scale", None) is not None:
        return float(config.logit_scale)
    if getattr(config, "logits_scaling", None) is not None:
        return 1.0 / float(config.logits_scaling)
    return None
