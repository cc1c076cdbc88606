"""A static cache of a hybrid model goes on after trees: with trees, with plain decoding, and once it is reset."""

from typing import Any

import pytest
import torch
from transformers import StaticCache

from hf_ddtree.compat import CACHE_NAME
from models.generating import drafter_for
from models.zoo import FAMILIES
from pairs import plain, tree

FIRST, SECOND = 12, 12
HYBRIDS = [name for name in ("qwen3_next", "qwen3_5", "lfm2", "bamba") if name in FAMILIES]


@pytest.fixture(params=HYBRIDS)
def turn(request: pytest.FixtureRequest) -> Any:
    """Target, drafter, prompt, the text after the first turn and after both, and the cache of the first, by trees."""
    family = FAMILIES[request.param]
    target = family.make(torch.float32)
    ids = torch.tensor([family.prompt(9)])
    settings: dict[str, Any] = dict(eos_token_id=None, pad_token_id=None)
    whole = plain(target, ids, attention_mask=torch.ones_like(ids), max_new_tokens=FIRST + SECOND, **settings)
    drafter, cache = drafter_for(target), StaticCache(config=target.config, max_cache_len=60)
    first = tree(
        target,
        drafter,
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=FIRST,
        **settings,
        **{CACHE_NAME: cache},
    )
    assert torch.equal(first, whole[:, : first.shape[1]])
    return target, drafter, ids, first, whole, cache, settings


@pytest.mark.parametrize("with_trees", [True, False])
def test_it_goes_on(turn: Any, with_trees: bool) -> None:
    """The one token that the cache has not read is read by a forward of one token."""
    target, drafter, _, first, whole, cache, settings = turn
    call = dict(attention_mask=torch.ones_like(first), max_new_tokens=SECOND, **settings, **{CACHE_NAME: cache})
    again = tree(target, drafter, first, **call) if with_trees else plain(target, first, **call)
    assert torch.equal(again, whole)


def test_it_starts_anew(turn: Any) -> None:
    target, _, ids, _, whole, cache, settings = turn
    cache.reset()
    call = dict(attention_mask=torch.ones_like(ids), max_new_tokens=FIRST, **settings, **{CACHE_NAME: cache})
    assert torch.equal(plain(target, ids, **call), whole[:, : ids.shape[1] + FIRST])
