"""Asking for a compiled forward, and counting what is compiled."""

from typing import Any

import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig

from pairs import tree

# What Dynamo makes of the forward is run as it is: everything is tested but the code that inductor writes.
TRACED = CompileConfig(backend="eager", mode=None)
INDUCTOR = CompileConfig()


def compiled(target: Any, drafter: Any, ids: torch.Tensor, config: CompileConfig = TRACED, **kwargs: Any) -> Any:
    """A tree-decoding `generate` with a static cache, compiled, which returns everything."""
    return tree(
        target, drafter, ids, cache_implementation="static", compile_config=config, return_dict_in_generate=True,
        **kwargs,
    )  # fmt: skip


def graphs() -> int:
    """Graphs that Dynamo has captured in this process."""
    return counters["stats"]["unique_graphs"]


def breaks() -> int:
    """Places at which it could not go on with a graph."""
    return sum(counters["graph_break"].values())
