"""Whole generates under `budget="auto"`: the text of plain `generate` whatever sizes rounds jump through."""

import itertools
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_ddtree
from hf_ddtree import DDTreeConfig
from hf_ddtree.compat import CACHE_NAME
from hf_ddtree.configuration import AUTO_START, LARGEST_AUTO
from hf_ddtree.generation import sizing
from hf_ddtree.generation.cost_model import SIZES
from hf_ddtree.generation.sizing import auto_size
from models.zoo import ALL
from pairs import make_drafter, make_target, plain, prompt, tree

NEW = 40
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": dict(do_sample=True, temperature=1.2),
    "processors": dict(repetition_penalty=1.3, eos_token_id=[5, 9]),
    "static": dict(cache_implementation="static"),
    "static sampling": dict(cache_implementation="static", do_sample=True),
}


@pytest.mark.parametrize("setting", list(SETTINGS))
@pytest.mark.parametrize("family", ["qwen3", "qwen3_sliding", "gpt_oss"])
def test_equals_generate_through_all_sizes(family: str, setting: str, scripted: list[int]) -> None:
    target = make_target(family)
    drafter, kwargs = make_drafter(target), {"max_new_tokens": NEW, **SETTINGS[setting]}
    for seed in range(2):
        expected = plain(target, prompt(seed=seed), **kwargs)
        output = tree(target, drafter, prompt(seed=seed), budget="auto", return_dict_in_generate=True, **kwargs)
        assert torch.equal(output.sequences, expected)
        stats = output.speculation
        assert len(stats.tree_sizes) == stats.rounds and sum(stats.tree_sizes) == stats.nodes_verified
    assert len(set(scripted)) > 3


@pytest.mark.parametrize("family", ["qwen3_next", "jamba"])
@pytest.mark.parametrize("kwargs", [{}, {"do_sample": True}], ids=["greedy", "sampling"])
def test_recurrent_layers(family: str, kwargs: dict[str, Any], scripted: list[int]) -> None:
    target = make_target(ALL[family].build)
    expected = plain(target, prompt(), max_new_tokens=NEW, **kwargs)
    assert torch.equal(
        tree(target, make_drafter(target), prompt(), budget="auto", max_new_tokens=NEW, **kwargs), expected
    )
    assert scripted


def test_the_drafter_reads_what_plain_rounds_left(scripted: list[int]) -> None:
    """A pass after rounds without one brings all taps: its trees are those of a drafter that never paused."""
    target = make_target()
    drafter = make_drafter(target)
    kwargs: dict[str, Any] = dict(max_new_tokens=60, return_dict_in_generate=True, output_trees=True)
    always = {}
    position = 0
    fixed = tree(target, drafter, prompt(), budget=255, **kwargs)
    for verified, length in zip(fixed.speculation.trees, fixed.speculation.acceptance_lengths, strict=True):
        always[position] = verified.tree
        position += length
    output, position, compared = tree(target, drafter, prompt(), budget="auto", **kwargs), 0, 0
    for verified, length in zip(output.speculation.trees, output.speculation.acceptance_lengths, strict=True):
        if verified.tree.num_drafted and position in always:
            expected = always[position].cut(verified.tree.num_drafted)
            assert torch.equal(verified.tree.token_ids, expected.token_ids)
            torch.testing.assert_close(verified.tree.log_probs, expected.log_probs, atol=1e-4, rtol=1e-4)
            compared += 1
        position += length
    assert compared > 3
    cache = output[CACHE_NAME]
    assert cache.drafter_context.length == cache.get_seq_length()


