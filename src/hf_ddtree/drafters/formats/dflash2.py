"""DFlash2: the z-lab layout with dynamic convolutions and a candidate selector (`DFlash2DraftModel`)."""

from typing import Any

from hf_ddtree.drafters.formats import nemo, zlab
from hf_ddtree.drafters.formats.body import setting
from hf_ddtree.drafters.formats.zlab import KEY_MAPPING

__all__ = ["KEY_MAPPING", "convert", "detect", "export"]

_NEMO = "Qwen3DFlash2DraftModel"
_ARCHITECTURES = ("DFlash2DraftModel", _NEMO)
_HEAD = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def detect(raw: dict[str, Any]) -> bool:
    """By architecture, or a selector in a plain one; the beam and MiniMax architectures' differences are not known."""
    names = raw.get("architectures") or []
    plain = not names or any(name in zlab.ARCHITECTURES for name in names)
    return any(name in _ARCHITECTURES for name in names) or (plain and bool(setting(raw, "selector_rank")))


def convert(raw: dict[str, Any]) -> dict[str, Any]:
    """Fields of a [`DFlashConfig`].

    Raises:
        ValueError: for experts, and if a size of the convolutions or of the selector is missing.
    """
    if missing := [name for name in _HEAD if not setting(raw, name)]:
        raise ValueError(
            f"The DFlash2 drafter's `dflash_config` has no {', '.join(f'`{name}`' for name in missing)}: put the "
            "values it was trained with there."
        )
    if setting(raw, "n_routed_experts"):
        raise ValueError(
            "This DFlash2 drafter has experts (`n_routed_experts`), which is not supported. See docs/drafters.md."
        )
    from_nemo = _NEMO in (raw.get("architectures") or [])
    fields = nemo.convert(raw) if from_nemo else zlab.convert(raw)
    return fields | {name: setting(raw, name) for name in _HEAD}


def export(config: Any) -> dict[str, Any]:
    """The `config.json` of a [`DFlashConfig`] in this layout."""
    raw = zlab.export(config)
    raw["dflash_config"] |= {name: getattr(config, name) for name in _HEAD}
    return raw | {"architectures": ["DFlash2DraftModel"]}
