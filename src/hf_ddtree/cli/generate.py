"""`hf-ddtree generate`: one text from any target and its drafter."""

import sys
import time
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from hf_ddtree import DDTreeConfig, SpeculationStats, record
from hf_ddtree.cli.console import quiet_transformers, short_errors, stderr, stdout
from hf_ddtree.cli.options import Budget, Chat, Device, Dtype
from hf_ddtree.cli.pair import Pair
from hf_ddtree.cli.streaming import TextPrinter
from hf_ddtree.cli.table import stages_table


def generate(
    model: Annotated[str, typer.Option(help="The target: a folder or Hub repository.")],
    drafter: Annotated[str, typer.Option(help="Its DFlash drafter: a folder or Hub repository.")],
    prompt: Annotated[str, typer.Option(help="The prompt; - reads it from standard input.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 256,
    budget: Budget = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Sample at this temperature; 0 is greedy.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from the k most probable tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Sample from this share of probability.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    dtype: Dtype = None,
    device: Device = None,
    chat: Chat = None,
    stats: Annotated[bool, typer.Option("--stats/--no-stats", help="Print statistics to standard error.")] = True,
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file of the target to load.")] = None,
) -> None:
    """Generate a text with draft trees: exactly the target's own output, streamed to standard output.

    Greedy unless --temperature, --top-k or --top-p is given.
    """
    with short_errors():
        quiet_transformers(warnings=True)
        text = sys.stdin.read() if prompt == "-" else prompt
        pair = Pair.load(model, drafter, dtype=dtype, device=device, gguf_file=gguf_file)
        inputs = pair.inputs(text, chat)
        config = DDTreeConfig(budget=budget, max_new_tokens=max_new_tokens, **_sampling(temperature, top_k, top_p))
        if seed is not None:
            torch.manual_seed(seed)
        printer = TextPrinter(stdout(), pair.tokenizer)
        with printer.watching(pair.target), record() as recorded:
            start = time.perf_counter()
            pair.target.generate(**inputs, assistant_model=pair.drafter, generation_config=config, streamer=printer)
            seconds = time.perf_counter() - start
        if stats:
            _print_stats(stderr(), recorded, sum(printer.emitted), seconds)


def _sampling(temperature: float | None, top_k: int | None, top_p: float | None) -> dict[str, Any]:
    """What is not given comes from the model's own generation config."""
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    given = {name: value for name, value in given.items() if value is not None}
    if not given or temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, **given}


def _print_stats(console: Console, stats: SpeculationStats, tokens: int, seconds: float) -> None:
    """What `--stats` prints after the text."""
    console.print(
        f"\n{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s; {stats.rounds} rounds of "
        f"{stats.mean_acceptance_length:.2f} tokens on average, {stats.nodes_verified} nodes verified"
    )
    if set(stats.routes) - {"attention"}:
        layers = ", ".join(f"{count} by {route}" for route, count in stats.routes.items())
        console.print(f"layers read trees: {layers}")
    if stats.rounds:
        other = max(seconds - stats.prefill_seconds - sum(stats.seconds.values()), 0.0)
        console.print(stages_table({**stats.seconds, "other": other}, stats.rounds))
