"""The ways to generate that are compared, and what each one asks `generate` for."""

from typing import Any

import torch
from transformers import GenerationConfig

from hf_ddtree import DDTreeConfig
from hf_ddtree.cli.pair import Pair
from hf_ddtree.compat import compile_config

PLAIN, COMPILED, LOOKUP, NATIVE, CHAIN, TREE = "plain", "compiled", "lookup", "native", "chain", "tree"
METHODS = (PLAIN, COMPILED, LOOKUP, NATIVE, CHAIN, TREE)
LOOKUP_TOKENS = 10

#: What the tables call them.
NAMES = {
    PLAIN: "plain",
    COMPILED: "plain, compiled",
    LOOKUP: f"prompt lookup ({LOOKUP_TOKENS})",
    NATIVE: "DFlash chain (native)",
    CHAIN: "chain (ours)",
    TREE: "draft tree",
}


def strategy(
    method: str, pair: Pair, settings: dict[str, Any], budget: int | str | None = None
) -> tuple[GenerationConfig, dict[str, Any]]:
    """The generation config of a method, and the arguments that go beside it.

    Args:
        method (`str`): one of [`METHODS`].
        pair (`Pair`): whose drafter serves the methods that have one.
        settings (`dict`): fields of the config that all methods share.
        budget (`int` or `str`, *optional*): nodes of the tree, or `"auto"`, where the method is one.
    """
    drafter = {"assistant_model": pair.drafter}
    match method:
        case "plain":
            return GenerationConfig(**settings), {}
        case "compiled":
            compiled = {"cache_implementation": "static", "compile_config": compile_config()}
            return GenerationConfig(**compiled, **settings), {}
        case "lookup":
            return GenerationConfig(prompt_lookup_num_tokens=LOOKUP_TOKENS, **settings), {}
        case "native":
            return GenerationConfig(speculation_type="dflash", **settings), drafter
        case "chain":
            return DDTreeConfig(budget=pair.drafter.config.block_size, max_branching=1, **settings), drafter
        case _:
            return DDTreeConfig(budget=budget, **settings), drafter


def matches_plain(method: str, temperature: float) -> bool:
    """Whether a method promises plain decoding's own tokens: ours always do, Transformers' drafts when greedy.

    Its assisted decoding samples from the same distribution, with other draws.
    """
    return temperature == 0 or method not in (LOOKUP, NATIVE)


def synchronize(device: torch.device) -> None:
    """Waits for what an accelerator still has to do."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
