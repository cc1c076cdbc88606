"""Masks that are kept from round to round against masks made anew, and what is written for them."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sliding_window_causal_mask_function,
)

from attention.trees import random_tree
from hf_ddtree.attention import KeptMask, ddtree_mask
from hf_ddtree.round import CURRENT_ROUND, TreeRound
from hf_ddtree.tree import DraftTree
from pairs import make_drafter, make_target, plain, prompt, tree

SPARE = 256


def masks(kept: KeptMask | None, drafted: DraftTree, prefix: int, groups: int = 3, **kwargs: Any) -> Any:
    """The mask of one round, and the one repeated for query groups."""
    tree_round = TreeRound(drafted.depths, drafted.subtree_ends, kept_mask=kept)
    return masks_in(tree_round, prefix, groups, **kwargs)


def masks_in(tree_round: TreeRound, prefix: int, groups: int = 3, **kwargs: Any) -> Any:
    nodes = len(tree_round.depths)
    layout: Any = dict(batch_size=1, q_length=nodes, kv_length=prefix + nodes, q_offset=prefix, kv_offset=0)
    token = CURRENT_ROUND.set(tree_round)
    try:
        mask = ddtree_mask(**{**layout, **kwargs})
    finally:
        CURRENT_ROUND.reset(token)
    return mask, tree_round.packed_mask(mask, groups)


def assert_kept(kept: KeptMask, drafted: DraftTree, prefix: int, **kwargs: Any) -> Any:
    found, expected = masks(kept, drafted, prefix, **kwargs), masks(None, drafted, prefix, **kwargs)
    assert all(map(torch.equal, found, expected))
    assert found[0].dtype == expected[0].dtype
    return found


def is_kept(kept: KeptMask, mask: torch.Tensor) -> bool:
    places = {buffer.storage.untyped_storage().data_ptr() for buffer in kept._buffers.values()}
    return mask.untyped_storage().data_ptr() in places


def test_rounds_after_one_another() -> None:
    """Trees of changing size over a prefix that grows by a path, by more than the spare room, and shrinks again."""
    kept, prefix = KeptMask(), 5
    rounds = [(7, 3), (7, 1), (30, 4), (2, 1), (13, 0), (13, SPARE + 40), (9, -200), (9, 2)]
    for seed, (nodes, step) in enumerate(rounds):
        found = assert_kept(kept, random_tree(nodes, seed), prefix)
        assert all(is_kept(kept, mask) for mask in found)
        prefix += step


def test_other_dtypes_and_groups() -> None:
    kept = KeptMask()
    for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.float32)):
        for groups in (1, 2, 4):
            assert_kept(kept, random_tree(6, seed), 9 + seed, dtype=dtype, groups=groups)


@pytest.mark.parametrize("before_packing", [False, True])
def test_what_a_model_writes_into_a_mask_is_gone_in_the_next_round(before_packing: bool) -> None:
    kept = KeptMask()
    drafted = random_tree(6, 1)
    tree_round = TreeRound(drafted.depths, drafted.subtree_ends, kept_mask=kept)
    mask, packed = masks_in(tree_round, 9)
    mask[..., 2] = packed[..., 3] = 1.0
    if before_packing:
        assert torch.equal(tree_round.packed_mask(mask, 2), mask.repeat(1, 1, 2, 1))
    assert_kept(kept, random_tree(6, 2), 12)


@pytest.mark.parametrize("function", [sliding_window_causal_mask_function(4), bidirectional_mask_function])
def test_other_patterns_are_made_anew(function: Any) -> None:
    kept = KeptMask()
    assert_kept(kept, random_tree(6, 0), 9)
    found, _ = assert_kept(kept, random_tree(6, 1), 9, mask_function=function)
    assert not is_kept(kept, found)
    assert_kept(kept, random_tree(6, 2), 11, mask_function=causal_mask_function)


def test_padding_batches_and_inference_mode_are_made_anew() -> None:
    kept, drafted = KeptMask(), random_tree(6, 1)
    padded = torch.ones(1, 15, dtype=torch.long)
    assert is_kept(kept, assert_kept(kept, drafted, 9, attention_mask=padded)[0])
    padded[:, :2] = 0
    found = assert_kept(kept, drafted, 9, attention_mask=padded)[0]
    assert not is_kept(kept, found) and bool((found[..., :2] < 0).all())
    assert not is_kept(kept, assert_kept(kept, drafted, 9, batch_size=2)[0])
    with torch.inference_mode():
        assert not is_kept(kept, assert_kept(kept, drafted, 9)[0])
    assert is_kept(kept, assert_kept(kept, drafted, 9)[0])


def test_two_kinds_of_layers_in_a_round() -> None:
    """The second has a mask of its own, whatever keys it holds and whatever the model writes into either."""
    kept, drafted = KeptMask(), random_tree(6, 1)
    tree_round = TreeRound(drafted.depths, drafted.subtree_ends, kept_mask=kept)
    first, _ = masks_in(tree_round, 9)
    other, _ = masks_in(tree_round, 4)
    same, _ = masks_in(tree_round, 9)
    same += 1.0
    expected = masks(None, drafted, 9)[0]
    assert torch.equal(first, expected) and torch.equal(same, expected + 1.0) and not is_kept(kept, same)
    assert torch.equal(other, masks(None, drafted, 4)[0]) and not is_kept(kept, other)


class Written(TorchDispatchMode):
    """How many numbers operations wrote, into tensors of their own or given ones."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable or not any(out.alias_info for out in func._schema.returns):
            self.count += sum(tensor.numel() for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor))
        return result


def test_what_a_round_writes_does_not_grow_with_the_context() -> None:
    counts = []
    for prefix in (64, 20_000):
        kept = KeptMask()
        masks(kept, random_tree(16, 0), prefix)
        with Written() as written:
            masks(kept, random_tree(16, 1), prefix + 3)
        counts.append(written.count)
    assert counts[0] == counts[1] > 0
    with Written() as written:
        masks(None, random_tree(16, 1), 20_003)
    assert written.count > 50 * counts[0]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_generate_keeps_its_mask(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target(family)
    prefixes: list[int] = []
    written = KeptMask.written
    monkeypatch.setattr(
        KeptMask, "written", lambda self, block, prefix: prefixes.append(prefix) or written(self, block, prefix)
    )
    output = tree(target, make_drafter(target), prompt(), max_new_tokens=24)
    assert torch.equal(output, plain(target, prompt(), max_new_tokens=24))
    assert len(set(prefixes)) > 3
