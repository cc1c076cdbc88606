"""DSpark's heads: a low-rank bias that depends on the tokens before, and a confidence in the draft."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class MarkovHead(nn.Module):
    """
    The vanilla head: `bias = W2 W1[token]`, the token being the one before the position that is scored.

    Args:
        config ([`DFlashConfig`]): read for `vocab_size`, `draft_vocab_size`, `hidden_size` and `markov_rank`.
    """

    def __init__(self, config: Any):
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size or config.vocab_size, bias=False)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """`(rows,)` target tokens to `(rows, rank)`; a token of the target's padding is 0, so it brings no bias."""
        return embed_known(tokens, self.markov_w1.weight)

    def step(
        self, tokens: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        One position of several drafts.

        Args:
            tokens (`torch.LongTensor` of shape `(rows,)`): the token before the position.
            hidden (`torch.Tensor` of shape `(rows, hidden_size)`): the drafter's final state at the position.
            state (`torch.Tensor` of shape `(rows, rank)`, *optional*): what the last step returned.

        Returns:
            The bias on the logits, `(rows, draft vocabulary)`, and the state for the next position.
        """
        return self.markov_w2(self.embed(tokens)), None


class GatedMarkovHead(MarkovHead):
    """`bias = W2 (sigmoid(G [hidden ; e]) * e)` with `e = W1[token]`."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def step(
        self, tokens: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        embedded = self.embed(tokens)
        gate = self.gate_proj(torch.cat([hidden, embedded], dim=-1)).sigmoid()
        return self.markov_w2(gate * embedded), None


class RecurrentMarkovHead(MarkovHead):
    """
    The rnn head: a state that has read every token of the path, zero before the anchor.

    `[g ; c ; o] = J [state ; e ; hidden]`, `state' = sigmoid(g) * state + (1 - sigmoid(g)) * tanh(c)`, and
    `bias = W2 tanh(o)`.
    """

    def __init__(self, config: Any):
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * config.markov_rank + config.hidden_size, 3 * config.markov_rank)

    def step(
        self, tokens: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        embedded = self.embed(tokens)
        state = torch.zeros_like(embedded) if state is None else state
        joint = self.joint_proj(torch.cat([state, embedded, hidden], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = gate.sigmoid()
        return self.markov_w2(output.tanh()), gate * state + (1 - gate) * candidate.tanh()


class ConfidenceHead(nn.Module):
    """
    The probability that the target accepts a position's draft, given that it accepted those before.

    Args:
        config ([`DFlashConfig`]): read for `hidden_size`, `confidence_head_with_markov` and `markov_rank`.
    """

    def __init__(self, config: Any):
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        self.proj = nn.Linear(config.hidden_size + self.with_markov * config.markov_rank, 1)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor | None) -> torch.Tensor:
        """`(rows, hidden_size)` states and, where it reads them, `(rows, rank)` Markov embeddings to `(rows,)`."""
        features = torch.cat([hidden, embedded], dim=-1) if self.with_markov and embedded is not None else hidden
        return self.proj(features)[..., 0].sigmoid()


def build_markov_head(config: Any) -> MarkovHead:
    """The head that `config.markov_head_type` names."""
    kinds = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RecurrentMarkovHead}
    return kinds[config.markov_head_type](config)


def embed_known(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows of a table, and zeros for tokens beyond it, which only a target's padding has."""
    known = tokens < table.shape[0]
    return F.embedding(tokens.clamp(max=table.shape[0] - 1), table) * known[:, None]
