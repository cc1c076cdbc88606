"""The z-lab layout: `architectures: ["DFlashDraftModel"]` and a nested `dflash_config`; the layout we write."""

from typing import Any

from hf_ddtree.drafters.formats.body import COPIED, body, setting

ARCHITECTURES = ("DFlashDraftModel",)

# Some exports nest the drafter under `model.` or call a single layer `midlayer.`.
KEY_MAPPING = {r"^model\.": "", r"^midlayer\.": "layers.0."}

_NESTED = ("target_layer_ids", "input_embedding_scale", "output_multiplier", "final_logit_softcapping")
# What no other loader has a name for is written under ours.
_OWN = ("sample_from_anchor", "own_embedding", "own_head", "draft_vocab_size")


def detect(raw: dict[str, Any]) -> bool:
    return any(name in ARCHITECTURES for name in raw.get("architectures") or []) or "dflash_config" in raw


def convert(raw: dict[str, Any]) -> dict[str, Any]:
    """Fields of a [`DFlashConfig`]; the raw JSON is read, as `model_type` names another family's defaults."""
    fields = body(raw)
    fields |= {name: setting(raw, name) for name in _NESTED}
    fields["block_size"] = setting(raw, "block_size") or 16
    fields["mask_token_id"] = setting(raw, "mask_token_id")
    fields["inclusive_window"] = raw.get("inclusive_window", False)
    fields["causal_layers"] = raw.get("causal_layers") or causal_layers(raw, fields["layer_types"])
    fields |= {name: value for name in _OWN if (value := setting(raw, name)) is not None}
    if fields.get("draft_vocab_size") == raw.get("vocab_size") and not fields.get("own_head"):
        # Only a smaller one means a map of the drafter's own.
        fields.pop("draft_vocab_size", None)
    return fields


def causal_layers(raw: dict[str, Any], layer_types: list[str]) -> list[bool]:
    """`is_causal` rules all layers, then `dflash_config.causal`; else sliding layers are causal, full ones not."""
    given = (raw.get("is_causal"), (raw.get("dflash_config") or {}).get("causal"))
    causal = next((value for value in given if value is not None), None)
    return [kind == "sliding_attention" if causal is None else bool(causal) for kind in layer_types]


def export(config: Any) -> dict[str, Any]:
    """The `config.json` of a [`DFlashConfig`] in this layout, with RoPE in both spellings."""
    raw = {name: getattr(config, name) for name in COPIED}
    nested = {name: getattr(config, name) for name in _NESTED if getattr(config, name) is not None}
    nested |= {name: getattr(config, name) for name in _OWN if getattr(config, name)}
    scaling = {key: value for key, value in config.rope_parameters.items() if key != "rope_theta"}
    raw |= {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "dflash_config": {**nested, "mask_token_id": config.mask_token_id, "block_size": config.block_size},
        "layer_types": config.layer_types,
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
        "rope_parameters": config.rope_parameters,
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_scaling": None if scaling.get("rope_type") == "default" else scaling,
        "tie_word_embeddings": False,
        "dtype": str(config.dtype).removeprefix("torch.") if config.dtype is not None else None,
    }
    # Other loaders know no causality by layer, but the same rule for layers that differ.
    if len(set(config.causal_layers)) == 1:
        raw["is_causal"] = config.causal_layers[0]
    if causal_layers(raw, config.layer_types) != config.causal_layers:
        raw["causal_layers"] = config.causal_layers
    if config.inclusive_window:
        raw["inclusive_window"] = True
    return raw
