"""The tree's mask: ancestors only, the library's patterns at depths, padding by slot, the original without a tree."""

from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    create_causal_mask,
    sliding_window_causal_mask_function,
)

from attention.trees import ancestors, random_tree, round_of
from hf_ddtree.attention import AttentionSwitch, ddtree_mask
from hf_ddtree.compat import ALL_MASK_ATTENTION_FUNCTIONS, CACHE_NAME
from hf_ddtree.round import CURRENT_ROUND, TreeRound
from hf_ddtree.tree import DraftTree
from pairs import make_target

# (nodes, length of the prefix in tokens, first slot a layer still holds)
SIZES = [(1, 4, 0), (6, 0, 0), (13, 9, 0), (30, 21, 5), (17, 50, 47)]


def tree_mask(tree: DraftTree | None, **kwargs: Any) -> Any:
    token = CURRENT_ROUND.set(round_of(tree) if tree is not None else None)
    try:
        return ddtree_mask(**kwargs)
    finally:
        CURRENT_ROUND.reset(token)


def layout(size: tuple[int, int, int]) -> dict[str, int]:
    nodes, prefix, first = size
    return dict(batch_size=1, q_length=nodes, kv_length=prefix - first + nodes, q_offset=prefix, kv_offset=first)


def written_out(tree: DraftTree, size: tuple[int, int, int], sees: Any, padding: int = 0) -> torch.Tensor:
    """`sees(query position, key position)` for true positions, one pair at a time."""
    nodes, prefix, first = size
    depths, family = tree.depths.tolist(), ancestors(tree)
    visible = torch.zeros(1, 1, nodes, prefix - first + nodes, dtype=torch.bool)
    for node in range(nodes):
        for slot in range(first, prefix):
            visible[0, 0, node, slot - first] = sees(prefix + depths[node], slot) and slot >= padding
        for other in family[node]:
            visible[0, 0, node, prefix - first + other] = sees(prefix + depths[node], prefix + depths[other])
    return visible


PATTERNS: dict[str, tuple[Any, Any]] = {
    "causal": (causal_mask_function, lambda q, k: True),
    **{f"window_{w}": (sliding_window_causal_mask_function(w), lambda q, k, w=w: q - k < w) for w in (1, 2, 3, 5, 20)},
    **{
        f"chunk_{c}": (
            chunked_causal_mask_function(c, torch.zeros(1, dtype=torch.long)),
            lambda q, k, c=c: q // c == k // c,
        )
        for c in (3, 8)
    },
}


@pytest.mark.parametrize("use_vmap", [False, True])
@pytest.mark.parametrize("pattern", list(PATTERNS))
@pytest.mark.parametrize("size", SIZES)
def test_patterns_hold_at_depths(size: tuple[int, int, int], pattern: str, use_vmap: bool) -> None:
    tree = random_tree(size[0], seed=size[0] + 1)
    function, sees = PATTERNS[pattern]
    mask = tree_mask(tree, **layout(size), mask_function=function, use_vmap=use_vmap)
    assert mask.dtype == torch.float32
    assert torch.equal(mask == 0, written_out(tree, size, sees))
    assert set(mask.unique().tolist()) <= {0.0, torch.finfo(torch.float32).min}


@pytest.mark.parametrize("pattern", ["causal", "window_5", "window_20"])
@pytest.mark.parametrize("padding", [1, 6, 9])
@pytest.mark.parametrize("size", SIZES[2:4])
def test_left_padding(size: tuple[int, int, int], padding: int, pattern: str) -> None:
    """The 2D mask spans all tokens, from slot 0; a sliding layer reads its own part of it."""
    tree = random_tree(size[0], seed=3)
    attention_mask = torch.ones(1, size[1] + size[0], dtype=torch.long)
    attention_mask[:, :padding] = 0
    function, sees = PATTERNS[pattern]
    mask = tree_mask(tree, **layout(size), mask_function=function, attention_mask=attention_mask, dtype=torch.bfloat16)
    assert mask.dtype == torch.bfloat16
    assert torch.equal(mask == 0, written_out(tree, size, sees, padding))


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("use_vmap", [False, True])
@pytest.mark.parametrize("padding", [0, 6])
@pytest.mark.parametrize("pattern", list(PATTERNS))
@pytest.mark.parametrize("size", [size for size in SIZES if size[2] == 0])
def test_slots_of_a_static_cache(
    size: tuple[int, int, int], pattern: str, padding: int, use_vmap: bool, as_tensor: bool
) -> None:
    """The same mask, with hidden slots behind the nodes; where the nodes begin may be a tensor."""
    nodes, prefix, _ = size
    tree, free = random_tree(nodes, seed=nodes + 1), 5
    attention_mask = torch.ones(1, prefix + nodes, dtype=torch.long)
    attention_mask[:, : min(padding, prefix)] = 0
    function, sees = PATTERNS[pattern]
    arguments: dict[str, Any] = layout(size)
    arguments["kv_length"] += free
    if as_tensor:
        arguments["q_offset"] = torch.tensor(prefix)
    mask = tree_mask(
        tree,
        **arguments,
        mask_function=function,
        attention_mask=attention_mask if padding else None,
        use_vmap=use_vmap,
    )
    assert torch.equal(mask[..., :-free] == 0, written_out(tree, size, sees, min(padding, prefix)))
    assert (mask[..., -free:] == torch.finfo(torch.float32).min).all()


