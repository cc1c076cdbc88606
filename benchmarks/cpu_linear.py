"""Linear layers on a CPU: PyTorch's own product beside oneDNN's, and a whole model's forward with each and packed.

    python benchmarks/cpu_linear.py

In fp32. Calls alternate, so that what else the machine does falls on both. A layer is one of as many as no cache
holds, as in a model. The model has SmolLM2-135M's shape and random weights. A line ends with the route that a generate
of this package takes there.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from hf_ddtree import packed_weights, products
from hf_ddtree.linear_layers import fast_linear_layers

#: inner and output width of SmolLM2-135M's layers, and of layers of a larger model.
SHAPES = [(576, 192), (576, 576), (576, 1536), (1536, 576), (576, 49152), (2048, 2048)]
ROWS = [1, 8, 16, 32, 64, 128]
BEYOND_CACHES = 64 << 20


def medians(ways: list[Callable[[], Any]], repeats: int) -> list[float]:
    """Milliseconds of each, called in turn."""
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(repeats + 1):
        for way, column in zip(ways, times, strict=True):
            started = time.perf_counter()
            way()
            column.append(1000 * (time.perf_counter() - started))
    return [sorted(column[1:])[repeats // 2] for column in times]


def layers(rows: list[int], repeats: int) -> Iterator[str]:
    for inner, columns in SHAPES:
        weights = torch.randn(BEYOND_CACHES // (4 * inner * columns) + 1, columns, inner)
        for count in rows:
            states = torch.randn(1, count, inner)
            ways = [
                lambda f=f, states=states, weights=weights: [f(states, weight) for weight in weights]
                for f in (F.linear, products.linear)
            ]
            usual, other = (milliseconds / len(weights) for milliseconds in medians(ways, repeats))
            taken = "oneDNN" if products.pays(count, inner, columns) else "PyTorch"
            yield f"{inner} x {columns}, {count} rows: {usual:.3f}, oneDNN {other:.3f}: {usual / other:.2f}x, {taken}"


def model(hidden: int = 576, blocks: int = 30, vocabulary: int = 49152) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 8 // 3, num_hidden_layers=blocks, num_attention_heads=9,
        num_key_value_heads=3, head_dim=hidden // 9, vocab_size=vocabulary, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def forwards(target: LlamaForCausalLM, rows: list[int], repeats: int) -> Iterator[str]:
    for count in rows:
        ids = torch.arange(count)[None]

        def usual(ids: torch.Tensor = ids) -> None:
            target(ids)

        def inside(ids: torch.Tensor = ids) -> None:
            with fast_linear_layers(target):
                target(ids)

        # Packing takes a second, so the packed forwards follow rather than take turns.
        plain, other = medians([usual, inside], repeats)
        with packed_weights(target):
            (packed,) = medians([usual], repeats)
        yield (
            f"forward, {count} rows: {plain:.1f}, in a generate of this package {other:.1f}: {plain / other:.2f}x, "
            f"packed {packed:.1f}: {plain / packed:.2f}x"
        )


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads, fp32; ms, medians of {options.repeats}")
    for line in layers(options.rows, options.repeats):
        print(" ", line)
    for line in forwards(model(), options.rows, max(options.repeats // 2, 1)):
        print(" ", line)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
