"""The gated delta rule over a draft tree, in one pass, with every node reading the state along its own path."""

import math
from dataclasses import dataclass

import torch

from ddtree_attention import tree_delta_rule


def tree_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    visible: torch.Tensor,
    normalise: bool = True,
    subtree_ends: torch.Tensor | None = None,
) -> tuple[torch.Tensor, "PendingDelta"]:
    r"""
    What the recurrence of Gated DeltaNet (hf.co/papers/2412.06464, equation 10) gives at each node of a tree.

    Along a path, token `i` decays the state and corrects what it stores under the key:
    `S_i = e^{g_i} S_p + k_i u_i^T` with `u_i = beta_i (v_i - e^{g_i} S_p^T k_i)` and `p` the token before, and reads
    `S_i^T q_i`. The paper's chunkwise form solves for all `u` of a row of tokens at once. Ours does so for a tree:
    with `G_i` the sum of `g` from the root to node `i`, and `D_ij = e^{G_i - G_j}` where `j` is an ancestor of `i` or
    `i` itself, else 0,

        u_i + beta_i sum_{j before i} D_ij (k_i . k_j) u_j = beta_i (v_i - e^{G_i} S^T k_i)
        output_i = e^{G_i} S^T q_i + sum_j D_ij (q_i . k_j) u_j

    which in preorder is a unit lower triangular system. Everything is computed in fp32, or in fp64 for fp64 inputs.

    Args:
        query, key (`torch.Tensor` of shape `(batch, nodes, key_heads, key_dim)`): before normalisation and scaling.
        value (`torch.Tensor` of shape `(batch, nodes, value_heads, value_dim)`): `value_heads` is a multiple of
            `key_heads`, and consecutive value heads share a key head.
        g (`torch.Tensor` of shape `(batch, nodes, value_heads)`): logarithm of the decay, at most 0.
        beta (`torch.Tensor` of shape `(batch, nodes, value_heads)`): strength of the correction.
        state (`torch.Tensor` of shape `(batch, value_heads, key_dim, value_dim)`): before the root; only read.
        visible (`torch.BoolTensor` of shape `(nodes, nodes)`): whether the column is the row or its ancestor.
        normalise (`bool`): whether queries and keys are brought to length 1 first.
        subtree_ends (`torch.Tensor` of shape `(nodes,)`, *optional*):
            one past the last node of each node's subtree: given, the Triton kernel solves the system.

    Returns:
        The output of shape `(batch, nodes, value_heads, value_dim)` in the query's dtype, and what a commit needs.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    nodes, key_heads, key_dim = key.shape[1:]
    groups = value.shape[2] // key_heads
    # (batch, key_heads, 1, nodes, key_dim), and (batch, key_heads, groups, nodes, value_dim or nothing).
    q, k = (t.transpose(1, 2).unsqueeze(2).to(dtype) for t in (query, key))
    v = value.transpose(1, 2).unflatten(1, (key_heads, groups)).to(dtype)
    b, decay = (t.transpose(1, 2).unflatten(1, (key_heads, groups)).to(dtype) for t in (beta, g))
    if normalise:
        q, k = (t * torch.rsqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    q = q * key_dim**-0.5
    visible = visible.to(q.device)

    # A decay below the smallest number is no decay to sum up: it would drown the small ones after it.
    decay = decay.clamp_min(math.log(torch.finfo(dtype).tiny))
    sums = decay @ visible.to(dtype).T
    if subtree_ends is not None:
        output, u = tree_delta_rule(
            q.squeeze(2), k.squeeze(2), value, beta, sums.flatten(1, 2), state, subtree_ends.to(q.device)
        )
        return output, PendingDelta(k, u.unflatten(1, (key_heads, groups)), sums)
    # Above the diagonal and between branches the differences may be large and positive, so they go before the exp.
    between = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(~visible, float("-inf")).exp()
    before = state.unflatten(1, (key_heads, groups)).to(dtype)
    # One pass over the state, which is by far the largest operand, for the reads of both.
    reads = torch.cat([k, q], dim=-2) @ before
    read_k, read_q = (reads * sums.exp().repeat(1, 1, 1, 2).unsqueeze(-1)).split(nodes, dim=-2)
    # The solver takes the diagonal for ones.
    system = between * (k @ k.mT) * b.unsqueeze(-1)
    u = torch.linalg.solve_triangular(system, b.unsqueeze(-1) * (v - read_k), upper=False, unitriangular=True)
    output = read_q + (between * (q @ k.mT)) @ u
    output = output.flatten(1, 2).transpose(1, 2).to(query.dtype)
    return output, PendingDelta(k, u, sums)


@dataclass
class PendingDelta:
    """What the nodes would write to the state, not written yet.

    Args:
        keys (`torch.Tensor` of shape `(batch, key_heads, 1, nodes, key_dim)`): as the rule uses them.
        corrections (`torch.Tensor` of shape `(batch, key_heads, groups, nodes, value_dim)`): the `u` of each node.
        sums (`torch.Tensor` of shape `(batch, key_heads, groups, nodes)`): `g` summed from the root to each node.
    """

    keys: torch.Tensor
    corrections: torch.Tensor
    sums: torch.Tensor

    def state_after(self, path: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        r"""
        `e^{G_e} S + sum_j e^{G_e - G_j} k_j u_j^T` over the nodes `j` of a path that ends in `e`.

        Args:
            path (`torch.LongTensor` of shape `(nodes of the path,)`): from the root down.
            state (`torch.Tensor` of shape `(batch, value_heads, key_dim, value_dim)`): before the root; only read.

        Returns:
            `torch.Tensor`: the state after the path, in the shape and dtype of `state`.
        """
        path = path.to(self.sums.device)
        sums = self.sums.index_select(-1, path)
        last = sums[..., -1:]
        keys = self.keys.index_select(-2, path) * (last - sums).exp().unsqueeze(-1)
        before = state.unflatten(1, self.sums.shape[1:3]).to(keys.dtype)
        after = before * last.exp().unsqueeze(-1) + keys.mT @ self.corrections.index_select(-2, path)
        return after.flatten(1, 2).to(state.dtype)
