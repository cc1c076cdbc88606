"""The forwards that a target's self-test compares: a tree's, and plain ones over the same tokens."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_ddtree.cache import DDTreeCache, begin
from hf_ddtree.compat import CACHE_NAME, has_adapters, text_config
from hf_ddtree.generation.verification import TreeVerifier
from hf_ddtree.round import TreeRound
from hf_ddtree.tree import DraftTree


class TrialForwards:
    """Short forwards of a target, which its own hooks do not see unless they are what brings its weights.

    Args:
        target (`PreTrainedModel`): the model that will verify.
        device (`torch.device`): where its inputs go.
        prefix_length (`int`): tokens before a tree's root.
        through_hooks (`bool`): whether the target's hooks must run, as for sharded weights.
    """

    def __init__(self, target: PreTrainedModel, device: torch.device, prefix_length: int, through_hooks: bool):
        self.target, self.device, self.prefix_length = target, device, prefix_length
        # Adapters may hold something for each row of the batch that `generate` was called with, which is one.
        self.rows_at_once = 1 if has_adapters(target) else None
        self.forward: Callable[..., Any] = target if through_hooks else functools.partial(type(target).forward, target)

    def tree(
        self, verifier: TreeVerifier, prefix: torch.Tensor, tree: DraftTree, tree_round: TreeRound, cache: DDTreeCache
    ) -> torch.Tensor:
        """`(nodes, vocab_size)` logits of a tree behind the prefix `(1, prefix_length)`; the round stays open."""
        self._plain(prefix, cache, 0)
        begin(cache)
        positions = torch.arange(self.prefix_length + 1, device=self.device)[None]
        kwargs: dict[str, Any] = {CACHE_NAME: cache, "position_ids": positions, "use_cache": True}
        with verifier.reading(tree_round):
            return self.forward(**verifier.inputs(tree, kwargs), return_dict=True).logits[0].float()

    def in_a_row(self, rows: torch.Tensor) -> torch.Tensor:
        """`(rows, tokens, vocab_size)` logits of the tokens after the prefix, all read at once."""
        parts = rows.split(self.rows_at_once or len(rows))
        return torch.cat([self._plain(part, self._cache(), 0)[:, self.prefix_length :] for part in parts])

    def token_by_token(self, rows: torch.Tensor) -> torch.Tensor:
        """The same, one token after the other, as plain decoding computes them."""
        return torch.cat([self._stepped(part) for part in rows.split(self.rows_at_once or len(rows))])

    def _stepped(self, rows: torch.Tensor) -> torch.Tensor:
        cache = self._cache()
        self._plain(rows[:, : self.prefix_length], cache, 0)
        steps = range(self.prefix_length, rows.shape[1])
        return torch.cat([self.next(rows[:, : step + 1], cache) for step in steps], dim=1)

    def next(self, rows: torch.Tensor, cache: DDTreeCache) -> torch.Tensor:
        """`(rows, 1, vocab_size)` logits of the last of `rows`, those before it being in the cache."""
        return self._plain(rows[:, -1:], cache, rows.shape[1] - 1)

    def _cache(self) -> DDTreeCache:
        return DDTreeCache(config=text_config(self.target))

    def _plain(self, ids: torch.Tensor, cache: DDTreeCache, start: int) -> torch.Tensor:
        """Logits of all of `ids`, with inputs prepared as `generate` prepares them."""
        ids = ids.to(self.device)
        positions = torch.arange(start, start + ids.shape[1], device=self.device).expand(len(ids), -1)
        kwargs: dict[str, Any] = {CACHE_NAME: cache, "position_ids": positions, "use_cache": True}
        inputs = self.target.prepare_inputs_for_generation(ids, is_first_iteration=start == 0, **kwargs)
        inputs.pop("logits_to_keep", None)
        return self.forward(**inputs, return_dict=True).logits.float()
