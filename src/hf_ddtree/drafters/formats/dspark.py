"""DSpark: a DFlash body with a Markov head (DeepSpec's flat configuration; SpecForge's and ModelOpt's nested one)."""

from typing import Any

from hf_ddtree.drafters.formats import deepspec, modelopt, zlab
from hf_ddtree.drafters.formats.body import setting

__all__ = ["KEY_MAPPING", "convert", "detect", "export", "head_fields", "refuse_variants"]

# DeepSpec and SpecForge write a module's names, ModelOpt leaves the module out.
KEY_MAPPING = {
    **zlab.KEY_MAPPING,
    r"^markov_w1\.": "markov_head.markov_w1.",
    r"^markov_w2\.": "markov_head.markov_w2.",
    r"^gate_proj\.": "markov_head.gate_proj.",
    r"^joint_proj\.": "markov_head.joint_proj.",
    r"^confidence_proj\.": "confidence_head.proj.",
}

_ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel", "DFlashDraftModel")
_EXPORTED = (
    "markov_rank",
    "markov_head_type",
    "confidence_head_with_markov",
    "confidence_threshold",
    "sample_from_anchor",
)
_REFUSED = {
    "attention_sink_bias": "attention sinks",
    "n_routed_experts": "experts",
    "num_experts": "experts",
}


def detect(raw: dict[str, Any]) -> bool:
    """A body of Qwen3's layers with a Markov head; `Gemma4DSparkModel` and its like have other layers."""
    names = raw.get("architectures") or []
    has_head = setting(raw, "projector_type") == "dspark" or bool(setting(raw, "markov_rank"))
    known = not names or any(name in _ARCHITECTURES for name in names)
    return known and ("DSparkDraftModel" in names or has_head)


def convert(raw: dict[str, Any]) -> dict[str, Any]:
    """Fields of a [`DFlashConfig`]. Without word of it, slots are in the anchor layout, and a flat configuration's
    checkpoint holds its own embedding and head, as DeepSpec's do.

    Raises:
        ValueError: for what another drafter of the family has and this one is not known to need: attention sinks,
            experts, latent attention, a tap on the embedding.
    """
    refuse_variants(raw)
    nested = bool(raw.get("dflash_config"))
    if not nested:
        fields = deepspec.base(raw)
    elif modelopt.detect(raw):
        fields = modelopt.convert(raw)
    else:
        fields = zlab.convert(raw)
    for name, field in (("has_embed_tokens", "own_embedding"), ("has_lm_head", "own_head")):
        if setting(raw, name) is not None:
            fields[field] = bool(setting(raw, name))
    if (rows := raw.get("draft_vocab_size")) and rows != raw["vocab_size"]:
        fields |= {"draft_vocab_size": rows, "own_head": True}
    layout = (setting(raw, "sample_from_anchor"), setting(raw, "shift_label"), True)
    fields["sample_from_anchor"] = bool(next(value for value in layout if value is not None))
    return fields | head_fields(raw)


def head_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of the Markov head and of the confidence head.

    Raises:
        ValueError: without a rank.
    """
    rank = setting(raw, "markov_rank")
    if not rank:
        raise ValueError(
            f"The drafter's configuration says DSpark but `markov_rank` is {rank!r}: put the rank of the Markov head "
            "it was trained with there."
        )
    # ModelOpt's name for it; its confidence head always reads the token before.
    confidence = setting(raw, "use_confidence_head")
    reads_token = True if confidence else setting(raw, "confidence_head_with_markov")
    if confidence is None:
        confidence = setting(raw, "enable_confidence_head")
    if confidence is None:
        confidence = (setting(raw, "confidence_head_alpha") or 0) > 0
    return {
        "markov_rank": rank,
        "markov_head_type": str(setting(raw, "markov_head_type") or "vanilla").lower(),
        "confidence_head": bool(confidence),
        "confidence_head_with_markov": bool(confidence) and reads_token is not False,
        "confidence_threshold": setting(raw, "confidence_threshold"),
    }


def export(config: Any) -> dict[str, Any]:
    """The `config.json` of a [`DFlashConfig`] in SpecForge's nested spelling."""
    raw = zlab.export(config)
    heads = {name: getattr(config, name) for name in _EXPORTED if getattr(config, name) is not None}
    raw["dflash_config"] |= {"projector_type": "dspark", "enable_confidence_head": config.confidence_head, **heads}
    return raw | {"architectures": ["DSparkDraftModel"]}


def refuse_variants(raw: dict[str, Any]) -> None:
    """Raises `ValueError`, naming it, for what some drafters of the family have and [`DFlashModel`] has not."""
    for name, what in _REFUSED.items():
        if setting(raw, name):
            raise ValueError(
                f"This DSpark drafter has {what} (`{name}`), which is not supported. See docs/drafters.md."
            )
    mode = setting(raw, "attention_mode")
    if mode is not None and str(mode).lower() not in ("gqa", "mha"):
        raise ValueError(
            f"This DSpark drafter's `attention_mode` is {mode!r}, which is not supported. See docs/drafters.md."
        )
    taps = setting(raw, "target_layer_ids") or []
    if any(tap < 0 for tap in taps):
        raise ValueError(
            f"The drafter taps {taps}, of which -1 is the target's embedding, which is not supported: taps are "
            "decoder layers. See docs/drafters.md."
        )
