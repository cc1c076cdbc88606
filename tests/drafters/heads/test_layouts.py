"""DSpark and DFlash2 checkpoints of every producer: what their configuration means, and every weight in its place."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.checkpoints import BLOCK, HIDDEN, TAPS, VOCABULARY, write
from drafters.heads import layouts
from drafters.heads.reference import dflash2_pass
from drafters.reference import draft
from hf_ddtree import DFlashConfig, DFlashModel
from hf_ddtree.drafters import check_native_chain

PRODUCERS: dict[str, Any] = {
    "deepspec": layouts.deepspec,
    "specforge": layouts.specforge,
    "modelopt": layouts.modelopt,
    "speculators": layouts.speculators,
}
KINDS = ("vanilla", "gated", "rnn")


def inputs(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    taps = torch.randn(7, len(TAPS) * HIDDEN, generator=generator)
    return taps, torch.randn(BLOCK, HIDDEN, generator=generator)


def run(drafter: DFlashModel, taps: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return drafter(noise_embeds=noise[None], context_hidden_states=taps[None]).last_hidden_state[0]


@pytest.mark.parametrize("producer", PRODUCERS)
@pytest.mark.parametrize("kind", KINDS)
def test_dspark_loads(tmp_path: Path, producer: str, kind: str) -> None:
    raw, weights = PRODUCERS[producer](kind)
    drafter = DFlashModel.from_pretrained(write(tmp_path, raw, weights))
    config = drafter.config
    assert (config.markov_rank, config.markov_head_type, config.confidence_head) == (layouts.RANK, kind, True)
    assert config.confidence_head_with_markov == (producer != "specforge")
    assert config.confidence_threshold is None
    assert (config.sample_from_anchor, config.draft_depth, config.first_draft_slot) == (True, BLOCK, 0)
    assert config.own_embedding == config.own_head == (producer == "deepspec")
    assert config.causal_layers == [False, False] and config.target_layer_ids == TAPS
    state = drafter.state_dict()
    assert len(state) == len(weights)
    for key, value in weights.items():
        named = key.replace("confidence_proj.", "confidence_head.proj.")
        if key.split(".")[0] in ("markov_w1", "markov_w2", "gate_proj", "joint_proj"):
            named = f"markov_head.{key}"
        assert torch.equal(state[named], value), key


def test_a_dspark_pass_is_the_plain_one(tmp_path: Path) -> None:
    raw, weights = layouts.specforge()
    taps, noise = inputs()
    expected = draft({**raw, "rope_scaling": None}, weights, taps, noise, [False, False])
    assert torch.allclose(
        run(DFlashModel.from_pretrained(write(tmp_path, raw, weights)), taps, noise).double(), expected, atol=1e-4
    )


@pytest.mark.parametrize("sliding", [False, True])
def test_a_dflash2_pass_is_its_definition(tmp_path: Path, sliding: bool) -> None:
    kinds = ["sliding_attention"] * 2 if sliding else ["full_attention"] * 2
    raw, weights = layouts.dflash2(layer_types=kinds, sliding_window=6 if sliding else None)
    drafter = DFlashModel.from_pretrained(write(tmp_path, raw, weights), dtype=torch.float64)
    config = drafter.config
    assert (config.conv_kernel_size, config.conv_group_size) == (layouts.TAPS_IN_TIME, layouts.GROUP)
    assert (config.selector_rank, config.selector_top_k) == (layouts.RANK, layouts.TOP_K)
    assert (config.sample_from_anchor, config.draft_depth) == (False, BLOCK - 1)
    assert drafter.state_dict().keys() == weights.keys()
    taps, noise = inputs()
    expected = dflash2_pass(raw, weights, taps, noise, [sliding, sliding])
    assert torch.allclose(run(drafter, taps.double(), noise.double()), expected, atol=1e-5)


def test_nemos_dflash2_is_never_causal(tmp_path: Path) -> None:
    kinds = ["sliding_attention"] * 2
    raw, weights = layouts.dflash2(
        architectures=["Qwen3DFlash2DraftModel"], layer_types=kinds, sliding_window=6, auto_map=...
    )
    assert DFlashModel.from_pretrained(write(tmp_path, raw, weights)).config.causal_layers == [False, False]


@pytest.mark.parametrize("make", [*PRODUCERS.values(), lambda: layouts.dflash2()], ids=[*PRODUCERS, "dflash2"])
def test_saving_and_loading_keep_everything(tmp_path: Path, make: Any) -> None:
    raw, weights = make()
    first = DFlashModel.from_pretrained(write(tmp_path / "given", raw, weights))
    if first.config.confidence_head:
        first.config.confidence_threshold = 0.25
    first.save_pretrained(tmp_path / "saved")
    second = DFlashModel.from_pretrained(tmp_path / "saved")
    ignored = {"_name_or_path", "architectures", "transformers_version"}
    before, after = (
        {key: value for key, value in model.config.to_dict().items() if key not in ignored}
        for model in (first, second)
    )
    assert before == after
    state = second.state_dict()
    assert state.keys() == first.state_dict().keys()
    assert all(torch.equal(state[key], value) for key, value in first.state_dict().items())


@pytest.mark.parametrize(
    ("said", "proposed", "expected"),
    [(True, 4, True), (False, 5, False), (None, BLOCK, True), (None, BLOCK - 1, False)],
)
def test_speculators_say_their_layout_in_two_ways(said: bool | None, proposed: int, expected: bool) -> None:
    proposals = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": proposed}]}
    raw, _ = layouts.speculators(sample_from_anchor=said, speculators_config=proposals)
    assert convert(raw)["sample_from_anchor"] is expected


def test_a_reduced_vocabulary_loads_beside_a_head(tmp_path: Path) -> None:
    kept = [0, 2, 3, 7, 9, 12]
    raw, weights = layouts.speculators("rnn", kept=kept)
    drafter = DFlashModel.from_pretrained(write(tmp_path, raw, weights))
    assert drafter.config.draft_vocab_size == len(kept)
    assert drafter.markov_head.markov_w1.weight.shape == (VOCABULARY, layouts.RANK)
    assert drafter.markov_head.markov_w2.weight.shape == (len(kept), layouts.RANK)


def test_the_fill_in_layout_is_honoured() -> None:
    raw, _ = layouts.specforge(sample_from_anchor=False)
    assert convert(raw)["sample_from_anchor"] is False


def test_a_dspark_drafter_may_share_half_of_the_targets_ends() -> None:
    raw, _ = layouts.specforge()
    fields = convert({**raw, "has_embed_tokens": True, "has_lm_head": False})
    assert (fields["own_embedding"], fields["own_head"]) == (True, False)


def test_a_confidence_head_is_known_by_its_loss_too() -> None:
    raw, _ = layouts.specforge(enable_confidence_head=None, confidence_head_alpha=1.0)
    assert convert(raw)["confidence_head"] is True


def convert(raw: dict[str, Any]) -> dict[str, Any]:
    from hf_ddtree.drafters.formats import detect

    return detect(raw).convert(raw)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({**layouts.DEEPSPEC, "architectures": ["Gemma4DSparkModel"]}, "DSpark"),
        ({**layouts.DEEPSPEC, "architectures": ["LingDSparkModel"]}, "DSpark"),
        ({**layouts.DEEPSPEC, "target_layer_ids": [-1, 2]}, "embedding"),
        (layouts.specforge(attention_sink_bias=True)[0], "attention sinks"),
        (layouts.specforge(attention_mode="mla")[0], "attention_mode"),
        ({**layouts.specforge()[0], "n_routed_experts": 8}, "experts"),
        (layouts.specforge(markov_rank=0)[0], "markov_rank"),
        (layouts.dflash2(architectures=["MiniMaxDFlash2DraftModel"])[0], "DFlash2"),
        (layouts.dflash2(architectures=["DFlash2BeamDraftModel"])[0], "DFlash2"),
        (layouts.dflash2(nested={"conv_group_size": None})[0], "conv_group_size"),
        (layouts.dflash2(nested={"n_routed_experts": 8})[0], "experts"),
    ],
)
def test_what_is_not_known_is_refused_by_name(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        convert(raw)
    if message not in ("markov_rank", "conv_group_size"):
        assert "docs/drafters.md" in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(markov_rank=4, selector_rank=4, conv_kernel_size=2), "one head"),
        (dict(markov_rank=4, markov_head_type="lstm"), "vanilla, gated, rnn"),
        (dict(confidence_head=True), "markov_rank"),
        (dict(markov_rank=4, confidence_threshold=0.5), "confidence_head"),
        (dict(markov_rank=4, confidence_head=True, confidence_threshold=1.5), "between 0 and 1"),
        (dict(selector_rank=4), "conv_kernel_size"),
        (dict(selector_rank=4, conv_kernel_size=2, conv_group_size=7), "conv_group_size"),
        (dict(selector_rank=4, conv_kernel_size=2, selector_top_k=99), "selector_top_k"),
        (dict(selector_rank=4, conv_kernel_size=2, draft_vocab_size=8, own_head=True), "draft_vocab_size"),
    ],
)
def test_heads_that_contradict_each_other_are_refused(fields: dict[str, Any], message: str) -> None:
    config = DFlashConfig(vocab_size=VOCABULARY, hidden_size=HIDDEN, mask_token_id=2, target_layer_ids=[0], **fields)
    with pytest.raises(ValueError, match=message):
        config.check()


def test_a_missing_or_further_weight_is_named(tmp_path: Path) -> None:
    raw, weights = layouts.dflash2()
    further = {**weights, "candidate_selector.third_codebook": torch.zeros(2)}
    with pytest.raises(ValueError, match="third_codebook"):
        DFlashModel.from_pretrained(write(tmp_path / "further", raw, further))
    raw, weights = layouts.deepspec("rnn")
    del weights["markov_head.joint_proj.bias"]
    with pytest.raises(ValueError, match=r"markov_head\.joint_proj\.bias"):
        DFlashModel.from_pretrained(write(tmp_path / "missing", raw, weights))


def test_saved_configurations_name_their_family(tmp_path: Path) -> None:
    for make, architecture in ((layouts.deepspec, "DSparkDraftModel"), (layouts.dflash2, "DFlash2DraftModel")):
        raw, weights = make()
        folder = write(tmp_path / architecture, raw, weights)
        DFlashModel.from_pretrained(folder).save_pretrained(tmp_path / "saved")
        assert json.loads((tmp_path / "saved" / "config.json").read_text())["architectures"] == [architecture]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(markov_rank=1), "DSpark"),
        (dict(selector_rank=1), "DFlash2"),
        (dict(sample_from_anchor=True), "anchor layout"),
        (dict(own_head=True), "output head"),
        (dict(own_embedding=True), "embedding of its own"),
        (dict(input_embedding_scale=2.0), "scaled"),
    ],
)
def test_the_native_chain_refuses_all_but_the_base_layout(fields: dict[str, Any], message: str) -> None:
    class Drafter:
        config = DFlashConfig(vocab_size=VOCABULARY, mask_token_id=2, target_layer_ids=[0])

    check_native_chain(Drafter())
    for name, value in fields.items():
        setattr(Drafter.config, name, value)
    with pytest.raises(ValueError, match=message) as error:
        check_native_chain(Drafter())
    assert "DDTreeConfig" in str(error.value)
