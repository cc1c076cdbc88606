"""Relatives of DFlash that are not supported, and how to know them: by their configuration, and by their weights."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from hf_ddtree.drafters.formats.body import setting
from hf_ddtree.drafters.formats.deepspec import ARCHITECTURES as DEEPSPEC

SUPPORTED = "docs/drafters.md lists what is supported, and why the rest is not."


@dataclass(frozen=True)
class Refused:
    """A family that is refused by name.

    Args:
        family (`str`): its name; `{...}` stands for a field of the `config.json`.
        matches (`Callable`): whether a raw `config.json` is of it.
    """

    family: str
    matches: Callable[[dict[str, Any]], bool]

    def detect(self, raw: dict[str, Any]) -> bool:
        return self.matches(raw)

    def refuse(self, raw: dict[str, Any]) -> NoReturn:
        raise ValueError(
            f"This drafter is a {self.family.format_map(raw)} checkpoint, which is not supported. Use a plain DFlash "
            f"drafter of the same target; {SUPPORTED}"
        )


def _architecture(*names: str) -> Callable[[dict[str, Any]], bool]:
    return lambda raw: any(name in names for name in raw.get("architectures") or [])


def _has_prefix(raw: dict[str, Any], prefix: str) -> bool:
    return any(key.startswith(prefix) for key in (*raw, *(raw.get("dflash_config") or {})))


def _projector(name: str) -> Callable[[dict[str, Any]], bool]:
    return lambda raw: setting(raw, "projector_type") == name


OPEN_SPEC = Refused("Open Spec Config {speculative_config[method]}", lambda raw: "open_spec_config_version" in raw)
SPECULATORS = Refused("speculators {speculators_model_type}", lambda raw: "speculators_model_type" in raw)
FLASHMAP = Refused("FlashMap", _architecture("FlashMapDraftModel"))
DFLARE = Refused("DFlare", _architecture("DFlareDraftModel"))
LILICORR = Refused("LiLiCorr", lambda raw: _architecture("LiLiCorrDraftModel")(raw) or _has_prefix(raw, "lilicorr_"))
DOMINO = Refused("Domino", lambda raw: _architecture("DominoDraftModel")(raw) or _projector("domino")(raw))
DFLASH2 = Refused(
    "DFlash2",
    lambda raw: (
        _architecture("DFlash2DraftModel", "DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel")(raw)
        or _architecture("Qwen3DFlash2DraftModel")(raw)
        or bool(setting(raw, "selector_rank"))
    ),
)
DSPARK = Refused(
    "DSpark",
    lambda raw: (
        _architecture("DSparkDraftModel", *DEEPSPEC)(raw)
        or _projector("dspark")(raw)
        or bool(setting(raw, "markov_rank"))
    ),
)
LAGUNA = Refused("Laguna", _architecture("DFlashLagunaForCausalLM"))
MIMO = Refused(
    "MiMo", lambda raw: any(setting(raw, name) for name in ("attention_sink_bias", "attention_value_scale"))
)

# Weights of which one names its family, for a configuration that does not.
_MARKERS = {
    "DFlash2": r"candidate_selector\.|(attention|mlp)_conv\.",
    "DSpark": r"markov",
    "Domino": r"prefix_gru\.",
    "LiLiCorr": r"lilicorr\.",
    "Laguna": r"g_proj|aux_hidden_norms",
    "MiMo": r"attention_sink_bias|mask_embedding",
    "DFlare": r"fusion_weights",
    "Transformers-native": r"encoder\.fc",
    "speculators": r"\bd2t\b|\bt2d\b|verifier_lm_head",
}


def family_of_weights(names: Iterable[str]) -> str | None:
    """The family that some of these weights belong to, or `None`."""
    names = list(names)
    for family, marker in _MARKERS.items():
        if any(re.search(marker, name) for name in names):
            return family
    return None
