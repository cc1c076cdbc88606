"""For whoever has a GPU: is the kernel right on it, how fast is it, and where does a round's time go? Under 5 minutes.

    python benchmarks/gpu_check.py --json gpu.json
    python benchmarks/gpu_check.py --model Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16
    TRITON_INTERPRET=1 python benchmarks/gpu_check.py --dry-run

The kernels, and what is written in place between the forwards, against float64; one layer's attention by the kernel,
by SDPA with a dense mask (as the library calls it, and packed) and by flex_attention, beside the floor that this
card's measured bandwidth and matrix rate set; a layer's gated delta rule by its kernel and in PyTorch; and whole texts
of a pair with and without the kernel, with the stages of a round. `--dry-run` runs the same code with tiny sizes on
the CPU, where times mean nothing. The exit code is 1 if something is wrong.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import triton
from transformers import AutoModelForCausalLM, AutoTokenizer

from attention_work import Layer
from delta_work import DeltaLayer
from hf_ddtree import DDTreeConfig, DFlashModel
from hf_ddtree.cache import DDTreeCache
from hf_ddtree.tree import top_marginals

NODES, PREFIXES = (64, 256, 512), (512, 2048, 8192, 32_768)
DRY_NODES, DRY_PREFIXES = (9,), (20,)
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 2e-5}
PROMPTS = ["def quicksort(items):\n", "class Stack:\n    def __init__(self):\n", "import json\n\ndef load(path):\n"]


def layers(dry: bool) -> list[Layer]:
    """What the kernel is checked on: every feature, head dimension and dtype, short and long."""
    cases: list[dict[str, Any]] = [
        dict(nodes=65, prefix=2048),
        dict(nodes=512, prefix=2048, dtype=torch.float16),
        dict(nodes=512, prefix=32_768),
        dict(nodes=1, prefix=0),
        dict(nodes=1024, prefix=333, heads=8, key_value_heads=8, head_dim=64),
        dict(nodes=200, prefix=1000, heads=40, key_value_heads=8, padding=77),
        dict(nodes=130, prefix=4000, heads=16, key_value_heads=8, head_dim=256, softcap=50.0, window=1024),
        dict(nodes=511, prefix=1500, heads=64, key_value_heads=8, head_dim=64, sinks=True, window=128),
        dict(nodes=33, prefix=700, head_dim=80, dtype=torch.float16, padding=700),
        dict(nodes=257, prefix=129, head_dim=96, window=5),
    ]
    small: dict[str, Any] = dict(device="cpu", heads=4, key_value_heads=2, head_dim=16)
    limits = dict(nodes=12, prefix=40, window=9, padding=7)
    if dry:
        shortened = [
            {name: min(limits[name], value) for name, value in case.items() if name in limits} for case in cases
        ]
        cases = [case | small | short for case, short in zip(cases, shortened, strict=True)]
    return [Layer(**case) for case in cases]


def error_of(output: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative where the expected number is large."""
    return float(((output.double() - expected).abs() / (1 + expected.abs())).max())


def check_kernel(dry: bool) -> list[dict[str, Any]]:
    """Largest differences from float64, plain, compiled and replayed from a CUDA graph whose inputs have changed."""
    found = []
    for index, layer in enumerate(layers(dry)):
        expected, run = layer.reference(), layer.kernel()
        ways = {"": run}
        if index < 2:
            ways[", compiled"] = torch.compile(run, fullgraph=True, backend="aot_eager" if dry else "inductor")
        for way, call in ways.items():
            error = error_of(call(), expected)
            found.append(dict(case=layer.name + way, error=error, right=error < TOLERANCE[layer.dtype]))
    found.append(check_graph(dry))
    return found


def delta_layers(dry: bool) -> list[DeltaLayer]:
    if dry:
        small: dict[str, Any] = dict(key_heads=1, heads=2, head_dim=16, device="cpu")
        return [DeltaLayer(40, **small), DeltaLayer(9, **small, dtype=torch.float32), DeltaLayer(1, **small)]
    wide = DeltaLayer(300, key_heads=4, heads=12, head_dim=256, dtype=torch.float32)
    return [DeltaLayer(512), wide, DeltaLayer(1)]


