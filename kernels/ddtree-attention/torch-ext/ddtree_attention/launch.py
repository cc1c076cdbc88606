"""Launching the kernels on tensors that have been checked."""

import torch
import triton

from .configs import Config, next_power_of_2
from .kernels import tree_attention_forward, tree_attention_merge
from .tree import TreeTables

#: Whether Triton interprets the kernels on the CPU: `TRITON_INTERPRET=1` was set when they were imported.
INTERPRETED = not isinstance(tree_attention_forward, triton.runtime.JITFunction)

MERGE_WARPS = 4
# Elements of a program's tile in the merge: 128 threads with 16 each.
_MERGE_TILE = 2048


def merge_rows(value_dim: int) -> int:
    """Rows that a program of the merge serves."""
    return max(_MERGE_TILE // next_power_of_2(value_dim), 1)


def launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tree: TreeTables,
    prefix: torch.Tensor,
    start: torch.Tensor,
    nodes: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    config: Config,
    splits: int,
) -> torch.Tensor:
    """Arguments and result as those of [`tree_attention`], every one given, and how to run it.

    Args:
        config (`Config`): tile sizes.
        splits (`int`): programs that share a row's prefix.
    """
    batch, heads, max_nodes, key_dim = query.shape
    key_value_heads, value_dim = key.shape[1], value.shape[-1]
    group = heads // key_value_heads
    value_block = max(next_power_of_2(value_dim), 16)
    rows = batch * max_nodes * heads
    output = query.new_empty(batch, max_nodes, heads, value_dim)
    partial, log_sum = output, output
    # Sinks come in at the merge, also with a single split.
    merged = splits > 1 or sinks is not None
    if merged:
        partial = query.new_empty(splits, rows, value_dim, dtype=torch.float32)
        log_sum = query.new_empty(splits, rows, dtype=torch.float32)
    tree_attention_forward[(triton.cdiv(max_nodes * group, config.block_m), batch * key_value_heads, splits)](
        query,
        key,
        value,
        *tree,
        start,
        prefix,
        nodes,
        partial,
        log_sum,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        max_nodes,
        tree.ancestors.shape[-1],
        window or 0,
        scale,
        softcap or 0.0,
        KEY_VALUE_HEADS=key_value_heads,
        GROUP=group,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEY_BLOCK=max(next_power_of_2(key_dim), 16),
        VALUE_BLOCK=value_block,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        PARTIAL=merged,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        UPCAST=INTERPRETED,
        num_warps=config.warps,
        num_stages=config.stages,
        **({} if config.max_registers is None else {"maxnreg": config.max_registers}),
    )
    if merged:
        block_rows = merge_rows(value_dim)
        tree_attention_merge[(triton.cdiv(rows, block_rows),)](
            partial,
            log_sum,
            # A pointer that is not read stands for one that is not given.
            sinks if sinks is not None else query,
            output,
            rows,
            HEADS=heads,
            VALUE_DIM=value_dim,
            VALUE_BLOCK=value_block,
            SPLITS=splits,
            BLOCK_ROWS=block_rows,
            HAS_SINKS=sinks is not None,
            num_warps=MERGE_WARPS,
        )
    return output
