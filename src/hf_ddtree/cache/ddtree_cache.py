"""The cache of a tree-decoded sequence, and the rounds of any cache with layers that take trees."""

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticLayer

from hf_ddtree.cache.adoption import adopt
from hf_ddtree.cache.layers import GrowingLayer, GrowingSlidingLayer
from hf_ddtree.cache.path import KeptPath
from hf_ddtree.cache.recurrent import TreeRecurrentLayer
from hf_ddtree.cache.static import StaticSlidingTreeLayer, StaticTreeLayer
from hf_ddtree.round import CURRENT_ROUND, MixerKind

# Layers that have rounds.
_ROUND_LAYERS = (GrowingLayer, GrowingSlidingLayer, StaticTreeLayer, StaticSlidingTreeLayer, TreeRecurrentLayer)


class DDTreeCache(DynamicCache):
    """A [`~transformers.DynamicCache`] that verifies trees: it takes all nodes and keeps one path.

    After generation it equals a cache filled by plain decoding of the same tokens, layer by layer. It also carries the
    drafter's context, so that a conversation continues without reading its past again.

    Args:
        args, kwargs: those of [`~transformers.DynamicCache`]; with `config`, sliding layers are recognised.
    """

    #: The drafter's side of this sequence, set by the generation loop.
    drafter_context: Any = None
    layer_class_to_replicate: Any

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        adopt(self)

    @classmethod
    def over(cls, cache: DynamicCache) -> "DDTreeCache":
        """A cache with the layers of `cache`, which is not used any more."""
        new = cls()
        new.__dict__.update(cache.__dict__)
        return new

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As in the parent; tells a tree's forward which layer the attention that follows is in."""
        tree = CURRENT_ROUND.get()
        if tree is not None:
            tree.updated_layer = layer_idx
        if self.offloading or self.layer_class_to_replicate is not None:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        # All that the parent does for layers that are there and stay there; each of a forward's layers comes by here.
        rows: tuple[torch.Tensor, torch.Tensor] = self.layers[layer_idx].update(
            key_states, value_states, *args, **kwargs
        )
        return rows

    def update_recurrent_state(self, recurrent_states: Any, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Any:
        """As in the parent; notes that the layer has read the tree, if a tree's forward is running."""
        tree = CURRENT_ROUND.get()
        if tree is not None:
            tree.mixed.add((layer_idx, MixerKind.RECURRENT))
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def begin(self) -> None:
        """Starts a round in every layer: what the next forward appends is a tree."""
        begin(self)

    def prune(self, path: torch.Tensor) -> None:
        """Ends the round in every layer.

        Args:
            path (`torch.LongTensor` of shape `(kept,)`): the nodes to keep, root first, increasing.
        """
        prune(self, path)

    def rollback(self) -> None:
        """Ends the round in every layer as if it had not been."""
        rollback(self)


def begin(cache: Cache) -> None:
    """See [`DDTreeCache.begin`]; works on any adopted cache."""
    for layer in _round_layers(cache):
        layer.begin()


def prune(cache: Cache, path: torch.Tensor | KeptPath) -> None:
    """See [`DDTreeCache.prune`]; works on any adopted cache. A layer that is not in a round is left alone."""
    if cache.offloading and torch.accelerator.is_available():
        # Copies to and from the host may be under way; the rows are read and written on either side.
        torch.accelerator.synchronize()
    kept, layers = path if isinstance(path, KeptPath) else KeptPath(path), _round_layers(cache)
    kept.move(layer for layer in layers if isinstance(layer, (GrowingLayer, GrowingSlidingLayer)))
    for layer in layers:
        layer.commit(kept)


def rollback(cache: Cache) -> None:
    """See [`DDTreeCache.rollback`]; works on any adopted cache."""
    for layer in _round_layers(cache):
        layer.rollback()


def mixers(cache: Cache) -> set[tuple[int, MixerKind]]:
    """`(layer_idx, kind)` of every layer that keeps something of the tokens it has read, after a prefill."""
    found = set()
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, (DynamicLayer, StaticLayer)):
            found.add((index, MixerKind.ATTENTION))
        if isinstance(layer, TreeRecurrentLayer) and layer.holds_states:
            found.add((index, MixerKind.RECURRENT))
    return found


def _round_layers(cache: Cache) -> list[Any]:
    return [layer for layer in cache.layers if isinstance(layer, _ROUND_LAYERS)]
