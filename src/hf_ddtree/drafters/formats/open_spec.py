"""Open Spec Config: the transformer at the top level, drafting in `speculative_config`; newer speculators write it."""

from typing import Any

from hf_ddtree.drafters.formats import speculators
from hf_ddtree.drafters.formats.speculators import DROPPED, KEY_MAPPING, of_weights

__all__ = ["DROPPED", "KEY_MAPPING", "convert", "detect", "of_weights"]

_REQUIRED = ("speculative_tokens", "target_layer_ids", "target_layer_start_idx", "mask_token_id")


def detect(raw: dict[str, Any]) -> bool:
    return "open_spec_config_version" in raw and _settings(raw).get("method", "dflash") == "dflash"


def convert(raw: dict[str, Any]) -> dict[str, Any]:
    """Fields of a [`DFlashConfig`], by way of the speculators layout.

    `target_layer_start_idx` is the first layer's output in the file's counting: a hidden state's index is
    `id + 1 - target_layer_start_idx`. `speculative_tokens` do not count the anchor of the fill-in layout.

    Raises:
        ValueError: if `speculative_config` lacks a field.
    """
    settings = _settings(raw)
    if missing := [name for name in _REQUIRED if settings.get(name) is None]:
        raise ValueError(
            f"The drafter's `speculative_config` has no {', '.join(f'`{name}`' for name in missing)}: add what the "
            "checkpoint was trained with."
        )
    anchored = bool(settings.get("sample_from_anchor", False))
    start = settings["target_layer_start_idx"]
    return speculators.convert(
        {
            "transformer_layer_config": raw,
            "aux_hidden_state_layer_ids": [tap + 1 - start for tap in settings["target_layer_ids"]],
            "block_size": settings["speculative_tokens"] + (not anchored),
            "sample_from_anchor": anchored,
            "mask_token_id": settings["mask_token_id"],
            "sliding_window_non_causal": settings.get("sliding_window_non_causal", False),
            "draft_vocab_size": settings.get("draft_vocab_size") or raw.get("vocab_size"),
            "target_hidden_size": raw.get("target_hidden_size"),
            "dtype": raw.get("dtype") or raw.get("torch_dtype"),
        }
    )


def _settings(raw: dict[str, Any]) -> dict[str, Any]:
    return raw.get("speculative_config") or {}
