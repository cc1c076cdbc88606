"""Which layout or family a `config.json` is, and what its fields mean."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from drafters.checkpoints import (
    BLOCK,
    MASK_ID,
    TAPS,
    deepspec_config,
    native_config,
    open_spec_config,
    speculators_config,
    write,
    zlab_config,
)
from hf_ddtree import DFlashConfig
from hf_ddtree.drafters.formats import (
    deepspec,
    detect,
    flat,
    jetspec,
    modelopt,
    native,
    nemo,
    open_spec,
    specforge,
    speculators,
    zlab,
)

FULL, SLIDING = "full_attention", "sliding_attention"

# Fields of the files that have another name, or none, in a `DFlashConfig`.
NOT_COPIED = {
    *("architectures", "auto_map", "model_type", "dtype", "use_sliding_window", "tie_word_embeddings"),
    *("dflash_config", "rope_theta", "rope_scaling", "attention_dropout"),
}


def read(folder: Path, raw: dict[str, Any], **kwargs: Any) -> DFlashConfig:
    return DFlashConfig.from_pretrained(write(folder, raw, {}), **kwargs)


@pytest.mark.parametrize(
    "raw, layout",
    [
        (zlab_config(), zlab),
        (zlab_config(model_type="gpt_oss"), zlab),
        (zlab_config(model_type="dflash"), zlab),
        (zlab_config(architectures=["Qwen3DFlashDraftModel"]), nemo),
        (zlab_config(nested={"markov_rank": 0}), zlab),
        (zlab_config(nested={"causal": False}), zlab),
        (zlab_config(rope_parameters={"rope_type": "default", "rope_theta": 50000.0}), specforge),
        (zlab_config(nested={"use_swa": False, "causal": False}), modelopt),
        (zlab_config(nested={"use_swa": True, "swa_window_size": 8}), modelopt),
        (zlab_config(nested={"causal": True}), jetspec),
        (zlab_config(causal_head=False), jetspec),
        (zlab_config(nested={"draft_shift": True}), jetspec),
        *(
            (deepspec_config(architectures=[name]), deepspec)
            for name in ("Qwen3DSparkModel", "Gemma4DSparkModel", "LingDSparkModel", "Lfm2DSparkDraftModel")
        ),
        # Rows of the table before it, whatever else a file says.
        (speculators_config(architectures=["DSparkDraftModel"]), speculators),
        (open_spec_config(speculators_model_type="xpress"), open_spec),
        (native_config(), native),
        (native_config(architectures=...), native),
        (native_config(model_type="other"), native),
        ({"model_type": "dflash", "target_layer_ids": TAPS, "mask_token_id": 1}, flat),
    ],
)
def test_layouts(raw: dict[str, Any], layout: ModuleType) -> None:
    assert detect(raw) is layout


@pytest.mark.parametrize(
    "raw, family",
    [
        (open_spec_config({"method": "eagle3"}), "Open Spec Config eagle3"),
        *((speculators_config(speculators_model_type=kind), f"speculators {kind}") for kind in ("xpress", "dflare")),
        (zlab_config(architectures=["FlashMapDraftModel"]), "FlashMap"),
        (zlab_config(architectures=["DFlareDraftModel"]), "DFlare"),
        *(
            (deepspec_config(architectures=[name], markov_rank=64), "DSpark")
            for name in ("Gemma4DSparkModel", "LingDSparkModel", "Lfm2DSparkDraftModel")
        ),
        (zlab_config(architectures=["LiLiCorrDraftModel"]), "LiLiCorr"),
        (zlab_config(nested={"lilicorr_rank": 8}), "LiLiCorr"),
        *((zlab_config(architectures=[f"{name}DraftModel"]), "DFlash2") for name in ("DFlash2Beam", "MiniMaxDFlash2")),
        (zlab_config(architectures=["DominoDraftModel"]), "Domino"),
        (zlab_config(nested={"projector_type": "domino"}), "Domino"),
        (zlab_config(architectures=["DFlashLagunaForCausalLM"]), "Laguna"),
        (zlab_config(nested={"attention_sink_bias": True}), "MiMo"),
        (zlab_config(attention_value_scale=0.7), "MiMo"),
    ],
)
def test_relatives_are_refused_by_name(raw: dict[str, Any], family: str) -> None:
    with pytest.raises(ValueError, match=rf"{family} checkpoint, which is not supported.*docs/drafters\.md"):
        detect(raw)


@pytest.mark.parametrize("raw", [{}, {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}])
def test_other_models_are_no_drafter(raw: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Not a DFlash drafter.*DFlashDraftModel"):
        detect(raw)


def test_quantised_checkpoints_are_refused_by_method() -> None:
    with pytest.raises(ValueError, match="fp8"):
        detect(zlab_config(quantization_config={"quant_method": "fp8"}))


def test_zlab_fields(tmp_path: Path) -> None:
    raw = zlab_config(pad_token_id=0, bos_token_id=1, eos_token_id=[3, 4])
    config = read(tmp_path, raw)
    for name in raw.keys() - NOT_COPIED:
        assert getattr(config, name) == raw[name], name
    assert (config.mask_token_id, config.target_layer_ids) == (MASK_ID, TAPS)
    assert config.target_hidden_size == config.hidden_size
    assert config.model_type == "dflash"
    assert not config.inclusive_window


def test_native_fields(tmp_path: Path) -> None:
    raw = native_config(sliding_window=7)
    config = read(tmp_path, raw)
    for name in raw.keys() - NOT_COPIED:
        assert getattr(config, name) == raw[name], name
    assert config.causal_layers == [False, False]
    assert config.inclusive_window
    assert config.vocab_size > config.mask_token_id


def test_native_defaults(tmp_path: Path) -> None:
    """What a flat file leaves out has the library's values, which are the published checkpoint's."""
    raw = {key: native_config()[key] for key in ("model_type", "architectures", "hidden_size", "num_hidden_layers")}
    config = read(tmp_path, raw)
    assert (config.block_size, config.mask_token_id, config.sliding_window) == (16, 201818, 2048)
    assert config.target_layer_ids == [1, 13, 25, 37, 49]
    assert config.layer_types == [SLIDING, SLIDING]


@pytest.mark.parametrize(
    "top, nested, expected",
    [(7, ..., 7), (7, 9, 9), (..., 9, 9), (..., ..., 16)],
    ids=["top", "both", "nested", "none"],
)
def test_block_size(top: Any, nested: Any, expected: int, tmp_path: Path) -> None:
    assert read(tmp_path, zlab_config(nested={"block_size": nested}, block_size=top)).block_size == expected


YARN = {"factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"rope_theta": 150000}, {"rope_type": "default", "rope_theta": 150000}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", **YARN}},
            {"rope_type": "yarn", "rope_theta": 5e5, **YARN},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", **YARN}},
            {"rope_type": "yarn", "rope_theta": 5e5, **YARN},
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7, **YARN}},
            {"rope_type": "yarn", "rope_theta": 1e7, **YARN},
        ),
        # Both spellings, as SpecForge writes them.
        (
            {"rope_theta": 1e6, "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            {"rope_type": "default", "rope_theta": 1e6},
        ),
    ],
)
def test_rope_in_either_spelling(fields: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    raw = zlab_config(**{"rope_theta": ..., "rope_scaling": ..., **fields})
    assert read(tmp_path, raw).rope_parameters == expected


def test_a_partial_rotation_inherited_from_the_target_is_ignored(tmp_path: Path) -> None:
    """Files of Qwen3.5 drafters have it, the drafters rotate whole heads (deepseek-ai/DeepSpec#72)."""
    inherited = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    raw = zlab_config(rope_theta=..., rope_parameters=inherited, partial_rotary_factor=0.25)
    assert read(tmp_path, raw).rope_parameters == {"rope_type": "default", "rope_theta": 1e7}


@pytest.mark.parametrize(
    "top, nested, types, expected",
    [
        (..., ..., [FULL, FULL], [False, False]),
        (..., ..., [SLIDING, FULL], [True, False]),
        (True, ..., [SLIDING, FULL], [True, True]),
        (False, ..., [SLIDING, FULL], [False, False]),
        (..., True, [FULL, FULL], [True, True]),
        (..., False, [SLIDING, FULL], [False, False]),
        (True, False, [FULL, FULL], [True, True]),
        (None, ..., [SLIDING, FULL], [True, False]),
    ],
)
def test_causality(top: Any, nested: Any, types: list[str], expected: list[bool], tmp_path: Path) -> None:
    raw = zlab_config(nested={"causal": nested}, is_causal=top, layer_types=types, sliding_window=8)
    assert read(tmp_path, raw).causal_layers == expected


def test_the_window_is_not_subject_to_another_family_s_defaults(tmp_path: Path) -> None:
    """Qwen3's own configuration drops `sliding_window` unless `use_sliding_window` is set; the raw file rules."""
    raw = zlab_config(layer_types=[SLIDING, FULL], sliding_window=8, use_sliding_window=False)
    assert read(tmp_path, raw).sliding_window == 8


def test_overrides_beside_the_file(tmp_path: Path) -> None:
    config = read(tmp_path, zlab_config(), block_size=3, num_target_layers=9)
    assert (config.block_size, config.num_target_layers) == (3, 9)


@pytest.mark.parametrize(
    "raw, message",
    [
        (zlab_config(nested={"target_layer_ids": ...}), "target_layer_ids.*dflash_config"),
        (zlab_config(nested={"mask_token_id": ...}), "mask_token_id.*dflash_config"),
        (zlab_config(block_size=1), "block_size.*at least 2.*1"),
        (zlab_config(layer_types=[FULL]), "layer_types.*1 entries.*2 layers"),
        (zlab_config(layer_types=[SLIDING, FULL]), "sliding_window"),
        (zlab_config(num_target_layers=2), r"\[0, 2\].*2 layers"),
        (zlab_config(rope_scaling={"type": "longrope"}), "longrope.*yarn"),
        (zlab_config(rope_scaling={"type": "dynamic", "factor": 2.0}), "dynamic.*yarn"),
    ],
)
def test_what_is_missing_or_contradictory_is_named(raw: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, raw)


def test_jetspec_s_causal_heads(tmp_path: Path) -> None:
    assert read(tmp_path, zlab_config(causal_head=True)).causal_layers == [True, True]
    assert read(tmp_path, zlab_config(nested={"causal_head": True})).causal_layers == [True, True]
    assert read(tmp_path, zlab_config(causal_head=False)).causal_layers == [False, False]


@pytest.mark.parametrize(
    "raw, message",
    [
        (zlab_config(nested={"draft_shift": True}), "draft_shift=True.*causal.*docs/drafters"),
        (zlab_config(causal_head=False, draft_shift=1), "draft_shift=1.*causal"),
        (zlab_config(nested={"use_swa": True}), "use_swa.*swa_window_size=None"),
        (zlab_config(hidden_size=..., num_attention_heads=...), "no `hidden_size`, `num_attention_heads`"),
        (
            zlab_config(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
            r"base twice.*50000\.0.*1000000\.0",
        ),
        (zlab_config(layer_types=["full_attention", "chunked_attention"]), "chunked_attention.*sliding_attention"),
        (zlab_config(is_neox_style=False), "interleaved"),
        (zlab_config(nested={"target_layer_ids": [-1, 2]}), r"target_layer_ids.*\[-1, 2\].*from 0"),
        (zlab_config(draft_vocab_size=12), "draft_vocab_size=12.*16.*own_head=False"),
        (
            zlab_config(rope_theta=..., rope_parameters={FULL: {"rope_theta": 1e6}, SLIDING: {"rope_theta": 1e4}}),
            f"by layer type.*{FULL}, {SLIDING}",
        ),
        (deepspec_config(enable_confidence_head=True), "confidence head.*markov_rank"),
        (speculators_config(aux_hidden_state_layer_ids=None), "aux_hidden_state_layer_ids.*None"),
        (speculators_config(aux_hidden_state_layer_ids=[0, 2]), r"aux_hidden_state_layer_ids.*\[0, 2\].*from 1"),
        (speculators_config(mask_token_id=None), "mask_token_id"),
        (speculators_config(draft_vocab_size=99), "draft_vocab_size=99.*16"),
        (open_spec_config({"target_layer_start_idx": ...}), "speculative_config.*`target_layer_start_idx`"),
        (open_spec_config({"speculative_tokens": ...}), "speculative_config.*`speculative_tokens`"),
        (open_spec_config({"target_layer_ids": [0], "target_layer_start_idx": 1}), r"\[0\].*from 1"),
    ],
)
def test_settings_that_cannot_be_read_are_named(raw: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, raw)


def test_the_same_settings_switched_off_are_plain(tmp_path: Path) -> None:
    """ModelOpt writes them into every file."""
    raw = zlab_config(nested={"use_swa": False, "swa_window_size": 2048, "causal": False, "draft_shift": 0})
    config = read(tmp_path, raw)
    assert config.causal_layers == [False, False]
    assert config.layer_types == [FULL, FULL]
    assert not config.sample_from_anchor


def test_a_draft_vocabulary_of_full_size_is_none(tmp_path: Path) -> None:
    assert read(tmp_path, zlab_config(draft_vocab_size=16)).draft_vocab_size is None


def test_speculators_fields(tmp_path: Path) -> None:
    """Fields of the nested configuration, and the defaults that its class has and the file leaves out."""
    layer = {"rms_norm_eps": ..., "head_dim": ..., "attention_bias": True}
    raw = speculators_config(layer=layer, block_size=..., target_hidden_size=24, draft_vocab_size=12)
    config = read(tmp_path, raw)
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (8, MASK_ID, TAPS)
    assert (config.vocab_size, config.draft_vocab_size, config.own_head) == (16, 12, True)
    assert (config.target_hidden_size, config.hidden_size) == (24, 32)
    assert config.attention_bias
    # Qwen3's own defaults.
    assert (config.head_dim, config.rms_norm_eps) == (128, 1e-6)
    assert config.rope_parameters["rope_theta"] == 50000.0


@pytest.mark.parametrize(("tokens", "anchored", "block"), [(7, False, 8), (7, True, 7)])
def test_open_spec_counts_proposed_tokens(tokens: int, anchored: bool, block: int, tmp_path: Path) -> None:
    raw = open_spec_config({"speculative_tokens": tokens, "sample_from_anchor": anchored, "draft_vocab_size": ...})
    config = read(tmp_path, raw)
    assert (config.block_size, config.draft_depth) == (block, tokens)
    assert config.draft_vocab_size is None


def test_deepspec_fields(tmp_path: Path) -> None:
    """Its slots see both sides in sliding layers too."""
    raw = deepspec_config(layer_types=[SLIDING, FULL], sliding_window=8)
    config = read(tmp_path, raw)
    assert (config.block_size, config.draft_depth) == (BLOCK, BLOCK)
    assert config.causal_layers == [False, False]
    assert config.own_embedding and config.own_head and config.sample_from_anchor
    assert (config.mask_token_id, config.target_layer_ids) == (MASK_ID, TAPS)
