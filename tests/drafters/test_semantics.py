"""What the fields of each layout mean, told by what is drafted: one drafter, written two ways, drafts the same."""

from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.checkpoints import (
    BLOCK,
    HIDDEN,
    TAPS,
    deepspec_config,
    open_spec_config,
    own_weights,
    speculators_config,
    write,
    zlab_config,
    zlab_weights,
)
from hf_ddtree import DFlashModel
from hf_ddtree.compat import decoder_layers
from hf_ddtree.drafters import TargetIO
from hf_ddtree.round import TapCollector
from pairs import LAYERS, VOCABULARY, make_drafter, make_target, prompt, tree

FULL, SLIDING = "full_attention", "sliding_attention"
KEPT = [0, 1, 2, 3, 5, 7, 8, 9, 10, 12, 13, 15]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def load(folder: Path, raw: dict[str, Any], extra: dict[str, torch.Tensor] | None = None) -> DFlashModel:
    weights = zlab_weights(bias=bool(raw.get("attention_bias"))) | (extra or {})
    return DFlashModel.from_pretrained(write(folder, raw, weights)).eval()


def states(model: DFlashModel, slots: int = BLOCK) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, slots, HIDDEN, generator=generator)
    taps = torch.randn(1, 12, HIDDEN * len(TAPS), generator=generator)
    with torch.no_grad():
        return model(noise, taps).last_hidden_state


def trees(drafter: DFlashModel, target: Any = None, **settings: Any) -> list[Any]:
    """The draft trees of a short generate."""
    target = make_target("qwen3") if target is None else target
    output = tree(
        target, drafter, prompt(), max_new_tokens=12, return_dict_in_generate=True, output_trees=True, **settings
    )
    return [verified.tree for verified in output.speculation.trees]


def same_trees(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a.token_ids, b.token_ids) and torch.equal(a.parents, b.parents)
        for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize(
    "raw",
    [
        speculators_config(),
        open_spec_config(),
        open_spec_config({"target_layer_ids": TAPS, "target_layer_start_idx": 0}),
    ],
    ids=["speculators", "open_spec_from_1", "open_spec_from_0"],
)
def test_tap_conventions(raw: dict[str, Any], tmp_path: Path) -> None:
    """Ids of layers (z-lab) and of hidden states (speculators) name the same taps; one off drafts other trees."""
    ours = load(tmp_path / "other", raw)
    assert ours.config.target_layer_ids == TAPS
    expected = trees(load(tmp_path / "zlab", zlab_config()))
    assert same_trees(trees(ours), expected)
    ours.config.target_layer_ids = [tap + 1 for tap in TAPS]
    assert not same_trees(trees(ours), expected)


@torch.no_grad()
def test_a_tap_on_the_last_layer_is_read_before_the_final_norm() -> None:
    target = make_target("qwen3")
    collector = TapCollector(decoder_layers(target), [LAYERS - 1])
    with collector.hooked(), collector.collect():
        outputs = target(prompt(), output_hidden_states=True)
    taps = collector.taps()
    assert not torch.allclose(taps, outputs.hidden_states[-1], atol=1e-3)
    assert torch.allclose(target.model.norm(taps), outputs.hidden_states[-1], atol=1e-5)


TWINS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "modelopt_windows": (
        zlab_config(nested={"use_swa": True, "swa_window_size": 3}, layer_types=...),
        zlab_config(layer_types=[SLIDING] * 2, sliding_window=3, is_causal=False),
    ),
    "modelopt_windows_by_layer": (
        zlab_config(nested={"use_swa": True, "swa_window_size": 3}, layer_types=[FULL, SLIDING]),
        zlab_config(layer_types=[FULL, SLIDING], sliding_window=3, is_causal=False),
    ),
    "nemo_windows_are_symmetric": (
        zlab_config(architectures=["Qwen3DFlashDraftModel"], layer_types=[SLIDING, FULL], sliding_window=3),
        zlab_config(layer_types=[SLIDING, FULL], sliding_window=3, is_causal=False),
    ),
    "jetspec": (zlab_config(nested={"causal_head": True}), zlab_config(is_causal=True)),
    "jetspec_of_both_spellings": (zlab_config(nested={"causal": True}), zlab_config(is_causal=True)),
    "speculators_sliding_is_causal": (
        speculators_config(layer={"layer_types": [SLIDING, FULL], "sliding_window": 3}),
        zlab_config(layer_types=[SLIDING, FULL], sliding_window=3),
    ),
    "speculators_non_causal": (
        speculators_config(
            layer={"layer_types": [SLIDING, FULL], "sliding_window": 3}, sliding_window_non_causal=True
        ),
        zlab_config(layer_types=[SLIDING, FULL], sliding_window=3, is_causal=False),
    ),
    "speculators_yarn": (
        speculators_config(layer={"rope_theta": ..., "rope_parameters": {**YARN, "rope_theta": 5e4}}),
        zlab_config(rope_scaling=YARN),
    ),
    "open_spec_non_causal": (
        open_spec_config({"sliding_window_non_causal": True}, layer_types=[SLIDING, FULL], sliding_window=3),
        zlab_config(layer_types=[SLIDING, FULL], sliding_window=3, is_causal=False),
    ),
    "rope_of_either_spelling": (
        zlab_config(rope_theta=..., rope_scaling=..., rope_parameters={"rope_type": "default", "rope_theta": 5e4}),
        zlab_config(),
    ),
}


