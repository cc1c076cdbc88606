"""The gated delta rule over a tree as an operator: checks, launch, and registration with PyTorch."""

import torch

from . import configs
from ._ops import add_op_namespace_prefix, ops
from .op import MAX_HEAD_DIM, unavailable_device

DELTA_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
#: Nodes of a tile. As many values make a program's block: 32 heads of 128 are 128 programs, one a processor.
TILE = 32
#: Dimensions of keys that a step multiplies: for pairs of nodes, where 32 spill registers, and with a state.
PAIR_STEP, STATE_STEP = 16, 32
WARPS = 4
STAGES = 2
#: Of a thread on NVIDIA's devices: left alone, the assembler saves some on sm_120 and keeps values in memory instead.
MAX_REGISTERS = 255


def delta_unsupported(key: torch.Tensor, value: torch.Tensor, state: torch.Tensor) -> str | None:
    """Why the kernel cannot serve these tensors, in a few words, or `None` if it can; their contents are not read.

    Args:
        key (`torch.Tensor` of shape `(..., key_dim)`): in any of the layouts that keys come in.
        value (`torch.Tensor` of shape `(..., value_dim)`): likewise.
        state (`torch.Tensor`): before the root.
    """
    for tensor in (key, value, state):
        if tensor.dtype not in DELTA_DTYPES:
            return f"a delta rule in {str(tensor.dtype).removeprefix('torch.')}"
    if max(key.shape[-1], value.shape[-1]) > MAX_HEAD_DIM:
        return f"a delta rule with heads of {key.shape[-1]} and {value.shape[-1]}, above {MAX_HEAD_DIM}"
    return unavailable_device(key.device)


def tree_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    beta: torch.Tensor,
    sums: torch.Tensor,
    state: torch.Tensor,
    subtree_ends: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What Gated DeltaNet (hf.co/papers/2412.06464, equation 10) gives at each node of one tree.

    With `S` the state before the root, and `D_ij = e^{G_i - G_j}` where `j` is an ancestor of `i` or is `i`, else 0:

        u_i + beta_i sum_{j before i} D_ij (k_i . k_j) u_j = beta_i (v_i - e^{G_i} S^T k_i)
        output_i = e^{G_i} S^T q_i + sum_j D_ij (q_i . k_j) u_j

    Args:
        query, key (`torch.Tensor` of shape `(batch, key_heads, nodes, key_dim)`):
            in fp32, normalised and scaled as they are used.
        value (`torch.Tensor` of shape `(batch, nodes, heads, value_dim)`): `heads` is a multiple of `key_heads`, and
            consecutive ones share a key head.
        beta (`torch.Tensor` of shape `(batch, nodes, heads)`): strength of the correction.
        sums (`torch.Tensor` of shape `(batch, heads, nodes)`): the `G` of each node in fp32, finite: logarithms of
            the decays summed from the root to it.
        state (`torch.Tensor` of shape `(batch, heads, key_dim, value_dim)`): before the root; only read.
        subtree_ends (`torch.Tensor` of shape `(nodes,)`): one past the last node of each node's subtree, in preorder.

    Returns:
        The output, in the shape and dtype of `value`, and every `u` in fp32, `(batch, heads, nodes, value_dim)`.

    Raises:
        ValueError: for dtypes, shapes or devices that the kernel does not serve.
    """
    if (reason := delta_unsupported(key, value, state)) is not None:
        raise ValueError(f"The delta rule kernel does not serve {reason}.")
    batch, key_heads, nodes, key_dim = key.shape
    heads, value_dim = value.shape[-2:]
    if heads % key_heads:
        raise ValueError(f"{heads} value heads are no multiple of {key_heads} key heads.")
    expected = {
        "query": (query.shape, (batch, key_heads, nodes, key_dim)),
        "value": (value.shape, (batch, nodes, heads, value_dim)),
        "beta": (beta.shape, (batch, nodes, heads)),
        "sums": (sums.shape, (batch, heads, nodes)),
        "state": (state.shape, (batch, heads, key_dim, value_dim)),
        "subtree_ends": (subtree_ends.shape, (nodes,)),
    }
    for name, (shape, wanted) in expected.items():
        if tuple(shape) != wanted:
            raise ValueError(f"`{name}` must be of shape {wanted} beside a key of {tuple(key.shape)}, got {shape}.")
    for name, tensor in (("query", query), ("key", key), ("sums", sums)):
        if tensor.dtype != torch.float32:
            raise ValueError(f"`{name}` must be in float32, got {tensor.dtype}.")
    return ops.tree_delta_rule(query, key, value, beta, sums, state, subtree_ends)


_NAME = add_op_namespace_prefix("tree_delta_rule")

torch.library.define(
    _NAME,
    "(Tensor query, Tensor key, Tensor value, Tensor beta, Tensor sums, Tensor state, Tensor subtree_ends) "
    "-> (Tensor, Tensor)",
)


@torch.library.impl(_NAME, ("cpu", "cuda"))
def _tree_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    beta: torch.Tensor,
    sums: torch.Tensor,
    state: torch.Tensor,
    subtree_ends: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    from .delta_kernels import delta_forward, delta_products

    batch, key_heads, nodes, key_dim = key.shape
    heads, value_dim = value.shape[-2:]
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    beta, sums, state, subtree_ends = (t.contiguous() for t in (beta, sums, state, subtree_ends))
    output, corrections = _outputs(key, value)
    tiles = -(-nodes // TILE)
    # Tiles of pairs are kept whole, so that they are read without a mask.
    system, reads = (key.new_empty(batch, heads, tiles, tiles, TILE, TILE) for _ in range(2))
    strides = (*query.stride()[:3], *key.stride()[:3])
    block_v = value_block(value_dim)
    limit = {} if torch.version.hip is not None else {"maxnreg": MAX_REGISTERS}
    sizes = dict(KEY_HEADS=key_heads, GROUP=heads // key_heads, KEY_DIM=key_dim, TILE=TILE)
    # Triton launches on the current device, which need not be that of the tensors.
    with torch.cuda.device_of(query):
        delta_products[(batch * heads, tiles, tiles)](
            query, key, beta, sums, subtree_ends, system, reads, *strides, nodes,
            **sizes, KEY_STEP=PAIR_STEP, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
        delta_forward[(batch * heads, -(-value_dim // block_v))](
            query, key, value, beta, sums, state, subtree_ends, system, reads, corrections, output,
            *strides, value.stride(0), value.stride(2), value.stride(1), nodes,
            **sizes, KEY_STEP=STATE_STEP, VALUE_DIM=value_dim, BLOCK_V=block_v, STAGES=STAGES,
            num_warps=WARPS, num_stages=STAGES, **limit,
        )  # fmt: skip
    return output, corrections


def value_block(value_dim: int) -> int:
    """Values of a head that a program corrects; 16 is the least that Triton multiplies."""
    return min(max(configs.next_power_of_2(value_dim), 16), TILE)


@torch.library.register_fake(_NAME)
def _fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _outputs(key, value)


def _outputs(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch, nodes, heads, value_dim = value.shape
    return value.new_empty(batch, nodes, heads, value_dim), key.new_empty(batch, heads, nodes, value_dim)
