"""What a tree builder asks of a path-conditioned head (the `Scorer` protocol of `hf_ddtree.tree`)."""

from typing import Any

import torch

from hf_ddtree.tree import Expansion, Scorer, log_probs_at, rank_children

from .markov import ConfidenceHead, MarkovHead
from .selector import CandidateSelector

# Scores of whole vocabularies held at once, 32 MiB in fp32; ranking them takes several times as much.
MAX_SCORES = 2**23


def path_scorer(
    drafter: Any, states: torch.Tensor, logits: torch.Tensor, token_map: torch.Tensor | None = None
) -> Scorer | None:
    """
    The scorer of a drafter's head, or `None` when its positions are independent of each other.

    Args:
        drafter (`PreTrainedModel`): a [`DFlashModel`], or a native assistant, which has no head.
        states (`torch.Tensor` of shape `(depth, hidden_size)`): final states of the slots that draft.
        logits (`torch.Tensor` of shape `(depth, draft vocabulary)`): unprocessed, from those states.
        token_map (`torch.LongTensor` of shape `(draft vocabulary,)`, *optional*): the target's token of each.
    """
    threshold = getattr(drafter.config, "confidence_threshold", None)
    confidence = None if threshold is None else drafter.confidence_head
    if getattr(drafter, "markov_head", None) is not None:
        return MarkovScorer(drafter.markov_head, states, logits, token_map, confidence, threshold or 0.0)
    if getattr(drafter, "candidate_selector", None) is not None:
        return SelectorScorer(drafter.candidate_selector, states, logits)
    return None


class MarkovScorer:
    """
    log p(child | path) is the log-softmax, over the head's whole vocabulary, of the logits plus DSpark's Markov bias.

    Args:
        head ([`MarkovHead`]): vanilla, gated or rnn.
        states, logits, token_map: see [`path_scorer`].
        confidence ([`ConfidenceHead`], *optional*): when given, ends paths it does not trust.
        threshold (`float`, *optional*, defaults to `0.0`): parents below it get no children.
    """

    def __init__(
        self,
        head: MarkovHead,
        states: torch.Tensor,
        logits: torch.Tensor,
        token_map: torch.Tensor | None = None,
        confidence: ConfidenceHead | None = None,
        threshold: float = 0.0,
    ) -> None:
        self.head, self.states, self.confidence, self.threshold = head, states, confidence, threshold
        # A target's head may be padded beyond the tokens there are.
        self.vocabulary = min(logits.shape[-1], head.markov_w2.out_features)
        self.logits = logits[:, : self.vocabulary].to(states.device)
        self.token_map = None if token_map is None else token_map.to(states.device)

    @property
    def depth(self) -> int:
        return len(self.logits)

    def expand(self, depth: int, tokens: torch.Tensor, node_state: torch.Tensor | None, width: int) -> Expansion:
        tokens = tokens.to(self.states.device)
        rows = max(1, MAX_SCORES // self.vocabulary)
        pieces = [
            self._expand(depth, part, None if node_state is None else node_state[i * rows : (i + 1) * rows], width)
            for i, part in enumerate(tokens.split(rows))
        ]
        log_probs, token_ids, states = zip(*pieces, strict=True)
        state = None if states[0] is None else torch.cat(states)
        return Expansion(torch.cat(log_probs), torch.cat(token_ids), state)

    def _expand(self, depth: int, tokens: torch.Tensor, state: torch.Tensor | None, width: int) -> Expansion:
        hidden = self.states[depth].expand(len(tokens), -1)
        bias, state = self.head.step(tokens, hidden, state)
        scores = self.logits[depth] + bias[:, : self.vocabulary].to(self.logits.dtype)
        values, ids = rank_children(scores, width)
        log_probs = values - scores.logsumexp(-1, keepdim=True)
        if self.confidence is not None:
            embedded = self.head.embed(tokens) if self.confidence.with_markov else None
            doubtful = self.confidence(hidden, embedded) < self.threshold
            log_probs = log_probs.masked_fill(doubtful[:, None], -torch.inf)
        return Expansion(log_probs, ids if self.token_map is None else self.token_map[ids], state)


class SelectorScorer:
    """
    log p(child | parent) from DFlash2's candidate selector.

    The selector tells only how a position's candidates share their probability: it is trained and used on these alone,
    so a constant added to a parent's scores means nothing. How much there is to share is told by the logits. So the
    softmax of `score_t(a, .)` over the candidates is multiplied by the candidates' probability under the log-softmax
    of `U_t` over the whole vocabulary; all other tokens keep theirs, and are not drafted. Along a path this ranks
    children as the selector does.

    Args:
        selector ([`CandidateSelector`]): the head.
        states, logits: see [`path_scorer`].
    """

    def __init__(self, selector: CandidateSelector, states: torch.Tensor, logits: torch.Tensor) -> None:
        self.selector = selector
        logits = logits[:, : len(selector.successor_codebook)].to(states.device)
        _, candidates = rank_children(logits, selector.top_k)
        # By id, so that equal scores rank by the lower one.
        self.candidates = candidates.sort(dim=-1).values
        self.unary = logits.gather(-1, self.candidates)
        self.log_mass = log_probs_at(logits, self.candidates).logsumexp(-1)
        self.projected = selector.hidden_projection(states)

    @property
    def depth(self) -> int:
        return len(self.candidates)

    def expand(self, depth: int, tokens: torch.Tensor, node_state: torch.Tensor | None, width: int) -> Expansion:
        candidates = self.candidates[depth]
        tokens = tokens.to(candidates.device)
        transitions = self.selector.transitions(tokens, self.projected[depth], candidates)
        scores = self.unary[depth] + transitions.to(self.unary.dtype)
        log_probs, ranks = rank_children(scores.log_softmax(-1) + self.log_mass[depth], width)
        return Expansion(log_probs, candidates[ranks], None)
