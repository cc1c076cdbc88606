"""The kernel on a GPU: workloads for `kernels benchmark`, and with `--sweep` the time of every configuration.

    kernels benchmark hf-ddtree/ddtree-attention --version 1
    python benchmarks/benchmark.py --sweep

The sweep says which entry of `configs.json` is the fastest for a device's head size and number of rows; a faster one
than the table's first choice is worth a change of the table.
"""

import argparse
from typing import Any

import torch

HEADS, KEY_VALUE_HEADS, HEAD_DIM = 32, 8, 128
DEPTH = 15


def chains(nodes: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Depths and subtree ends of chains of `DEPTH` nodes that hang under one root."""
    node = torch.arange(nodes, device=device)
    depths = torch.where(node == 0, 0, (node - 1) % DEPTH + 1)
    ends = torch.where(node == 0, nodes, (((node - 1) // DEPTH + 1) * DEPTH + 1).clamp(max=nodes))
    return depths, ends


def states(nodes: int, prefix: int, device: str, dim: int = HEAD_DIM) -> tuple[torch.Tensor, ...]:
    def normal(heads: int, rows: int) -> torch.Tensor:
        return torch.randn(1, heads, rows, dim, dtype=torch.bfloat16, device=device)

    slots = prefix + nodes
    return normal(HEADS, nodes), normal(KEY_VALUE_HEADS, slots), normal(KEY_VALUE_HEADS, slots)


def masked_sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The same by scaled dot-product attention with a dense mask, `(1, nodes, heads, dim)`."""
    nodes = query.shape[2]
    node = torch.arange(nodes, device=query.device)
    in_tree = (node <= node[:, None]) & (node[:, None] < ends)
    visible = torch.cat([in_tree.new_ones(nodes, key.shape[2] - nodes), in_tree], dim=-1)
    key, value = (t.repeat_interleave(HEADS // KEY_VALUE_HEADS, dim=1) for t in (key, value))
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible)
    return output.transpose(1, 2)


def sweep() -> None:
    """Prints the milliseconds of every configuration and number of splits."""
    import triton

    from ddtree_attention import configs, tree_tables
    from ddtree_attention.launch import launch

    architecture = configs.architecture(torch.device("cuda"))
    print(torch.cuda.get_device_name(), architecture)
    if architecture is None:
        raise SystemExit("configs.json has no entry for this device")
    for size, entries in configs.table()[architecture].items():
        for nodes, prefix in ((16, 2048), (64, 2048), (256, 8192), (512, 32_768)):
            query, key, value = states(nodes, prefix, "cuda", size)
            tree = tree_tables(*chains(nodes, "cuda"), DEPTH)
            lengths = [torch.full((1,), n, dtype=torch.int32, device="cuda") for n in (prefix, 0, nodes)]
            for fewest, config in entries:
                for splits in (1, 2, 4, 8, 16, 32):
                    arguments: Any = (query, key, value, tree, *lengths, size**-0.5, None, None, None, config, splits)
                    time = triton.testing.do_bench(lambda given=arguments: launch(*given), return_mode="median")
                    chosen = configs.choose(architecture, size, size, nodes * HEADS // KEY_VALUE_HEADS) == config
                    mark = f"{'*' * chosen:1}"
                    print(f"{mark} dim {size}, {nodes} nodes, prefix {prefix}, from {fewest} rows {tuple(config)}, "
                          f"{splits} splits: {time:.3f} ms")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", required=True)
    parser.parse_args()
    sweep()
else:
    from kernels.benchmark import Benchmark

    class TreeAttention(Benchmark):
        """A layer of 32 query heads over 8 key-value heads of 128, at sizes of real rounds."""

        seed = 0

        def _make(self, nodes: int, prefix: int) -> None:
            self.query, self.key, self.value = states(nodes, prefix, self.device)
            depths, self.ends = chains(nodes, self.device)
            self.tree = self.kernel.tree_tables(depths, self.ends, DEPTH)
            self.prefix = torch.full((1,), prefix, dtype=torch.int32, device=self.device)
            self.out = torch.empty(1, nodes, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=self.device)

        def _run(self) -> None:
            self.out = self.kernel.tree_attention(self.query, self.key, self.value, self.tree, self.prefix)

        def _expected(self) -> torch.Tensor:
            return masked_sdpa(self.query, self.key, self.value, self.ends)

        def setup_small(self) -> None:
            self._make(64, 2048)

        def benchmark_small(self) -> None:
            self._run()

        def verify_small(self) -> torch.Tensor:
            return self._expected()

        def setup_large(self) -> None:
            self._make(512, 32_768)

        def benchmark_large(self) -> None:
            self._run()

        def verify_large(self) -> torch.Tensor:
            return self._expected()
