"""Mixtures of experts over a tree: one product per expert, where decoding a token may gather the weights it needs."""

import functools
from typing import Any

import torch

from hf_ddtree.compat import ALL_EXPERTS_FUNCTIONS
from hf_ddtree.round import CURRENT_ROUND

GATHERING, GROUPED = "batched_mm", "grouped_mm"


def keep_trees_grouped() -> None:
    """Puts the grouped route in the place of the gathering one for as long as a tree is verified.

    `"batched_mm"`, which Transformers may choose for decoding on an accelerator, copies the weights of an expert for
    each (token, expert) pair: fast for one token, and gigabytes for a tree. The switch lies in the registry and looks
    for a tree in its own context, so that neither a model nor another thread's forward is changed.
    """
    gathering = ALL_EXPERTS_FUNCTIONS[GATHERING]
    if getattr(gathering, "groups_trees", False):
        return

    @functools.wraps(gathering)
    def batched_mm(*args: Any, **kwargs: Any) -> torch.Tensor:
        # A compiled forward cannot read a context variable, and has no tree.
        if torch.compiler.is_compiling() or CURRENT_ROUND.get() is None:
            return gathering(*args, **kwargs)
        return ALL_EXPERTS_FUNCTIONS[GROUPED](*args, **kwargs)

    batched_mm.groups_trees = True  # type: ignore[attr-defined]
    ALL_EXPERTS_FUNCTIONS.register(GATHERING, batched_mm)
