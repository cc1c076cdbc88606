"""NVIDIA ModelOpt's exports: the z-lab layout with windows of its own (`use_swa`) and an explicit causality."""

from typing import Any

from hf_ddtree.drafters.formats import zlab
from hf_ddtree.drafters.formats.body import setting
from hf_ddtree.drafters.formats.zlab import KEY_MAPPING

__all__ = ["KEY_MAPPING", "convert", "detect"]


def detect(raw: dict[str, Any]) -> bool:
    return setting(raw, "use_swa") is not None or setting(raw, "shift_label") is not None


def convert(raw: dict[str, Any]) -> dict[str, Any]:
    """As in the z-lab layout. `use_swa` makes the layers that `layer_types` calls sliding, or all where it is absent,
    slide over `swa_window_size` tokens, seeing both sides of their slot; `shift_label` means the anchor layout.

    Raises:
        ValueError: if `use_swa` is set without a window.
    """
    fields = zlab.convert(raw)
    if setting(raw, "use_swa"):
        window = setting(raw, "swa_window_size")
        if not window:
            raise ValueError(
                f"The drafter's configuration sets `use_swa` with `swa_window_size={window}`: put the window it was "
                "trained with there."
            )
        if not raw.get("layer_types"):
            fields["layer_types"] = ["sliding_attention"] * fields["num_hidden_layers"]
        fields["sliding_window"] = window
        fields["causal_layers"] = [bool(setting(raw, "causal"))] * fields["num_hidden_layers"]
    return fields | {"sample_from_anchor": bool(setting(raw, "shift_label"))}
