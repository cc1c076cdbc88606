"""The dispatchers in the modeling files: nothing without a tree, the tree's forms with one."""

import importlib
from typing import Any

import pytest
import torch

from attention.trees import random_tree, round_of
from hf_ddtree.linear_attention.dispatch import OVER_TREES, globals_of, install
from hf_ddtree.round import CURRENT_ROUND

NODES = 9


def convolution(*args: Any, **kwargs: Any) -> Any:
    return "convolution", args, kwargs


def rule(*args: Any, **kwargs: Any) -> Any:
    return "rule", args, kwargs


def fresh() -> dict[str, Any]:
    return {
        "causal_conv1d_fn": convolution,
        "torch_chunk_gated_delta_rule": rule,
        "torch_recurrent_gated_delta_rule": rule,
        "another": rule,
    }


def test_without_a_tree_the_call_goes_to_what_was_there() -> None:
    module = fresh()
    install(module)
    assert module["another"] is rule
    for name in OVER_TREES:
        kind = "convolution" if name == "causal_conv1d_fn" else "rule"
        assert module[name](1, activation="silu") == (kind, (1,), {"activation": "silu"})
        assert module[name].__name__ == kind


def test_installing_again_changes_nothing() -> None:
    module = fresh()
    install(module)
    once = dict(module)
    install(module)
    assert module == once


def test_a_function_that_was_replaced_later_is_wrapped_too() -> None:
    """As another package may do, after the first generate."""
    module = fresh()
    install(module)
    module["causal_conv1d_fn"] = convolution
    install(module)
    assert hasattr(module["causal_conv1d_fn"], "over_tree")
    assert module["causal_conv1d_fn"](1)[0] == "convolution"


def test_with_a_tree_the_trees_forms_are_called() -> None:
    module = fresh()
    install(module)
    tree = round_of(random_tree(NODES, seed=1))
    token = CURRENT_ROUND.set(tree)
    try:
        row = torch.randn(1, 6, 4 + NODES)
        output = module["causal_conv1d_fn"](
            row, weight=torch.randn(6, 4), bias=None, activation="silu", use_cache=True
        )
        assert output.shape == (1, 6, NODES)
        heads = torch.randn(3, 1, NODES, 2, 8)
        numbers = torch.rand(2, 1, NODES, 2)
        for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
            output, pending = module[name](
                *heads,
                g=-numbers[0],
                beta=numbers[1],
                initial_state=torch.zeros(1, 2, 8, 8),
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                cu_seqlens=None,
            )
            assert output.shape == (1, NODES, 2, 8)
            assert pending.state_after(torch.tensor([0]), torch.zeros(1, 2, 8, 8)).shape == (1, 2, 8, 8)
    finally:
        CURRENT_ROUND.reset(token)
    assert module["causal_conv1d_fn"](1)[0] == "convolution"


def test_a_mixer_is_known_by_all_the_functions_it_calls() -> None:
    class Calls:
        def forward(self) -> Any:
            return causal_conv1d_fn, torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule  # noqa: F821

    class CallsOther:
        def forward(self) -> Any:
            return causal_conv1d_fn, torch_chunk_gated_delta_rule  # noqa: F821

    assert globals_of(Calls) is None
    globals().update(fresh())
    try:
        assert globals_of(Calls) is globals()
        assert globals_of(CallsOther) is None
    finally:
        for name in fresh():
            del globals()[name]


@pytest.mark.parametrize("model", ["qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid"])
def test_the_librarys_files_still_have_what_is_replaced(model: str) -> None:
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    mixers = [value for name, value in vars(module).items() if name.endswith("GatedDeltaNet")]
    assert len(mixers) == 1
    assert globals_of(mixers[0]) is vars(module)
