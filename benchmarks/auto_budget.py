"""`budget="auto"` beside every fixed budget and plain `generate`, in turn on the same prompts.

    python benchmarks/auto_budget.py --json demo.json                          # the shipped pair
    python benchmarks/auto_budget.py --random-drafter --json random.json       # a drafter that knows nothing
    python benchmarks/auto_budget.py --target DIR --drafter DIR --prompts FILE --category code --json code.json
    python benchmarks/auto_budget.py --simulate h200-8b --json simulated.json  # recorded trees, computed costs

Greedy, so all methods emit the same tokens and their times are compared prompt by prompt, each in an order of its own,
as a method may leave the machine otherwise than it found it. The interval is a bootstrap over prompts, and in each of
its draws auto is held against the budget that is best in that draw. What auto learns is kept from prompt to prompt, as
in a program that serves many; `--cold` forgets it before each. With `--by-token` all methods work at a prompt at once,
a token each in turn and with models of their own, which a busy machine disturbs least (`by_token.py`; it needs `pip
install greenlet`). The exit code is 0 where both lower bounds are at least 0.97.
"""

import argparse
import copy
import json
import random
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import bootstrap
from transformers import GenerationConfig

from budget_replay import CURVES, Replay, fresh_size, recorded
from hf_ddtree import DDTreeConfig, DFlashModel
from hf_ddtree.cli.pair import Pair, load_pair, read_prompts, shipped_prompts

PLAIN, AUTO = "plain", "auto"
BUDGETS = "0,7,15,31,63,127,255,511"
#: What the lower bounds are held to.
HELD = 0.97
RESAMPLES, CONFIDENCE = 4999, 0.95
WARM_UP_TOKENS = 24


def generate(
    pair: Pair, drafter: Any, ids: torch.Tensor, method: Any, new: int, streamer: Any = None, **settings: Any
) -> tuple[Any, float]:
    """The output of one timed generate, and its seconds."""
    arguments: dict[str, Any] = dict(attention_mask=torch.ones_like(ids), streamer=streamer)
    fields = dict(max_new_tokens=new, do_sample=False, return_dict_in_generate=True, **settings)
    if method == PLAIN:
        arguments["generation_config"] = GenerationConfig(**fields)
    else:
        arguments |= dict(assistant_model=drafter, generation_config=DDTreeConfig(budget=method, **fields))
    start = time.perf_counter()
    output = pair.target.generate(ids, **arguments)
    return output, time.perf_counter() - start


def measure(pair: Pair, prompts: list[torch.Tensor], methods: list[Any], options: argparse.Namespace) -> list[Any]:
    """One row a prompt: tokens, seconds of each method, the sizes that auto chose."""
    rows = []
    for method in methods:
        generate(pair, copy.deepcopy(pair.drafter), prompts[0], method, WARM_UP_TOKENS)
    for number, ids in enumerate(prompts * options.repeats):
        seconds, outputs = {}, {}
        for method in random.Random(number).sample(methods, len(methods)):
            drafter = copy.deepcopy(pair.drafter) if options.cold and method == AUTO else pair.drafter
            name = str(method)
            outputs[name], seconds[name] = generate(pair, drafter, ids, method, options.max_new_tokens)
        rows.append(prompt_row(ids, outputs, seconds))
        shown = " ".join(f"{method} {value:.1f}" for method, value in seconds.items())
        print(f"prompt {number + 1}: {rows[-1]['tokens']} tokens; seconds {shown}", flush=True)
    return rows


def prompt_row(ids: torch.Tensor, outputs: dict[str, Any], seconds: dict[str, float]) -> dict[str, Any]:
    """What all methods made of the prompt `ids`."""
    texts = {name: output.sequences[0].tolist() for name, output in outputs.items()}
    return {
        "tokens": len(texts[PLAIN]) - ids.shape[1],
        "seconds": seconds,
        "sizes": outputs[AUTO].speculation.tree_sizes,
        "identical": all(text == texts[PLAIN] for text in texts.values()),
    }


def measure_by_token(
    pair: Pair, prompts: list[torch.Tensor], methods: list[Any], options: argparse.Namespace
) -> list[Any]:
    """As [`measure`], with all methods at work on a prompt at the same time."""
    from by_token import in_turn

    rows: list[Any] = []
    pairs = {str(method): copy.deepcopy(pair) for method in methods}
    for number, ids in enumerate(prompts[:1] + prompts * options.repeats):
        if options.cold:
            pairs[AUTO].drafter = copy.deepcopy(pair.drafter)
        new = options.max_new_tokens if number else WARM_UP_TOKENS

        def job(method: Any, ids: torch.Tensor = ids, new: int = new) -> Any:
            own = pairs[str(method)]
            return lambda streamer: generate(own, own.drafter, ids, method, new, streamer)[0]

        runners = in_turn({str(method): job(method) for method in methods})
        if number == 0:
            continue
        seconds = {name: runner.seconds for name, runner in runners.items()}
        rows.append(prompt_row(ids, {name: runner.output for name, runner in runners.items()}, seconds))
        shown = " ".join(f"{name} {value:.2f}" for name, value in seconds.items())
        print(f"prompt {number}: {rows[-1]['tokens']} tokens; seconds {shown}", flush=True)
    return rows


