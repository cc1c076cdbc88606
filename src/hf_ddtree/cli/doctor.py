"""`hf-ddtree doctor`: whether a target and a drafter work together, and what they take."""

from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoTokenizer

from hf_ddtree import DDTreeConfig
from hf_ddtree.cli.console import FAILED as EXIT_FAILED
from hf_ddtree.cli.console import quiet_transformers, short_errors, stdout
from hf_ddtree.cli.diagnosis import (
    DOUBTFUL,
    FAILED,
    OK,
    TRIAL_TOKENS,
    Finding,
    compare,
    describe,
    load_drafter,
    memory,
    read_layout,
    run_trial,
)
from hf_ddtree.cli.options import Device, Dtype
from hf_ddtree.cli.pair import Pair, load_target
from hf_ddtree.cli.tested import rows_of
from hf_ddtree.configuration import TreeSettings

PROMPT = "Write a Python function that returns the n-th Fibonacci number."
_STYLES = {OK: "green", DOUBTFUL: "yellow", FAILED: "bold red"}


def doctor(
    target: Annotated[str, typer.Argument(help="The target: a folder or Hub repository.", show_default=False)],
    drafter: Annotated[str, typer.Argument(help="Its drafter: a folder or Hub repository.", show_default=False)],
    prompt: Annotated[str, typer.Option(help="What the trial continues or answers.")] = PROMPT,
    budget: Annotated[int | None, typer.Option(min=1, help="Nodes of a draft tree; default: the library's.")] = None,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Check a pair: what was detected, what must agree, the memory it takes, and a short trial.

    Ends with exit code 1 if a check fails.
    """
    with short_errors():
        quiet_transformers()
        if _examine(stdout(), target, drafter, prompt, budget, dtype, device):
            return
    raise typer.Exit(EXIT_FAILED)


def _examine(
    console: Console, target: str, drafter: str, prompt: str, budget: int | None, dtype: str | None, device: str | None
) -> bool:
    """Prints the report as it comes; whether nothing failed."""
    raw, layout = read_layout(drafter)
    findings = [layout]
    if layout.status == FAILED:
        return _checks(console, findings)
    model = load_target(target, dtype=dtype, device=device)
    loaded, weights = load_drafter(drafter, model)
    findings.append(weights)
    if loaded is None:
        return _checks(console, findings)
    _table(console, "Drafter", describe(loaded, raw).items())
    findings += compare(model, loaded)
    if not _checks(console, findings):
        return False
    _tested(console, rows_of(model))
    pair = Pair(model, loaded, AutoTokenizer.from_pretrained(target))
    trial = run_trial(pair, prompt, budget)
    rows = TreeSettings.read(DDTreeConfig(budget=budget)).largest_on(model.device.type) + 1
    sizes = memory(pair, rows, trial.output)
    _table(console, "Memory (estimated)", ((what, _size(size)) for what, size in sizes.items()))
    console.print(Text(f"\nTrial, {TRIAL_TOKENS} tokens", "bold"))
    console.print(Text(trial.text, "dim"))
    sound = _checks(console, trial.findings, title="")
    if sound:
        console.print(Text("\nEvery check passed.", _STYLES[OK]))
    return sound


def _checks(console: Console, findings: list[Finding], title: str = "Checks") -> bool:
    table = _grid()
    for column in ("", "drafter", "target", ""):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row(finding.what, finding.drafter, finding.target, Text(finding.status, _STYLES[finding.status]))
    if title:
        console.print(Text(f"\n{title}", "bold"))
    console.print(table)
    for finding in findings:
        if finding.advice:
            style = _STYLES[finding.status]
            console.print(Text.assemble((f"\n{finding.what}: ", style), finding.advice), soft_wrap=True)
    failed = sum(finding.status == FAILED for finding in findings)
    if failed:
        console.print(Text(f"\n{failed} check{'s' * (failed != 1)} failed.", _STYLES[FAILED]))
    return not failed


def _tested(console: Console, rows: list[dict[str, Any]]) -> None:
    """The rows of the target's class in the matrix of tested models."""
    if not rows:
        return
    table = _grid()
    for column in ("family", "dtype", "route", "error", "text"):
        table.add_column(column, overflow="fold")
    for row in rows:
        error = f"≤ {row['max_error']:.0e}"
        table.add_row(row["title"], row["dtype"], ", ".join(row["routes"]), error, row["generate"] or "–")
    console.print(Text("\nTiny models of this class, as this release was tested", "bold"))
    console.print(Text("error: of a node's logits, in their standard deviations", "dim"))
    console.print(table)


def _table(console: Console, title: str, rows: Iterable[tuple[str, str]]) -> None:
    table = _grid(show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(Text(f"\n{title}", "bold"))
    console.print(table)


def _grid(show_header: bool = True) -> Table:
    style = box.SIMPLE_HEAD if show_header else None
    return Table(box=style, show_header=show_header, header_style="bold", show_edge=False, pad_edge=False)


def _size(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count / 2**10:.1f} KiB"
