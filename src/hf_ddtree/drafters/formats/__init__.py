"""One module per checkpoint layout: `detect(raw)`, `convert(raw)` to [`DFlashConfig`] fields, and `KEY_MAPPING`."""

from types import ModuleType
from typing import Any

from hf_ddtree.drafters.formats import flat, native, zlab

FORMATS: tuple[ModuleType, ...] = (flat, native, zlab)

# Relatives of DFlash whose heads or layers differ: loading their weights as plain DFlash would draft nonsense.
_RELATIVES = {
    "FlashMap": ("FlashMapDraftModel",),
    "DFlare": ("DFlareDraftModel",),
    "DeepSpec DSpark": ("Qwen3DSparkModel", "Gemma4DSparkModel", "LingDSparkModel", "Lfm2DSparkDraftModel"),
    "DSpark": ("DSparkDraftModel",),
    "LiLiCorr": ("LiLiCorrDraftModel",),
    "DFlash2": (
        "DFlash2DraftModel",
        "DFlash2BeamDraftModel",
        "MiniMaxDFlash2DraftModel",
        "Qwen3DFlash2DraftModel",
    ),
    "Domino": ("DominoDraftModel",),
    "Laguna": ("DFlashLagunaForCausalLM",),
}


def family_of(raw: dict[str, Any]) -> str | None:
    """The DFlash relative a `config.json` belongs to, or `None` for plain DFlash."""
    nested = raw.get("dflash_config") or {}
    architectures = raw.get("architectures") or []
    if "open_spec_config_version" in raw:
        return "Open Spec Config"
    if "speculators_model_type" in raw:
        return "speculators"
    for family, names in _RELATIVES.items():
        if any(name in names for name in architectures):
            return family
    if any(key.startswith("lilicorr_") for key in nested):
        return "LiLiCorr"
    if "selector_rank" in nested or "selector_rank" in raw:
        return "DFlash2"
    if nested.get("projector_type"):
        return str(nested["projector_type"]).capitalize()
    if nested.get("markov_rank") or raw.get("markov_rank"):
        return "DSpark"
    return None


def detect(raw: dict[str, Any]) -> ModuleType:
    """The layout module for a raw `config.json`.

    Raises:
        ValueError: for a relative of DFlash that is not supported, and for anything that is not a DFlash drafter.
    """
    if family := family_of(raw):
        raise ValueError(
            f"This drafter is a {family} checkpoint, which is not supported yet. Supported are plain DFlash "
            "checkpoints in the z-lab layout (`DFlashDraftModel`) and in Transformers' native layout "
            "(`muse_glimmer_assistant`)."
        )
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ValueError(f"This drafter is quantised ({method}), which is not supported: use its bf16 checkpoint.")
    for layout in FORMATS:
        if layout.detect(raw):
            return layout
    raise ValueError(
        f"Not a DFlash drafter: architectures {raw.get('architectures')}, model_type {raw.get('model_type')!r}. "
        "Expected the architecture `DFlashDraftModel` with a `dflash_config` (z-lab layout), or "
        "`muse_glimmer_assistant`."
    )
