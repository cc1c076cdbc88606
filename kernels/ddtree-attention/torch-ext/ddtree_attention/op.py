"""The operator: checks, the choice of tile sizes, and registration with PyTorch."""

import functools
from importlib.util import find_spec

import torch

from . import configs
from ._ops import add_op_namespace_prefix, ops
from .tree import TreeTables

DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
#: Elements between slots: within a tile of at most 64 slots, offsets have 32 bits.
MAX_SLOT_STRIDE = 2**24


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernel serves no tensors of a device and dtype, in a few words, or `None` if it serves some."""
    if dtype not in DTYPES:
        return f"{str(dtype).removeprefix('torch.')} states"
    return unavailable_device(device)


def unsupported(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str | None:
    """Why the kernel cannot serve these tensors, in a few words, or `None` if it can.

    Reads shapes, dtypes and the device, never the contents.
    """
    if (reason := unavailable(query.device, query.dtype)) is not None:
        return reason
    if not query.dtype == key.dtype == value.dtype:
        return "queries, keys and values of different dtypes"
    if max(query.shape[-1], value.shape[-1]) > MAX_HEAD_DIM:
        return f"head dimensions {query.shape[-1]} and {value.shape[-1]}, above {MAX_HEAD_DIM}"
    if query.shape[1] % key.shape[1]:
        return f"{query.shape[1]} query heads over {key.shape[1]} key-value heads"
    if any(states.stride(-1) != 1 for states in (query, key, value)):
        return "states whose last dimension is not contiguous"
    if max(key.stride(2), value.stride(2)) > MAX_SLOT_STRIDE:
        return f"slots more than {MAX_SLOT_STRIDE} elements apart"
    return None


@torch.compiler.assume_constant_result
@functools.cache
def unavailable_device(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "an installation without Triton"
    if device.type == "cpu":
        from .launch import INTERPRETED

        return None if INTERPRETED else "tensors on the CPU"
    if configs.architecture(device) is None:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return f"tensors on {name}, for which it has no tile sizes"
    return None


def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tree: TreeTables,
    prefix: torch.Tensor,
    start: torch.Tensor | None = None,
    nodes: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each tree's nodes over its prefix, their ancestors and themselves.

    Works under `torch.compile` without a graph break and in a CUDA graph: lengths are read on the device, and the
    launch depends on shapes alone.

    Args:
        query (`torch.Tensor` of shape `(batch, heads, nodes, key_dim)`):
            in fp16 or bf16; `heads` is a multiple of `key_value_heads`.
        key (`torch.Tensor` of shape `(batch, key_value_heads, slots, key_dim)`):
            a row's prefix in the slots `[start, prefix)`, its nodes in `[prefix, prefix + nodes)`. Any strides but the
            last; other slots are not read.
        value (`torch.Tensor` of shape `(batch, key_value_heads, slots, value_dim)`): likewise.
        tree (`TreeTables`): from [`tree_tables`].
        prefix (`torch.IntTensor` of shape `(batch,)`): slots before the tree's.
        start (`torch.IntTensor` of shape `(batch,)`, *optional*): first slot of the prefix to read; 0 by default.
        nodes (`torch.IntTensor` of shape `(batch,)`, *optional*): of each tree; all of `query`'s by default.
        scale (`float`, *optional*, defaults to `key_dim ** -0.5`): factor on the dot products.
        window (`int`, *optional*): a node sees positions less than `window` before its own, where a node's position is
            `prefix` plus its depth and a slot's is the slot.
        softcap (`float`, *optional*): scores become `softcap * tanh(score / softcap)`.
        sinks (`torch.Tensor` of shape `(heads,)`, *optional*): scores that take weight and add nothing.

    Returns:
        `torch.Tensor` of shape `(batch, nodes, heads, value_dim)`, zero past a tree's nodes.

    Raises:
        ValueError: for dtypes, shapes or devices that the kernel does not serve.
    """
    if (reason := unsupported(query, key, value)) is not None:
        raise ValueError(f"The tree attention kernel does not serve {reason}.")
    batch, _, width, key_dim = query.shape
    expected = {
        "key": (key.shape, (batch, key.shape[1], value.shape[2], key_dim)),
        "value": (value.shape, (batch, key.shape[1], value.shape[2], value.shape[3])),
        "depths": (tree.depths.shape, (batch, width)),
        "subtree_ends": (tree.subtree_ends.shape, (batch, width)),
        "ancestors": (tree.ancestors.shape, (batch, width, tree.ancestors.shape[-1])),
        "prefix": (prefix.shape, (batch,)),
        "start": (prefix.shape if start is None else start.shape, (batch,)),
        "nodes": (prefix.shape if nodes is None else nodes.shape, (batch,)),
        "sinks": ((query.shape[1],) if sinks is None else tuple(sinks.shape), (query.shape[1],)),
    }
    for name, (shape, wanted) in expected.items():
        if tuple(shape) != wanted:
            raise ValueError(
                f"`{name}` must be of shape {wanted} beside a query of {tuple(query.shape)}, got {tuple(shape)}."
            )
    for name, tensor in (*tree._asdict().items(), ("prefix", prefix), ("start", start), ("nodes", nodes)):
        if tensor is not None and (tensor.dtype != torch.int32 or not tensor.is_contiguous()):
            raise ValueError(f"`{name}` must be a contiguous int32 tensor, got {tensor.dtype}.")
    if window is not None and window < 1:
        raise ValueError(f"`window` must be 1 or more, or None, got {window}.")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"`softcap` must be above 0, or None, got {softcap}.")
    scale = key_dim**-0.5 if scale is None else scale
    return ops.tree_attention(query, key, value, *tree, prefix, start, nodes, scale, window, softcap, sinks)


_NAME = add_op_namespace_prefix("tree_attention")

torch.library.define(
    _NAME,
    "(Tensor query, Tensor key, Tensor value, Tensor depths, Tensor subtree_ends, Tensor ancestors, Tensor prefix, "
    "Tensor? start, Tensor? nodes, float scale, int? window, float? softcap, Tensor? sinks) -> Tensor",
)


# Defined directly: the wrapper of `torch.library.custom_op` costs a layer several times what this does.
@torch.library.impl(_NAME, ("cpu", "cuda"))
def _tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    depths: torch.Tensor,
    subtree_ends: torch.Tensor,
    ancestors: torch.Tensor,
    prefix: torch.Tensor,
    start: torch.Tensor | None,
    nodes: torch.Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    from .launch import launch

    batch, heads, width, key_dim = query.shape
    key_value_heads, slots = key.shape[1], key.shape[2]
    rows = width * (heads // key_value_heads)
    architecture = configs.architecture(query.device)
    assert architecture is not None
    config = configs.choose(architecture, key_dim, value.shape[-1], rows)
    programs = -(-rows // config.block_m) * batch * key_value_heads
    splits = configs.splits_for(programs, slots, config.block_n, configs.processors(query.device))
    tree = TreeTables(depths, subtree_ends, ancestors)
    start = torch.zeros_like(prefix) if start is None else start
    nodes = torch.full_like(prefix, width) if nodes is None else nodes
    # Triton launches on the current device, which need not be that of the tensors.
    with torch.cuda.device_of(query):
        return launch(query, key, value, tree, prefix, start, nodes, scale, window, softcap, sinks, config, splits)


@torch.library.register_fake(_NAME)
def _fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *tables_and_settings: object, **more: object
) -> torch.Tensor:
    batch, heads, width, _ = query.shape
    return query.new_empty(batch, width, heads, value.shape[-1])
