"""A target's forward over trees on this machine: as it is, with packed weights, compiled, and both.

    python benchmarks/compiled_forward.py --target build/smollm2 --drafter PATH_OR_REPO --prompts prompts.jsonl
    python benchmarks/compiled_forward.py                    # the shipped pair, which is too small to gain much

First one forward over trees of 1 to 64 nodes, then whole texts. The ways take turns, so that what else the machine
does falls on all, and medians are compared. Compiling a model of 30 layers takes up to a minute for each size of
trees. The exit code is 1 if a text is wrong.
"""

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, CompileConfig, GenerationConfig, StaticCache

from gpu_check import PROMPTS, first_difference
from hf_ddtree import DDTreeCache, DDTreeConfig, DFlashModel, packed_weights
from hf_ddtree.cache import adopt_static, begin, rollback
from hf_ddtree.compat import CACHE_NAME, compile_config, decoder_layers
from hf_ddtree.generation.ranks import Ranks
from hf_ddtree.generation.verification import TreeVerifier
from hf_ddtree.round import TapCollector
from hf_ddtree.tree import DraftTree


def bush(nodes: int) -> DraftTree:
    """The root and its children."""
    index = torch.arange(nodes)
    ends = index + 1
    ends[0] = nodes
    parents, depths = torch.where(index == 0, -1, 0), (index > 0).long()
    return DraftTree(index + 3, parents, depths, ends, torch.zeros(nodes, dtype=torch.float64))


class Forward:
    """A target's forward over a tree of so many nodes behind a prefix, which it leaves as it was."""

    def __init__(self, target: Any, layer_ids: list[int], nodes: int, prefix: int, config: CompileConfig | None):
        self.target, self.tree = target, bush(nodes)
        length = prefix + nodes + 1
        cache: Any = StaticCache(config=target.config, max_cache_len=length) if config else DDTreeCache()
        self.kwargs: dict[str, Any] = {
            CACHE_NAME: cache, "position_ids": torch.arange(prefix + 1)[None], "use_cache": True
        }  # fmt: skip
        self.verify = TreeVerifier(target, TapCollector(decoder_layers(target), layer_ids))
        settings = GenerationConfig(compile_config=config)
        self.verify.compile_if_asked(Ranks(target, False, target.device), settings, self.kwargs, nodes - 1)
        adopt_static(cache, self.verify.room(nodes - 1), fixed=config is not None)
        target(torch.arange(prefix)[None] % 99 + 3, use_cache=True, **{CACHE_NAME: cache})
        self.cache = cache

    def __call__(self) -> None:
        begin(self.cache)
        with self.verify.taps.hooked():
            self.verify(self.tree, self.kwargs)
        rollback(self.cache)


@contextlib.contextmanager
def weights(packed: bool, *models: Any) -> Iterator[None]:
    with packed_weights(*models) if packed else contextlib.nullcontext():
        yield


WAYS = {"as it is": (False, False), "packed": (False, True), "compiled": (True, False), "both": (True, True)}


