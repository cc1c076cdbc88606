"""Writes drafter checkpoints as their producers do: raw JSON and safetensors, by nothing of the package's own."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 32, 48, 4, 2, 8
LAYERS, TAPS, BLOCK, MASK_ID, VOCABULARY = 2, [0, 2], 5, 2, 16

#: Values that differ from every default, so that a field which is not read shows.
ZLAB: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "layer_types": ["full_attention"] * LAYERS,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "num_target_layers": 4,
    "block_size": BLOCK,
    "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": TAPS},
    "rope_theta": 50000.0,
    "rope_scaling": None,
    "dtype": "float32",
}

#: A flat configuration, as Transformers writes it for its own assistant.
NATIVE: dict[str, Any] = {
    "architectures": ["MuseGlimmerAssistantModel"],
    "model_type": "muse_glimmer_assistant",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-4,
    "attention_dropout": 0,
    "layer_types": ["sliding_attention"] * LAYERS,
    "sliding_window": 2048,
    "block_size": BLOCK,
    "mask_token_id": MASK_ID,
    "target_layer_ids": TAPS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "dtype": "float32",
}


def zlab_config(nested: dict[str, Any] | None = None, **overrides: Any) -> dict[str, Any]:
    """The z-lab `config.json`; a value of `...` removes the field."""
    dflash = {**ZLAB["dflash_config"], **(nested or {})}
    raw = {**ZLAB, "dflash_config": {key: value for key, value in dflash.items() if value is not ...}, **overrides}
    return {key: value for key, value in raw.items() if value is not ...}


def native_config(**overrides: Any) -> dict[str, Any]:
    raw = {**NATIVE, **overrides}
    return {key: value for key, value in raw.items() if value is not ...}


def zlab_weights(
    seed: int = 0, layers: int = LAYERS, taps: int = len(TAPS), bias: bool = False, target_hidden: int = HIDDEN
) -> dict[str, torch.Tensor]:
    """Random weights under the keys of the z-lab layout; norms too, so that a swapped or shifted one shows."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    def norm(size: int) -> torch.Tensor:
        return 1 + normal(size)

    weights = {"fc.weight": normal(HIDDEN, taps * target_hidden), "hidden_norm.weight": norm(HIDDEN)}
    weights["norm.weight"] = norm(HIDDEN)
    for layer in range(layers):
        attention = f"layers.{layer}.self_attn."
        for name, rows, columns in (
            ("q_proj", HEADS * HEAD_DIM, HIDDEN),
            ("k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("o_proj", HIDDEN, HEADS * HEAD_DIM),
        ):
            weights[f"{attention}{name}.weight"] = normal(rows, columns)
            if bias:
                weights[f"{attention}{name}.bias"] = normal(rows)
        for name in ("q_norm", "k_norm"):
            weights[f"{attention}{name}.weight"] = norm(HEAD_DIM)
        mlp = f"layers.{layer}.mlp."
        weights[f"{mlp}gate_proj.weight"] = normal(INTERMEDIATE, HIDDEN)
        weights[f"{mlp}up_proj.weight"] = normal(INTERMEDIATE, HIDDEN)
        weights[f"{mlp}down_proj.weight"] = normal(HIDDEN, INTERMEDIATE)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"layers.{layer}.{name}.weight"] = norm(HIDDEN)
    return weights


_TO_NATIVE = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}


def native_weights(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights under the keys of Transformers' own assistant."""
    renamed = {}
    for key, value in weights.items():
        for old, new in _TO_NATIVE.items():
            if key.startswith(old):
                key = new + key.removeprefix(old)
        renamed[key] = value
    return renamed


def write(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor], shards: int = 1) -> Path:
    """A checkpoint folder, in one file or in several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    keys, index = sorted(weights), {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = keys[shard::shards]
        save_file({key: weights[key] for key in part}, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(part, name)
    size = sum(value.numel() * value.element_size() for value in weights.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": index})
    )
    return folder


def deepspec_config(**overrides: Any) -> dict[str, Any]:
    """DeepSpec's flat `config.json`: the drafting fields at the top level, no `dflash_config`."""
    raw = {**ZLAB, "architectures": ["Qwen3DSparkModel"], "markov_rank": 0, **ZLAB["dflash_config"], **overrides}
    return {key: value for key, value in raw.items() if value is not ... and key != "dflash_config"}


#: What a speculators file holds of its transformer; fields at their class's defaults are left out there.
_LAYER_FIELDS = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "layer_types", "sliding_window"),
    "rope_theta",
)


def speculators_config(layer: dict[str, Any] | None = None, **overrides: Any) -> dict[str, Any]:
    """A `config.json` of speculators with the full vocabulary; taps are indices of hidden states."""
    nested = {name: ZLAB[name] for name in _LAYER_FIELDS} | (layer or {})
    raw = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.5.0",
        "block_size": BLOCK,
        "draft_vocab_size": VOCABULARY,
        "mask_token_id": MASK_ID,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS],
        "sliding_window_non_causal": False,
        "dtype": "float32",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": BLOCK - 1}],
            "verifier": {"name_or_path": "some/verifier", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": {key: value for key, value in nested.items() if value is not ...},
        **overrides,
    }
    return {key: value for key, value in raw.items() if value is not ...}


def open_spec_config(settings: dict[str, Any] | None = None, **overrides: Any) -> dict[str, Any]:
    """An Open Spec Config, as newer versions of speculators write it."""
    speculative = {
        "method": "dflash",
        "speculative_tokens": BLOCK - 1,
        "verifier": "some/verifier",
        "target_layer_ids": [tap + 1 for tap in TAPS],
        "target_layer_start_idx": 1,
        "draft_vocab_size": VOCABULARY,
        "sample_from_anchor": False,
        "mask_token_id": MASK_ID,
        "sliding_window_non_causal": False,
        **(settings or {}),
    }
    raw = {
        **{name: ZLAB[name] for name in _LAYER_FIELDS},
        "architectures": ["DflashDraftModel"],
        "open_spec_config_version": "0.0.0",
        "speculative_config": {key: value for key, value in speculative.items() if value is not ...},
        "target_hidden_size": None,
        "speculators_metadata": {"verifier_architectures": ["Qwen3ForCausalLM"], "speculators_version": "0.6.0"},
        "dtype": "float32",
        **overrides,
    }
    return {key: value for key, value in raw.items() if value is not ...}


def own_weights(
    embedding: bool = True, head_rows: int | None = VOCABULARY, kept: list[int] | None = None, copies: bool = False
) -> dict[str, torch.Tensor]:
    """What speculators and DeepSpec write beside the body.

    Args:
        embedding: whether there is an embedding.
        head_rows: rows of the head, `None` for no head.
        kept: the target's ids that the draft vocabulary keeps, which adds `d2t` and `t2d`.
        copies: whether the verifier's head and norm are there too.
    """
    generator = torch.Generator().manual_seed(9)
    weights = {}
    if embedding:
        weights["embed_tokens.weight"] = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    if head_rows is not None:
        weights["lm_head.weight"] = torch.randn(head_rows, HIDDEN, generator=generator) * 0.3
    if kept is not None:
        weights["d2t"] = torch.tensor(kept) - torch.arange(len(kept))
        weights["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, torch.tensor(kept), True)
    if copies:
        weights["verifier_lm_head.weight"] = torch.randn(VOCABULARY, HIDDEN, generator=generator)
        weights["verifier_norm.weight"] = torch.ones(HIDDEN)
    return weights
