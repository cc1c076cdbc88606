"""The two walks give the same tokens and paths where both serve, equal logits included."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from hf_ddtree.generation.acceptance import GreedyWalk, LazyWalk
from hf_ddtree.tree import DeviceMarginals, build_draft_tree, top_marginals

VOCABULARY = 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_walks_agree_on_logits_full_of_ties(dtype: Any) -> None:
    criteria = StoppingCriteriaList([MaxLengthCriteria(8), EosTokenCriteria(torch.tensor([4]))])
    lazy = LazyWalk(LogitsProcessorList(), criteria, GenerationConfig(do_sample=False), None)
    greedy, ids, lengths = GreedyWalk(criteria, None), torch.tensor([[5, 6, 7]]), set()
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        tree = build_draft_tree(torch.randn(5, VOCABULARY, generator=generator).log_softmax(-1), 39)
        logits = torch.randint(-1, 2, (1, 40, VOCABULARY), generator=generator).to(dtype)
        first, second = lazy(tree, logits, ids), greedy(tree, logits, ids)
        assert torch.equal(first.input_ids, second.input_ids) and first.input_ids.dtype == second.input_ids.dtype
        assert (first.path, first.last_token, first.finished) == (second.path, second.last_token, second.finished)
        assert first.tree is second.tree is tree
        lengths.add(len(first.path))
    assert len(lengths) > 2


def test_a_tree_from_a_device_is_walked_without_its_padding() -> None:
    """The padding repeats the most probable token below the root, which the walk must find once."""
    values, tokens = top_marginals(torch.tensor([[2.0, 1.0, 0.0]]), 8)
    drafted = DeviceMarginals(values, tokens).build(8, anchor=7)
    logits = torch.full((1, 9, 3), -1.0)
    logits[0, 0, 0] = logits[0, 1, 2] = logits[0, 4:, 1] = 1.0
    criteria = StoppingCriteriaList([MaxLengthCriteria(20)])
    walks: list[Any] = [
        GreedyWalk(criteria, None),
        LazyWalk(LogitsProcessorList(), criteria, GenerationConfig(do_sample=False), None),
    ]
    for walk in walks:
        walked = walk(drafted, logits, torch.tensor([[1, 2]]))
        assert walked.path == [0, 1] and walked.input_ids.tolist() == [[1, 2, 0, 2]]
        assert walked.tree.token_ids.tolist() == [7, 0, 1, 2]
