"""A target that would give a tree's nodes other logits is refused by name before its first token."""

from typing import Any

import pytest
import torch
import transformers as T

from hf_ddtree.generation.self_test import _passed
from pairs import FAMILIES, make_drafter, make_target, plain, prompt, tree

NEW = 20


def refused(target: Any, message: str) -> None:
    drafter = make_drafter(target)
    tokens: list[int] = []

    class Tape:
        def put(self, value: torch.Tensor) -> None:
            tokens.append(1)

        def end(self) -> None: ...

    with pytest.raises(ValueError, match=message):
        tree(target, drafter, prompt(), max_new_tokens=NEW, streamer=Tape())
    assert len(tokens) == 1, "only the prompt may have been streamed"


def test_windows_from_slots_of_the_cache() -> None:
    config = T.GPTNeoConfig(
        vocab_size=16,
        hidden_size=32,
        num_layers=4,
        num_heads=4,
        intermediate_size=48,
        attention_types=[[["global", "local"], 2]],
        window_size=6,
        max_position_embeddings=128,
    )
    refused(
        T.GPTNeoForCausalLM(config).eval(),
        "None of the layers of GPTNeoForCausalLM reads",
    )


def test_positions_from_the_caches_length() -> None:
    target = make_target("llama")
    rotary, forward = target.model.rotary_emb, target.model.rotary_emb.forward

    def by_slot(states: torch.Tensor, position_ids: torch.Tensor) -> Any:
        first = position_ids[:, :1]
        return forward(states, first + torch.arange(position_ids.shape[1])[None])

    rotary.forward = by_slot
    refused(target, r"LlamaForCausalLM gives the nodes of a draft tree other logits")


def test_an_override_that_prepares_other_positions_is_honoured() -> None:
    class Shifted(T.LlamaForCausalLM):
        def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
            inputs["position_ids"] = inputs["position_ids"] * 2
            return inputs

    target = make_target("llama")
    shifted = Shifted(target.config).eval()
    shifted.load_state_dict(target.state_dict())
    shifted.generation_config = target.generation_config
    expected = plain(shifted, prompt(), max_new_tokens=NEW)
    assert torch.equal(tree(shifted, make_drafter(shifted), prompt(), max_new_tokens=NEW), expected)


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_runs_once_and_passes(family: str, dtype: torch.dtype) -> None:
    target = make_target(family).to(dtype)
    drafter = make_drafter(target).to(dtype)
    forwards: list[int] = []
    target.register_forward_pre_hook(lambda *args: forwards.append(1))
    output = tree(target, drafter, prompt(), max_new_tokens=NEW, return_dict_in_generate=True)
    assert len(forwards) == output.speculation.rounds + 1, "the test's own forwards are not the user's"
    assert len(_passed[target]) == 1
    inner: list[int] = []
    target.get_decoder().register_forward_pre_hook(lambda *args: inner.append(1))
    again = tree(target, drafter, prompt(), max_new_tokens=NEW, return_dict_in_generate=True)
    assert len(inner) == again.speculation.rounds + 1
