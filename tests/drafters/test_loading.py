"""Loading and saving drafters: every weight accounted for, errors that name what is wrong, round trips."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drafters.checkpoints import (
    BLOCK,
    HIDDEN,
    LAYERS,
    TAPS,
    native_config,
    native_weights,
    write,
    zlab_config,
    zlab_weights,
)
from hf_ddtree import DFlashConfig, DFlashModel

FULL, SLIDING = "full_attention", "sliding_attention"


def assert_weights(model: DFlashModel, weights: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> None:
    state = model.state_dict()
    assert state.keys() == weights.keys()
    for key, value in weights.items():
        assert state[key].dtype == dtype
        assert torch.equal(state[key], value.to(dtype)), key


def test_keys_of_the_layout() -> None:
    """The model's own keys are the z-lab layout's, 11 a layer and 3, no embedding and no head."""
    config = DFlashConfig(num_hidden_layers=3, hidden_size=32, target_layer_ids=[0], mask_token_id=1)
    with torch.device("meta"):
        model = DFlashModel(config)
    assert model.state_dict().keys() == zlab_weights(layers=3).keys()
    assert len(model.state_dict()) == 11 * 3 + 3


@pytest.mark.parametrize("shards", [1, 3])
def test_zlab(shards: int, tmp_path: Path) -> None:
    weights = zlab_weights()
    assert_weights(DFlashModel.from_pretrained(write(tmp_path, zlab_config(), weights, shards)), weights)


@pytest.mark.parametrize("shards", [1, 3])
def test_native(shards: int, tmp_path: Path) -> None:
    weights = zlab_weights()
    folder = write(tmp_path, native_config(), native_weights(weights), shards)
    assert_weights(DFlashModel.from_pretrained(folder), weights)


def test_bias(tmp_path: Path) -> None:
    weights = zlab_weights(bias=True)
    assert_weights(DFlashModel.from_pretrained(write(tmp_path, zlab_config(attention_bias=True), weights)), weights)


def test_taps_of_a_wider_target(tmp_path: Path) -> None:
    weights = zlab_weights(taps=3, target_hidden=24)
    raw = zlab_config(nested={"target_layer_ids": [0, 1, 3]}, target_hidden_size=24)
    model = DFlashModel.from_pretrained(write(tmp_path, raw, weights))
    assert_weights(model, weights)
    assert model(torch.zeros(1, BLOCK, HIDDEN), torch.zeros(1, 4, 72)).last_hidden_state.shape == (1, BLOCK, HIDDEN)


def test_a_prefix_is_tolerated(tmp_path: Path) -> None:
    weights = zlab_weights()
    nested = {f"model.{key}": value for key, value in weights.items()}
    model = DFlashModel.from_pretrained(write(tmp_path / "prefixed", zlab_config(), nested))
    assert_weights(model, weights)
    model.save_pretrained(tmp_path / "plain")
    assert load_file(tmp_path / "plain" / "model.safetensors").keys() == weights.keys()


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_single_layer_may_be_called_midlayer(prefix: str, tmp_path: Path) -> None:
    weights = zlab_weights(layers=1)
    renamed = {prefix + key.replace("layers.0.", "midlayer."): value for key, value in weights.items()}
    raw = zlab_config(num_hidden_layers=1, layer_types=[FULL])
    assert_weights(DFlashModel.from_pretrained(write(tmp_path, raw, renamed)), weights)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("asked", [None, "auto", torch.float32, torch.bfloat16])
def test_dtype(stored: torch.dtype, asked: Any, tmp_path: Path) -> None:
    weights = {key: value.to(stored) for key, value in zlab_weights().items()}
    raw = zlab_config(dtype=str(stored).removeprefix("torch."))
    kwargs = {} if asked is None else {"dtype": asked}
    model = DFlashModel.from_pretrained(write(tmp_path, raw, weights), **kwargs)
    # The library's own default is the dtype of the file.
    expected = asked if isinstance(asked, torch.dtype) else stored
    assert model.dtype == expected
    assert_weights(model, weights, expected)


def test_overrides_and_loading_info(tmp_path: Path) -> None:
    folder = write(tmp_path, zlab_config(), zlab_weights())
    model, info = DFlashModel.from_pretrained(folder, block_size=3, output_loading_info=True)
    assert model.config.block_size == 3
    assert not info["missing_keys"]
    config = DFlashConfig.from_pretrained(folder)
    config.block_size = 4
    assert DFlashModel.from_pretrained(folder, config=config).config.block_size == 4


@pytest.mark.parametrize("layout", ["zlab", "native"])
@pytest.mark.parametrize("key", ["fc.weight", "layers.1.self_attn.k_norm.weight", "norm.weight"])
def test_missing_weights_are_named(layout: str, key: str, tmp_path: Path) -> None:
    weights = zlab_weights()
    del weights[key]
    raw = zlab_config() if layout == "zlab" else native_config()
    folder = write(tmp_path, raw, weights if layout == "zlab" else native_weights(weights))
    with pytest.raises(ValueError, match=rf"{layout} layout.*missing keys: {key}"):
        DFlashModel.from_pretrained(folder)


@pytest.mark.parametrize(
    "key",
    [
        "lm_head.weight",
        "embed_tokens.weight",
        "candidate_selector.predecessor_codebook",
        "layers.0.attention_conv.base_kernel",
        "layers.0.self_attn.attention_sink_bias",
        "layers.2.mlp.up_proj.weight",
        "layers.0.self_attn.q_proj.bias",
    ],
)
def test_unknown_weights_are_named(key: str, tmp_path: Path) -> None:
    weights = zlab_weights() | {key: torch.zeros(4)}
    with pytest.raises(ValueError, match=rf"unexpected keys: {key}.*another family"):
        DFlashModel.from_pretrained(write(tmp_path, zlab_config(), weights))


@pytest.mark.parametrize(
    "message, change",
    [
        (r"fc\.weight is \(32, 64\), by the configuration \(32, 96\)", {"nested": {"target_layer_ids": [0, 1, 2]}}),
        (r"layers\.1\.mlp\.gate_proj\.weight is \(48, 32\), by .* \(40, 32\)", {"intermediate_size": 40}),
        (r"layers\.0\.self_attn\.k_proj\.weight is \(16, 32\), by .* \(32, 32\)", {"num_key_value_heads": 4}),
    ],
)
def test_wrong_shapes_are_named(message: str, change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        DFlashModel.from_pretrained(write(tmp_path, zlab_config(**change), zlab_weights()))


def test_a_missing_tap_list_is_an_error_before_the_weights_are_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="target_layer_ids"):
        DFlashModel.from_pretrained(write(tmp_path, zlab_config(nested={"target_layer_ids": ...}), {}))


SAVED: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal_layers": [True, True]},
    "mixed": {"layer_types": [SLIDING, FULL], "sliding_window": 9, "causal_layers": [True, False]},
    "odd_causality": {"layer_types": [SLIDING, FULL], "sliding_window": 9, "causal_layers": [False, True]},
    "bidirectional_windows": {"layer_types": [SLIDING] * 2, "sliding_window": 9, "inclusive_window": True},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
        }
    },
    "everything": {
        "attention_bias": True,
        "target_hidden_size": 24,
        "input_embedding_scale": 5.5,
        "output_multiplier": 0.25,
        "final_logit_softcapping": 20.0,
        "eos_token_id": [3, 4],
        "pad_token_id": 0,
        "bos_token_id": 1,
        "rms_norm_eps": 1e-4,
        "num_target_layers": 7,
        "block_size": 7,
    },
}


def saved(case: str, dtype: torch.dtype = torch.float32) -> DFlashModel:
    fields: dict[str, Any] = dict(
        vocab_size=99,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        mask_token_id=98,
        target_layer_ids=TAPS,
        block_size=BLOCK,
    )
    torch.manual_seed(0)
    return DFlashModel(DFlashConfig(**fields | SAVED[case])).to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", list(SAVED))
def test_saving_and_loading_gives_the_same_model(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = saved(case, dtype)
    model.save_pretrained(tmp_path)
    again = DFlashModel.from_pretrained(tmp_path, dtype="auto")
    assert_weights(again, model.state_dict(), dtype)
    for name in set(DFlashConfig.__dataclass_fields__) - {"transformers_version", "architectures", "dtype"}:
        assert getattr(again.config, name) == getattr(model.config, name), name
    noise = torch.randn(1, BLOCK, HIDDEN, dtype=dtype)
    taps = torch.randn(1, 12, len(TAPS) * model.config.target_hidden_size, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(again(noise, taps).last_hidden_state, model(noise, taps).last_hidden_state)


@pytest.mark.parametrize("case", ["plain", "everything", "mixed", "yarn"])
def test_what_is_written_is_the_zlab_layout(case: str, tmp_path: Path) -> None:
    model = saved(case)
    model.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["architectures"] == ["DFlashDraftModel"]
    assert raw["dflash_config"]["target_layer_ids"] == TAPS
    assert raw["dflash_config"]["mask_token_id"] == 98
    assert raw["dflash_config"]["block_size"] == raw["block_size"] == model.config.block_size
    # Readers of either spelling of RoPE find theirs.
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == model.config.rope_parameters["rope_theta"]
    assert (raw["rope_scaling"] or {}).get("factor") == model.config.rope_parameters.get("factor")
    # Other loaders know no causality by layer: what they derive from the layer types must be what was meant.
    causal = raw.get("is_causal")
    derived = [kind == SLIDING if causal is None else causal for kind in raw["layer_types"]]
    assert derived == model.config.causal_layers
    keys = load_file(tmp_path / "model.safetensors").keys()
    expected = zlab_weights(bias=model.config.attention_bias).keys()
    assert keys == expected
    assert len(keys) == 11 * LAYERS + 3 + 4 * LAYERS * model.config.attention_bias


def test_sharded_saving(tmp_path: Path) -> None:
    model = saved("plain")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_weights(DFlashModel.from_pretrained(tmp_path), model.state_dict())


def test_a_native_checkpoint_is_saved_in_the_zlab_layout(tmp_path: Path) -> None:
    native = write(tmp_path / "native", native_config(sliding_window=4), native_weights(zlab_weights()))
    model = DFlashModel.from_pretrained(native)
    model.save_pretrained(tmp_path / "zlab")
    again = DFlashModel.from_pretrained(tmp_path / "zlab")
    assert_weights(again, zlab_weights())
    assert load_file(tmp_path / "zlab" / "model.safetensors").keys() == zlab_weights().keys()
    noise, taps = torch.randn(1, BLOCK, HIDDEN), torch.randn(1, 12, HIDDEN * len(TAPS))
    with torch.no_grad():
        assert torch.equal(again(noise, taps).last_hidden_state, model(noise, taps).last_hidden_state)


def test_the_flat_layout_of_the_configuration_alone(tmp_path: Path) -> None:
    """`to_json_string`, which some tools write, is read back as well."""
    config = saved("mixed").config
    (tmp_path / "config.json").write_text(config.to_json_string())
    again = DFlashConfig.from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict()


def test_pushing_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="upload_folder"):
        saved("plain").config.save_pretrained(tmp_path, push_to_hub=True)
