"""`hf-ddtree bench`: a pair's speed and acceptance against everything else `generate` offers."""

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.text import Text

from hf_ddtree.cli.benchmark import data as data_sets
from hf_ddtree.cli.benchmark.data import SHIPPED
from hf_ddtree.cli.benchmark.exactness import unexplained
from hf_ddtree.cli.benchmark.extra import needs
from hf_ddtree.cli.benchmark.header import header_of
from hf_ddtree.cli.benchmark.hub import HUB_SETS
from hf_ddtree.cli.benchmark.lists import budgets as budgets_of
from hf_ddtree.cli.benchmark.lists import numbers, words
from hf_ddtree.cli.benchmark.plan import Grid
from hf_ddtree.cli.benchmark.plan import methods as planned
from hf_ddtree.cli.benchmark.processes import Processes
from hf_ddtree.cli.benchmark.results import Results, read_lines
from hf_ddtree.cli.benchmark.run import Bench
from hf_ddtree.cli.benchmark.summary import summarise
from hf_ddtree.cli.console import FAILED, quiet_transformers, short_errors, stderr, stdout
from hf_ddtree.cli.methods import CHAIN, COMPILED, LOOKUP, NATIVE, TREE
from hf_ddtree.cli.options import Chat, Device, Dtype, Threads
from hf_ddtree.cli.pair import check_pair_options, load_pair
from hf_ddtree.cli.reporting.table import markdown

BUDGETS: dict[str, list[int | str]] = {"cpu": [7, 15, 31, 63], "accelerator": [15, 31, 63, 127, 255, 511, 1023]}


def bench(
    model: Annotated[str | None, typer.Option(help="The target, or the pair smollm2; default: the shipped.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Its drafter.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help=f"JSON lines of prompts, {SHIPPED}, or from the Hub: {', '.join(HUB_SETS)}. Repeatable."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where runs are kept; the summary goes beside it.")] = Path("bench.jsonl"),
    budgets: Annotated[str | None, typer.Option(help="Nodes of the trees, such as auto,7,15,31,63.")] = None,
    temperatures: Annotated[str, typer.Option(help="0 is greedy; 0,1 measures both.")] = "0",
    methods: Annotated[str, typer.Option(help="Compared with plain decoding.")] = ",".join(
        (LOOKUP, NATIVE, CHAIN, TREE)
    ),
    compiled: Annotated[bool, typer.Option("--compiled", help="Compare with compiled plain decoding too.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each data set, spread over it.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of a run at most.")] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each method on each prompt.")] = 3,
    contexts: Annotated[
        str | None, typer.Option(help="Also on prompts of these lengths, made of the data: 512,2048.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the sampling; prompt n begins with seed + n.")] = 0,
    threads: Threads = None,
    dtype: Dtype = None,
    device: Device = None,
    chat: Chat = None,
    thinking: Annotated[bool, typer.Option("--thinking", help="Let a chat template that asks turn it on.")] = False,
) -> None:
    """Measure a pair against plain decoding, prompt lookup, the native chain and its own chain.

    An interrupted measurement goes on when the same command is given again. Several processes share the prompts
    under `accelerate launch -m hf_ddtree bench ...`. Ends with code 1 if a chain or tree changes the text.
    """
    with short_errors():
        quiet_transformers()
        check_pair_options(model, drafter)
        if out.suffix == ".json" or not out.suffix or not out.parent.is_dir():
            raise ValueError(f"--out {out}: give a name like bench.jsonl in a folder that exists.")
        if data is None and model is not None:
            raise ValueError("Name the prompts for this pair with --data.")
        needs("scipy.stats")
        if threads is not None:
            torch.set_num_threads(threads)
        chosen = [*words(methods), *([COMPILED] if compiled else [])]
        planned(chosen, [])
        heats = numbers(temperatures, "--temperatures", float)
        nodes = budgets_of(budgets, "--budgets") if budgets else None
        lengths = numbers(contexts, "--contexts", int, lowest=1) if contexts else []
        sources = data_sets.read(data or [SHIPPED], limit)
        processes = Processes.join(device)
        pair = load_pair(model, drafter, dtype=dtype, device=processes.device)
        nodes = nodes or BUDGETS["cpu" if pair.target.device.type == "cpu" else "accelerator"]
        encoded = data_sets.encode(pair, sources, chat, thinking)
        encoded += data_sets.contexts(encoded, lengths)
        data_sets.check_lengths(pair, encoded, max_new_tokens)
        grid = Grid(
            planned(chosen, nodes),
            {part.name: len(part.prompts) for part in encoded},
            heats,
            repeats,
            frozenset(part.name for part in encoded if part.context),
        )
        header = header_of(pair, encoded, grid, max_new_tokens, seed, processes.count)
        results = Results(processes.file(out), header | {"names": [model or SHIPPED, drafter or model or SHIPPED]})
        _run(Bench(pair, encoded, grid, results, max_new_tokens, seed, processes.rank, processes.count))
        processes.wait()
        if processes.rank:
            return
        files = [processes.file(out, rank) for rank in range(processes.count)]
        summary = summarise([line for file in files for line in read_lines(file)[0]])
        path = out.with_suffix(".json")
        path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        stdout().print(markdown(summary), soft_wrap=True)
        stderr().print(f"Written to {path}; hf-ddtree report {path} --out FOLDER draws it.", soft_wrap=True)
        problems = unexplained(summary)
    for problem in problems:
        stderr().print(Text(problem, "bold red"), soft_wrap=True)
    if problems:
        raise typer.Exit(FAILED)


def _run(bench: Bench) -> None:
    """Warm-up, runs, and a look at what differs; an interruption says how to go on."""
    first = bench.rank == 0
    try:
        bench.warm_up()
        for method, reason in bench.results.failed().items() if first else ():
            stderr().print(Text(f"{method} cannot run here and is left out: {reason}", "yellow"), soft_wrap=True)
        bench.measure(shown=first)
        bench.look_at_differences()
    except KeyboardInterrupt:
        done, all_of_it = len(bench.results.finished()), len(bench.units())
        stderr().print(
            f"\n{done} of {all_of_it} runs are in {bench.results.path}: the same command goes on from there.",
            soft_wrap=True,
        )
        raise
