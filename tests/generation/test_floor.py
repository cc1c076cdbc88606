"""A drafter of another target warns once when nearly nothing is accepted, and one that is accepted never does."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_ddtree.generation import floor
from hf_ddtree.generation.floor import FLOOR, LEAST_NODES, ROUNDS, AcceptanceFloor
from pairs import make_drafter, make_target, prompt, tree


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    said: list[str] = []
    monkeypatch.setattr(floor.logger, "warning", said.append)
    yield said


def wrong_pair() -> Any:
    """A target that is sure of its tokens among thousands, and a drafter that knows nothing of them."""
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, head_dim=8)
    target = Qwen3ForCausalLM(Qwen3Config(vocab_size=4000, num_key_value_heads=2, **shape)).eval()
    target.generation_config.eos_token_id = None
    for weight in target.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.25)
    return target, make_drafter(target, vocab_size=4000)


def test_a_wrong_drafter_warns_once_for_a_pair(warnings: list[str]) -> None:
    target, drafter = wrong_pair()
    # The rounds are counted over generates, as a chat's answers may be short.
    for _ in range(3):
        tree(target, drafter, prompt(), budget=LEAST_NODES, max_new_tokens=ROUNDS // 2 + 6)
    assert len(warnings) == 1
    for cause in ("another target", "target_layer_ids", "fp16", "chat template"):
        assert cause in warnings[0]
    tree(target, drafter, prompt(), budget=LEAST_NODES, max_new_tokens=2 * ROUNDS)
    assert len(warnings) == 1
    tree(target, make_drafter(target, seed=7, vocab_size=4000), prompt(), max_new_tokens=2 * ROUNDS)
    assert len(warnings) == 2, "another drafter is another pair"


def test_an_accepted_drafter_does_not_warn(warnings: list[str]) -> None:
    target = make_target()
    tree(target, make_drafter(target), prompt(), max_new_tokens=4 * ROUNDS)
    assert not warnings


@pytest.mark.parametrize("accepted", [0, 1, 2, ROUNDS])
def test_threshold(warnings: list[str], accepted: int) -> None:
    counter = AcceptanceFloor()
    for index in range(ROUNDS):
        assert not warnings
        counter.observe(drafted=LEAST_NODES, emitted=1 + (index < accepted))
    assert bool(warnings) == (1 + accepted / ROUNDS < FLOOR)


def test_small_trees_prove_nothing(warnings: list[str]) -> None:
    counter = AcceptanceFloor()
    for _ in range(3 * ROUNDS):
        counter.observe(drafted=LEAST_NODES - 1, emitted=1)
    assert not warnings
