"""Our own flat layout: the fields of a [`DFlashConfig`] as they are (`model_type: "dflash"`)."""

from typing import Any

from hf_ddtree.drafters.formats import zlab

KEY_MAPPING: dict[str, str] = {}


def detect(raw: dict[str, Any]) -> bool:
    return raw.get("model_type") == "dflash" and not zlab.detect(raw)


def convert(raw: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in raw.items() if name not in ("model_type", "architectures")}
