"""Figures of several panels with one legend, and their files."""

import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_ddtree.cli.benchmark.extra import needs

COLUMNS = 3
WIDTH, HEIGHT = 4.0, 3.2
#: Letters of a heading that fit into an inch.
LETTERS = 11


def panels(shown: Sequence[tuple[str, Any]], paint: Callable[[Any, Any], None], heading: str) -> Any:
    """A figure with a panel for each title and what `paint` makes of its content, one scale of heights for all.

    Args:
        shown (`Sequence[tuple[str, Any]]`): titles and contents.
        paint (`Callable`): draws a content into axes.
        heading (`str`): above them all.
    """
    # Not `pyplot`, which would keep every figure and the program's own settings.
    figure_class = needs("matplotlib.figure").Figure
    columns = min(COLUMNS, len(shown))
    rows = math.ceil(len(shown) / columns)
    # A single panel still has to hold the legend below it.
    size = (max(WIDTH * columns, 6.0), HEIGHT * rows + 1.3)
    figure = figure_class(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    labels: dict[str, Any] = {}
    for axes, (title, content) in zip(grid.flat, shown, strict=False):
        paint(axes, content)
        axes.set_title(title, fontsize=10)
        axes.tick_params(labelsize=9)
        if not axes.get_subplotspec().is_first_col():
            axes.set_ylabel("")
        axes.grid(axis="y", color="#dddddd", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            labels.setdefault(label, handle)
    for axes in list(grid.flat)[len(shown) :]:
        axes.set_visible(False)
    # Once everything is drawn, since it fixes the other end too.
    grid[0, 0].set_ylim(bottom=0)
    lines = [textwrap.fill(line, int(LETTERS * size[0])) for line in heading.splitlines()]
    figure.suptitle("\n".join(lines), fontsize=12)
    # As many lines as it takes, each of the same length.
    entries = math.ceil(len(labels) / math.ceil(len(labels) / (2 + columns)))
    figure.legend(list(labels.values()), list(labels), loc="outside lower center", ncols=entries, fontsize=9)
    return figure


def save(figure: Any, path: Path) -> list[Path]:
    """Writes `path.png` and `path.svg`."""
    files = [path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg")]
    for file in files:
        figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files