@pytest.mark.parametrize("name", list(TWINS))
def test_two_spellings_of_one_drafter(name: str, tmp_path: Path) -> None:
    other, zlab = TWINS[name]
    expected = states(load(tmp_path / "zlab", zlab))
    assert torch.equal(states(load(tmp_path / "other", other)), expected)
    if name != "rope_of_either_spelling":
        assert not torch.equal(states(load(tmp_path / "plain", zlab_config())), expected)


def test_a_bias_is_read_in_a_nested_configuration(tmp_path: Path) -> None:
    raw = speculators_config(layer={"attention_bias": True})
    weights = zlab_weights(bias=True)
    model = DFlashModel.from_pretrained(write(tmp_path / "spec", raw, weights)).eval()
    plain = zlab_config(attention_bias=True)
    assert torch.equal(states(model), states(load(tmp_path / "zlab", plain)))


def first_choice(drafter: DFlashModel, target: Any) -> tuple[torch.Tensor, Any]:
    """The logits of the first pass's slots, and the tree that was built of them."""
    passes: list[torch.Tensor] = []
    handle = drafter.register_forward_hook(lambda module, args, output: passes.append(output.last_hidden_state))
    try:
        drafted = trees(drafter, target)[0]
    finally:
        handle.remove()
    with torch.no_grad():
        return TargetIO(target, drafter).logits(passes[0])[0], drafted


@pytest.mark.parametrize(
    "raw, extra, slot, depth",
    [
        (zlab_config(), {}, 1, BLOCK - 1),
        (speculators_config(), {}, 1, BLOCK - 1),
        (speculators_config(sample_from_anchor=True), {}, 0, BLOCK),
        (open_spec_config({"sample_from_anchor": True, "speculative_tokens": BLOCK}), {}, 0, BLOCK),
        (deepspec_config(), own_weights(), 0, BLOCK),
        (zlab_config(nested={"causal_head": True, "draft_shift": True}), {}, 0, BLOCK - 1),
        (zlab_config(nested={"use_swa": False, "shift_label": True}), {}, 0, BLOCK),
    ],
    ids=["zlab", "speculators", "anchored", "open_spec", "deepspec", "jetspec", "modelopt"],
)
def test_which_slot_predicts_the_next_token(
    raw: dict[str, Any], extra: dict[str, torch.Tensor], slot: int, depth: int, tmp_path: Path
) -> None:
    target, drafter = make_target("qwen3"), load(tmp_path, raw, extra)
    logits, drafted = first_choice(drafter, target)
    chain = drafted.most_probable_chain()
    assert (drafter.config.first_draft_slot, drafter.config.draft_depth) == (slot, depth)
    assert chain == logits[slot : slot + len(chain)].argmax(-1).tolist()
    assert drafted.depths.max() <= depth
    drafter.norm.weight.data.fill_(3.0)
    assert max(int(item.depths.max()) for item in trees(drafter, target, budget=12)) == depth


def test_a_block_of_the_anchor_alone_drafts_one_token() -> None:
    target = make_target("qwen3")
    drafted = trees(make_drafter(target, block_size=1, sample_from_anchor=True), target)
    assert {int(item.depths.max()) for item in drafted} == {0, 1}, "the last round has no room"


def test_shifted_slots_of_a_causal_head_do_not_see_the_last_one(tmp_path: Path) -> None:
    """JetSpec's reference runs `block_size` slots and reads all but the last."""
    shifted = load(tmp_path / "a", zlab_config(nested={"causal_head": True, "draft_shift": True}))
    whole = load(tmp_path / "b", zlab_config(nested={"causal_head": True}))
    noise, taps = torch.randn(1, BLOCK, HIDDEN), torch.randn(1, 7, HIDDEN * len(TAPS))
    with torch.no_grad():
        expected = whole(noise, taps).last_hidden_state[:, : BLOCK - 1]
        assert shifted.config.block_size == BLOCK - 1
        assert torch.allclose(shifted(noise[:, : BLOCK - 1], taps).last_hidden_state, expected, atol=1e-5)


