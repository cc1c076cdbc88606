"""SpecForge's exports: the z-lab layout with RoPE in both spellings; sliding layers are causal inside the block."""

from typing import Any

from hf_ddtree.drafters.formats import zlab
from hf_ddtree.drafters.formats.zlab import KEY_MAPPING, convert

__all__ = ["KEY_MAPPING", "convert", "detect"]


def detect(raw: dict[str, Any]) -> bool:
    return zlab.detect(raw) and "rope_theta" in raw and bool(raw.get("rope_parameters"))