def in_turn(ways: dict[str, Callable[[], Any]], repeats: int, *models: Any) -> dict[str, float]:
    """Median milliseconds of each way; a first call, which may compile, is not counted."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for packed in (False, True):
        with weights(packed, *models):
            for name, run in ways.items():
                if WAYS[name][1] == packed:
                    run()
    # A block of calls each time that weights are packed, which takes longer than a call.
    for _ in range(3):
        for packed in (False, True):
            with weights(packed, *models):
                for _ in range(repeats):
                    for name, run in ways.items():
                        if WAYS[name][1] == packed:
                            start = time.perf_counter()
                            run()
                            times[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(column) for name, column in times.items()}


def forwards(options: argparse.Namespace, target: Any, drafter: Any, config: CompileConfig) -> None:
    print(f"\nOne forward behind {options.prefix} tokens: ms (times one row as it is)")
    print(f"  {'rows':>4}", *(f"{name:>16}" for name in WAYS))
    unit = None
    for rows in options.rows:
        ways: dict[str, Any] = {
            name: Forward(target, drafter.config.target_layer_ids, rows, options.prefix, config if compiled else None)
            for name, (compiled, _) in WAYS.items()
        }
        times = in_turn(ways, options.repeats, target)
        unit = unit or times["as it is"]
        print(f"  {rows:>4}", *(f"{f'{ms:.1f} ({ms / unit:.2f}x)':>16}" for ms in times.values()), flush=True)


def texts(options: argparse.Namespace, target: Any, drafter: Any, prompts: list[Any], config: CompileConfig) -> int:
    print(f"\nWhole texts of {options.max_new_tokens} tokens: seconds (times plain decoding as it is)")
    base = dict(max_new_tokens=options.max_new_tokens, do_sample=False)
    static: dict[str, Any] = dict(cache_implementation="static")
    wrong = 0
    # The first call's cache sets the size of all, and another size compiles again.
    for ids in sorted(prompts, key=lambda ids: ids.shape[1], reverse=True):
        outputs: dict[str, torch.Tensor] = {}

        def run(name: str, generation: GenerationConfig, ids: torch.Tensor = ids, **kwargs: Any) -> None:
            mask = torch.ones_like(ids)
            outputs[name] = target.generate(ids, attention_mask=mask, generation_config=generation, **kwargs)  # noqa: B023

        plain: dict[str, Any] = {}
        tree: dict[str, Any] = {}
        for name, (compiled, _) in WAYS.items():
            asked = dict(compile_config=config, **static) if compiled else {}
            ours = DDTreeConfig(budget=options.budget, **asked, **base)
            own = dict(compile_config=compile_config(), **static) if compiled else {}
            theirs = GenerationConfig(**own, **base)
            if not compiled or config.backend == "inductor":
                plain[name] = lambda name=name, theirs=theirs: run(f"plain, {name}", theirs)
            tree[name] = lambda name=name, ours=ours: run(name, ours, assistant_model=drafter)
        seconds = [
            {name: ms / 1000 for name, ms in in_turn(ways, 1, target, drafter).items()} for ways in (plain, tree)
        ]
        unit = seconds[0]["as it is"]
        for kind, row in zip(("plain", "tree"), seconds, strict=True):
            shown = ", ".join(f"{name} {value:.2f} ({unit / value:.2f}x)" for name, value in row.items())
            print(f"  {ids.shape[1]} tokens, {kind}: {shown}", flush=True)
        for name, output in outputs.items():
            gap = first_difference(target, outputs["plain, as it is"], output)
            if gap is not None:
                print(f"    {name} differs where the two best tokens are {gap:.1e} apart")
            wrong += gap is not None and gap >= 1e-4
    return wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shipped = files("hf_ddtree") / "demo_pair"
    parser.add_argument("--target", default=str(shipped / "target"))
    parser.add_argument("--drafter", default=str(shipped / "drafter"))
    parser.add_argument("--prompts", type=Path, help='a file of lines `{"prompt": ...}`')
    parser.add_argument("--limit", type=int, default=3, help="prompts")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument("--prefix", type=int, default=256)
    parser.add_argument("--budget", type=int, default=15)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    config = CompileConfig(backend=options.backend, mode="default" if options.backend == "inductor" else None)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.float32).eval()
    drafter = DFlashModel.from_pretrained(options.drafter, dtype=torch.float32)
    read = PROMPTS
    if options.prompts is not None:
        read = [json.loads(line)["prompt"] for line in options.prompts.read_text(encoding="utf-8").splitlines()]
    prompts = [tokenizer(text, return_tensors="pt")["input_ids"] for text in read[: options.limit]]
    print(f"torch {torch.__version__}, {options.threads} threads, fp32; medians of calls that take turns")
    with torch.no_grad():
        forwards(options, target, drafter, config)
        return int(texts(options, target, drafter, prompts, config) > 0)


if __name__ == "__main__":
    sys.exit(main())
