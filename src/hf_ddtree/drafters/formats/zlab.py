"""The z-lab layout: `architectures: ["DFlashDraftModel"]` and a nested `dflash_config`; the layout we write."""

from typing import Any

ARCHITECTURES = ("DFlashDraftModel", "Qwen3DFlashDraftModel")

# Some exports nest the drafter under `model.` or call a single layer `midlayer.`.
KEY_MAPPING = {r"^model\.": "", r"^midlayer\.": "layers.0."}

_COPIED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "attention_bias",
    "num_target_layers",
    "target_hidden_size",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
# What changes the meaning of a pass, in ways not supported: JetSpec's shifted slots, ModelOpt's own windows.
_REFUSED = ("draft_shift", "use_swa")
_NESTED = ("target_layer_ids", "input_embedding_scale", "output_multiplier", "final_logit_softcapping")


def detect(raw: dict[str, Any]) -> bool:
    return any(name in ARCHITECTURES for name in raw.get("architectures") or []) or "dflash_config" in raw


def convert(raw: dict[str, Any]) -> dict[str, Any]:
    """Fields of a [`DFlashConfig`]; the raw JSON is read, as `model_type` names another family's defaults.

    Raises:
        ValueError: for a setting that is not supported.
    """
    nested = raw.get("dflash_config") or {}
    for name in _REFUSED:
        if value := nested.get(name, raw.get(name)):
            raise ValueError(f"The drafter's configuration sets `{name}={value!r}`, which is not supported yet.")
    fields = {name: raw[name] for name in _COPIED if raw.get(name) is not None}
    fields |= {name: nested.get(name, raw.get(name)) for name in _NESTED}
    fields["block_size"] = nested.get("block_size") or raw.get("block_size") or 16
    fields["mask_token_id"] = nested.get("mask_token_id", raw.get("mask_token_id"))
    fields["rope_parameters"] = rope_parameters(raw)
    count = raw["num_hidden_layers"]
    fields["layer_types"] = raw.get("layer_types") or ["full_attention"] * count
    if "sliding_attention" in fields["layer_types"]:
        fields["sliding_window"] = raw.get("sliding_window")
    fields["inclusive_window"] = raw.get("inclusive_window", False)
    fields["causal_layers"] = raw.get("causal_layers") or causal_layers(raw, fields["layer_types"])
    if raw.get("dtype") or raw.get("torch_dtype"):
        fields["dtype"] = raw.get("dtype") or raw.get("torch_dtype")
    return fields


def causal_layers(raw: dict[str, Any], layer_types: list[str]) -> list[bool]:
    """`is_causal` rules all layers, then `dflash_config.causal`; else sliding layers are causal, full ones not."""
    nested = raw.get("dflash_config") or {}
    given = (raw.get("is_causal"), nested.get("causal"), nested.get("causal_head"), raw.get("causal_head"))
    causal = next((value for value in given if value is not None), None)
    if causal is None and "Qwen3DFlashDraftModel" in (raw.get("architectures") or []):
        # NeMo AutoModel's drafters are bidirectional throughout.
        causal = False
    return [kind == "sliding_attention" if causal is None else bool(causal) for kind in layer_types]


def rope_parameters(raw: dict[str, Any]) -> dict[str, Any]:
    """RoPE settings from either spelling: `rope_parameters`, or `rope_theta` with `rope_scaling`."""
    settings = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    settings["rope_type"] = settings.pop("type", None) or settings.get("rope_type") or "default"
    settings.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    return settings


def export(config: Any) -> dict[str, Any]:
    """The `config.json` of a [`DFlashConfig`] in this layout, with RoPE in both spellings."""
    raw = {name: getattr(config, name) for name in _COPIED}
    nested = {name: getattr(config, name) for name in _NESTED if getattr(config, name) is not None}
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
