"""A measurement as Markdown: what was measured, a table a data set, and what a round spends its time on."""

from collections.abc import Iterable, Sequence
from typing import Any

from hf_ddtree.cli.benchmark.machine import what_peak_is
from hf_ddtree.cli.benchmark.plan import nodes_of
from hf_ddtree.cli.methods import NAMES, TREE

Summary = dict[str, Any]
Group = tuple[str, float]


def markdown(summary: Summary, heading: str = "##") -> str:
    """The whole report.

    Args:
        summary (`dict`): of `hf-ddtree bench`.
        heading (`str`): of its first heading.
    """
    parts = [f"{heading} {title(summary)}", facts(summary)]
    for group, cells in groups(summary["cells"]):
        parts += [f"{heading}# {group_title(group)}, {prompts(cells)}", _figures(cells, summary)]
    ours = [cell for cell in summary["cells"] if cell.get("stage_ms")]
    if ours:
        parts += [f"{heading}# Milliseconds a round", _stages(ours)]
    parts += [f"{method} could not run: {reason}" for method, reason in summary["failed"].items()]
    parts += _differences(summary["differences"])
    return "\n\n".join(parts)


def title(summary: Summary) -> str:
    target, drafter = summary["names"]
    return f"{target} with {drafter}" if target != drafter else f"the {target} pair"


def facts(summary: Summary) -> str:
    """The lines under the title: enough to measure it again."""
    machine, versions, settings = (summary[part] for part in ("machine", "versions", "configuration"))
    peak = [cell["peak_bytes"] for cell in summary["cells"] if cell["peak_bytes"]]
    where = f"{machine['gpu']}, on a host with {machine['cpu']}" if "gpu" in machine else machine["cpu"]
    load = "" if summary["load"] is None else f" under a load of {summary['load']}"
    lines = [
        f"`{summary['command']}`",
        f"{where}, {machine['cores']} cores, {_count(machine['threads'], 'thread')}, {machine['memory_gib']} GiB; "
        f"{settings['dtype']}, {settings['attention']} attention; {_count(settings['repeats'], 'repeat')}, "
        f"{settings['max_new_tokens']} new tokens at most; started {summary['started']}{load}.",
        "; ".join(f"{name} {version}" for name, version in versions.items() if version)
        + (f"; commit {summary['commit']}." if summary["commit"] else "."),
    ]
    if peak:
        lines.append(f"Peak memory {max(peak) / 2**30:.2f} GiB ({what_peak_is(machine['device'])}).")
    return "\n".join(f"- {line}" for line in lines)


def groups(cells: Iterable[Summary]) -> list[tuple[Group, list[Summary]]]:
    """The cells of each data set and temperature, in order of appearance; methods in the order of the tables."""
    found: dict[Group, list[Summary]] = {}
    for cell in cells:
        found.setdefault((cell["dataset"], cell["temperature"]), []).append(cell)
    order = list(NAMES)
    for mine in found.values():
        mine.sort(key=lambda cell: (order.index(cell["method"]), nodes_of(cell["budget"])))
    return list(found.items())


def group_title(group: Group) -> str:
    dataset, temperature = group
    return f"{dataset}, {'greedy' if temperature == 0 else f'temperature {temperature:g}'}"


def prompts(cells: Sequence[Summary]) -> str:
    return _count(max(cell["prompts"] for cell in cells), "prompt")


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"


def name(cell: Summary) -> str:
    return f"{NAMES[TREE]} ({cell['budget']})" if cell["method"] == TREE else NAMES[cell["method"]]


def _figures(cells: Sequence[Summary], summary: Summary) -> str:
    on_cuda = summary["machine"]["device"] == "cuda"
    head = ["", "tokens/s", "speedup", "with prefill", "acceptance length", "identical"]
    rows = []
    for cell in cells:
        same = "other draws" if cell["identical"] is None else f"{cell['identical']} of {cell['prompts']}"
        row = [
            name(cell),
            "-" if cell["tokens_per_second"] is None else f"{cell['tokens_per_second']:.1f}",
            *(estimate_text(cell[figure]) for figure in ("speedup", "speedup_whole", "acceptance_length")),
            same,
        ]
        rows.append([*row, f"{cell['peak_bytes'] / 2**30:.2f} GiB"] if on_cuda else row)
    return table([*head, "peak memory"] if on_cuda else head, rows)


def _stages(cells: Sequence[Summary]) -> str:
    stages = list(cells[0]["stage_ms"])
    rows = []
    for group, mine in groups(cells):
        for cell in mine:
            times = [cell["stage_ms"][stage] for stage in stages]
            figures = [f"{value:.2f}" for value in (*times, sum(times))]
            rows.append([group_title(group), name(cell), f"{cell['nodes_per_round']:.1f}", *figures])
    return table(["", "", "nodes", *stages, "round"], rows, left=2)


def _differences(places: Sequence[Summary]) -> list[str]:
    if not places:
        return []
    lines = ["Texts that are not plain decoding's, by the first token that differs:"]
    for place in places:
        gap = "" if place["gap"] is None else f", the two best logits {place['gap']:.1e} apart there"
        rounding = " (rounding)" if place["rounding"] else ""
        lines.append(
            f"- {name(place)}, {group_title((place['dataset'], place['temperature']))}, prompt {place['prompt']}, "
            f"repeat {place['repeat']}: token {place['token']}{gap}{rounding}"
        )
    return ["\n".join(lines)]


def estimate_text(estimate: Summary | None, digits: int = 2) -> str:
    """A value and its interval, where there is one."""
    if estimate is None:
        return "-"
    # Plain decoding against itself, say.
    if estimate["low"] is None or estimate["low"] == estimate["high"]:
        return f"{estimate['value']:.{digits}f}"
    value, low, high = (f"{estimate[bound]:.{digits}f}" for bound in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table that reads in a terminal too; the first `left` columns are flush left."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        pairs = zip(cells, widths, strict=True)
        padded = [cell.ljust(w) if column < left else cell.rjust(w) for column, (cell, w) in enumerate(pairs)]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * (w + 2) if column < left else "-" * (w + 1) + ":" for column, w in enumerate(widths)]
    return "\n".join([line(head), f"|{'|'.join(rule)}|", *map(line, rows)])
