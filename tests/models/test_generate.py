"""Every family: whole generates with trees equal plain ones over rounds in which drafts are taken and refused."""

import itertools
from typing import Any

import pytest
import torch

from hf_ddtree.compat import CACHE_NAME
from models.generating import (
    GREEDY,
    NEW,
    PROMPT,
    check_rounding,
    drafter_for,
    generated_by,
    logits_over,
    resolved_gap,
    run,
)
from models.measure import as_dictionary, measure
from models.zoo import FAMILIES, cases

IMAGES = [name for name, family in FAMILIES.items() if family.image is not None]


@pytest.mark.parametrize("family", cases())
def test_equals_plain_text(family: str, models_report: list[dict[str, Any]]) -> None:
    generated = generated_by(family, "float32")
    lengths = generated.acceptance_lengths
    assert generated.verdict == "equal"
    assert set(generated.routes) == FAMILIES[family].routes
    assert len(lengths) > 20 and lengths.count(1) > 2 and max(lengths) > 1 and sum(lengths) == 2 * (NEW - 1), lengths
    # A text that repeats one token would prove little about the cache behind it.
    late = generated.text[NEW // 2 :]
    assert len(set(generated.text)) > 4 and sum(a != b for a, b in itertools.pairwise(late)) > 2
    models_report.append(as_dictionary(measure(family, "float32")))


@pytest.mark.parametrize("family", cases())
def test_rounds_without_a_draft_are_plain_decoding(family: str) -> None:
    """They may leave out what plain decoding hands along, such as a mask that hides nothing."""
    chosen = FAMILIES[family]
    model, prompt = chosen.make(), chosen.prompt(PROMPT, seed=3)
    settings: dict[str, Any] = dict(max_new_tokens=10, output_logits=True, **GREEDY)
    plain, ours = run(chosen, model, prompt, **settings), run(chosen, model, prompt, drafter_for(model), 0, **settings)
    assert torch.equal(ours.sequences, plain.sequences)
    assert torch.allclose(torch.cat(ours.logits), torch.cat(plain.logits), atol=1e-4)


@pytest.mark.parametrize("family", cases(slow=True))
def test_equals_plain_text_to_rounding_in_bf16(family: str, models_report: list[dict[str, Any]]) -> None:
    generated = generated_by(family, "bfloat16")
    assert set(generated.routes) == FAMILIES[family].routes
    assert max(generated.acceptance_lengths) > 1
    models_report.append(as_dictionary(measure(family, "bfloat16")))


@pytest.mark.parametrize("family", cases(slow=True))
def test_a_wrong_token_shows_in_bf16(family: str) -> None:
    """At most places of a text the second-best token is refused, were it the only one that is wrong."""
    chosen = FAMILIES[family]
    model, prompt = chosen.make(torch.bfloat16), chosen.prompt(PROMPT, seed=3)
    text = generated_by(family, "bfloat16").text
    best = logits_over(chosen, model, prompt, text).topk(2)
    clear = (best.values[:, 0] - best.values[:, 1] > 1.5 * resolved_gap(family)).nonzero()[:, 0].tolist()
    assert len(clear) > NEW // 2, clear
    for step in (clear[0], clear[len(clear) // 2], clear[-1]):
        wrong = [*text[:step], int(best.indices[step, 1]), *text[step + 1 :]]
        with pytest.raises(AssertionError, match="below the best"):
            check_rounding(family, model, prompt, wrong)


@pytest.mark.parametrize("family", cases(IMAGES))
def test_a_second_turn_after_an_image(family: str) -> None:
    """The returned cache continues the text: the positions after an image are the model's own, kept beside it."""
    chosen = FAMILIES[family]
    model = chosen.make()
    drafter, prompt, more = drafter_for(model), chosen.prompt(PROMPT, seed=3), chosen.tokens(3, seed=9)
    texts = []
    for assistant in (None, drafter):
        first = run(chosen, model, prompt, assistant, max_new_tokens=9, suppress_tokens=[12, 13, 14, 15], **GREEDY)
        ids = first.sequences[0].tolist() + more
        held = {CACHE_NAME: getattr(first, CACHE_NAME)}
        texts.append(run(chosen, model, ids, assistant, max_new_tokens=16, **held, **GREEDY).sequences)
    assert torch.equal(texts[0], texts[1])


@pytest.mark.parametrize("family", ["gemma4_shared", "gemma4_image", "gemma3n", "llama4", "kimi_k2", "muse_glimmer"])
def test_a_prompt_read_in_chunks(family: str) -> None:
    chosen = FAMILIES[family]
    model = chosen.make()
    prompt = chosen.prompt(PROMPT, seed=3)
    settings: dict[str, Any] = dict(prefill_chunk_size=8, max_new_tokens=20, **GREEDY)
    expected = run(chosen, model, prompt, **settings)
    assert torch.equal(run(chosen, model, prompt, drafter_for(model), **settings).sequences, expected.sequences)


@pytest.mark.parametrize("family", ["gemma4_shared", "gemma3n", "llama4", "deepseek_v3", "qwen2_5_vl", "gpt_oss"])
def test_states_and_weights_of_the_accepted_path(family: str) -> None:
    """`hidden_states` and `attentions` have the shapes and values of plain decoding, a token at a time."""
    chosen = FAMILIES[family]
    model = chosen.make(implementation="eager")
    prompt = chosen.prompt(PROMPT, seed=3)
    settings: dict[str, Any] = dict(output_hidden_states=True, output_attentions=True, max_new_tokens=14, **GREEDY)
    plain, ours = run(chosen, model, prompt, **settings), run(chosen, model, prompt, drafter_for(model), **settings)
    assert torch.equal(ours.sequences, plain.sequences)
    for name in ("hidden_states", "attentions"):
        tokens, expected = getattr(ours, name), getattr(plain, name)
        assert len(tokens) == len(expected) == 14
        for layers, theirs in zip(tokens, expected, strict=True):
            assert [state.shape for state in layers] == [state.shape for state in theirs]
            for state, other in zip(layers, theirs, strict=True):
                assert torch.allclose(state, other, atol=1e-3), name