def check_delta(dry: bool) -> list[dict[str, Any]]:
    """Largest differences of the gated delta rule's kernel from float64."""
    found = []
    for layer in delta_layers(dry):
        error = error_of(layer.kernel(), layer.reference())
        found.append(dict(case=layer.name, error=error, right=error < TOLERANCE[layer.dtype]))
    return found


def check_between(dry: bool) -> list[dict[str, Any]]:
    """Largest differences of what is written in place between the forwards: log-probabilities, and rows of a path."""
    device, vocabulary = ("cpu", 999) if dry else ("cuda", 151_936)
    logits = 4 * torch.randn(15, vocabulary, device=device)
    exact = logits.double().log_softmax(-1)
    log_probs, ids = top_marginals(logits, 64, overwrite=True)
    found = [dict(case="log-probabilities in the place of logits", error=error_of(log_probs, exact.gather(-1, ids)))]
    rows = [torch.randn(2, 1, 4, 48, 64, device=device).bfloat16() for _ in range(3)]
    for path in ([0, 12, 13, 20], [0, 2, 3, 9]):
        cache, kept = DDTreeCache(), [*range(25), *(25 + node for node in path)]
        for part in (slice(25), slice(25, 48)):
            cache.begin()
            for layer, (keys, values) in enumerate(rows):
                cache.update(keys[:, :, part], values[:, :, part], layer)
            if part == slice(25):
                cache.prune(torch.arange(25))
        cache.prune(torch.tensor(path))
        pairs = zip(cache.layers, rows, strict=True)
        error = max(error_of(torch.stack([layer.keys, layer.values]), whole[:, :, :, kept]) for layer, whole in pairs)
        found.append(dict(case=f"rows of the path {path}", error=error))
    return [dict(case, right=case["error"] < TOLERANCE[torch.float32]) for case in found]


def time_delta(dry: bool) -> list[dict[str, Any]]:
    """Milliseconds of one layer's gated delta rule, of Qwen3-Next's shape, by the kernel and in PyTorch."""
    layer = delta_layers(dry)[0]
    right = error_of(layer.kernel(), layer.in_pytorch().double()) < 2 * TOLERANCE[layer.dtype]
    times = {name: milliseconds(getattr(layer, name), dry) for name in ("kernel", "in_pytorch")}
    return [dict(case=layer.name, kernel_right=right, **times)]


def check_graph(dry: bool) -> dict[str, Any]:
    """One graph of 64 nodes and up to 2,048 slots serves a shorter prefix: only the length's tensor is written."""
    sizes = dict(nodes=9, prefix=40, heads=4, key_value_heads=2, head_dim=16, device="cpu") if dry else {}
    layer = Layer(**{"nodes": 64, "prefix": 2048, **sizes})  # type: ignore[arg-type]
    prefix, start = layer.lengths()
    tables = layer.tables
    run = lambda: torch.ops.ddtree_attention.tree_attention(  # noqa: E731
        layer.query, layer.key, layer.value, *tables, prefix, start, None, layer.scale, None, None, None
    )
    output, replay = captured(run, dry)
    shorter = layer.prefix // 2
    prefix.fill_(shorter)
    layer.key[:, :, shorter : shorter + layer.nodes] = layer.key[:, :, layer.prefix :].clone()
    layer.value[:, :, shorter : shorter + layer.nodes] = layer.value[:, :, layer.prefix :].clone()
    layer.key[:, :, shorter + layer.nodes :] = layer.value[:, :, shorter + layer.nodes :] = float("nan")
    output = replay() if dry else (replay(), output)[1]
    slots = shorter + layer.nodes
    layer.key, layer.value, layer.prefix = layer.key[:, :, :slots], layer.value[:, :, :slots], shorter
    error = error_of(output, layer.reference())
    return dict(case="a CUDA graph replayed at half the prefix", error=error, right=error < TOLERANCE[layer.dtype])


