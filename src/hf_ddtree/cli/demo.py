"""`hf-ddtree demo`: the shipped pair in every mode, its text, one of its trees, and the table."""

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.text import Text

from hf_ddtree.cli.comparison import Tallies, as_json, differences, machine
from hf_ddtree.cli.console import FAILED, quiet_transformers, short_errors, stderr, stdout, with_progress
from hf_ddtree.cli.measure import MODES, Runner, Tally
from hf_ddtree.cli.options import Budget, Threads
from hf_ddtree.cli.pair import Pair, Prompt, check_pair_options, load_pair, read_prompts, shipped_prompts
from hf_ddtree.cli.streaming import TextPrinter, legend
from hf_ddtree.cli.table import modes_table, stages_table
from hf_ddtree.cli.tree_view import draw_tree, telling_round
from hf_ddtree.configuration import DDTreeConfig, TreeSettings

REPEATS = 2
WARM_UP_TOKENS = 16


def demo(
    prompt: Annotated[str | None, typer.Option(help="Text to continue, in place of a shipped prompt.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Measure over every shipped prompt, not one.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate from each prompt.")] = 128,
    budget: Budget = None,
    threads: Threads = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the measurements to this file.")] = None,
    model: Annotated[str | None, typer.Option(help="Another target: a folder or Hub repository.")] = None,
    drafter: Annotated[str | None, typer.Option(help="The drafter of that target.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help='JSON lines of {"file", "prompt"}, for the shipped ones.')
    ] = None,
) -> None:
    """Compare plain decoding, prompt lookup, the DFlash chain and the draft tree on a small pair that comes along.

    Greedy, in fp32 on a CPU. Ends with code 1 if any mode's output differs from plain decoding.
    """
    with short_errors():
        check_pair_options(model, drafter)
        if full and prompt is not None:
            raise ValueError(
                "--full measures over many prompts: drop --prompt, or name a file of them with --prompts."
            )
        if json_file is not None and not json_file.parent.is_dir():
            raise ValueError(f"--json {json_file}: the folder {json_file.parent} does not exist.")
        quiet_transformers()
        if threads is not None:
            torch.set_num_threads(threads)
        pair, texts = _load(model, drafter, prompt, prompts)
        runner = Runner(pair, max_new_tokens, budget)
        console = stdout()
        _show(console, runner, texts[0])
        texts = texts if full else texts[:1]
        tallies = _measure(runner, texts)
        used = TreeSettings.read(DDTreeConfig(budget=budget)).budget_on(pair.target.device.type)
        _print_tables(console, runner, tallies, used)
        if json_file is not None:
            json_file.write_text(json.dumps(as_json(tallies, used), indent=2) + "\n", encoding="utf-8")
        problems = differences(tallies, texts, runner)
    for problem in problems:
        stderr().print(Text(problem, "bold red"))
    if problems:
        raise typer.Exit(FAILED)


def _load(
    model: str | None, drafter: str | None, prompt: str | None, prompts: Path | None
) -> tuple[Pair, list[Prompt]]:
    pair = load_pair(model, drafter, dtype="float32", device="cpu")
    if prompt is not None:
        return pair, [Prompt(prompt)]
    return pair, read_prompts(prompts) if prompts else shipped_prompts()


def _show(console: Console, runner: Runner, prompt: Prompt) -> None:
    """Streams one text and draws one of its trees; warms the tree up on the way."""
    console.rule(f"draft tree, from {prompt.file}" if prompt.file != "prompt" else "draft tree", align="left")
    console.print(Text(prompt.text, "dim"), end="", soft_wrap=True)
    run = runner.run("tree", prompt.text, TextPrinter(console, runner.pair.tokenizer), output_trees=True)
    lengths, trees = run.acceptance_lengths, run.stats.trees
    console.print()
    if console.color_system is not None:
        console.print(legend())
    drafted = sum(lengths) - len(lengths)
    console.print(f"{len(run.tokens)} tokens in {len(lengths)} rounds; {drafted} of them were drafted and accepted.\n")
    if trees:
        number = telling_round(trees)
        end = len(run.tokens) - sum(lengths[number + 1 :])
        accepted, nodes = lengths[number] - 1, trees[number].tree.num_drafted
        title = f"the tree of round {number + 1}: {accepted} of {nodes} drafted tokens accepted"
        console.rule(title, align="left")
        console.print(draw_tree(trees[number], run.tokens[end - 1], runner.pair.decode))
        console.print()


def _measure(runner: Runner, prompts: list[Prompt]) -> Tallies:
    """Every mode on every prompt in turn, so that a change of the machine's pace meets all of them."""
    tallies = {mode: Tally(mode) for mode in MODES}
    for mode in MODES:
        runner.run(mode, prompts[0].text, max_new_tokens=min(WARM_UP_TOKENS, runner.max_new_tokens))
    for number, mode in with_progress([(number, mode) for number in range(len(prompts)) for mode in MODES * REPEATS]):
        tallies[mode].add(number, runner.run(mode, prompts[number].text))
    return tallies


def _print_tables(console: Console, runner: Runner, tallies: Tallies, budget: int | str) -> None:
    tree, prompts = tallies["tree"], len(tallies["tree"].runs)
    what = f"{prompts} prompts" if prompts > 1 else "one prompt"
    console.rule(f"{what}, {runner.max_new_tokens} new tokens, greedy", align="left")
    console.print(modes_table(tallies, budget), "")
    console.rule("where a round of the tree spends its time", align="left")
    console.print(stages_table(tree.stage_seconds, tree.rounds), "")
    console.print(Text(f"{machine(runner)}; best of {REPEATS} runs of each.", "dim"))