def test_free_slots_are_hidden_whatever_the_pattern_says() -> None:
    """Image tokens see later ones, and a slot that nothing was written to looks later."""
    tree, size = random_tree(13, seed=14), (13, 9, 0)
    arguments: dict[str, Any] = {**layout(size), "kv_length": 27, "mask_function": bidirectional_mask_function}
    mask = tree_mask(tree, **arguments)
    assert torch.equal(mask[..., :22] == 0, written_out(tree, size, lambda q, k: True))
    assert (mask[..., 22:] < 0).all()


def test_a_static_cache_without_a_free_slot() -> None:
    tree, size = random_tree(13, seed=14), (13, 9, 0)
    arguments: dict[str, Any] = {**layout(size), "q_offset": torch.tensor(9)}
    assert torch.equal(tree_mask(tree, **arguments), tree_mask(tree, **layout(size)))


def test_padding_differs_within_a_batch_of_a_static_cache() -> None:
    tree, size = random_tree(7, seed=4), (7, 5, 0)
    attention_mask = torch.ones(3, 12, dtype=torch.bool)
    attention_mask[1, :2] = attention_mask[2, :5] = False
    mask = tree_mask(tree, **{**layout(size), "batch_size": 3, "kv_length": 15}, attention_mask=attention_mask)
    for row, padding in enumerate((0, 2, 5)):
        assert torch.equal(mask[row : row + 1, ..., :12] == 0, written_out(tree, size, lambda q, k: True, padding))
    assert (mask[..., 12:] < 0).all()


def test_padding_differs_within_a_batch() -> None:
    tree, size = random_tree(7, seed=4), (7, 5, 0)
    attention_mask = torch.ones(3, 12, dtype=torch.bool)
    attention_mask[1, :2] = attention_mask[2, :5] = False
    mask = tree_mask(tree, **{**layout(size), "batch_size": 3}, attention_mask=attention_mask)
    for row, padding in enumerate((0, 2, 5)):
        assert torch.equal(mask[row : row + 1] == 0, written_out(tree, size, lambda q, k: True, padding))


def test_a_batch_without_padding_shares_the_mask() -> None:
    mask = tree_mask(random_tree(7, seed=4), **{**layout((7, 5, 0)), "batch_size": 3})
    assert mask.shape == (3, 1, 7, 12)
    assert torch.equal(mask[0], mask[2])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("pattern", ["causal", "window_3", "chunk_3"])
def test_without_a_tree_it_is_the_original(pattern: str, implementation: str, padded: bool) -> None:
    config = make_target("llama", implementation=implementation).config
    attention_mask = (torch.arange(9)[None] > 2) if padded else None
    arguments = dict(
        layout((4, 5, 0)),
        mask_function=PATTERNS[pattern][0],
        attention_mask=attention_mask,
        allow_is_causal_skip=pattern == "causal",
        config=config,
        dtype=torch.bfloat16,
    )
    expected = ALL_MASK_ATTENTION_FUNCTIONS[implementation](**arguments)
    mask = tree_mask(None, **arguments)
    assert mask.dtype == expected.dtype
    assert torch.equal(mask, expected)


@pytest.mark.parametrize("length", [1, 6])
def test_without_a_tree_the_skip_of_the_causal_mask_is_kept(length: int) -> None:
    model = make_target("llama", implementation="sdpa")
    cache = DynamicCache(config=model.config)
    embeds = torch.zeros(1, length, 32)
    arguments: dict[str, Any] = {
        "config": model.config,
        "inputs_embeds": embeds,
        "attention_mask": None,
        CACHE_NAME: cache,
    }
    arguments["position_ids"] = torch.arange(length)[None]
    expected = create_causal_mask(**arguments)
    with AttentionSwitch(model).tree(TreeRound(torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=torch.long))):
        CURRENT_ROUND.set(None)
        assert model.config._attn_implementation == "ddtree"
        assert expected is create_causal_mask(**arguments) is None