def captured(run: Callable[[], torch.Tensor], dry: bool) -> tuple[torch.Tensor, Callable[[], Any]]:
    """The output of a graph of `run` and what replays it; in a dry run `run` itself."""
    output = run()
    if dry:
        return output, run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    return output, graph.replay


def milliseconds(run: Callable[[], Any], dry: bool) -> float:
    """Median time of a call, the cache of the card emptied before each."""
    if dry:
        start = time.perf_counter()
        run()
        return 1000 * (time.perf_counter() - start)
    return float(triton.testing.do_bench(run, warmup=10, rep=60, return_mode="median"))


def rates(dry: bool) -> tuple[float, float]:
    """Bytes a second of a copy and operations a second of a matrix product, as this device does them."""
    size, device = (256, "cpu") if dry else (8192, "cuda")
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    source = torch.empty(size * size * 8, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / milliseconds(lambda: target.copy_(source), dry) * 1000
    return copied, 2 * size**3 / milliseconds(lambda: a @ b, dry) * 1000


def time_kernel(dry: bool, deadline: float) -> list[dict[str, Any]]:
    """Milliseconds of one layer of Qwen3-8B's shape by each way, and of the floor."""
    bandwidth, operations = rates(dry)
    rows: list[dict[str, Any]] = []
    for prefix in DRY_PREFIXES if dry else PREFIXES:
        for nodes in DRY_NODES if dry else NODES:
            small = dict(heads=4, key_value_heads=2, head_dim=16, device="cpu") if dry else {}
            layer = Layer(nodes, prefix, **small)  # type: ignore[arg-type]
            moved, done = layer.work()
            row: dict[str, Any] = dict(nodes=nodes, prefix=prefix, bandwidth=bandwidth, operations=operations)
            row["floor"] = 1000 * max(moved / bandwidth, done / operations)
            expected = None
            for name in ("kernel", "library", "packed", "flex"):
                if name == "flex" and time.monotonic() > deadline:
                    row[name] = None
                    continue
                run = getattr(layer, name)()
                output = run()
                expected = output if expected is None else expected
                # A time is worth something only if the result is the same.
                row[name + "_right"] = error_of(output, expected.double()) < 2 * TOLERANCE[layer.dtype]
                row[name] = milliseconds(run, dry)
            rows.append(row)
    return rows


def timed(model: Any, ids: torch.Tensor, **kwargs: Any) -> tuple[Any, float]:
    """A generate and its seconds, the device's work included."""
    synchronize = torch.cuda.synchronize if ids.device.type == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **kwargs)
    synchronize()
    return output, time.perf_counter() - start


def first_difference(model: Any, plain: torch.Tensor, other: torch.Tensor) -> float | None:
    """`None` where both are equal, else how far the two best tokens were apart at the first difference."""
    if torch.equal(plain, other):
        return None
    length = min(plain.shape[1], other.shape[1])
    first = int((plain[0, :length] != other[0, :length]).nonzero()[0])
    with torch.no_grad():
        best = model(plain[:, :first]).logits[0, -1].float().topk(2).values
    return float(best[0] - best[1])


