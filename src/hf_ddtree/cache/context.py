"""The drafter's cache: keys and values of the context only, the slots' own dropped after each pass."""

import weakref
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DFlashCache, StaticLayer

from hf_ddtree.cache.adoption import adopt
from hf_ddtree.cache.ddtree_cache import begin, prune, rollback
from hf_ddtree.cache.path import KeptPath


class DrafterContext:
    """What a drafter has read of one sequence.

    Args:
        drafter (`PreTrainedModel`): the drafter; only a weak reference to it is kept.
    """

    def __init__(self, drafter: PreTrainedModel):
        self._drafter = weakref.ref(drafter)
        self.cache = DFlashCache(config=drafter.config)
        adopt(self.cache)
        #: Tokens of the sequence whose keys and values the drafter holds.
        self.position = 0
        # In pieces, as rounds may add tokens one by one for long before a pass reads them.
        self._unread: list[torch.Tensor] = []
        self._rows: tuple[torch.Tensor, int] | None = None

    @property
    def length(self) -> int:
        """Tokens of the sequence the drafter has read or been given to read."""
        return self.position + sum(taps.shape[1] for taps in self._unread)

    def unread(self, taps: torch.Tensor) -> None:
        """Adds taps, `(1, new, taps * hidden_size)`, for the next pass to read."""
        self._unread.append(taps)

    def read(self) -> torch.Tensor:
        """The taps that the next pass brings."""
        if not self._unread:
            raise RuntimeError("There is nothing to read: a drafter pass follows a forward of the target.")
        if len(self._unread) > 1:
            self._unread = [torch.cat(self._unread, dim=1)]
        return self._unread[0]

    def belongs_to(self, drafter: PreTrainedModel) -> bool:
        return self._drafter() is drafter

    def begin(self, new: int) -> None:
        """Before a pass that brings `new` context tokens, followed by the block's slots."""
        self.cache.set_previous_accepted_tokens(new)
        begin(self.cache)

    def commit(self, new: int) -> None:
        """After the pass: keeps the context tokens."""
        prune(self.cache, KeptPath(range(new)))
        self.position, self._unread = self.position + new, []

    def rollback(self) -> None:
        """After a failed pass: keeps nothing of it."""
        rollback(self.cache)

    def seal(self, cache: Cache) -> None:
        """Notes which rows this context belongs to; any change of the cache shows in the tensors that hold them."""
        self._rows = _first_rows(cache)

    def continues(self, cache: Cache) -> bool:
        """Whether the cache is as it was when sealed: not cropped, reordered or extended since."""
        rows = _first_rows(cache)
        return self._rows is not None and rows is not None and self._rows[0] is rows[0] and self._rows[1] == rows[1]

    def __reduce__(self) -> Any:
        # The drafter is not part of a cache that is copied or pickled; the copy's drafter reads its context anew.
        return _nothing, ()


def _first_rows(cache: Cache) -> tuple[torch.Tensor, int] | None:
    """The first rows of the cache, and how often they were written; `None` if that cannot be told."""
    for layer in cache.layers:
        keys = getattr(layer, "keys", None)
        if keys is None:
            continue
        # Other layers than those of a fixed length show other tensors after a change.
        if not isinstance(layer, StaticLayer):
            return keys, 0
        return None if keys.is_inference() else (keys, keys._version)
    return None


def _nothing() -> None:
    return None
