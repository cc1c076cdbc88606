"""One layer's attention over a draft tree, as the benchmarks run it: states, every way to compute it, the floor."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from ddtree_attention import TreeTables, tree_attention, tree_tables
from hf_ddtree.attention.naive import naive_tree_attention
from hf_ddtree.attention.packed import packed_sdpa
from hf_ddtree.round import TreeRound
from hf_ddtree.tree import build_draft_tree

POSITIONS = 15


@dataclass
class Layer:
    """Random states of a layer over a tree behind a prefix.

    Args:
        nodes (`int`): of the tree, the root included.
        prefix (`int`): cached tokens before it.
        heads, key_value_heads, head_dim (`int`): of the layer.
    """

    nodes: int
    prefix: int
    heads: int = 32
    key_value_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    padding: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.nodes)
        log_probs = torch.randn(POSITIONS, 1000, generator=generator).mul(3).log_softmax(-1)
        self.drafted = build_draft_tree(log_probs, budget=self.nodes - 1)
        self.round = TreeRound(self.drafted.depths.to(self.device), self.drafted.subtree_ends.to(self.device))
        slots = self.prefix + self.nodes
        self.query = self._states(self.heads, self.nodes)
        self.key = self._states(self.key_value_heads, slots)
        self.value = self._states(self.key_value_heads, slots)
        self.sink_scores = self._states(self.heads, 1)[0, :, 0, 0].contiguous() if self.sinks else None
        self.scale = self.head_dim**-0.5

    def _states(self, heads: int, rows: int) -> torch.Tensor:
        return torch.randn(1, heads, rows, self.head_dim, dtype=self.dtype, device=self.device)

    @property
    def name(self) -> str:
        extras = {"window": self.window, "softcap": self.softcap, "padding": self.padding or None}
        more = [f"{name} {value}" for name, value in extras.items() if value is not None] + ["sinks"] * self.sinks
        size = (
            f"{self.nodes} nodes, prefix {self.prefix}, {self.heads}/{self.key_value_heads} heads of {self.head_dim}"
        )
        return ", ".join([size, str(self.dtype).removeprefix("torch."), *more])

    @cached_property
    def tables(self) -> TreeTables:
        return tree_tables(self.round.depths, self.round.subtree_ends, POSITIONS)

    @cached_property
    def visible(self) -> torch.Tensor:
        """`(1, 1, nodes, keys)` booleans."""
        prefix = torch.arange(self.prefix, device=self.device)
        positions = torch.cat([prefix, self.prefix + self.round.depths])
        seen = torch.cat([(prefix >= self.padding).expand(self.nodes, -1), self.round.visible], dim=-1)
        if self.window is not None:
            seen = seen & (positions > (self.prefix + self.round.depths)[:, None] - self.window)
        return seen[None, None]

    @cached_property
    def mask(self) -> torch.Tensor:
        zeros = torch.zeros(self.visible.shape, dtype=self.dtype, device=self.device)
        return zeros.masked_fill(~self.visible, torch.finfo(self.dtype).min)

    def lengths(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Prefix and padding as the kernel reads them."""
        prefix, padding = (
            torch.full((1,), n, dtype=torch.int32, device=self.device) for n in (self.prefix, self.padding)
        )
        return prefix, padding

    def reference(self) -> torch.Tensor:
        """Float64, `(1, nodes, heads, head_dim)`."""
        return naive_tree_attention(
            self.query, self.key, self.value, self.visible, self.scale, self.softcap, self.sink_scores
        )

    def kernel(self) -> Callable[[], torch.Tensor]:
        prefix, padding = self.lengths()
        tables = self.tables

        def run() -> torch.Tensor:
            return tree_attention(
                self.query, self.key, self.value, tables, prefix, padding,
                scale=self.scale, window=self.window, softcap=self.softcap, sinks=self.sink_scores,
            )  # fmt: skip

        return run

    def library(self) -> Callable[[], torch.Tensor]:
        """SDPA as the library calls it: a boolean mask, keys and values repeated for each query head."""
        visible, group = self.visible, self.heads // self.key_value_heads

        def repeated(states: torch.Tensor) -> torch.Tensor:
            batch, heads, rows, dim = states.shape
            return states[:, :, None].expand(batch, heads, group, rows, dim).reshape(batch, heads * group, rows, dim)

        def run() -> torch.Tensor:
            output = F.scaled_dot_product_attention(
                self.query, repeated(self.key), repeated(self.value), attn_mask=visible, scale=self.scale
            )
            return output.transpose(1, 2).contiguous()

        return run

    def packed(self) -> Callable[[], torch.Tensor]:
        """The package's route without the kernel; the mask is repeated once a round, not once a layer."""
        mask = self.mask
        self.round.packed_mask(mask, self.heads // self.key_value_heads)
        return lambda: packed_sdpa(self.query, self.key, self.value, mask, self.scale, self.round)

    def flex(self) -> Callable[[], torch.Tensor]:
        """flex_attention, compiled on a GPU; its block mask is made once a round."""
        prefix, ends = self.prefix, self.round.subtree_ends

        def sees(b: torch.Tensor, h: torch.Tensor, row: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
            node = (slot - prefix).clamp(min=0)
            return (slot < prefix) | ((node <= row) & (row < ends[node]))

        blocks = create_block_mask(sees, None, None, self.nodes, prefix + self.nodes, device=self.device)
        attend = flex_attention
        if self.device == "cuda":
            # Without this the ninth shape would run uncompiled.
            torch.compiler.reset()
            attend = torch.compile(flex_attention, dynamic=False)

        def run() -> torch.Tensor:
            output = attend(self.query, self.key, self.value, block_mask=blocks, scale=self.scale, enable_gqa=True)
            return output.transpose(1, 2).contiguous()

        return run

    def work(self) -> tuple[float, float]:
        """Bytes that must move, each row once, and operations that must be done, for pairs that see each other."""
        rows = 2 * self.key_value_heads * (self.prefix + self.nodes) + 2 * self.heads * self.nodes
        pairs = float(self.nodes * self.prefix + int((self.drafted.depths + 1).sum()))
        return rows * self.head_dim * self.dtype.itemsize, 4 * self.heads * self.head_dim * pairs
