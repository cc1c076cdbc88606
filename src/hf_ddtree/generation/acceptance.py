"""Walking a verified tree: which tokens the target itself would have chosen, one at a time as `generate` does."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from hf_ddtree.integers import long_tensor
from hf_ddtree.tree import DeviceTree, DraftTree, chooser


@dataclass
class Walk:
    """What a walk emitted.

    Args:
        input_ids (`torch.LongTensor` of shape `(1, length)`): the sequence, new tokens included.
        path (`list[int]`): the nodes whose logits chose a token, root first; one for each new token.
        last_token (`int`): the last new token, the next round's anchor.
        finished (`bool`): whether a stopping criterion fired on it.
        tree (`DraftTree`): the tree that was walked, on the host.
    """

    input_ids: torch.Tensor
    path: list[int]
    last_token: int
    finished: bool
    tree: DraftTree


class LazyWalk:
    """Processors, choice, stopping and streaming for one token at a time, in the order and number of `generate`'s own.

    Sampling draws once a token from the processed distribution of the node that was reached, so that with a seed the
    output is the one `generate` samples without a drafter, draw for draw.

    Args:
        logits_processor, stopping_criteria, generation_config, streamer: as the decoding method receives them.
    """

    def __init__(
        self,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: Any,
    ):
        self.logits_processor, self.stopping_criteria = logits_processor, stopping_criteria
        self.do_sample, self.streamer = generation_config.do_sample, streamer
        wanted = generation_config.return_dict_in_generate
        self.scores: tuple[torch.Tensor, ...] | None = () if wanted and generation_config.output_scores else None
        self.logits: tuple[torch.Tensor, ...] | None = () if wanted and generation_config.output_logits else None

    def __call__(self, tree: DraftTree | DeviceTree, logits: torch.Tensor, input_ids: torch.Tensor) -> Walk:
        """Walks from the root.

        Args:
            tree (`DraftTree` or `DeviceTree`): the verified tree.
            logits (`torch.Tensor` of shape `(1, nodes, vocab_size)`): the target's.
            input_ids (`torch.LongTensor` of shape `(1, length)`): the sequence, the anchor last.

        Raises:
            `ValueError`: before a token is chosen, if a [`DeviceTree`] turns out to be built from NaN.
        """
        tree = tree.on_host()
        node, path = 0, []
        while True:
            path.append(node)
            token, input_ids = self._choose(input_ids, logits[:, node])
            finished = bool(self.stopping_criteria(input_ids, self.scores).all())
            if self.streamer is not None:
                self.streamer.put(input_ids[:, -1].cpu())
            child = tree.child(node, token)
            if finished or child is None:
                return Walk(input_ids, path, token, finished, tree)
            node = child

    def _choose(self, input_ids: torch.Tensor, logits: torch.Tensor) -> tuple[int, torch.Tensor]:
        logits = logits.to(copy=True, dtype=torch.float32, device=input_ids.device)
        scores = self.logits_processor(input_ids, logits)
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)
        if self.do_sample:
            token = torch.multinomial(nn.functional.softmax(scores, dim=-1), num_samples=1)
        else:
            token = scores.argmax(dim=-1, keepdim=True)
        return int(token), torch.cat([input_ids, token], dim=-1)


class GreedyWalk:
    """The walk of greedy decoding that stops at a length or an end token only.

    On an accelerator there is one argmax over all nodes, brought to the host with the tree by one wait for the device.
    On a CPU, where nothing waits, only the nodes that are reached are looked at.

    Args:
        stopping_criteria, streamer: as the decoding method receives them.
    """

    scores = None
    logits = None

    def __init__(self, stopping_criteria: StoppingCriteriaList, streamer: Any):
        self.streamer = streamer
        self.max_length: int | None = None
        self.end_ids: set[int] = set()
        for criterion in stopping_criteria:
            if isinstance(criterion, MaxLengthCriteria):
                length = criterion.max_length
                self.max_length = length if self.max_length is None else min(length, self.max_length)
            else:
                self.end_ids |= set(criterion.eos_token_id.flatten().tolist())

    @staticmethod
    def serves(
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
    ) -> bool:
        """Whether this walk gives what [`LazyWalk`] would."""
        wanted = generation_config.return_dict_in_generate and (
            generation_config.output_scores or generation_config.output_logits
        )
        plain = all(type(criterion) in (MaxLengthCriteria, EosTokenCriteria) for criterion in stopping_criteria)
        return not (generation_config.do_sample or len(logits_processor) or wanted) and plain

    def __call__(self, tree: DraftTree | DeviceTree, logits: torch.Tensor, input_ids: torch.Tensor) -> Walk:
        """As [`LazyWalk.__call__`]."""
        if logits.device.type == "cpu":
            tree, choose = tree.on_host(), chooser(logits[0])
        else:
            tree, choices = tree.on_host_with(logits[0].argmax(dim=-1))
            choose = choices.__getitem__
        length, last, node, path, tokens, finished = input_ids.shape[1], len(tree) - 1, 0, [], [], False
        while True:
            token = choose(node)
            path.append(node)
            tokens.append(token)
            finished = token in self.end_ids or (self.max_length is not None and length + len(path) >= self.max_length)
            # The last node has no child, as that of a round without a draft.
            child = None if finished or node == last else tree.child(node, token)
            if child is None:
                break
            node = child
        new = long_tensor(tokens).to(input_ids.dtype)
        if self.streamer is not None:
            for token_id in new.split(1):
                self.streamer.put(token_id)
        return Walk(torch.cat([input_ids, new.to(input_ids.device)[None]], dim=-1), path, token, finished, tree)
