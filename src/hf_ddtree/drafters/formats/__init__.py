"""One module per checkpoint layout: `detect(raw)`, `convert(raw)` to [`DFlashConfig`] fields, and `KEY_MAPPING`.

A layout may also have `DROPPED`, patterns of weights that are left in the file, and `of_weights(fields, names)`, the
fields that only the names of the weights tell.
"""

from types import ModuleType
from typing import Any

from hf_ddtree.drafters.formats import (
    deepspec,
    dflash2,
    dspark,
    flat,
    jetspec,
    modelopt,
    native,
    nemo,
    open_spec,
    refused,
    specforge,
    speculators,
    speculators_dspark,
    zlab,
)
from hf_ddtree.drafters.formats.refused import Refused, family_of_weights

__all__ = ["ORDER", "detect", "family_of_weights"]

#: The first that detects a `config.json` has it; a layout that shares an architecture with others follows them.
ORDER: tuple[ModuleType | Refused, ...] = (
    flat,
    open_spec,
    refused.OPEN_SPEC,
    speculators,
    speculators_dspark,
    refused.SPECULATORS,
    native,
    refused.FLASHMAP,
    refused.DFLARE,
    deepspec,
    refused.LILICORR,
    dflash2,
    refused.DFLASH2,
    refused.DOMINO,
    dspark,
    refused.DSPARK,
    refused.LAGUNA,
    refused.MIMO,
    nemo,
    modelopt,
    jetspec,
    specforge,
    zlab,
)


def detect(raw: dict[str, Any]) -> ModuleType:
    """The layout module for a raw `config.json`.

    Raises:
        ValueError: for a relative of DFlash that is not supported, a quantised drafter, and what is no DFlash drafter.
    """
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ValueError(f"This drafter is quantised ({method}), which is not supported: use its bf16 checkpoint.")
    for layout in ORDER:
        if layout.detect(raw):
            return layout.refuse(raw) if isinstance(layout, Refused) else layout
    raise ValueError(
        f"Not a DFlash drafter: architectures {raw.get('architectures')}, model_type {raw.get('model_type')!r}. "
        f"Expected the architecture `DFlashDraftModel` with a `dflash_config`, or another layout; {refused.SUPPORTED}"
    )
