"""Whole generates equal `generate` without a drafter, token for token and draw for draw, in every setting."""

from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)

from pairs import FAMILIES, VOCABULARY, make_drafter, make_target, plain, prompt, tree

NEW = 48
LETTERS = "abcdefghijklmnop"


class Stateful(LogitsProcessor):
    """Order-sensitive: an extra, missing or reordered call changes every later score."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores = scores.clone()
        scores[:, (self.calls * 5 + int(input_ids[0, -1])) % VOCABULARY] -= 3
        return scores


class StopOnPair(StoppingCriteria):
    """Fires in the middle of rounds: on a repeated token after some length."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([input_ids.shape[1] > 25 and int(input_ids[0, -1]) == int(input_ids[0, -2])])


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": dict(repetition_penalty=1.3, no_repeat_ngram_size=3),
    "end_tokens": dict(eos_token_id=[5, 9]),
    "min_new_tokens": dict(min_new_tokens=30, eos_token_id=[5, 9, 11]),
    "sampling": dict(do_sample=True, temperature=0.8, top_k=10),
    "sampling_top_p": dict(do_sample=True, temperature=1.3, top_p=0.9, eos_token_id=7),
    "stateful_processor": dict(logits_processor=lambda: LogitsProcessorList([Stateful()])),
    "custom_stop": dict(stopping_criteria=lambda: StoppingCriteriaList([StopOnPair()])),
    "one_token": dict(max_new_tokens=1),
    "two_tokens": dict(max_new_tokens=2),
    "max_length": dict(max_length=30, max_new_tokens=None),
    "chunked_prefill": dict(prefill_chunk_size=4),
    "guidance": dict(guidance_scale=1.5),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    target = make_target(request.param)
    return target, make_drafter(target)


@pytest.mark.parametrize("setting", list(SETTINGS))
def test_equals_generate(pair: tuple[Any, Any], setting: str) -> None:
    target, drafter = pair
    kwargs = {"max_new_tokens": NEW, **SETTINGS[setting]}
    expected = plain(target, prompt(), **kwargs)
    output = tree(target, drafter, prompt(), return_dict_in_generate=True, **kwargs)
    assert torch.equal(output.sequences, expected)
    assert sum(output.speculation.acceptance_lengths) == output.sequences.shape[1] - prompt().shape[1] - 1


def test_trees_are_accepted(pair: tuple[Any, Any]) -> None:
    target, drafter = pair
    lengths = []
    for seed in range(4):
        output = tree(target, drafter, prompt(seed=seed), max_new_tokens=NEW, return_dict_in_generate=True)
        assert torch.equal(output.sequences, plain(target, prompt(seed=seed), max_new_tokens=NEW))
        lengths += output.speculation.acceptance_lengths
    assert sum(lengths) / len(lengths) > 1.3


def test_left_padding(pair: tuple[Any, Any]) -> None:
    target, drafter = pair
    ids = torch.cat([torch.zeros(1, 3, dtype=torch.long), prompt()], dim=1)
    mask = (ids != 0).long()
    expected = plain(target, ids, attention_mask=mask, max_new_tokens=NEW)
    assert torch.equal(tree(target, drafter, ids, attention_mask=mask, max_new_tokens=NEW), expected)
    assert torch.equal(expected[:, 3:], plain(target, prompt(), max_new_tokens=NEW))


