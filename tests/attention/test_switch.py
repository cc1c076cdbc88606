"""The switch: on for a forward, counted over threads, invisible to others, restored whatever happens."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from attention.trees import random_tree, round_of
from hf_ddtree.attention import NAME, AttentionSwitch, check, original_implementation
from hf_ddtree.round import CURRENT_ROUND
from pairs import FAMILIES, make_target, prompt


def in_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(timeout=60)
    return results[0]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_on_inside_and_restored(implementation: str) -> None:
    model = make_target(implementation=implementation)
    tree = round_of(random_tree(5, seed=0))
    with AttentionSwitch(model).tree(tree):
        assert model.config._attn_implementation == NAME
        assert original_implementation(model.config) == implementation
        assert CURRENT_ROUND.get() is tree
    assert model.config._attn_implementation == original_implementation(model.config) == implementation
    assert CURRENT_ROUND.get() is None


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_restored_after_an_exception(error: type[BaseException]) -> None:
    model = make_target(implementation="eager")
    with pytest.raises(error), AttentionSwitch(model).tree(round_of(random_tree(5, seed=0))):
        raise error
    assert model.config._attn_implementation == "eager"
    assert CURRENT_ROUND.get() is None


def test_the_last_of_two_threads_restores() -> None:
    """Overlapping holders, the first to enter leaving first: the second must still find its tree's attention."""
    model, errors = make_target(implementation="sdpa"), []
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()
    trees = [round_of(random_tree(n, seed=0)) for n in (4, 9)]

    def first() -> None:
        with AttentionSwitch(model).tree(trees[0]):
            first_in.set()
            assert second_in.wait(30)
            assert CURRENT_ROUND.get() is trees[0]
        assert model.config._attn_implementation == NAME
        first_out.set()

    def second() -> None:
        assert first_in.wait(30)
        with AttentionSwitch(model).tree(trees[1]):
            second_in.set()
            assert first_out.wait(30)
            assert model.config._attn_implementation == NAME
            assert original_implementation(model.config) == "sdpa"
            assert CURRENT_ROUND.get() is trees[1]

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=run, args=(function,)) for function in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not errors
    assert model.config._attn_implementation == "sdpa"


def test_nested_on_one_model() -> None:
    model = make_target(implementation="sdpa")
    outer, inner = (round_of(random_tree(n, seed=0)) for n in (4, 9))
    with AttentionSwitch(model).tree(outer):
        with AttentionSwitch(model).tree(inner):
            assert CURRENT_ROUND.get() is inner
        assert CURRENT_ROUND.get() is outer
        assert model.config._attn_implementation == NAME
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_forward_of_another_thread_keeps_every_bit(family: str, padded: bool) -> None:
    model, ids = make_target(family), prompt(13)
    mask = torch.ones_like(ids)
    if padded:
        mask[:, :4] = 0

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return model(ids, attention_mask=mask).logits

    expected = forward()
    with AttentionSwitch(model).tree(round_of(random_tree(13, seed=1))):
        inside, elsewhere = forward(), in_thread(forward)
    assert torch.equal(elsewhere, expected)
    # The control: where the tree is visible it changes the output.
    assert not torch.allclose(inside, expected, atol=1e-3)


def test_the_text_part_of_a_composite_model_is_switched() -> None:
    text = dict(
        vocab_size=16, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=4,
    )  # fmt: skip
    vision = dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4))
    vision_before = model.config.vision_config._attn_implementation
    with AttentionSwitch(model).tree(round_of(random_tree(5, seed=0))):
        assert model.config.text_config._attn_implementation == NAME
        assert model.config.vision_config._attn_implementation == vision_before
    assert model.config.text_config._attn_implementation != NAME


def test_check_names_the_implementation_and_the_way_out() -> None:
    model = make_target()
    check(model)
    with AttentionSwitch(model).tree(round_of(random_tree(5, seed=0))):
        check(model)
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match=r"'flash_attention_2'.*'sdpa' or 'eager'.*set_attn_implementation"):
        check(model)
