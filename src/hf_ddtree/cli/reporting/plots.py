"""The plots of a measurement: speedup and acceptance against budget, what is accepted, where a round's time goes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hf_ddtree.cli.benchmark.extra import needs
from hf_ddtree.cli.benchmark.plan import nodes_of
from hf_ddtree.cli.methods import CHAIN, COMPILED, LOOKUP, NAMES, NATIVE, PLAIN, TREE
from hf_ddtree.cli.reporting.canvas import panels, save
from hf_ddtree.cli.reporting.table import Summary, group_title, groups, name, prompts, title
from hf_ddtree.configuration import AUTO

# Okabe and Ito's colours, which colour-blind readers can tell apart; line styles and markers differ too.
_LINES: dict[str, dict[str, Any]] = {
    TREE: {"color": "#0072B2", "linestyle": "-"},
    CHAIN: {"color": "#009E73", "linestyle": "--"},
    NATIVE: {"color": "#D55E00", "linestyle": "-."},
    LOOKUP: {"color": "#CC79A7", "linestyle": ":"},
    COMPILED: {"color": "#56B4E9", "linestyle": (0, (7, 2))},
    PLAIN: {"color": "#555555", "linestyle": (0, (1, 2))},
}
#: The tree of automatic size, which is a level as well.
_AUTO_LINE: dict[str, Any] = {"color": "#0072B2", "linestyle": (0, (4, 1, 1, 1, 1, 1))}
_STAGES = {
    "draft": "#0072B2",
    "build": "#F0E442",
    "verify": "#E69F00",
    "accept": "#009E73",
    "commit": "#CC79A7",
    "other": "#999999",
}
#: The chain, a middling tree, the largest tree.
_DISTRIBUTIONS = ("#009E73", "#56B4E9", "#0072B2")


class Panel(NamedTuple):
    """A plot of its own in a figure."""

    title: str
    cells: list[Summary]


def draw(summary: Summary, folder: Path, prefix: str = "") -> list[Path]:
    """Writes every plot that the measurement has figures for, as PNG and as SVG, and returns the files.

    Raises:
        ImportError: without `matplotlib`.
    """
    needs("matplotlib").use("Agg")
    sets = [
        Panel(f"{group_title(group)} ({prompts(cells)})", cells)
        for group, cells in groups(summary["cells"])
        if cells[0]["context"] is None
    ]
    trees = [panel for panel in sets if _trees(panel.cells)]
    ours = [panel for panel in sets if _ours(panel.cells)]
    contexts = _by_context(summary["cells"])
    plots = {
        "speedup": (trees, _speedup, "Speed of decoding against budget"),
        "acceptance-length": (trees, _acceptance, "Acceptance length against budget"),
        "accepted": (ours, _distribution, "Draft tokens accepted in a round"),
        "stages": (ours, _stages, "Where a round spends its time"),
        "context": (contexts, _contexts, "What a round costs after a long prompt"),
    }
    written = []
    for kind, (shown, paint, heading) in plots.items():
        if shown:
            figure = panels(shown, paint, f"{heading}\n{title(summary)}, {summary['machine'].get('gpu', 'CPU')}")
            written += save(figure, folder / f"{prefix}{kind}")
    return written


def _trees(cells: Sequence[Summary]) -> list[Summary]:
    """Those of a size that was given: an automatic one has no place on an axis of sizes."""
    return [cell for cell in cells if cell["method"] == TREE and cell["budget"] != AUTO]


def _ours(cells: Sequence[Summary]) -> list[Summary]:
    return [cell for cell in cells if cell.get("stage_ms")]


def _by_context(cells: Sequence[Summary]) -> list[Panel]:
    """A panel a method of ours, with plain decoding's cells beside its own."""
    long = [cell for cell in cells if cell["context"] is not None]
    plain = [cell for cell in long if cell["method"] == PLAIN]
    order = sorted(_ours(long), key=lambda cell: (nodes_of(cell["budget"]), cell["context"]))
    names = dict.fromkeys(name(cell) for cell in order)
    return [Panel(label, [cell for cell in order if name(cell) == label] + plain) for label in names]


