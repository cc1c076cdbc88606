"""How long a draft tree takes from the drafter's log-probabilities until the target can read it, by each builder.

    python benchmarks/tree_building.py --device cuda

On the host: sorted log-probabilities to the host, the tree, its tensors back. On the device: [`DeviceBuilder`] as it
is called, and on CUDA as a captured graph. Builders take turns, and the best time counts. All must give one tree.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from hf_ddtree.tree import DeviceMarginals, build_from_top, compiled, top_marginals

BUDGETS = (63, 511, 1023)


def inputs(budget: int, positions: int, vocabulary: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorted log-probabilities and tokens: a few likely tokens at each position and a long tail."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(positions, vocabulary, generator=generator)
    logits[:, :40] += 8 * torch.rand(positions, 40, generator=generator)
    return top_marginals(logits.to(device), budget)


def builders(budget: int, values: torch.Tensor, ids: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Functions that end with the tree's tensors on the device, by name."""
    device = values.device

    def on_host() -> torch.Tensor:
        tree = build_from_top(values, ids, budget, anchor=0)
        return torch.stack([tree.token_ids, tree.depths, tree.subtree_ends]).to(device)

    def without_numba() -> torch.Tensor:
        with patch.object(compiled, "INSTALLED", False):
            return on_host()

    def on_device() -> torch.Tensor:
        tree = DeviceMarginals(values, ids).build(budget, 0)
        return torch.stack([tree.token_ids, tree.depths, tree.subtree_ends])

    found = {"host": without_numba, "device": on_device}
    if compiled.INSTALLED:
        found["host, numba"] = on_host
    if device.type == "cuda":
        on_device()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = on_device()

        def replayed() -> torch.Tensor:
            graph.replay()
            return result

        found["device, graph"] = replayed
    return found


def milliseconds(ways: dict[str, Callable[[], Any]], repeats: int, device: torch.device) -> dict[str, float]:
    """The best time of each, the device's work included."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(repeats):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            if device.type != "cpu":
                torch.accelerator.synchronize()
            best[name] = min(best[name], 1000 * (time.perf_counter() - started))
    return best


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--budget", type=int, nargs="+", default=BUDGETS)
    parser.add_argument("--positions", type=int, default=15)
    parser.add_argument("--vocabulary", type=int, default=50_000)
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args(arguments)
    wrong = False
    for budget in options.budget:
        ways = builders(budget, *inputs(budget, options.positions, options.vocabulary, options.device))
        results = [way().cpu() for way in ways.values()]
        wrong |= not all(torch.equal(results[0], other) for other in results)
        times = milliseconds(ways, options.repeats, options.device)
        print(f"budget {budget}: " + ", ".join(f"{name} {best:.3f} ms" for name, best in sorted(times.items())))
    if wrong:
        print("The builders give different trees.")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
