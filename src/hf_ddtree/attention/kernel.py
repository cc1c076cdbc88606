"""The Triton kernel's route: which masks and layers it serves, and why not the others.

`ddtree_attention`, the kernel's own package, knows nothing of Transformers; what a layer and its mask ask for is
translated here. Triton is imported when a tree is first verified by the kernel.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import causal_mask_function

from ddtree_attention import TreeTables, tree_attention, tree_tables, unavailable, unsupported
from hf_ddtree.attention.eager import eager_features, eager_function
from hf_ddtree.attention.lazy_mask import Plan, TreeMask
from hf_ddtree.attention.mask import ddtree_mask
from hf_ddtree.compat import causal_window
from hf_ddtree.configuration import ATTENTION_ROUTES
from hf_ddtree.round import CURRENT_ROUND, TreeRound

AUTO, KERNEL, TORCH = ATTENTION_ROUTES

# Arguments of the attention function that change the result and that the kernel can honour; others it does not know.
_HONOURED = ("softcap", "s_aux")
_UNKNOWN = ("position_bias", "head_mask")

_WAY_OUT = f"pass `attention_route={AUTO!r}` to use it where it can be."


def check_padding(route: str, attention_mask: torch.Tensor | None) -> None:
    """Raises `ValueError` if `route` asks for the kernel and a prompt's `(batch, tokens)` mask has holes."""
    if route == KERNEL and attention_mask is not None and has_holes(attention_mask.bool()):
        raise ValueError(
            f"`attention_route={KERNEL!r}` verifies trees with the Triton kernel, which reads all tokens from the "
            f"first on, but `attention_mask` has padding between tokens: {_WAY_OUT}"
        )


def check_route(target: PreTrainedModel, route: str, output_attentions: bool) -> None:
    """Raises `ValueError` if `route` asks for the kernel and no layer of the target could take it."""
    if route != KERNEL:
        return
    reason = unavailable(target.device, target.dtype)
    if output_attentions:
        reason = "attention weights as an output"
    if reason is not None:
        raise ValueError(
            f"`attention_route={KERNEL!r}` verifies trees with the Triton kernel, which does not serve {reason}. It "
            f"takes fp16 and bf16 on a CUDA or ROCm device with `triton` installed: {_WAY_OUT}"
        )


def wanted(tree: TreeRound, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether layers with masks of this device and dtype are to take the kernel, if they can."""
    if tree.attention_route == AUTO:
        # An interpreted kernel runs on a CPU, slowly: for tests, which ask for it.
        return device.type != "cpu" and unavailable(device, dtype) is None
    return tree.attention_route == KERNEL


def planned_mask(**kwargs: Any) -> Any:
    """The mask registered under `"ddtree"`: that of [`ddtree_mask`], or a [`TreeMask`] of it where a kernel is wanted.

    Args:
        kwargs: those of [`ddtree_mask`].
    """
    tree = CURRENT_ROUND.get()
    device, dtype = torch.device(kwargs.get("device", "cpu")), kwargs.get("dtype", torch.float32)
    if tree is None or not wanted(tree, device, dtype):
        return ddtree_mask(**kwargs)

    def build() -> torch.Tensor:
        token = CURRENT_ROUND.set(tree)
        try:
            return ddtree_mask(**kwargs)
        finally:
            CURRENT_ROUND.reset(token)

    shape = (kwargs["batch_size"], 1, kwargs["q_length"], kwargs["kv_length"])
    return TreeMask(_plan(tree, **kwargs), build, shape, dtype, device)


def _plan(
    tree: TreeRound,
    batch_size: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **_: Any,
) -> Plan | str:
    """What the kernel needs of a mask, or the reason why it cannot serve it; arguments as those of [`ddtree_mask`]."""
    causal, window = causal_window(mask_function)
    if not causal:
        return "a mask that is neither causal nor a sliding window"
    device = tree.depths.device
    tables: TreeTables = tree.once("tables", lambda: _tables(tree, batch_size))
    rows = torch.full((batch_size,), int(q_offset) - kv_offset, dtype=torch.int32, device=device)
    if attention_mask is None:
        return Plan(tables, rows, None, window)
    seen = attention_mask[:, : int(q_offset)].to(device, torch.bool)
    # One look at the values a round: with a hole the readable rows are no longer all those from the first on.
    if tree.once("holes", lambda: has_holes(seen)):
        return "padding that is not all on the left"
    padding = (~seen).sum(dim=-1, dtype=torch.int32)
    return Plan(tables, rows, (padding - kv_offset).clamp(min=0), window)


def has_holes(seen: torch.Tensor) -> bool:
    """Whether a token is followed by padding, in booleans of shape `(batch, tokens)`."""
    return bool((seen[:, :-1] & ~seen[:, 1:]).any())


def _tables(tree: TreeRound, batch_size: int) -> TreeTables:
    depths, ends = (t.expand(batch_size, -1) for t in (tree.depths, tree.subtree_ends))
    return tree_tables(depths, ends, tree.deepest)


def try_kernel(
    tree: TreeRound,
    module: nn.Module,
    implementation: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor | None, str | None]:
    """The layer's output by the kernel, or why it takes another route; neither where no kernel is wanted.

    Args:
        implementation (`str`): the layer's own attention implementation, whose result is to be met.
        kwargs (`dict`): what the layer passes beside the arguments of [`ddtree_attention`].

    Raises:
        ValueError: if `attention_route="kernel"` asks for the kernel and it does not serve the layer.
    """
    if not wanted(tree, query.device, query.dtype):
        return None, None
    reason = _refusal(module, implementation, query, key, value, mask, kwargs)
    if reason is None:
        assert isinstance(mask, TreeMask) and isinstance(mask.plan, Plan)
        plan = mask.plan
        output = tree_attention(
            query, key, value, plan.tables, plan.prefix, plan.start,
            scale=scaling, window=plan.window, softcap=kwargs.get("softcap"), sinks=kwargs.get("s_aux"),
        )  # fmt: skip
        return output, None
    if tree.attention_route == KERNEL:
        raise ValueError(
            f"`attention_route={KERNEL!r}` verifies trees with the Triton kernel, which does not serve {reason} "
            f"({type(module).__name__}): {_WAY_OUT}"
        )
    return None, reason


def _refusal(
    module: nn.Module,
    implementation: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> str | None:
    if mask is None:
        return "a layer that is given no mask"
    if not isinstance(mask, TreeMask):
        return "a mask that the model reads or changes"
    if isinstance(mask.plan, str):
        return mask.plan
    features = frozenset[str]()
    if implementation == "eager":
        known = eager_features(eager_function(module))
        if known is None:
            return f"the eager attention of {type(module).__module__.rpartition('.')[2]}"
        features = known
    if kwargs.get("output_attentions"):
        return "attention weights as an output"
    for name in (*_HONOURED, *_UNKNOWN):
        if kwargs.get(name) is not None and name not in features:
            return f"`{name}` on {implementation} attention"
    if "s_aux" in features and kwargs.get("s_aux") is None:
        return "sinks that are not passed to the attention"
    return unsupported(query, key, value)


def dense(mask: torch.Tensor | None) -> torch.Tensor | None:
    """A mask with its numbers, for every other route."""
    return mask.dense() if isinstance(mask, TreeMask) else mask
