"""The speculators layout (RedHatAI): nested `transformer_layer_config`, taps one higher, a reduced vocabulary."""

from collections.abc import Collection
from typing import Any

from hf_ddtree.drafters.formats.body import COPIED, body
from hf_ddtree.drafters.formats.zlab import KEY_MAPPING

__all__ = ["DROPPED", "KEY_MAPPING", "convert", "detect", "of_weights"]

# Copies of the verifier's weights, which the target itself has, and the inverse of `d2t`.
DROPPED = (r"^verifier_lm_head\.", r"^verifier_norm\.", r"^t2d$")
_WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers")
_DEFAULT_BLOCK, _DEFAULT_DRAFT_VOCABULARY = 8, 32000


def detect(raw: dict[str, Any]) -> bool:
    return raw.get("speculators_model_type") == "dflash"


def convert(raw: dict[str, Any]) -> dict[str, Any]:
    """Fields of a [`DFlashConfig`].

    `aux_hidden_state_layer_ids` index the hidden states, whose entry 0 is the embedding: layer id + 1. Embedding rows
    are read unscaled.

    Raises:
        ValueError: without tap indices, whose default depends on the verifier, or with one that is no layer's output.
    """
    taps = raw.get("aux_hidden_state_layer_ids")
    if not taps or min(taps) < 1:
        raise ValueError(
            f"The drafter's `aux_hidden_state_layer_ids` are {taps}, but must be indices of hidden states from 1, the "
            "first layer's output: add the list the checkpoint was trained with to its config.json."
        )
    fields = body(_complete(raw.get("transformer_layer_config") or {}))
    non_causal = raw.get("sliding_window_non_causal", False)
    draft_vocabulary = raw.get("draft_vocab_size") or _DEFAULT_DRAFT_VOCABULARY
    reduced = draft_vocabulary != fields["vocab_size"]
    fields |= {
        "target_layer_ids": [tap - 1 for tap in taps],
        "block_size": raw.get("block_size") or _DEFAULT_BLOCK,
        "mask_token_id": raw.get("mask_token_id"),
        "sample_from_anchor": bool(raw.get("sample_from_anchor", False)),
        "causal_layers": [kind == "sliding_attention" and not non_causal for kind in fields["layer_types"]],
        "input_embedding_scale": 1.0,
        "own_head": reduced,
        "draft_vocab_size": draft_vocabulary if reduced else None,
    }
    if raw.get("target_hidden_size"):
        fields["target_hidden_size"] = raw["target_hidden_size"]
    if dtype := raw.get("dtype") or raw.get("torch_dtype"):
        fields["dtype"] = dtype
    return fields


def of_weights(fields: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """What only the weights tell: whether they hold an embedding, a head, and a map for a vocabulary of full size."""
    found: dict[str, Any] = {"own_embedding": "embed_tokens.weight" in names}
    if fields["draft_vocab_size"] is None:
        found["own_head"] = "lm_head.weight" in names
        if "d2t" in names:
            found |= {"own_head": True, "draft_vocab_size": fields["vocab_size"]}
    return found


def _complete(layer: dict[str, Any]) -> dict[str, Any]:
    """The file leaves out what its configuration class has by default."""
    from transformers import AutoConfig

    names = {*COPIED, "layer_types"} - {"num_target_layers", "target_hidden_size"}
    settings = {name: layer[name] for name in (*names, *_WINDOWS) if name in layer}
    config = AutoConfig.for_model(layer.get("model_type", "qwen3"), **settings)
    if not layer.keys() & {"rope_parameters", "rope_theta", "rope_scaling"}:
        names.add("rope_parameters")
    return {name: getattr(config, name) for name in names if hasattr(config, name)} | layer
