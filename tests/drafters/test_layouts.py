"""Every layout loads, drafts for a whole generate, and is saved and read back; what does not belong is named."""

from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.checkpoints import (
    BLOCK,
    HIDDEN,
    TAPS,
    deepspec_config,
    native_config,
    native_weights,
    open_spec_config,
    own_weights,
    speculators_config,
    write,
    zlab_config,
    zlab_weights,
)
from hf_ddtree import DFlashConfig, DFlashModel
from hf_ddtree.drafters.formats import detect
from pairs import make_target, plain, prompt, tree

KEPT = [0, 1, 2, 3, 5, 7, 8, 9, 10, 12, 13, 15]
SLIDING = "sliding_attention"
REDUCED = own_weights(head_rows=len(KEPT), kept=KEPT, copies=True)
Checkpoint = tuple[dict[str, Any], dict[str, torch.Tensor]]

# (the configuration, the weights beside the body's)
LAYOUTS: dict[str, Checkpoint] = {
    "zlab": (zlab_config(), {}),
    "specforge": (zlab_config(rope_parameters={"rope_type": "default", "rope_theta": 50000.0}), {}),
    "modelopt": (
        zlab_config(nested={"use_swa": True, "swa_window_size": 6, "causal": False}, layer_types=[SLIDING] * 2),
        {},
    ),
    "nemo": (
        zlab_config(architectures=["Qwen3DFlashDraftModel"], layer_types=[SLIDING] * 2, sliding_window=6),
        {},
    ),
    "jetspec": (zlab_config(nested={"causal_head": True}), {}),
    "deepspec": (deepspec_config(), own_weights()),
    "native": (native_config(), {}),
    "speculators": (speculators_config(), {}),
    "open_spec": (open_spec_config(), {}),
}
VARIANTS: dict[str, Checkpoint] = {
    **LAYOUTS,
    "jetspec_shifted": (zlab_config(nested={"causal_head": True, "draft_shift": True}), {}),
    "modelopt_shifted": (zlab_config(nested={"use_swa": False, "shift_label": True}), {}),
    "speculators_reduced": (speculators_config(draft_vocab_size=len(KEPT)), REDUCED),
    "speculators_anchor": (speculators_config(sample_from_anchor=True), own_weights(embedding=True, head_rows=None)),
    "speculators_full_map": (speculators_config(), own_weights(embedding=False, kept=list(range(16)))),
    "open_spec_reduced": (open_spec_config({"draft_vocab_size": len(KEPT)}), REDUCED),
}


def checkpoint(name: str) -> Checkpoint:
    raw, extra = VARIANTS[name]
    body = zlab_weights()
    return raw, (native_weights(body) if name == "native" else body) | extra


