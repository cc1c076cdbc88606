"""Position encodings that look at a forward's largest position, and so would see the deepest node at every other."""

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel

from hf_ddtree.compat import text_config


def rope_settings(config: Any) -> Iterator[dict[str, Any]]:
    """The RoPE parameters of a configuration; a model with several kinds of layer has one set for each."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    yield from nested or ([parameters] if parameters else [])


def check(target: PreTrainedModel) -> None:
    """Raises `ValueError` for encodings that cannot give the nodes of one forward their own depth."""
    config, name = text_config(target), type(target).__name__
    remedy = "Generate without `assistant_model`."
    if any("dynamic" in settings.get("rope_type", "") for settings in rope_settings(config)):
        raise ValueError(f"{name} uses dynamic RoPE, whose frequencies follow the longest position. {remedy}")
    if getattr(config, "alibi", False):
        raise ValueError(f"{name} uses ALiBi, whose biases follow slots of the cache, not positions. {remedy}")
    if getattr(config, "attn_temperature_tuning", False):
        raise ValueError(
            f"{name} scales attention by the cache's length (`attn_temperature_tuning`), which differs from a node's "
            f"depth. {remedy}"
        )


def check_length(target: PreTrainedModel, length: int) -> None:
    """Raises `ValueError` if a sequence of `length` tokens would cross longrope's switch of frequencies.

    There the library reads the whole sequence anew with other frequencies, which a tree's forward cannot do.
    """
    for settings in rope_settings(text_config(target)):
        boundary = settings.get("original_max_position_embeddings")
        if settings.get("rope_type") == "longrope" and boundary is not None and length > boundary:
            raise ValueError(
                f"{type(target).__name__} uses longrope, whose frequencies switch after {boundary} tokens, but up to "
                f"{length} are asked for: lower `max_new_tokens`, or generate without `assistant_model`."
            )