@pytest.mark.parametrize("padding", [0, 3])
def test_the_drafter_gets_a_mask_where_there_is_padding(padding: int) -> None:
    """And drafts the same with one of ones only, which it need not make its own masks of."""
    target = make_target()
    drafter, masks = make_drafter(target), []
    drafter.register_forward_pre_hook(
        lambda _module, _args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    ids = torch.cat([torch.zeros(1, padding, dtype=torch.long), prompt()], dim=1)
    mask = torch.ones_like(ids)
    mask[:, :padding] = 0
    output = tree(target, drafter, ids, attention_mask=mask, max_new_tokens=NEW, return_dict_in_generate=True)
    assert torch.equal(output.sequences[:, padding:], plain(target, prompt(), max_new_tokens=NEW))
    assert masks
    if padding:
        assert all(int((given == 0).sum()) == padding for given in masks)
    else:
        assert masks == [None] * len(masks)


@pytest.mark.parametrize("padding", [0, 3])
def test_a_round_without_a_draft_gets_a_mask_where_there_is_padding(padding: int) -> None:
    target = make_target()
    drafter, masks = make_drafter(target), []
    ids = torch.cat([torch.zeros(1, padding, dtype=torch.long), prompt()], dim=1)
    mask = torch.ones_like(ids)
    mask[:, :padding] = 0
    expected = plain(target, ids, attention_mask=mask, max_new_tokens=NEW)
    target.register_forward_pre_hook(
        lambda _module, _args, kwargs: masks.append(kwargs.get("attention_mask")), with_kwargs=True
    )
    found = tree(target, drafter, ids, attention_mask=mask, max_new_tokens=NEW, budget=0)
    assert torch.equal(found, expected)
    rounds = masks[-(NEW - 1) :]
    if padding:
        assert all(int((given == 0).sum()) == padding for given in rounds)
    else:
        assert rounds == [None] * (NEW - 1)


@pytest.mark.parametrize("family", ["llama", "qwen3_sliding"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_implementations(family: str, implementation: str) -> None:
    target = make_target(family, implementation=implementation)
    expected = plain(target, prompt(), max_new_tokens=NEW)
    assert torch.equal(tree(target, make_drafter(target), prompt(), max_new_tokens=NEW), expected)
    assert target.config._attn_implementation == implementation


@pytest.mark.parametrize("budget", [0, 1, 2, 7, 200])
@pytest.mark.parametrize("block_size", [2, 5, 16])
def test_budgets_and_blocks(budget: int, block_size: int) -> None:
    target = make_target("qwen3_sliding")
    drafter = make_drafter(target, block_size=block_size)
    output = tree(target, drafter, prompt(), budget=budget, max_new_tokens=NEW, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain(target, prompt(), max_new_tokens=NEW))
    assert output.speculation.nodes_verified <= budget * output.speculation.rounds
    assert max(output.speculation.acceptance_lengths) <= block_size


def test_a_chain_is_a_tree_of_one_branch() -> None:
    target = make_target()
    drafter = make_drafter(target)
    output = tree(
        target, drafter, prompt(), max_branching=1, max_new_tokens=NEW, output_trees=True, return_dict_in_generate=True
    )
    assert torch.equal(output.sequences, plain(target, prompt(), max_new_tokens=NEW))
    for verified in output.speculation.trees:
        assert verified.tree.parents.tolist() == list(range(-1, len(verified.tree) - 1))


def test_embeddings_as_input() -> None:
    target = make_target()
    embeds = target.get_input_embeddings()(prompt())
    empty = torch.empty(1, 0, dtype=torch.long)
    expected = plain(target, empty, inputs_embeds=embeds, max_new_tokens=NEW)
    assert torch.equal(tree(target, make_drafter(target), empty, inputs_embeds=embeds, max_new_tokens=NEW), expected)


def test_longrope_below_its_switch() -> None:
    target = make_target("longrope")
    expected = plain(target, prompt(), max_new_tokens=13)
    # Phi-3 reads the sequence anew when it is handed more tokens than the switch, so the tree is kept below it.
    assert torch.equal(tree(target, make_drafter(target), prompt(), budget=12, max_new_tokens=13), expected)
    with pytest.raises(ValueError, match=r"switch after 24 tokens, but up to 25"):
        tree(target, make_drafter(target), prompt(), max_new_tokens=14)


def test_no_time_left() -> None:
    target = make_target()
    expected = plain(target, prompt(), max_new_tokens=NEW, max_time=1e-9)
    output = tree(target, make_drafter(target), prompt(), max_new_tokens=NEW, max_time=1e-9)
    assert output.shape[1] == prompt().shape[1] + 1
    assert torch.equal(output, expected)


def test_stop_strings() -> None:
    letters = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="a"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    letters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="a")
    target = make_target()
    whole = plain(target, prompt(), max_new_tokens=NEW)
    kwargs: dict[str, Any] = dict(max_new_tokens=NEW, tokenizer=tokenizer, stop_strings=[LETTERS[int(whole[0, 30])]])
    expected = plain(target, prompt(), **kwargs)
    output = tree(target, make_drafter(target), prompt(), **kwargs)
    assert output.shape[1] < whole.shape[1]
    assert torch.equal(output, expected)


def test_prefix_allowed_tokens() -> None:
    target = make_target()

    def allowed(batch: int, ids: torch.Tensor) -> list[int]:
        return [3 + (len(ids) + k) % (VOCABULARY - 3) for k in range(6)]

    kwargs: dict[str, Any] = dict(max_new_tokens=NEW, prefix_allowed_tokens_fn=allowed)
    expected = plain(target, prompt(), **kwargs)
    assert torch.equal(tree(target, make_drafter(target), prompt(), **kwargs), expected)


def test_bfloat16_runs() -> None:
    target = make_target().to(torch.bfloat16)
    drafter = make_drafter(target).to(torch.bfloat16)
    output = tree(target, drafter, prompt(), max_new_tokens=NEW)
    assert output.shape == (1, prompt().shape[1] + NEW)
