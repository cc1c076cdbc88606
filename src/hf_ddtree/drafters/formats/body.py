"""What all layouts spell alike: the drafter's transformer, read from raw JSON and never through a library class."""

from typing import Any

COPIED = (
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
_LAYER_TYPES = ("full_attention", "sliding_attention")
_REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def body(raw: dict[str, Any]) -> dict[str, Any]:
    """[`DFlashConfig`] fields of the transformer: shapes, RoPE, layer types and window, dtype.

    Raises:
        ValueError: if a shape is missing, for layers or positions of an unknown kind, and if the two spellings of RoPE
            contradict each other.
    """
    if missing := [name for name in _REQUIRED if raw.get(name) is None]:
        raise ValueError(f"The drafter's config.json has no {', '.join(f'`{name}`' for name in missing)}.")
    fields = {name: raw[name] for name in COPIED if raw.get(name) is not None}
    fields["rope_parameters"] = rope_parameters(raw)
    fields["layer_types"] = raw.get("layer_types") or ["full_attention"] * raw["num_hidden_layers"]
    if unknown := set(fields["layer_types"]) - set(_LAYER_TYPES):
        raise ValueError(
            f"The drafter has layers of type {', '.join(sorted(unknown))}, which are not supported: supported are "
            f"{' and '.join(_LAYER_TYPES)}. See docs/drafters.md."
        )
    if "sliding_attention" in fields["layer_types"]:
        fields["sliding_window"] = raw.get("sliding_window")
    if raw.get("dtype") or raw.get("torch_dtype"):
        fields["dtype"] = raw.get("dtype") or raw.get("torch_dtype")
    return fields


def rope_parameters(raw: dict[str, Any]) -> dict[str, Any]:
    """RoPE settings from either spelling: `rope_parameters`, or `rope_theta` with `rope_scaling`.

    `partial_rotary_factor` is left out: files inherit it from their target, and drafters rotate whole heads
    (deepseek-ai/DeepSpec#72).
    """
    settings = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    if by_layer_type := [name for name, value in settings.items() if isinstance(value, dict)]:
        raise ValueError(
            f"The drafter's config.json has RoPE settings by layer type ({', '.join(by_layer_type)}), which are not "
            "supported. See docs/drafters.md."
        )
    if raw.get("is_neox_style") is False or raw.get("rope_interleaved") or settings.get("rope_interleaved"):
        raise ValueError("The drafter's RoPE is interleaved, which is not supported. See docs/drafters.md.")
    settings.pop("partial_rotary_factor", None)
    settings["rope_type"] = settings.pop("type", None) or settings.get("rope_type") or "default"
    theta, beside = settings.get("rope_theta"), raw.get("rope_theta")
    if theta is not None and beside is not None and theta != beside:
        raise ValueError(
            f"The drafter's config.json gives RoPE's base twice: `rope_theta` is {beside}, `rope_parameters` says "
            f"{theta}. Keep the one it was trained with."
        )
    if theta is None:
        settings["rope_theta"] = 10000.0 if beside is None else beside
    return settings


def setting(raw: dict[str, Any], name: str) -> Any:
    """A drafting setting: `dflash_config` first, then the top level, else `None`."""
    value = (raw.get("dflash_config") or {}).get(name)
    return raw.get(name) if value is None else value
