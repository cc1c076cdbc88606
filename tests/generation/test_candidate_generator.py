"""The generator under Transformers' own assisted decoding: the native contract of `get_candidates`."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from hf_ddtree import DDTreeCandidateGenerator
from pairs import VOCABULARY, make_drafter, make_target, plain, prompt

NEW = 40


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A target whose native assisted decoding drafts with our generator, and the candidates it was given."""
    target = make_target("qwen3")
    drafter = make_drafter(target)
    given: list[tuple[int, Any]] = []

    def generator(**kwargs: Any) -> DDTreeCandidateGenerator:
        made = DDTreeCandidateGenerator(drafter, target, kwargs["generation_config"])
        original = made.get_candidates

        def spy(input_ids: torch.Tensor, **call: Any) -> Any:
            candidates, logits = original(input_ids, **call)
            given.append((candidates.shape[1] - input_ids.shape[1], logits))
            return candidates, logits

        monkeypatch.setattr(made, "get_candidates", spy)
        return made

    monkeypatch.setattr(target, "_get_candidate_generator", generator, raising=False)
    return target, drafter, given


def test_the_native_loop_takes_our_chains(native: Any) -> None:
    target, drafter, given = native
    config = GenerationConfig(max_new_tokens=NEW, speculation_type="dflash")
    output = target.generate(prompt(), assistant_model=drafter, generation_config=config)
    assert torch.equal(output, plain(target, prompt(), max_new_tokens=NEW))
    assert given[0] == (0, None), "the first iteration is the prefill, which drafts nothing"
    lengths = {length for length, _ in given[1:]}
    assert max(lengths) == drafter.config.block_size - 1
    for length, logits in given[1:]:
        if length:
            assert logits.shape == (1, length, VOCABULARY)


def test_no_logits_when_sampling(native: Any) -> None:
    target, drafter, given = native
    config = GenerationConfig(max_new_tokens=NEW, do_sample=True, speculation_type="dflash")
    torch.manual_seed(0)
    output = target.generate(prompt(), assistant_model=drafter, generation_config=config)
    assert output.shape[1] == prompt().shape[1] + NEW
    assert any(length for length, _ in given)
    assert all(logits is None for _, logits in given)


def test_the_chain_is_the_same_as_the_native_generators() -> None:
    target = make_target("llama")
    drafter = make_drafter(target)
    config = GenerationConfig(max_new_tokens=NEW, speculation_type="dflash")
    forwards: list[int] = []
    handle = target.register_forward_hook(lambda *args: forwards.append(1))
    prompts = [prompt(seed=seed) for seed in range(8)]
    for ids in prompts:
        target.generate(ids, assistant_model=drafter, generation_config=config)
    native_forwards = len(forwards)
    forwards.clear()
    target._get_candidate_generator = lambda **kwargs: DDTreeCandidateGenerator(
        drafter, target, kwargs["generation_config"]
    )
    for ids in prompts:
        target.generate(ids, assistant_model=drafter, generation_config=config)
    handle.remove()
    assert len(forwards) == native_forwards < len(prompts) * NEW


def test_hidden_states_are_needed() -> None:
    target = make_target()
    generator = DDTreeCandidateGenerator(make_drafter(target), target, GenerationConfig(max_length=50))
    with pytest.raises(ValueError, match="hidden_states"):
        generator.get_candidates(prompt(), model_kwargs={}, model_outputs=object(), n_last_matches=1)
