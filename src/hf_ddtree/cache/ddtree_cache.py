"""The cache of a tree-decoded sequence, and adopting one that `generate` or a user made."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from hf_ddtree.cache.layers import GrowingLayer, GrowingSlidingLayer
from hf_ddtree.compat import EMPTY_CACHE_LAYERS
from hf_ddtree.round import MixerKind

_ADOPTED: dict[type, Any] = {DynamicLayer: GrowingLayer.adopt, DynamicSlidingWindowLayer: GrowingSlidingLayer.adopt}
_KEPT = (GrowingLayer, GrowingSlidingLayer, *EMPTY_CACHE_LAYERS)


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
        if self.layer_class_to_replicate is DynamicLayer:
            self.layer_class_to_replicate = GrowingLayer
        adopt(self)

    @classmethod
    def over(cls, cache: DynamicCache) -> "DDTreeCache":
        """A cache with the layers of `cache`, which is not used any more."""
        new = cls()
        new.layers, new.layer_class_to_replicate = cache.layers, cache.layer_class_to_replicate
        return new

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


def check(cache: Any) -> None:
    """Raises `ValueError` unless every layer of `cache` can take a tree and keep one path of it."""
    remedy = "Leave `cache_implementation` unset, or pass a `DynamicCache` or a `DDTreeCache`."
    if not isinstance(cache, DynamicCache):
        found = "no cache" if cache is None else type(cache).__name__
        raise ValueError(
            f"A draft tree needs a cache that can drop rejected nodes, but the model uses {found}. {remedy}"
        )
    if getattr(cache, "offloading", False):
        raise ValueError(f"An offloaded cache cannot take a draft tree yet. {remedy}")
    unknown = sorted({type(layer).__name__ for layer in cache.layers if type(layer) not in (*_ADOPTED, *_KEPT)})
    if unknown:
        raise ValueError(
            f"The model's cache has layers of type {', '.join(unknown)} (recurrent, compressed or quantised states), "
            "which a draft tree cannot be rolled back from yet. Generate without `assistant_model`."
        )


def adopt(cache: Cache) -> None:
    """Replaces the cache's layers by ones that take trees. The cache stays the same object with the same rows."""
    for index, layer in enumerate(cache.layers):
        if type(layer) in _ADOPTED:
            cache.layers[index] = _ADOPTED[type(layer)](layer)
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = GrowingLayer


# What an update outside a round changes of a layer.
_STATE = ("keys", "values", "is_initialized", "cumulative_length")


@contextmanager
def restored_on_error(cache: Cache) -> Iterator[None]:
    """Gives the layers their rows back if the forward inside fails half way through them.

    Outside a round a layer replaces its tensors and writes none of the rows in use, so the old ones still hold.
    """
    saved = [{name: getattr(layer, name, None) for name in _STATE} for layer in cache.layers]
    try:
        yield
    except BaseException:
        del cache.layers[len(saved) :]
        for layer, state in zip(cache.layers, saved, strict=True):
            for name, value in state.items():
                if hasattr(layer, name):
                    setattr(layer, name, value)
        raise


def begin(cache: Cache) -> None:
    """See [`DDTreeCache.begin`]; works on any adopted cache."""
    for layer in _round_layers(cache):
        layer.begin()


def prune(cache: Cache, path: torch.Tensor) -> None:
    """See [`DDTreeCache.prune`]; works on any adopted cache. A layer that is not in a round is left alone."""
    for layer in _round_layers(cache):
        layer.commit(path)


def rollback(cache: Cache) -> None:
    """See [`DDTreeCache.rollback`]; works on any adopted cache."""
    for layer in _round_layers(cache):
        layer.rollback()


def mixers(cache: Cache) -> set[tuple[int, MixerKind]]:
    """`(layer_idx, kind)` of every layer that keeps something of the tokens it has read, after a prefill."""
    return {
        (index, MixerKind.ATTENTION) for index, layer in enumerate(cache.layers) if isinstance(layer, DynamicLayer)
    }


def _round_layers(cache: Cache) -> list[Any]:
    return [layer for layer in cache.layers if isinstance(layer, (GrowingLayer, GrowingSlidingLayer))]
