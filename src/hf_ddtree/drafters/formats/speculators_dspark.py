"""DSpark in the speculators layout (`speculators_model_type: "dspark"`): the head's fields at the top level."""

from typing import Any

from hf_ddtree.drafters.formats import speculators
from hf_ddtree.drafters.formats.dspark import head_fields, refuse_variants
from hf_ddtree.drafters.formats.speculators import DROPPED, KEY_MAPPING, of_weights

__all__ = ["DROPPED", "KEY_MAPPING", "convert", "detect", "of_weights"]


def detect(raw: dict[str, Any]) -> bool:
    return raw.get("speculators_model_type") == "dspark"


def convert(raw: dict[str, Any]) -> dict[str, Any]:
    """Fields of a [`DFlashConfig`], as of a plain drafter of this layout and with a Markov head.

    Raises:
        ValueError: as the plain layout, and for a variant of the head that is not known.
    """
    refuse_variants(raw)
    fields = speculators.convert(raw)
    return fields | head_fields(raw) | {"sample_from_anchor": _from_anchor(raw, fields["block_size"])}


def _from_anchor(raw: dict[str, Any], block_size: int) -> bool:
    """What the file says; older ones say it only by the tokens they propose; else the layout's default for DSpark."""
    if raw.get("sample_from_anchor") is not None:
        return bool(raw["sample_from_anchor"])
    proposals = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    proposed = proposals[0].get("speculative_tokens")
    return proposed is None or proposed >= block_size
