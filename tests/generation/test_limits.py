"""Lengths at which a model changes, or ends: trees stay on this side of them, or say so before the first token."""

from typing import Any

import pytest
import torch
import transformers as T

from models.zoo import ALL, FAMILIES
from pairs import make_drafter, make_target, plain, prompt, tree

LEARNED = ["gpt2", "opt", "gpt_bigcode"]


@pytest.mark.parametrize("family", LEARNED)
def test_nodes_end_with_the_table_of_positions(family: str) -> None:
    """Plain decoding stops at the table's last position, when nodes of a tree would lie beyond it."""
    length = 24
    field = {"opt": "max_position_embeddings"}.get(family, "n_positions")
    model = FAMILIES[family].build(**{field: length})
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.25, generator=torch.Generator().manual_seed(0))
    model.eval()

    def at_the_end() -> Any:
        return T.StoppingCriteriaList([lambda ids, scores: torch.tensor([ids.shape[1] > length])])

    settings: dict[str, Any] = dict(max_new_tokens=60, stopping_criteria=at_the_end, pad_token_id=0, eos_token_id=None)
    expected = plain(model, prompt(), **settings)
    assert expected.shape[1] == length + 1
    found = tree(model, make_drafter(model), prompt(), return_dict_in_generate=True, **settings)
    assert torch.equal(found.sequences, expected)
    assert max(found.speculation.acceptance_lengths) > 1


def test_a_tree_that_longrope_would_take_for_a_long_text() -> None:
    target = make_target("longrope")
    boundary = target.config.rope_parameters["original_max_position_embeddings"]
    ids, new = prompt(8), boundary - 8
    drafter = make_drafter(target)
    expected = plain(target, ids, max_new_tokens=new)
    assert torch.equal(tree(target, drafter, ids, max_new_tokens=new, budget=boundary - 1), expected)
    with pytest.raises(ValueError, match=rf"trees of {boundary + 1} nodes: lower"):
        tree(target, drafter, ids, max_new_tokens=new, budget=boundary)


def llama4(floor_scale: int) -> Any:
    model = ALL["llama4"].build(attn_temperature_tuning=True, floor_scale=floor_scale, attn_scale=1.0)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.25, generator=generator)
    model.generation_config = T.GenerationConfig(pad_token_id=0, eos_token_id=None)
    return model.eval()


def test_attention_temperature_below_its_first_step() -> None:
    """`attn_temperature_tuning` is on in Llama 4 as released, and does nothing before `floor_scale`."""
    ids, new, budget = prompt(), 20, 15
    target = llama4(floor_scale=ids.shape[1] + new + budget + 2)
    expected = plain(target, ids, max_new_tokens=new)
    assert torch.equal(tree(target, make_drafter(target), ids, max_new_tokens=new, budget=budget), expected)
    with pytest.raises(ValueError, match=r"attention by the cache's length from 48 tokens on"):
        tree(target, make_drafter(target), ids, max_new_tokens=new, budget=budget + 1)
