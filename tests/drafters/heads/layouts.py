"""Writes DSpark and DFlash2 checkpoints as their producers do: raw JSON and safetensors, by nothing of the package."""

from typing import Any

import torch

from drafters.checkpoints import (
    HIDDEN,
    LAYERS,
    VOCABULARY,
    ZLAB,
    own_weights,
    speculators_config,
    zlab_config,
    zlab_weights,
)

RANK, TOP_K, TAPS_IN_TIME, GROUP = 4, 5, 2, 8

#: DeepSpec copies the target's configuration and adds its own fields beside it.
DEEPSPEC: dict[str, Any] = {
    **{key: value for key, value in ZLAB.items() if key not in ("auto_map", "dflash_config")},
    **ZLAB["dflash_config"],
    "architectures": ["Qwen3DSparkModel"],
    "num_anchors": 512,
    "max_window_layers": 36,
    "use_cache": True,
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
HEAD_FIELDS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
SPECFORGE_HEADS: dict[str, Any] = {
    "projector_type": "dspark",
    "attention_mode": "gqa",
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": False,
}
MODELOPT_HEADS: dict[str, Any] = {
    "projector_type": "dspark",
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "use_confidence_head": True,
    "shift_label": True,
    "causal": False,
}
DFLASH2: dict[str, Any] = {
    "conv_kernel_size": TAPS_IN_TIME,
    "conv_group_size": GROUP,
    "selector_rank": RANK,
    "selector_top_k": TOP_K,
    "block_size": ZLAB["block_size"],
}


def deepspec(kind: str = "vanilla", seed: int = 0, **overrides: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    raw = {**DEEPSPEC, "markov_head_type": kind, **overrides}
    weights = (
        body(seed)
        | markov_weights(kind, seed)
        | {
            "embed_tokens.weight": normal(seed + 2, VOCABULARY, HIDDEN),
            "lm_head.weight": normal(seed + 3, VOCABULARY, HIDDEN),
        }
    )
    if raw["enable_confidence_head"]:
        weights |= confidence_weights(HIDDEN + RANK, seed)
    return raw, weights


def specforge(kind: str = "vanilla", seed: int = 0, **nested: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    raw = zlab_config({**SPECFORGE_HEADS, "markov_head_type": kind, **nested}, architectures=["DSparkDraftModel"])
    return raw, body(seed) | markov_weights(kind, seed) | confidence_weights(HIDDEN, seed)


def modelopt(kind: str = "vanilla", seed: int = 0, **nested: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """ModelOpt's head has no module of its own, and its architecture is plain DFlash's."""
    raw = zlab_config({**MODELOPT_HEADS, "markov_head_type": kind, **nested})
    heads = markov_weights(kind, seed) | confidence_weights(HIDDEN + RANK, seed)
    bare = {
        key.removeprefix("markov_head.").replace("confidence_head.proj.", "confidence_proj."): value
        for key, value in heads.items()
    }
    return raw, body(seed) | bare


def speculators(
    kind: str = "vanilla", seed: int = 0, kept: list[int] | None = None, **overrides: Any
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The head's fields at the top level; `kept` are the target's tokens of a reduced vocabulary."""
    fields = {name: DEEPSPEC[name] for name in HEAD_FIELDS}
    raw = speculators_config(
        architectures=["DSparkDraftModel"],
        speculators_model_type="dspark",
        draft_vocab_size=VOCABULARY if kept is None else len(kept),
        **{**fields, "markov_head_type": kind, "sample_from_anchor": True, **overrides},
    )
    weights = body(seed) | markov_weights(kind, seed) | confidence_weights(HIDDEN + RANK, seed)
    if kept is not None:
        weights |= own_weights(head_rows=len(kept), kept=kept)
        weights["markov_head.markov_w2.weight"] = weights["markov_head.markov_w2.weight"][: len(kept)].clone()
    return raw, weights


def dflash2(
    seed: int = 0, nested: dict[str, Any] | None = None, **overrides: Any
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    raw = zlab_config({**DFLASH2, **(nested or {})}, **{"architectures": ["DFlash2DraftModel"], **overrides})
    weights = body(seed) | {
        "candidate_selector.predecessor_codebook": normal(seed + 5, VOCABULARY, RANK) * 2,
        "candidate_selector.successor_codebook": normal(seed + 6, VOCABULARY, RANK) * 2,
        "candidate_selector.hidden_projection.weight": normal(seed + 7, RANK, HIDDEN),
    }
    for layer in range(LAYERS):
        for place, name in enumerate(("attention_conv", "mlp_conv")):
            prefix, own = f"layers.{layer}.{name}.", seed + 10 + 2 * layer + place
            weights[prefix + "base_kernel"] = 0.5 + normal(own, 2, TAPS_IN_TIME, HIDDEN)
            rows = 2 * TAPS_IN_TIME * HIDDEN // GROUP
            weights[prefix + "kernel_projection.weight"] = normal(own + 20, rows, HIDDEN) * 0.3
    return raw, weights


def body(seed: int) -> dict[str, torch.Tensor]:
    return zlab_weights(seed)


def markov_weights(kind: str, seed: int) -> dict[str, torch.Tensor]:
    weights = {
        "markov_head.markov_w1.weight": normal(seed + 30, VOCABULARY, RANK) * 3,
        "markov_head.markov_w2.weight": normal(seed + 31, VOCABULARY, RANK) * 3,
    }
    shapes = {"gated": ("gate_proj", RANK, HIDDEN + RANK), "rnn": ("joint_proj", 3 * RANK, 2 * RANK + HIDDEN)}
    if kind in shapes:
        name, rows, columns = shapes[kind]
        weights[f"markov_head.{name}.weight"] = normal(seed + 32, rows, columns)
        weights[f"markov_head.{name}.bias"] = normal(seed + 33, rows)
    return weights


def confidence_weights(columns: int, seed: int) -> dict[str, torch.Tensor]:
    return {
        "confidence_head.proj.weight": normal(seed + 34, 1, columns),
        "confidence_head.proj.bias": normal(seed + 35, 1),
    }


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.3