def simulate(pair: Pair, prompts: list[torch.Tensor], methods: list[Any], options: argparse.Namespace) -> list[Any]:
    """The same rows from recorded trees and computed costs; plain `generate` is taken to cost what budget 0 does."""
    rows, curve = [], CURVES[options.simulate]
    budget = max(method for method in methods if isinstance(method, int))
    texts = []
    for number, ids in enumerate(prompts):
        output, seconds = generate(pair, pair.drafter, ids, budget, options.record_tokens, output_trees=True)
        texts.append((recorded(output, ids.shape[1]), ids.shape[1]))
        print(f"prompt {number + 1}: {output.speculation.rounds} rounds recorded in {seconds:.0f} s", flush=True)
    depth, tokens = pair.drafter.config.block_size, options.max_new_tokens
    size = fresh_size(depth)
    for number, (rounds, length) in enumerate(texts * options.repeats):
        if options.cold:
            size = fresh_size(depth)
        context = length + options.context
        seconds = {
            str(method): Replay(rounds, context, curve, number).fixed(0 if method == PLAIN else method, tokens)
            for method in methods
            if method != AUTO
        }
        replay = Replay(rounds, context, curve, number)
        seconds[AUTO] = replay.auto(size, tokens)
        rows.append({"tokens": tokens, "seconds": seconds, "sizes": replay.sizes, "identical": True})
    return rows


def estimate(seconds: dict[str, list[float]], against: list[str]) -> dict[str, float]:
    """Speed of auto over the best of `against`, with its interval; paired by prompt."""

    def ratio(*samples: Any, axis: int = -1) -> Any:
        auto, *others = (np.sum(sample, axis=axis) for sample in samples)
        return np.min(others, axis=0) / auto

    samples = [np.asarray(seconds[name]) for name in (AUTO, *against)]
    found = bootstrap(
        samples,
        ratio,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    low, high = found.confidence_interval
    return {"value": float(ratio(*samples)), "low": float(low), "high": float(high)}


def report(rows: list[Any], methods: list[Any], options: argparse.Namespace) -> dict[str, Any]:
    seconds = {str(method): [row["seconds"][str(method)] for row in rows] for method in methods}
    tokens = sum(row["tokens"] for row in rows)
    budgets = [str(method) for method in methods if isinstance(method, int)]
    best = min(budgets, key=lambda name: sum(seconds[name]))
    return {
        "label": options.label or options.simulate or options.category or "",
        "texts": len(rows),
        "budgets": budgets,
        "command": shlex.join(["python", "benchmarks/auto_budget.py", *sys.argv[1:]]),
        "computed_costs": options.simulate,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "tokens": tokens,
        "identical": sum(row["identical"] for row in rows),
        "tokens_per_second": {name: tokens / sum(values) for name, values in seconds.items()},
        "best_budget": int(best),
        "auto_over_best": estimate(seconds, budgets),
        "auto_over_plain": estimate(seconds, [PLAIN]),
        "first_over_best": seconds[best][0] / seconds[AUTO][0],
        "rows": rows,
    }


def encode(pair: Pair, text: str) -> torch.Tensor:
    return pair.inputs(text)["input_ids"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or repository; default: the shipped pair")
    parser.add_argument("--drafter")
    parser.add_argument("--prompts", type=Path, help="JSON lines with a `prompt` each; default: the shipped ones")
    parser.add_argument("--category", help="only prompts of this `category`")
    parser.add_argument("--random-drafter", action="store_true", help="the drafter's shape with random weights")
    parser.add_argument("--simulate", choices=sorted(CURVES))
    parser.add_argument("--context", type=int, default=0, help="tokens before each prompt, in a simulation")
    parser.add_argument("--record-tokens", type=int, default=256, help="tokens to record of each prompt for it")
    parser.add_argument("--budgets", default=BUDGETS)
    parser.add_argument("--limit", type=int, default=8, help="prompts, spread over those there are")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--by-token", action="store_true", help="all methods in turn, a token each")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--label", help="what the report calls the run")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    pair = load_pair(options.target, options.drafter, dtype=None, device=None)
    if options.random_drafter:
        torch.manual_seed(0)
        pair.drafter = DFlashModel(pair.drafter.config).to(pair.target.device, pair.target.dtype).eval()
    listed = read_prompts(options.prompts) if options.prompts else shipped_prompts()
    listed = [prompt for prompt in listed if options.category in (None, prompt.category)]
    chosen = listed[:: max(1, len(listed) // options.limit)][: options.limit]
    prompts = [encode(pair, prompt.text) for prompt in chosen]
    methods = [PLAIN, *map(int, options.budgets.split(",")), AUTO]
    way = simulate if options.simulate else measure_by_token if options.by_token else measure
    rows = way(pair, prompts, methods, options)
    summary = report(rows, methods, options)
    if options.json:
        options.json.write_text(json.dumps(summary, indent=1) + "\n")
    speeds = ", ".join(f"{name} {value:.1f}" for name, value in summary["tokens_per_second"].items())
    print(f"{summary['tokens']} tokens a method; tokens/s: {speeds}")
    for name, what in (("auto_over_best", f"best budget ({summary['best_budget']})"), ("auto_over_plain", PLAIN)):
        found = summary[name]
        print(f"auto over {what}: {found['value']:.3f} ({found['low']:.3f} to {found['high']:.3f})")
    print(f"the first text alone, over the best budget: {summary['first_over_best']:.3f}")
    return int(min(summary["auto_over_best"]["low"], summary["auto_over_plain"]["low"]) < HELD)


if __name__ == "__main__":
    sys.exit(main())
