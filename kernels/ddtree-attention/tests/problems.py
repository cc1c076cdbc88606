"""Random trees and attention problems, with everything that may not be read filled with NaN."""

from dataclasses import dataclass, field
from typing import Any

import torch

from ddtree_attention import TreeTables, naive_tree_attention, tree_tables
from ddtree_attention.configs import Config
from ddtree_attention.launch import INTERPRETED, launch

DEVICE = "cpu" if INTERPRETED else "cuda"

#: fp32 is for the interpreter only, where it tells a missing column from rounding.
DTYPES = [torch.float16, torch.bfloat16, *([torch.float32] if INTERPRETED else [])]
EXACT = DTYPES[-1] if INTERPRETED else torch.float16
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}

SMALL = Config(16, 16, 4, 1)
MIDDLE = Config(64, 32, 4, 2)
LARGE = Config(128, 64, 4, 1)


def random_parents(nodes: int, seed: int, max_depth: int = 15) -> list[int]:
    """Parents in depth-first preorder: each node hangs under a random node of the path to the node before it."""
    generator = torch.Generator().manual_seed(seed)
    parents, path = [-1], [0]
    while len(parents) < nodes:
        # Four times in five the next node goes under the last: deep trees have the long ancestor lists.
        deep = int(torch.randint(0, 5, (), generator=generator))
        keep = len(path) if deep else 1 + int(torch.randint(0, len(path), (), generator=generator))
        path = path[: min(keep, max_depth)]
        parents.append(path[-1])
        path.append(len(parents) - 1)
    return parents


def depths_and_ends(parents: list[int]) -> tuple[list[int], list[int]]:
    depths, ends = [0], list(range(1, len(parents) + 1))
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    for node in range(len(parents) - 1, 0, -1):
        ends[parents[node]] = max(ends[parents[node]], ends[node])
    return depths, ends


@dataclass(frozen=True)
class Shape:
    """One attention problem; `nodes`, `prefix` and `start` hold a number for each sequence of the batch."""

    nodes: tuple[int, ...]
    prefix: tuple[int, ...]
    start: tuple[int, ...] = ()
    key_value_heads: int = 1
    group: int = 2
    key_dim: int = 16
    value_dim: int = 0
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    splits: int = 1
    config: Config = SMALL
    max_depth: int = 15

    def __str__(self) -> str:
        parts = [f"N{'.'.join(map(str, self.nodes))}", f"P{'.'.join(map(str, self.prefix))}"]
        parts += [f"S{'.'.join(map(str, self.start))}"] if any(self.start) else []
        parts += [f"H{self.key_value_heads}x{self.group}", f"D{self.key_dim}"]
        parts += [f"V{self.value_dim}"] if self.value_dim else []
        parts += [f"W{self.window}"] if self.window else []
        parts += ["cap"] * (self.softcap is not None) + ["sinks"] * self.sinks
        return "-".join([*parts, f"x{self.splits}", f"{self.config.block_m}by{self.config.block_n}"])


@dataclass
class Problem:
    """Tensors of a shape."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    tree: TreeTables
    prefix: torch.Tensor
    start: torch.Tensor
    nodes: torch.Tensor
    settings: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> tuple[Any, ...]:
        return self.query, self.key, self.value, self.tree, self.prefix, self.start, self.nodes

    def run(self, config: Config, splits: int) -> torch.Tensor:
        return launch(*self.tensors(), **self.settings, config=config, splits=splits)

    def expected(self) -> torch.Tensor:
        on_cpu = [TreeTables(*(t.cpu() for t in x)) if isinstance(x, TreeTables) else x.cpu() for x in self.tensors()]
        sinks = self.settings["sinks"]
        return naive_tree_attention(*on_cpu, **self.settings | {"sinks": sinks.cpu() if sinks is not None else None})


def problem(shape: Shape, dtype: torch.dtype = EXACT, seed: int = 0, spare: int = 5) -> Problem:
    """Random states; every slot and query row outside of what `shape` makes readable is NaN."""
    generator = torch.Generator().manual_seed(seed)
    batch, width, heads = len(shape.nodes), max(shape.nodes), shape.key_value_heads * shape.group
    start = shape.start or (0,) * batch
    slots = max(p + n for p, n in zip(shape.prefix, shape.nodes, strict=True)) + spare
    nan = float("nan")

    def states(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    query = states(batch, heads, width, shape.key_dim)
    key = states(batch, shape.key_value_heads, slots, shape.key_dim)
    value = states(batch, shape.key_value_heads, slots, shape.value_dim or shape.key_dim)
    depths, ends = torch.full((batch, width), 10**6), torch.full((batch, width), 10**6)
    for b, (nodes, prefix) in enumerate(zip(shape.nodes, shape.prefix, strict=True)):
        tree = depths_and_ends(random_parents(nodes, seed=nodes + b, max_depth=shape.max_depth))
        depths[b, :nodes], ends[b, :nodes] = torch.tensor(tree[0]), torch.tensor(tree[1])
        low = start[b] if shape.window is None else max(start[b], prefix - shape.window + 1)
        query[b, :, nodes:] = nan
        for kept in (key, value):
            kept[b, :, :low], kept[b, :, prefix + nodes :] = nan, nan
    deepest = max(int(depths[b, :n].max()) for b, n in enumerate(shape.nodes))
    sinks = states(heads).to(dtype).to(DEVICE) if shape.sinks else None
    scale = 1.3 * shape.key_dim**-0.5
    return Problem(
        *(t.to(dtype).to(DEVICE) for t in (query, key, value)),
        tree_tables(depths.to(DEVICE), ends.to(DEVICE), deepest),
        *(torch.tensor(numbers, dtype=torch.int32, device=DEVICE) for numbers in (shape.prefix, start, shape.nodes)),
        dict(scale=scale, window=shape.window, softcap=shape.softcap, sinks=sinks),
    )
