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


def check_length(target: PreTrainedModel, length: int, budget: int) -> None:
    """Raises `ValueError` if a sequence, or a tree after it, reaches a length at which attention or RoPE changes.

    Past longrope's switch of frequencies the library reads the whole sequence anew with others, which a tree's forward
    cannot do, and it takes the nodes of a large tree for so many tokens. Attention temperature grows in steps with the
    slots of the cache, which differ from a node's depth.

    Args:
        target (`PreTrainedModel`): the model that will verify.
        length (`int`): tokens of the sequence at most.
        budget (`int`): nodes of a tree at most, the root not counted.
    """
    config, name = text_config(target), type(target).__name__
    remedy = "lower `max_new_tokens` or `budget`, or generate without `assistant_model`."
    for settings in rope_settings(config):
        boundary = settings.get("original_max_position_embeddings")
        if settings.get("rope_type") == "longrope" and boundary is not None and max(length, budget + 1) > boundary:
            raise ValueError(
                f"{name} uses longrope, whose frequencies switch after {boundary} tokens, but up to {length} are "
                f"asked for, and trees of {budget + 1} nodes: {remedy}"
            )
    step = getattr(config, "floor_scale", 0)
    if getattr(config, "attn_temperature_tuning", False) and length + budget + 1 >= step:
        raise ValueError(
            f"{name} scales attention by the cache's length from {step} tokens on (`attn_temperature_tuning`), which "
            f"differs from a node's depth; up to {length} tokens are asked for, and trees of {budget + 1} nodes: "
            f"{remedy}"
        )


def most_nodes(target: PreTrainedModel, length: int, budget: int) -> int:
    """The largest tree up to `budget` nodes, behind up to `length` tokens, that [`check_length`] passes."""
    config = text_config(target)
    for settings in rope_settings(config):
        boundary = settings.get("original_max_position_embeddings")
        if settings.get("rope_type") == "longrope" and boundary is not None:
            budget = min(budget, boundary - 1)
    if getattr(config, "attn_temperature_tuning", False):
        budget = min(budget, getattr(config, "floor_scale", 0) - length - 2)
    return max(budget, 0)


def last_position(target: PreTrainedModel) -> int | None:
    """The last position that the model has an embedding for, or `None` if it computes embeddings for any.

    Plain decoding may end before that table does, while the nodes of a tree lie beyond.
    """
    config = text_config(target)
    length = getattr(config, "max_position_embeddings", None)
    return None if length is None or any(rope_settings(config)) else length - 1
