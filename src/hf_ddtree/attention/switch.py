"""Putting a model on the tree's attention for the length of a forward, and back."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from hf_ddtree.compat import (
    all_modules,
    attention_implementation,
    decoder_layers,
    set_attention_implementation,
    text_config,
)
from hf_ddtree.round import CURRENT_ROUND, TreeRound

NAME = "ddtree"

SUPPORTED = ("sdpa", "eager")

_lock = threading.Lock()
# id of a configuration -> [the configuration, its own implementation, how many forwards hold the switch]
_held: dict[int, list[Any]] = {}


def original_implementation(config: Any) -> str:
    """The attention implementation `config` had before the switch, or has now if it is not switched."""
    entry = _held.get(id(config))
    return entry[1] if entry is not None else attention_implementation(config)


class AttentionSwitch:
    """Switches the configurations that a model's decoder reads its attention implementation from.

    Without a tree in the current context the `"ddtree"` attention delegates to the original one, so that a forward of
    another thread on the same model is unchanged. The last holder restores the original.

    Args:
        model (`PreTrainedModel`): the target.
    """

    def __init__(self, model: PreTrainedModel):
        # A module that lacks an attribute takes long to say so.
        layers = [vars(module).get("config") for module in all_modules(decoder_layers(model))]
        configs = [text_config(model), getattr(model.get_decoder(), "config", None), *layers]
        self.configs = list({id(config): config for config in configs if config is not None}.values())

    @contextmanager
    def tree(self, tree: TreeRound) -> Iterator[None]:
        """Inside, forwards of this thread see `tree`."""
        token = CURRENT_ROUND.set(tree)
        taken = []
        try:
            with _lock:
                for config in self.configs:
                    entry = _held.setdefault(id(config), [config, attention_implementation(config), 0])
                    entry[2] += 1
                    taken.append(entry)
                    set_attention_implementation(config, NAME)
            yield
        finally:
            with _lock:
                for entry in taken:
                    config, original, _ = entry
                    entry[2] -= 1
                    if entry[2] == 0:
                        set_attention_implementation(config, original)
                        del _held[id(config)]
            CURRENT_ROUND.reset(token)


def check(model: PreTrainedModel) -> None:
    """Raises `ValueError` unless the model's attention implementation is one the tree has a route for."""
    implementation = original_implementation(text_config(model))
    if implementation not in SUPPORTED:
        raise ValueError(
            f"{type(model).__name__} runs attention implementation {implementation!r}, but a draft tree is verified "
            f'through {" or ".join(map(repr, SUPPORTED))}: load the model with `attn_implementation="sdpa"`, or call '
            '`model.set_attn_implementation("sdpa")`.'
        )