def test_a_reduced_vocabulary_drafts_the_tokens_it_maps_to(tmp_path: Path) -> None:
    raw = speculators_config(draft_vocab_size=len(KEPT))
    drafter = load(tmp_path, raw, own_weights(head_rows=len(KEPT), kept=KEPT))
    target = make_target("qwen3")
    logits, drafted = first_choice(drafter, target)
    assert logits.shape == (BLOCK, len(KEPT))
    chain = drafted.most_probable_chain()
    assert chain == [KEPT[index] for index in logits[1 : 1 + len(chain)].argmax(-1).tolist()]
    drafter.norm.weight.data.fill_(0.1)
    seen = {int(token) for item in trees(drafter, target, budget=200) for token in item.token_ids[1:]}
    assert seen <= set(KEPT)
    assert seen - set(range(len(KEPT))), "tokens that only the map reaches"


def test_own_parts_are_used_instead_of_the_targets(tmp_path: Path) -> None:
    target, own = make_target("qwen3"), own_weights()
    io = TargetIO(target, load(tmp_path, deepspec_config(), own))
    ids, hidden = torch.tensor([[3, 7]]), torch.randn(1, 2, HIDDEN)
    with torch.no_grad():
        assert torch.equal(io.embed(ids), own["embed_tokens.weight"][ids])
        assert torch.allclose(io.logits(hidden), hidden @ own["lm_head.weight"].T, atol=1e-5)
    assert io.token_map is None


def test_an_own_head_is_not_capped_as_the_targets() -> None:
    """The target's softcap and multiplier belong to its head; the drafter's own fields go with its own."""
    target, hidden = make_target("gemma2"), torch.randn(1, 2, HIDDEN) * 200
    with torch.no_grad():
        drafter = make_drafter(target, own_head=True)
        assert torch.allclose(TargetIO(target, drafter).logits(hidden), hidden @ drafter.lm_head.weight.T, atol=1e-4)
        drafter = make_drafter(target, own_head=True, final_logit_softcapping=2.0)
        assert TargetIO(target, drafter).logits(hidden).abs().max() <= 2


def test_a_head_padded_beyond_the_target_drafts_only_its_tokens() -> None:
    """A size that differs without a map is padding: the ids are the target's own."""
    target = make_target("qwen3")
    drafter = make_drafter(target, own_head=True, vocab_size=VOCABULARY + 8)
    drafter.lm_head.weight.data[VOCABULARY:] *= 100
    with torch.no_grad():
        assert TargetIO(target, drafter).logits(torch.randn(1, 3, HIDDEN)).shape[-1] == VOCABULARY
    assert all(item.token_ids.max() < VOCABULARY for item in trees(drafter, target))


def test_raw_embedding_rows_for_speculators_on_a_scaled_target(tmp_path: Path) -> None:
    target, ids = make_target("gemma3"), torch.tensor([[3, 7]])
    rows = target.get_input_embeddings().weight[ids]
    with torch.no_grad():
        assert torch.equal(TargetIO(target, load(tmp_path / "s", speculators_config())).embed(ids), rows)
        assert not torch.allclose(TargetIO(target, load(tmp_path / "z", zlab_config())).embed(ids), rows)


def test_the_softcap_is_in_the_trees_scores() -> None:
    target = make_target("gemma2")
    drafter = make_drafter(target, final_logit_softcapping=0.5, output_multiplier=3.0)
    drafter.norm.weight.data.fill_(3.0)
    logits, drafted = first_choice(drafter, target)
    assert logits.abs().max() <= 0.5
    scores = logits[1].log_softmax(-1)
    for token, node in drafted.children[0].items():
        assert float(drafted.log_probs[node]) == pytest.approx(float(scores[token]), abs=1e-4)


def test_a_mask_beyond_the_tokenizer_inside_the_embedding() -> None:
    target = make_target("qwen3")
    assert trees(make_drafter(target, mask_token_id=VOCABULARY - 1))
    with pytest.raises(ValueError, match=rf"mask token {VOCABULARY} .* {VOCABULARY} embedding rows"):
        trees(make_drafter(target, mask_token_id=VOCABULARY))
    own = make_drafter(target, own_embedding=True, vocab_size=VOCABULARY + 4, mask_token_id=VOCABULARY + 3)
    assert trees(own, target)
    with pytest.raises(ValueError, match=rf"own {VOCABULARY - 2} .*{VOCABULARY}"):
        trees(make_drafter(target, own_embedding=True, vocab_size=VOCABULARY - 2), target)
