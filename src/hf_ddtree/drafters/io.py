"""What turns tokens into a drafter's inputs and its states into logits: the target's modules, or the drafter's own."""

from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from hf_ddtree.compat import text_config
from hf_ddtree.drafters.borrowing import borrowed, device_of, dtype_of, embedding_shape, plain_weight, unwrapped


class TargetIO:
    """Embeds tokens and turns drafter states into logits, with the target's modules or the drafter's own.

    The modules are called, so that quantised, offloaded, sharded and adapted ones serve as they serve the target.

    Args:
        target (`PreTrainedModel`): the model whose embedding and head are borrowed; nothing of it is changed. Where
            FSDP2 shards it, every process makes its `TargetIO` at the same time.
        drafter (`PreTrainedModel`): the drafter. Its configuration may scale either, or say that it has its own.
    """

    def __init__(self, target: PreTrainedModel, drafter: PreTrainedModel):
        config, target_config = drafter.config, text_config(target)
        own_embedding, own_head = (getattr(config, name, False) for name in ("own_embedding", "own_head"))
        embedding = drafter.embed_tokens if own_embedding else target.get_input_embeddings()
        head = drafter.lm_head if own_head else target.get_output_embeddings()
        self.embedding = borrowed(drafter if own_embedding else target, embedding)
        self.head = borrowed(drafter if own_head else target, head)
        self.dtype, self.device = drafter.dtype, drafter.device
        self._ids_device, self._head_device = device_of(self.embedding), device_of(self.head)
        self._head_dtype = dtype_of(self.head, drafter if own_head else target)
        self.scale = getattr(config, "input_embedding_scale", None)
        self.multiplier = getattr(config, "output_multiplier", None)
        self.softcap = getattr(config, "final_logit_softcapping", None)
        if not own_head:
            self.multiplier = self.multiplier or _target_multiplier(target_config)
            self.softcap = self.softcap or getattr(target_config, "final_logit_softcapping", None)
        self._rows = embedding_shape(target)[0]
        #: `torch.LongTensor` of shape `(draft_vocab_size,)`, the target's id of each token of [`TargetIO.logits`], or
        #: `None` where these are the target's own ids.
        self.token_map: torch.Tensor | None = None
        if getattr(config, "draft_vocab_size", None) is not None:
            self.token_map = torch.arange(len(drafter.d2t), device=drafter.d2t.device) + drafter.d2t

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`(batch, length)` target ids to `(batch, length, hidden_size)` in the drafter's dtype, on its device."""
        token_ids = token_ids.to(self._ids_device)
        if self.scale is not None:
            states = self._rows_of(token_ids) * self.scale
        elif getattr(self.embedding, "embed_norm", None) is not None:
            states = F.embedding(token_ids, self.embedding.weight)
        else:
            states = self.embedding(token_ids)
        return states.to(device=self.device, dtype=self.dtype)

    def _rows_of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding's table without the scale that some targets multiply them by."""
        weight = plain_weight(self.embedding)
        if weight is not None:
            return F.embedding(token_ids, weight)
        return self.embedding(token_ids) / getattr(unwrapped(self.embedding), "embed_scale", 1.0)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """`(batch, length, hidden_size)` to fp32 logits `(batch, length, draft vocabulary)`, scaled and softcapped.

        A head padded beyond the target's vocabulary is cut, so that every id is one the target can embed. The caller
        may write to them: a hook of the head that keeps what it is given here must copy it.
        """
        logits = self.head(states.to(device=self._head_device, dtype=self._head_dtype)).float()
        if self.token_map is None and logits.shape[-1] > self._rows:
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
