"""Making a modeling file's convolution and recurrence read a tree while one is verified."""

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch

from hf_ddtree.linear_attention.convolution import tree_convolution
from hf_ddtree.linear_attention.delta_rule import PendingDelta, tree_gated_delta_rule
from hf_ddtree.linear_attention.kernel import takes_kernel
from hf_ddtree.round import CURRENT_ROUND, TreeRound


def _convolution(
    tree: TreeRound,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    return tree_convolution(hidden_states, weight, bias, activation, tree)


def _delta_rule(
    tree: TreeRound,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, PendingDelta]:
    ends = tree.subtree_ends if takes_kernel(tree, key, value, initial_state) else None
    return tree_gated_delta_rule(
        query, key, value, g, beta, initial_state, tree.visible, use_qk_l2norm_in_kernel, subtree_ends=ends
    )


#: What the modeling files of Transformers call for Gated DeltaNet, and what a tree takes in its place.
OVER_TREES: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "torch_recurrent_gated_delta_rule": _delta_rule,
}

_lock = threading.Lock()


def globals_of(mixer_class: type) -> dict[str, Any] | None:
    """The module globals in which a class of mixers looks up every function of `OVER_TREES`, or `None`."""
    forward = inspect.unwrap(mixer_class.forward)  # type: ignore[attr-defined]
    code = getattr(forward, "__code__", None)
    found: dict[str, Any] = getattr(forward, "__globals__", {})
    return found if code is not None and all(name in code.co_names and name in found for name in OVER_TREES) else None


def install(module_globals: dict[str, Any]) -> None:
    """Puts dispatchers in the place of a modeling file's functions, once and for good.

    Without a tree in the current context a dispatcher calls what was there before it: the library's function, or the
    kernel that another package or the Hub put in its place.
    """
    with _lock:
        for name, over_tree in OVER_TREES.items():
            function = module_globals[name]
            if not hasattr(function, "over_tree"):
                module_globals[name] = _dispatcher(function, over_tree)


def _dispatcher(function: Callable[..., Any], over_tree: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function, updated=())
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        # A compiled forward cannot read a context variable, and has no tree.
        tree = None if torch.compiler.is_compiling() else CURRENT_ROUND.get()
        return function(*args, **kwargs) if tree is None else over_tree(tree, *args, **kwargs)

    dispatch.over_tree = over_tree  # type: ignore[attr-defined]
    return dispatch