def test_unscripted_it_learns_over_generates() -> None:
    target = make_target()
    drafter = make_drafter(target)
    sizes: list[int] = []
    for seed in range(4):
        output = tree(
            target, drafter, prompt(seed=seed), budget="auto", max_new_tokens=60, return_dict_in_generate=True
        )
        assert torch.equal(output.sequences, plain(target, prompt(seed=seed), max_new_tokens=60))
        sizes += output.speculation.tree_sizes
    assert sizes[0] == AUTO_START["cpu"] and max(sizes) <= LARGEST_AUTO["cpu"]
    pair = sizing._pairs[drafter][target][("cpu", torch.float32)]
    greedy, sampled = pair.controllers
    costs = greedy.costs
    assert sum(map(costs.count, range(1, len(SIZES)))) == sum(map(bool, sizes)) and costs.draft > 0
    # Of many plain rounds a part is enough to know what one costs.
    assert 0 < costs.count(0) <= sizes.count(0)
    assert costs is sampled.costs
    assert (pair.calibrations[0].factors != 1).any() and (pair.calibrations[1].factors == 1).all()


def test_what_is_known_goes_with_the_models() -> None:
    target = make_target()
    drafter = make_drafter(target)
    device = torch.device("cpu")
    first, second = (auto_size(target, drafter, device, False, 255, False) for _ in range(2))
    assert first.controller is second.controller and first.calibration is second.calibration
    assert auto_size(target, drafter, device, True, 255, False).controller is not first.controller
    assert auto_size(target, make_drafter(target), device, False, 255, False).controller is not first.controller


def test_an_interrupted_generate_leaves_the_pair_as_it_was() -> None:
    target = make_target()
    drafter = make_drafter(target)
    tree(target, drafter, prompt(), budget="auto", max_new_tokens=30)
    calls = itertools.count()

    def interrupt(*_: Any) -> None:
        if next(calls) == 7:
            raise KeyboardInterrupt

    handle = target.model.layers[2].register_forward_pre_hook(interrupt)
    with hf_ddtree.record() as stats, pytest.raises(KeyboardInterrupt):
        tree(target, drafter, prompt(seed=1), budget="auto", max_new_tokens=60)
    handle.remove()
    assert stats.rounds == len(stats.tree_sizes) > 0
    for seed in range(2):
        expected = plain(target, prompt(seed=seed), max_new_tokens=60)
        assert torch.equal(tree(target, drafter, prompt(seed=seed), budget="auto", max_new_tokens=60), expected)


def test_a_config_that_was_saved(tmp_path: Any) -> None:
    target = make_target("llama")
    target.generation_config = DDTreeConfig(budget="auto", max_new_tokens=NEW, pad_token_id=0)
    target.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.generation_config.budget == "auto"
    with hf_ddtree.record() as stats:
        output = loaded.generate(prompt(), assistant_model=make_drafter(loaded))
    assert stats.tree_sizes[0] == AUTO_START["cpu"]
    assert torch.equal(output, plain(make_target("llama"), prompt(), max_new_tokens=NEW))


def test_a_static_cache_has_room_for_the_largest_tree() -> None:
    target = make_target()
    kwargs: dict[str, Any] = dict(cache_implementation="static", max_new_tokens=NEW, return_dict_in_generate=True)
    output = tree(target, make_drafter(target), prompt(), budget="auto", **kwargs)
    assert {layer.room for layer in output[CACHE_NAME].layers} == {LARGEST_AUTO["cpu"]}


def test_trees_stay_below_a_length_at_which_the_model_changes() -> None:
    """Where a number would be refused, an automatic budget stays small enough."""
    target = make_target("longrope")
    boundary = target.config.rope_parameters["original_max_position_embeddings"]
    ids, drafter = prompt(8), make_drafter(target)
    for seed in range(3):
        output = tree(
            target, drafter, ids, seed=seed, budget="auto", max_new_tokens=boundary - 8, return_dict_in_generate=True
        )
        assert max(output.speculation.tree_sizes) < boundary
    assert torch.equal(output.sequences, plain(target, ids, max_new_tokens=boundary - 8))
    with pytest.raises(ValueError, match="longrope"):
        tree(target, drafter, ids, budget="auto", max_new_tokens=boundary)
