"""DFlash2's candidate selector: how well a candidate follows the token before it."""

from typing import Any

import torch
from torch import nn

from .markov import embed_known


class CandidateSelector(nn.Module):
    """
    Scores pairs of neighbouring tokens: `score_t(a, b) = U_t(b) + <A[a] * (W h_t), B[b]>`.

    `U` are the logits, `h_t` the drafter's final state at the position, `a` the token before it, and `b` one of the
    `top_k` candidates by `U_t`.

    Args:
        config ([`DFlashConfig`]): read for `vocab_size`, `hidden_size`, `selector_rank` and `selector_top_k`.
    """

    def __init__(self, config: Any):
        super().__init__()
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.selector_rank))
        nn.init.normal_(self.predecessor_codebook, std=config.initializer_range)
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def transitions(self, tokens: torch.Tensor, projected: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """
        Args:
            tokens (`torch.LongTensor` of shape `(rows,)`): the tokens before the position.
            projected (`torch.Tensor` of shape `(rank,)`): `W h_t`.
            candidates (`torch.LongTensor` of shape `(candidates,)`): tokens that may stand at the position.

        Returns:
            `torch.Tensor` of shape `(rows, candidates)`: what is added to the candidates' logits.
        """
        predecessors = embed_known(tokens, self.predecessor_codebook) * projected
        return predecessors @ self.successor_codebook[candidates].T
