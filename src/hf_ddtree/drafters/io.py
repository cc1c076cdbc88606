"""What a drafter borrows of its target: the embedding, the head, and the head's scaling."""

from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from hf_ddtree.compat import text_config


class TargetIO:
    """Embeds tokens and turns drafter states into logits, with the target's own weights.

    Args:
        target (`PreTrainedModel`): the model whose embedding and head are used; nothing of it is changed.
        drafter (`PreTrainedModel`): the drafter, whose configuration may scale either.
    """

    def __init__(self, target: PreTrainedModel, drafter: PreTrainedModel):
        config, target_config = drafter.config, text_config(target)
        self.embedding = target.get_input_embeddings()
        self.head = target.get_output_embeddings()
        self.dtype, self.device = drafter.dtype, drafter.device
        self.scale = getattr(config, "input_embedding_scale", None)
        self.multiplier = getattr(config, "output_multiplier", None) or _target_multiplier(target_config)
        own_cap = getattr(config, "final_logit_softcapping", None)
        self.softcap = own_cap or getattr(target_config, "final_logit_softcapping", None)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`(batch, length)` ids to `(batch, length, hidden_size)` in the drafter's dtype, on its device."""
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
        """`(batch, length, hidden_size)` to fp32 logits `(batch, length, vocab_size)`, softcapped as the target's."""
        weight = self.head.weight
        logits = self.head(states.to(device=weight.device, dtype=weight.dtype)).float()
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
