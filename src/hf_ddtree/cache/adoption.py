"""Which caches can take a tree, and giving one that `generate` or a user made the layers for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from hf_ddtree.cache.fixed import FixedSlidingTreeLayer
from hf_ddtree.cache.layers import GrowingLayer, GrowingSlidingLayer
from hf_ddtree.cache.recurrent import (
    TreeRecurrentAndGrowingLayer,
    TreeRecurrentAndGrowingSlidingLayer,
    TreeRecurrentLayer,
    saved_states,
)
from hf_ddtree.cache.static import StaticSlidingTreeLayer, StaticTreeLayer
from hf_ddtree.compat import EMPTY_CACHE_LAYERS

# The library's layers, and ours that take their place.
_ADOPTED: dict[type, Any] = {
    DynamicLayer: GrowingLayer,
    DynamicSlidingWindowLayer: GrowingSlidingLayer,
    LinearAttentionLayer: TreeRecurrentLayer,
    LinearAttentionAndFullAttentionLayer: TreeRecurrentAndGrowingLayer,
    LinearAttentionAndSlidingWindowAttentionLayer: TreeRecurrentAndGrowingSlidingLayer,
}
# Those of a fixed length, which must be made with room for a tree.
_STATIC: dict[type, Any] = {
    StaticLayer: StaticTreeLayer,
    StaticTreeLayer: StaticTreeLayer,
    StaticSlidingWindowLayer: StaticSlidingTreeLayer,
    StaticSlidingTreeLayer: StaticSlidingTreeLayer,
    FixedSlidingTreeLayer: FixedSlidingTreeLayer,
}
_KEPT = (*_ADOPTED.values(), *_STATIC.values(), *EMPTY_CACHE_LAYERS)

# Methods through which a model's layers and masks see a cache.
_READ_THROUGH = ("update", "get_mask_sizes", "get_seq_length", "get_query_offset")


def check(cache: Any) -> None:
    """Raises `ValueError` unless every layer of `cache` can take a tree and keep one path of it."""
    remedy = (
        "Leave `cache_implementation` unset or choose 'static' or, on CUDA, 'offloaded' or 'offloaded_static', or "
        "pass a `DynamicCache`, a `StaticCache` or a `DDTreeCache`."
    )
    found = "no cache" if cache is None else type(cache).__name__
    if not isinstance(cache, Cache) or not hasattr(cache, "layers"):
        raise ValueError(
            f"A draft tree needs a cache that can drop rejected nodes, but the model uses {found}. {remedy}"
        )
    base = next((cls for cls in type(cache).__mro__ if cls.__module__.startswith("hf_ddtree.")), Cache)
    own = [name for name in _READ_THROUGH if getattr(type(cache), name) is not getattr(base, name)]
    if own:
        raise ValueError(
            f"{found} has a way of its own to hold rows (its `{own[0]}`), which may not fit a draft tree. {remedy}"
        )
    known = (*_ADOPTED, *_STATIC, *_KEPT)
    replicated = cache.layer_class_to_replicate
    kinds = {*(type(layer) for layer in cache.layers), *([replicated] if replicated is not None else [])}
    if unknown := sorted(kind.__name__ for kind in kinds if kind not in known):
        raise ValueError(
            f"The cache ({found}) has layers of type {', '.join(unknown)}, which a draft tree cannot be rolled back "
            f"from: they hold compressed, quantised or indexed states, or are not the library's own. {remedy} If the "
            "model itself asks for them, generate without `assistant_model`."
        )
    both = [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer) and hasattr(layer, "keys")]
    if cache.offloading and both:
        raise ValueError(
            f"The cache ({found}) is offloaded, and has layers whose recurrent states would move with their keys, "
            "which a draft tree does not follow: use one that is not offloaded."
        )


def fixed_length(cache: Cache, window: int | None) -> int | None:
    """The number of tokens that fit in `cache`, or `None` if any number does.

    Args:
        cache (`Cache`): one that [`check`] has passed.
        window (`int`, *optional*): the model's sliding window; a layer as long as that holds any number of tokens.
    """
    return min(
        (
            layer.max_cache_len - getattr(layer, "room", 0)
            for layer in cache.layers
            if isinstance(layer, StaticLayer)
            and not (layer.is_sliding and (window is None or layer.max_cache_len >= window))
        ),
        default=None,
    )


def adopt(cache: Cache) -> None:
    """Replaces the cache's layers by ones that take trees. The cache stays the same object with the same rows."""
    for index, layer in enumerate(cache.layers):
        if type(layer) in _ADOPTED:
            cache.layers[index] = _ADOPTED[type(layer)].adopt(layer)
    replicated: Any = cache.layer_class_to_replicate
    cache.layer_class_to_replicate = _ADOPTED.get(replicated, replicated)


def adopt_static(cache: Cache, room: int, fixed: bool = False) -> None:
    """The same for layers of a fixed length, which get `room` slots more for a tree's nodes, once.

    It comes before the prompt is read, so that the tensors of a new cache are made in their final size.

    Args:
        cache (`Cache`): one that [`check`] has passed.
        room (`int`): nodes of a tree at most, the root not counted.
        fixed (`bool`): whether rounds must have one shape, whatever the cache holds, as a compiled forward needs it.
    """
    for index, layer in enumerate(cache.layers):
        if type(layer) in _STATIC:
            kind = FixedSlidingTreeLayer if fixed and layer.is_sliding else _STATIC[type(layer)]
            cache.layers[index] = kind.adopt(layer, room)


# What an update outside a round changes of a layer.
_STATE = ("keys", "values", "_start", "_end", "is_initialized", "cumulative_length", "cumulative_length_int")


@contextmanager
def restored_on_error(cache: Cache) -> Iterator[None]:
    """Gives the layers their rows back if the forward inside fails half way through them.

    Outside a round a layer replaces its tensors and writes none of the rows in use, so the old ones still hold. Only
    recurrent states, windows of a fixed length and the static layers' counts are written in place, so copies of those
    are taken.
    """
    restores = [saved_states(layer) for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]
    saved = [{name: _saved(layer, name) for name in _STATE} for layer in cache.layers]
    try:
        yield
    except BaseException:
        del cache.layers[len(saved) :]
        for layer, state in zip(cache.layers, saved, strict=True):
            for name, value in state.items():
                if hasattr(layer, name):
                    setattr(layer, name, value)
        for restore in restores:
            restore()
        raise


def _saved(layer: Any, name: str) -> Any:
    value = getattr(layer, name, None)
    written = isinstance(layer, StaticLayer) and (layer.is_sliding or name == "cumulative_length")
    return value.clone() if written and isinstance(value, torch.Tensor) else value
