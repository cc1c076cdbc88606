"""DeepSpec's flat configuration (`Qwen3DSparkModel` and its like) without a Markov head: plain, anchor layout."""

from typing import Any

from hf_ddtree.drafters.formats.body import body, setting
from hf_ddtree.drafters.formats.zlab import KEY_MAPPING

__all__ = ["ARCHITECTURES", "KEY_MAPPING", "base", "convert", "detect"]

ARCHITECTURES = ("Qwen3DSparkModel", "Gemma4DSparkModel", "LingDSparkModel", "Lfm2DSparkDraftModel")


def detect(raw: dict[str, Any]) -> bool:
    return any(name in ARCHITECTURES for name in raw.get("architectures") or []) and not setting(raw, "markov_rank")


def convert(raw: dict[str, Any]) -> dict[str, Any]:
    """Fields of a [`DFlashConfig`]: slots see both sides, slot k predicts the token k + 1 after the anchor, and the
    checkpoint holds its own embedding and head.

    Raises:
        ValueError: for a confidence head, which without a Markov head is of no known layout.
    """
    if setting(raw, "enable_confidence_head"):
        raise ValueError(
            "This DeepSpec drafter has a confidence head but no Markov head (`markov_rank` 0), a layout that is not "
            "known. See docs/drafters.md."
        )
    return base(raw)


def base(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields that do not depend on the heads."""
    fields = body(raw)
    names = ("target_layer_ids", "mask_token_id", "input_embedding_scale", "output_multiplier")
    fields |= {name: setting(raw, name) for name in (*names, "final_logit_softcapping")}
    anchored = setting(raw, "sample_from_anchor")
    return fields | {
        "block_size": setting(raw, "block_size") or 16,
        "causal_layers": [False] * fields["num_hidden_layers"],
        "sample_from_anchor": True if anchored is None else bool(anchored),
        "own_embedding": True,
        "own_head": True,
    }
