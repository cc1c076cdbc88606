"""JetSpec's causal heads: the z-lab layout with `causal_head` (or `causal: true`), and perhaps shifted slots."""

from typing import Any

from hf_ddtree.drafters.formats import zlab
from hf_ddtree.drafters.formats.body import setting
from hf_ddtree.drafters.formats.zlab import KEY_MAPPING

__all__ = ["KEY_MAPPING", "convert", "detect"]


def detect(raw: dict[str, Any]) -> bool:
    marked = setting(raw, "causal") or setting(raw, "draft_shift") or setting(raw, "causal_head") is not None
    return zlab.detect(raw) and bool(marked)


def convert(raw: dict[str, Any]) -> dict[str, Any]:
    """As in the z-lab layout, all layers causal if the head is.

    `draft_shift` means that slot k predicts the token k + 1 after the anchor, and that the last slot is not read. It
    is left out here, which changes nothing, for no slot of a causal head sees it.

    Raises:
        ValueError: for shifted slots without a causal head, where the last slot would be seen.
    """
    fields = zlab.convert(raw)
    if setting(raw, "causal_head") is not None:
        fields["causal_layers"] = [bool(setting(raw, "causal_head"))] * fields["num_hidden_layers"]
    if setting(raw, "draft_shift"):
        if not all(fields["causal_layers"]):
            raise ValueError(
                f"The drafter's configuration sets `draft_shift={setting(raw, 'draft_shift')!r}` without a causal "
                "head (`causal_head: true`), which is not supported. See docs/drafters.md."
            )
        fields |= {"sample_from_anchor": True, "block_size": fields["block_size"] - 1}
    return fields