def time_rounds(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Texts of the pair by each route: tokens a second, stages of a round, and whether the text is the target's."""
    dry = options.dry_run
    device, dtype = "cpu" if dry else "cuda", getattr(torch, options.dtype)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(device)
    drafter = DFlashModel.from_pretrained(options.drafter, dtype=torch.bfloat16 if dtype == torch.float16 else dtype)
    drafter = drafter.to(device)
    settings = dict(max_new_tokens=4 if dry else options.max_new_tokens, do_sample=False)
    rows = []
    for prompt in PROMPTS[: 1 if dry else None]:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(device)
        for _ in range(1 if dry else 2):
            plain, plain_seconds = timed(model, ids, **settings)
        for budget in (7,) if dry else options.budgets:
            for route in ("torch", "kernel" if dtype != torch.float32 else "auto"):
                config = DDTreeConfig(budget=budget, attention_route=route, return_dict_in_generate=True, **settings)
                for _ in range(1 if dry else 2):
                    output, seconds = timed(model, ids, assistant_model=drafter, generation_config=config)
                stats = output.speculation
                gap = first_difference(model, plain, output.sequences)
                rows.append(
                    dict(
                        prompt=prompt.splitlines()[0], budget=budget, route=route, routes=stats.attention_routes,
                        times_plain=plain_seconds / seconds, acceptance_length=stats.mean_acceptance_length,
                        stages_ms={stage: 1000 * s / max(stats.rounds, 1) for stage, s in stats.seconds.items()},
                        identical=gap is None, gap=gap, right=gap is None or dtype != torch.float32 or gap < 1e-4,
                    )
                )  # fmt: skip
    return rows


def show(report: dict[str, Any]) -> None:
    print(f"{report['device']}, torch {report['torch']}, triton {report['triton']}\n")
    print("The kernels and what is written in place, against float64")
    for case in report["correctness"]:
        print(f"  {'right' if case['right'] else 'WRONG'}  {case['error']:.1e}  {case['case']}")
    print("\nOne layer, 32/8 heads of 128, bf16: milliseconds (times the kernel)")
    print(f"  {'nodes':>5} {'prefix':>6} {'floor':>8} {'kernel':>8} {'SDPA, 4D mask':>16} {'packed':>16} {'flex':>16}")
    for row in report["times"]:
        others = [
            "not run: time is up" if row[name] is None else f"{row[name]:.3f} ({row[name] / row['kernel']:.1f}x)"
            for name in ("library", "packed", "flex")
        ]
        size = f"  {row['nodes']:>5} {row['prefix']:>6} {row['floor']:>8.3f} {row['kernel']:>8.3f}"
        print(size, *(f"{other:>16}" for other in others))
    for row in report["delta"]:
        print(f"\nOne layer, {row['case']}: kernel {row['kernel']:.3f} ms, in PyTorch {row['in_pytorch']:.3f} ms")
    print("\nWhole texts; milliseconds a round")
    for row in report["rounds"]:
        stages = ", ".join(f"{stage} {ms:.2f}" for stage, ms in row["stages_ms"].items())
        same = "identical" if row["identical"] else f"differs where the gap is {row['gap']:.1e}"
        print(
            f"  {row['prompt']!r}, budget {row['budget']}, {row['route']}: {row['times_plain']:.2f}x plain, "
            f"{row['acceptance_length']:.2f} tokens a round, {same}; {stages}; {row['routes']}"
        )
    print(f"\n{'All right' if report['right'] else 'SOMETHING IS WRONG'}, {report['seconds']:.0f} s")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shipped = files("hf_ddtree") / "demo_pair"
    parser.add_argument("--model", default=str(shipped / "target"))
    parser.add_argument("--drafter", default=str(shipped / "drafter"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--budgets", type=int, nargs="+", default=[63, 255, 511])
    parser.add_argument("--json", type=Path, help="where to write the report")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, under TRITON_INTERPRET=1")
    options = parser.parse_args(arguments)
    if options.dry_run and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("--dry-run needs TRITON_INTERPRET=1 in the environment")
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("no GPU is available: --dry-run runs the script's logic on the CPU")
    start = time.monotonic()
    report: dict[str, Any] = dict(
        device="CPU, a dry run" if options.dry_run else torch.cuda.get_device_name(),
        torch=torch.__version__, triton=triton.__version__, pair=[options.model, options.drafter], dtype=options.dtype,
    )  # fmt: skip
    checks = (check_kernel, check_delta, check_between)
    report["correctness"] = [case for check in checks for case in check(options.dry_run)]
    report["rounds"] = time_rounds(options)
    report["times"] = time_kernel(options.dry_run, deadline=start + 210)
    report["delta"] = time_delta(options.dry_run)
    report["seconds"] = time.monotonic() - start
    entries = [entry for part in ("correctness", "rounds", "times", "delta") for entry in report[part]]
    report["right"] = all(mark for entry in entries for name, mark in entry.items() if "right" in name)
    show(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return int(not report["right"])


if __name__ == "__main__":
    sys.exit(main())