def _against_budget(axes: Any, cells: Sequence[Summary], figure: str) -> None:
    """The line of trees of each size with its intervals, and all else as a level."""
    trees = [cell for cell in _trees(cells) if cell[figure] is not None]
    places = range(len(trees))
    values = [cell[figure]["value"] for cell in trees]
    reach = [
        [0 if cell[figure]["low"] is None else abs(cell[figure][side] - cell[figure]["value"]) for cell in trees]
        for side in ("low", "high")
    ]
    for cell in cells:
        auto = cell["budget"] == AUTO
        if (cell["method"] != TREE or auto) and cell[figure] is not None:
            line = _AUTO_LINE if auto else _LINES[cell["method"]]
            axes.axhline(
                cell[figure]["value"], label=name(cell) if auto else NAMES[cell["method"]], linewidth=1.6, **line
            )
    axes.errorbar(places, values, yerr=reach, label=NAMES[TREE], marker="o", capsize=3, zorder=3, **_LINES[TREE])
    axes.set_xticks(places, [str(cell["budget"]) for cell in trees])
    axes.set_xlim(-0.4, len(trees) - 0.6)
    axes.set_xlabel("budget (nodes)")


def _speedup(axes: Any, cells: Sequence[Summary]) -> None:
    _against_budget(axes, cells, "speedup")
    axes.set_ylabel("times plain decoding")


def _acceptance(axes: Any, cells: Sequence[Summary]) -> None:
    _against_budget(axes, cells, "acceptance_length")
    axes.set_ylabel("tokens a round")


def _distribution(axes: Any, cells: Sequence[Summary]) -> None:
    """The chain beside a middling and the largest tree: bars of the share of rounds."""
    trees = [cell for cell in _trees(cells) if cell["budget"]]
    shown = [cell for cell in cells if cell["method"] == CHAIN]
    shown += [trees[place] for place in sorted({(len(trees) - 1) // 2, len(trees) - 1})] if trees else []
    shown = [cell for cell in shown if cell["histogram"]]
    width = 0.8 / max(len(shown), 1)
    colors = _DISTRIBUTIONS if shown and shown[0]["method"] == CHAIN else _DISTRIBUTIONS[1:]
    most = max((int(accepted) for cell in shown for accepted in cell["histogram"]), default=0)
    for number, (cell, color) in enumerate(zip(shown, colors, strict=False)):
        rounds = sum(cell["histogram"].values())
        places = [int(accepted) - 0.4 + (number + 0.5) * width for accepted in cell["histogram"]]
        shares = [100 * count / rounds for count in cell["histogram"].values()]
        axes.bar(places, shares, width, label=name(cell), color=color)
    axes.set_xticks(range(0, most + 1, max(1, most // 8)))
    axes.set_xlabel("draft tokens accepted, the bonus token apart")
    axes.set_ylabel("% of rounds")


def _stack(axes: Any, cells: Sequence[Summary]) -> None:
    """A bar a cell, its stages on top of each other."""
    bottom = [0.0] * len(cells)
    for stage, color in _STAGES.items():
        heights = [cell["stage_ms"].get(stage, 0.0) for cell in cells]
        axes.bar(range(len(cells)), heights, 0.7, bottom=bottom, color=color, label=stage, edgecolor="white", lw=0.4)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_ylabel("ms a round")


def _stages(axes: Any, cells: Sequence[Summary]) -> None:
    ours = _ours(cells)
    _stack(axes, ours)
    axes.set_xticks(range(len(ours)), ["chain" if cell["method"] == CHAIN else str(cell["budget"]) for cell in ours])
    axes.set_xlabel("budget (nodes)")
    for cell in cells:
        if cell["method"] == PLAIN and cell["tokens_per_second"] is not None:
            level = 1000 / cell["tokens_per_second"]
            axes.axhline(level, label="a token of plain decoding", color="black", linestyle="--", linewidth=1.2)


def _contexts(axes: Any, cells: Sequence[Summary]) -> None:
    ours = _ours(cells)
    _stack(axes, ours)
    axes.set_xticks(range(len(ours)), [f"{cell['context']:,}" for cell in ours])
    axes.set_xlabel("tokens of the prompt")
    plain = {cell["context"]: cell["tokens_per_second"] for cell in cells if cell["method"] == PLAIN}
    levels = [(place, plain.get(cell["context"])) for place, cell in enumerate(ours)]
    points = [(place, 1000 / speed) for place, speed in levels if speed]
    if points:
        label = "a token of plain decoding"
        axes.plot(*zip(*points, strict=True), color="black", marker="D", markersize=5, linestyle="--", label=label)
