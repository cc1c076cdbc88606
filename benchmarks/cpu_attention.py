"""Packed grouped-query attention beside the library's masked path, on a CPU.

    python benchmarks/cpu_attention.py

Both are SDPA over the same states and mask, in fp32. Calls alternate, so that what else the machine does falls on
both, and the best and the median of each are compared. The exit code is 1 where the best times of a shape are below
the ratio that it is held to: on a machine that is busy with other things the medians say more about those.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from attention_work import Layer

#: heads, key-value heads, head dimension, nodes, prefix, the ratio it is held to.
SHAPES = [
    (9, 3, 64, 17, 512, None),
    (9, 3, 64, 17, 2000, 1.9),
    (32, 8, 128, 17, 2000, None),
    (32, 8, 128, 65, 2000, 2.5),
]


def seconds(run: Callable[[], torch.Tensor]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@torch.no_grad()
def compare(layer: Layer, repeats: int) -> list[list[float]]:
    """Milliseconds of the library's path and of the packed one, called in turn, from the least to the most."""
    ways = layer.library(), layer.packed()
    first, second = (way() for way in ways)
    if not torch.allclose(first, second, atol=1e-5):
        raise AssertionError("the two paths give different outputs")
    times = [[1000 * seconds(way) for way in ways] for _ in range(repeats)]
    return [sorted(column) for column in zip(*times, strict=True)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads, fp32; ms, best / median of {options.repeats}")
    low = 0
    for heads, key_value_heads, dim, nodes, prefix, wanted in SHAPES:
        sizes: dict[str, Any] = dict(heads=heads, key_value_heads=key_value_heads, head_dim=dim)
        layer = Layer(nodes, prefix, dtype=torch.float32, device="cpu", **sizes)
        library, packed = compare(layer, options.repeats)
        ratio = library[0] / packed[0]
        low += wanted is not None and ratio < wanted
        middle = options.repeats // 2
        held = f" (held to {wanted}x)" if wanted else ""
        print(
            f"  {layer.name}: library {library[0]:.2f} / {library[middle]:.2f}, packed {packed[0]:.2f} / "
            f"{packed[middle]:.2f}: {ratio:.2f}x best{held}, {library[middle] / packed[middle]:.2f}x median"
        )
    return int(low > 0)


if __name__ == "__main__":
    sys.exit(main())
