"""NeMo AutoModel's exports: the z-lab layout under another architecture's name, and never causal."""

from typing import Any

from hf_ddtree.drafters.formats import zlab
from hf_ddtree.drafters.formats.zlab import KEY_MAPPING

__all__ = ["KEY_MAPPING", "convert", "detect"]


def detect(raw: dict[str, Any]) -> bool:
    return "Qwen3DFlashDraftModel" in (raw.get("architectures") or [])


def convert(raw: dict[str, Any]) -> dict[str, Any]:
    """As in the z-lab layout, but every layer sees both sides of its slot, sliding layers a symmetric window."""
    fields = zlab.convert(raw)
    return fields | {"causal_layers": [False] * fields["num_hidden_layers"]}
