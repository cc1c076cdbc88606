"""One layer's gated delta rule over a draft tree, as `gpu_check.py` runs it: states, both forms, the reference."""

from dataclasses import dataclass

import torch

from hf_ddtree.linear_attention.delta_rule import tree_gated_delta_rule
from hf_ddtree.round import ancestors_or_self
from hf_ddtree.tree import build_draft_tree

POSITIONS = 15


@dataclass
class DeltaLayer:
    """Random states of a layer over a tree.

    Args:
        nodes (`int`): of the tree, the root included.
        key_heads, heads, head_dim (`int`): of the layer.
    """

    nodes: int
    key_heads: int = 16
    heads: int = 32
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.nodes)
        log_probs = torch.randn(POSITIONS, 1000, generator=generator).mul(3).log_softmax(-1)
        self.ends = build_draft_tree(log_probs, budget=self.nodes - 1).subtree_ends.to(self.device)
        self.visible = ancestors_or_self(self.ends)
        query, key = (self._states(1, self.nodes, self.key_heads, self.head_dim) for _ in range(2))
        value = self._states(1, self.nodes, self.heads, self.head_dim)
        decay = -self._states(1, self.nodes, self.heads).float().exp() / 4
        state = self._states(1, self.heads, self.head_dim, self.head_dim).float()
        self.states = (query, key, value, decay, self._states(1, self.nodes, self.heads).sigmoid(), state)

    def _states(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    @property
    def name(self) -> str:
        size = f"gated delta rule, {self.nodes} nodes, {self.key_heads}/{self.heads} heads of {self.head_dim}"
        return f"{size}, {str(self.dtype).removeprefix('torch.')}"

    def kernel(self) -> torch.Tensor:
        return tree_gated_delta_rule(*self.states, self.visible, subtree_ends=self.ends)[0]

    def in_pytorch(self) -> torch.Tensor:
        return tree_gated_delta_rule(*self.states, self.visible)[0]

    def reference(self) -> torch.Tensor:
        return tree_gated_delta_rule(*(states.double() for states in self.states), self.visible)[0]
