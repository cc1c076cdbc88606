"""From the target's taps to a draft tree: one drafter pass, its scorer, the best-first tree."""

from typing import Any, ClassVar

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import CandidateGenerator

from hf_ddtree.cache import DrafterContext
from hf_ddtree.compat import CACHE_NAME, model_name
from hf_ddtree.drafters import TargetIO
from hf_ddtree.drafters.heads import path_scorer
from hf_ddtree.integers import long_tensor
from hf_ddtree.tree import (
    DeviceMarginals,
    DeviceTree,
    DraftTree,
    MarginalScorer,
    Scorer,
    build_from_scorer,
    builds_on_device,
    top_marginals,
    useful_marginals,
)


class DDTreeCandidateGenerator(CandidateGenerator):
    r"""
    Drafts with a DFlash drafter (hf.co/papers/2602.06036): trees for tree decoding, the chain for Transformers' own
    loop.

    Args:
        assistant_model (`PreTrainedModel`): a [`DFlashModel`] or a native DFlash assistant.
        target (`PreTrainedModel`): the model that will verify; its embedding and head are used.
        generation_config (`GenerationConfig`): read for `max_length` and `do_sample`.
        budget (`int`, *optional*, defaults to `15`): nodes of a tree at most, the root not counted.
        max_branching (`int`, *optional*): children of a node at most.
        context (`DrafterContext`, *optional*): what the drafter has read of this sequence already.
    """

    requires_model_outputs = True
    model_kwargs_overrides: ClassVar[dict[str, Any]] = {"output_hidden_states": True}

    def __init__(
        self,
        assistant_model: PreTrainedModel,
        target: PreTrainedModel,
        generation_config: GenerationConfig,
        budget: int = 15,
        max_branching: int | None = None,
        context: DrafterContext | None = None,
    ):
        self.drafter, self.config = assistant_model, assistant_model.config
        self.target_io = TargetIO(target, assistant_model)
        self.context = context if context is not None else DrafterContext(assistant_model)
        self.max_length, self.do_sample = generation_config.max_length, generation_config.do_sample
        self.budget, self.max_branching = budget, max_branching
        # A native assistant's configuration knows the fill-in layout only, whose slot 0 drafts nothing.
        self.first_slot = getattr(self.config, "first_draft_slot", 1)
        #: `int`: tokens a pass drafts, which bounds a tree's depth.
        self.draft_depth = self.config.block_size - self.first_slot
        heads = ("markov_head", "candidate_selector")
        self._has_head = any(getattr(assistant_model, name, None) is not None for name in heads)
        masks = torch.full((1, self.config.block_size - 1), self.config.mask_token_id)
        self._mask_embeds = self.target_io.embed(masks)
        self._offsets = torch.arange(1, self.config.block_size)

    @torch.no_grad()
    def draft_states(
        self,
        anchor: int,
        taps: torch.Tensor,
        position_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        depth: int,
        keep: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One drafter pass.

        Args:
            anchor (`int`): the last token, not in the target's cache yet.
            taps (`torch.Tensor` of shape `(1, new, taps * hidden_size)`): of the tokens before it that are new.
            position_ids (`torch.Tensor` of shape `(..., 1, length)`, *optional*): ending at the anchor's.
            attention_mask (`torch.Tensor` of shape `(1, length)`, *optional*): ending at the anchor.
            depth (`int`): draft positions wanted, at most `draft_depth`.
            keep (`bool`, *optional*, defaults to `True`): whether the context keeps what the pass has read.

        Returns:
            `torch.Tensor` of shape `(depth, hidden_size)`: final states of the positions after the anchor, and their
            fp32 logits, `(depth, draft vocabulary)`.
        """
        device, new = self.target_io.device, taps.shape[1]
        anchor_embed = self.target_io.embed(long_tensor([[anchor]]))
        positions = self._positions(position_ids, new)
        self._offsets = self._offsets.to(positions.device)
        positions = torch.cat([positions, positions[:, -1:] + self._offsets], dim=-1)
        mask = None
        if attention_mask is not None:
            covered = self.context.cache.get_seq_length() + new
            mask = attention_mask[:, -covered - 1 :].to(device)
            mask = torch.cat([mask, mask.new_ones((1, self.config.block_size - 1))], dim=-1)
        try:
            self.context.begin(new)
            outputs = self.drafter(
                noise_embeds=torch.cat([anchor_embed, self._mask_embeds], dim=1),
                context_hidden_states=taps.to(device=device, dtype=self.target_io.dtype),
                position_ids=positions.to(device),
                attention_mask=mask,
                **{CACHE_NAME: self.context.cache},
            )
        except BaseException:
            self.context.rollback()
            raise
        if keep:
            self.context.commit(new)
        else:
            self.context.rollback()
        states = outputs.last_hidden_state[:, self.first_slot : self.first_slot + depth]
        return states[0], self.target_io.logits(states)[0]

    def _positions(self, position_ids: torch.Tensor | None, new: int) -> torch.Tensor:
        """`(1, new + 1)` positions of the new context and the anchor."""
        if position_ids is None:
            last = self.context.position + new
            return torch.arange(last - new, last + 1)[None]
        flat = position_ids.reshape(-1, position_ids.shape[-1])[:1]
        if flat.shape[1] > new:
            return flat[:, -new - 1 :]
        return flat[:, -1:] + torch.arange(-new, 1, device=flat.device)

    def scorer(
        self, states: torch.Tensor, logits: torch.Tensor, budget: int | None = None, overwrite: bool = False
    ) -> Scorer:
        """The drafter's path-conditioned head, or its marginals, of no more ranks than the budget can use; `overwrite`
        as in [`top_marginals`].
        """
        budget = self.budget if budget is None else budget
        if self._has_head:
            if torch.isnan(states).any():
                self._refuse_nan()
            head = path_scorer(self.drafter, states, logits, self.target_io.token_map)
            assert head is not None
            return head
        try:
            return MarginalScorer(*self._on_host(logits, budget, overwrite), ranked=True)
        except ValueError:
            # It looks at all that it takes, so that the states need no look of their own in each round.
            if torch.isnan(states).any():
                self._refuse_nan()
            raise

    def ranking(
        self, states: torch.Tensor, logits: torch.Tensor, budget: int | None = None
    ) -> Scorer | DeviceMarginals:
        """What [`DDTreeCandidateGenerator.build`] takes: [`DDTreeCandidateGenerator.scorer`], but an accelerator that
        is the sooner to build the tree keeps its marginals, unread. NaN then shows when the tree comes to the host,
        before anything of it is emitted. The logits are not kept: what is computed may take their memory.
        """
        budget = self.budget if budget is None else budget
        depth, vocabulary = logits.shape
        if self._has_head or not builds_on_device(logits.device, depth, self._width(budget, vocabulary), budget):
            return self.scorer(states, logits, budget, overwrite=True)
        nan = torch.isnan(states).any()[None].to(logits.device)

        def explain() -> None:
            if nan:
                self._refuse_nan()

        return DeviceMarginals(*self._top(logits, budget, overwrite=True), nan, explain)

    def _refuse_nan(self) -> None:
        raise ValueError(
            f"The drafter {model_name(self.drafter)} in {self.drafter.dtype} gave NaN logits: load it with "
            "`dtype=torch.bfloat16` or `torch.float32`."
        )

    def _on_host(self, logits: torch.Tensor, budget: int, overwrite: bool) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities and target tokens of the ranks that the budget can use, or only of those that its tree can
        hold, where the logits may be overwritten.
        """
        if not overwrite or logits.device.type != "cpu" or self._width(budget, budget) < budget:
            log_probs, token_ids = self._top(logits, budget, overwrite)
            return log_probs.cpu().numpy(), token_ids.cpu().numpy()
        useful, ids = useful_marginals(logits, max(1, budget))
        if (token_map := self.target_io.token_map) is not None:
            ids = token_map.to("cpu")[torch.from_numpy(ids)].numpy()
        return useful, ids

    def _top(self, logits: torch.Tensor, budget: int, overwrite: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and target tokens of the ranks that the budget can use."""
        log_probs, token_ids = top_marginals(logits, self._width(budget, logits.shape[-1]), overwrite)
        if (token_map := self.target_io.token_map) is not None:
            token_ids = token_map.to(token_ids.device)[token_ids]
        return log_probs, token_ids

    def _width(self, budget: int, vocabulary: int) -> int:
        return max(1, min(budget, self.max_branching or budget, vocabulary))

    def build(
        self, anchor: int, ranking: Scorer | DeviceMarginals, budget: int | None = None
    ) -> DraftTree | DeviceTree:
        """The tree of `budget` nodes with the highest expected acceptance length under the scorer (Algorithm 1)."""
        budget = self.budget if budget is None else budget
        if isinstance(ranking, DeviceMarginals):
            return ranking.build(budget, anchor)
        return build_from_scorer(ranking, budget, max_branching=self.max_branching, anchor=anchor)

    def get_candidates(
        self,
        input_ids: torch.Tensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Transformers' contract for assisted decoding: the most probable chain, and its logits.

        There are none when sampling, from a path-conditioned head, and over a vocabulary of the drafter's own: without
        them the native loop accepts a token only if the target chose it, which keeps sampling exact.

        Args:
            input_ids (`torch.LongTensor` of shape `(1, length)`): the sequence, the anchor last.
            model_kwargs (`dict`): `generate`'s.
            model_outputs (`ModelOutput`): of the target's last forward, with all `hidden_states`.
            is_first_iteration (`bool`): whether the target has not read the prompt yet; nothing is drafted then.
            n_last_matches (`int`): how many of the last candidates the target accepted.

        Returns:
            `(1, length + depth)` ids, and `(1, depth, vocab_size)` fp32 logits or `None`.

        Raises:
            ValueError: if `model_outputs` has no hidden states.
        """
        depth = min(self.draft_depth, self.max_length - input_ids.shape[1] - 1)
        if is_first_iteration or depth <= 0:
            return input_ids, None
        if getattr(model_outputs, "hidden_states", None) is None:
            raise ValueError("`model_outputs` must hold `hidden_states`: the drafter reads them.")
        first = self.context.position == 0
        new = input_ids.shape[1] - 1 if first else int(n_last_matches) + 1
        taps = [model_outputs.hidden_states[i + 1][:, :new] for i in self.config.target_layer_ids]
        kwargs, anchor = model_kwargs or {}, int(input_ids[0, -1])
        states, logits = self.draft_states(
            anchor,
            torch.cat([tap.to(taps[0].device) for tap in taps], dim=-1),
            kwargs.get("position_ids"),
            kwargs.get("attention_mask"),
            depth,
        )
        scorer = self.scorer(states, logits)
        tree = build_from_scorer(scorer, depth, max_branching=1, anchor=anchor)
        chain = tree.token_ids[1:].to(input_ids.device)[None]
        independent = isinstance(scorer, MarginalScorer) and self.target_io.token_map is None
        given = logits[None].to(input_ids.device) if independent and not self.do_sample else None
        return torch.cat([input_ids, chain], dim=-1), given