def load(name: str, folder: Path) -> DFlashModel:
    return DFlashModel.from_pretrained(write(folder, *checkpoint(name))).eval()


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_is_detected(name: str) -> None:
    assert detect(LAYOUTS[name][0]).__name__.rpartition(".")[2] == name


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "temperature": 0.8}], ids=["greedy", "sampling"])
@pytest.mark.parametrize("name", list(VARIANTS))
def test_a_whole_generate_is_the_targets_own(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    target, ids, drafter = make_target("qwen3"), prompt(), load(name, tmp_path)
    drafter.norm.weight.data.fill_(0.4)
    settings = {"max_new_tokens": 24, **settings}
    output = tree(target, drafter, ids, return_dict_in_generate=True, **settings)
    assert torch.equal(output.sequences, plain(target, ids, **settings))
    assert output.speculation.mean_acceptance_length > 1


@pytest.mark.parametrize("name", list(VARIANTS))
def test_a_saved_drafter_is_the_same(name: str, tmp_path: Path) -> None:
    model = load(name, tmp_path / "published")
    model.save_pretrained(tmp_path / "saved")
    again = DFlashModel.from_pretrained(tmp_path / "saved").eval()
    assert again.state_dict().keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    for field in set(DFlashConfig.__dataclass_fields__) - {"transformers_version", "architectures", "dtype"}:
        assert getattr(again.config, field) == getattr(model.config, field), field
    noise, taps = torch.randn(1, BLOCK, HIDDEN), torch.randn(1, 9, HIDDEN * len(TAPS))
    with torch.no_grad():
        assert torch.equal(again(noise, taps).last_hidden_state, model(noise, taps).last_hidden_state)


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_missing_and_unknown_weights_are_named(name: str, tmp_path: Path) -> None:
    raw, weights = checkpoint(name)
    less = {key: value for key, value in weights.items() if key != "layers.1.mlp.up_proj.weight"}
    with pytest.raises(ValueError, match=rf"{name} layout.*missing keys: layers\.1\.mlp\.up_proj\.weight"):
        DFlashModel.from_pretrained(write(tmp_path / "less", raw, less))
    more = weights | {"layers.0.self_attn.extra.weight": torch.zeros(4)}
    with pytest.raises(ValueError, match=rf"{name} layout.*unexpected keys: layers\.0\.self_attn\.extra\.weight"):
        DFlashModel.from_pretrained(write(tmp_path / "more", raw, more))


@pytest.mark.parametrize(
    "name, lost, message",
    [
        ("speculators_reduced", "d2t", "missing keys: d2t"),
        ("speculators_reduced", "lm_head.weight", r"missing keys: lm_head\.weight"),
        ("open_spec_reduced", "d2t", "missing keys: d2t"),
        ("deepspec", "lm_head.weight", r"missing keys: lm_head\.weight"),
        ("deepspec", "embed_tokens.weight", r"missing keys: embed_tokens\.weight"),
    ],
)
def test_own_parts_must_be_there(name: str, lost: str, message: str, tmp_path: Path) -> None:
    raw, weights = checkpoint(name)
    del weights[lost]
    with pytest.raises(ValueError, match=message):
        DFlashModel.from_pretrained(write(tmp_path, raw, weights))


@pytest.mark.parametrize(
    "key, family",
    [
        ("candidate_selector.predecessor_codebook", "DFlash2"),
        ("layers.0.attention_conv.base_kernel", "DFlash2"),
        ("markov_head.markov_w1.weight", "DSpark"),
        ("prefix_gru.weight_ih_l0", "Domino"),
        ("lilicorr.weight", "LiLiCorr"),
        ("layers.0.self_attn.g_proj.weight", "Laguna"),
        ("layers.0.self_attn.attention_sink_bias", "MiMo"),
        ("d2t", "speculators"),
        ("t2d", "speculators"),
        ("verifier_norm.weight", "not those of"),
    ],
)
def test_weights_of_another_family_name_it(key: str, family: str, tmp_path: Path) -> None:
    """A plain configuration over a relative's weights, which would otherwise draft nonsense."""
    with pytest.raises(ValueError, match=rf"unexpected keys: {key}.*{family}|{family}.*unexpected keys: {key}"):
        DFlashModel.from_pretrained(write(tmp_path, zlab_config(), zlab_weights() | {key: torch.zeros(4)}))


@pytest.mark.parametrize(
    "offsets, message",
    [
        ([5] * len(KEPT), "from 5 to 16"),
        ([-1] * len(KEPT), "from -1 to 10"),
        ([-index for index in range(len(KEPT))], "12 draft tokens 1 different ids"),
    ],
    ids=["beyond", "below", "ids_instead_of_offsets"],
)
def test_a_map_outside_the_targets_vocabulary_is_refused(offsets: list[int], message: str, tmp_path: Path) -> None:
    raw, weights = checkpoint("speculators_reduced")
    folder = write(tmp_path, raw, weights | {"d2t": torch.tensor(offsets)})
    with pytest.raises(ValueError, match=rf"d2t.*{message}.*16.*offsets"):
        DFlashModel.from_pretrained(folder)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    """Also where `config.json` does not say so: by type, by scales beside the weights, by ModelOpt's own file."""
    weights = zlab_weights()
    packed = weights | {"fc.weight": torch.zeros(HIDDEN, HIDDEN * len(TAPS), dtype=torch.int8)}
    with pytest.raises(ValueError, match=r"quantised \(fc\.weight in I8\).*bf16"):
        DFlashModel.from_pretrained(write(tmp_path / "packed", zlab_config(), packed))
    scaled = weights | {"fc.weight_scale": torch.ones(1)}
    with pytest.raises(ValueError, match=r"quantised \(fc\.weight_scale\)"):
        DFlashModel.from_pretrained(write(tmp_path / "scaled", zlab_config(), scaled))
    folder = write(tmp_path / "modelopt", zlab_config(), weights)
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    with pytest.raises(ValueError, match=r"quantised \(hf_quant_config\.json\)"):
        DFlashModel.from_pretrained(folder)


def test_pickles_and_damaged_files_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "pickle", zlab_config(), {})
    (folder / "model.safetensors").unlink()
    torch.save(zlab_weights(), folder / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"pickles.*refused"):
        DFlashModel.from_pretrained(folder)
    with pytest.raises(ValueError, match="use_safetensors=False"):
        DFlashModel.from_pretrained(folder, use_safetensors=False)
    whole = write(tmp_path / "damaged", zlab_config(), zlab_weights()) / "model.safetensors"
    whole.write_bytes(whole.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors.*damaged or incomplete"):
        DFlashModel.from_pretrained(tmp_path / "damaged")


def test_a_damaged_index_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, zlab_config(), zlab_weights(), shards=2)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"index\.json.*damaged"):
        DFlashModel.from_pretrained(folder)
