"""A tree's forward runs each expert once over its tokens, whatever decoding a single token does."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers as T
from torch.utils._python_dispatch import TorchDispatchMode

from hf_ddtree.compat import ALL_EXPERTS_FUNCTIONS
from hf_ddtree.experts import GATHERING, GROUPED, keep_trees_grouped
from hf_ddtree.round import CURRENT_ROUND, TreeRound
from pairs import make_drafter, make_target, plain, prompt, tree

WIDTH, EXPERTS, TOP_K = 32, 8, 4


def wide_experts() -> Any:
    """A layer of experts whose weights are far larger than what it computes."""
    config = T.Qwen3MoeConfig(
        hidden_size=WIDTH, num_experts=EXPERTS, num_experts_per_tok=TOP_K, moe_intermediate_size=64
    )
    config._experts_implementation = GATHERING
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    torch.manual_seed(0)
    experts = Qwen3MoeExperts(config)
    for weight in experts.parameters():
        weight.data.normal_(0, 0.1)
    return experts


def run(experts: Any, nodes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(nodes)
    states = torch.randn(nodes, WIDTH, generator=generator)
    chosen = torch.rand(nodes, EXPERTS, generator=generator).topk(TOP_K).indices
    with torch.no_grad():
        return experts(states, chosen, torch.full((nodes, TOP_K), 0.25))


@contextmanager
def in_a_round(nodes: int) -> Iterator[None]:
    """A root with leaves only."""
    ends = torch.arange(1, nodes + 1)
    ends[0] = nodes
    token = CURRENT_ROUND.set(TreeRound((torch.arange(nodes) > 0).long(), ends))
    try:
        yield
    finally:
        CURRENT_ROUND.reset(token)


class LargestResult(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation inside makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and not func.is_view:
                self.elements = max(self.elements, tensor.numel())
        return result


def largest(nodes: int, tree_round: bool) -> int:
    experts = wide_experts()
    with LargestResult() as seen:
        if tree_round:
            with in_a_round(nodes):
                run(experts, nodes)
        else:
            run(experts, nodes)
    return seen.elements


@pytest.mark.parametrize("nodes", [8, 64, 512])
def test_no_weights_are_copied_for_a_node(nodes: int) -> None:
    weights_of_one_expert = 2 * 64 * WIDTH
    # Nothing larger than the activations, of the widest layer, or one count for each expert.
    assert largest(nodes, tree_round=True) <= max(nodes * TOP_K * 2 * 64, weights_of_one_expert)
    # The control: without a tree the chosen route does copy them.
    assert largest(nodes, tree_round=False) == nodes * TOP_K * weights_of_one_expert


def test_both_routes_agree() -> None:
    experts, nodes = wide_experts(), 37
    with in_a_round(nodes):
        grouped = run(experts, nodes)
    assert torch.allclose(grouped, run(experts, nodes), atol=1e-5)


def test_registering_twice_wraps_once() -> None:
    before = ALL_EXPERTS_FUNCTIONS[GATHERING]
    keep_trees_grouped()
    assert ALL_EXPERTS_FUNCTIONS[GATHERING] is before


class Calls:
    """Counts the calls of the grouped route and the widths they had."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.grouped: list[int] = []
        original = ALL_EXPERTS_FUNCTIONS[GROUPED]

        def counted(module: Any, states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            self.grouped.append(states.shape[0])
            return original(module, states, *args, **kwargs)

        monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._local_mapping, GROUPED, counted)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_generate_groups_its_trees_and_leaves_the_rest(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target(family)
    target.set_experts_implementation(GATHERING)
    calls = Calls(monkeypatch)
    expected = plain(target, prompt(), max_new_tokens=40)
    assert not calls.grouped, "plain decoding keeps the route that was chosen for it"
    output = tree(target, make_drafter(target), prompt(), max_new_tokens=40, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert calls.grouped and min(calls.grouped) > 1
    assert target.get_experts_implementation() == {"": GATHERING}


def test_another_thread_keeps_its_route(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, calls = wide_experts(), Calls(monkeypatch)
    with in_a_round(8):
        thread = threading.Thread(target=run, args=(experts, 8))
        thread.start()
        thread.join()
    assert not calls.grouped


def test_a_compiled_forward_does_not_look_for_a_tree() -> None:
    experts = wide_experts()
    compiled = torch.compile(experts, fullgraph=True, backend="eager")
    states, chosen = torch.randn(3, WIDTH), torch.arange(3 * TOP_K).reshape(3, TOP_K) % EXPERTS
    weights = torch.full((3, TOP_K), 0.25)
    with torch.no_grad():
        assert torch.allclose(compiled(states, chosen, weights), experts(states, chosen, weights), atol=1e-6)
