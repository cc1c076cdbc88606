"""Writes measured tables into the documentation, from what `hf-ddtree bench` has left in `docs/numbers/`.

`auto.json` is a list of what `benchmarks/auto_budget.py --label TEXT --json FILE` has left.

    python docs/tables.py            # writes
    python docs/tables.py --check    # fails where a table is not what its measurement says

A place is marked by `<!-- numbers: NAME -->` and `<!-- end of numbers -->` around it; NAME is a file of
`docs/numbers/` without its `.json`. What stands between is made anew.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from hf_ddtree.cli.reporting.table import estimate_text, facts, group_title, groups, name, table

DOCS = Path(__file__).parent
PLACE = re.compile(r"(<!-- numbers: ([\w-]+) -->\n).*?(<!-- end of numbers -->)", re.DOTALL)


def written(text: str, numbers: Path) -> str:
    """`text` with every marked place filled.

    Raises:
        FileNotFoundError: if a measurement is not there.
    """

    def fill(place: re.Match[str]) -> str:
        summary = json.loads((numbers / f"{place[2]}.json").read_text(encoding="utf-8"))
        return f"{place[1]}\n{section(summary)}\n\n{place[3]}"

    return PLACE.sub(fill, text)


def section(summary: Any) -> str:
    """One table of all data sets, and the lines that say how it was measured."""
    if isinstance(summary, list):
        return auto_section(summary)
    rows = []
    for group, cells in groups(summary["cells"]):
        rows += [[group_title(group), *row(cell)] for cell in cells]
    head = ["", "", "tokens/s", "times plain", "acceptance length", "identical"]
    return f"{table(head, rows, left=2)}\n\n{facts(summary)}"


def auto_section(runs: list[dict[str, Any]]) -> str:
    """One table of all runs of `benchmarks/auto_budget.py`, and their commands."""
    head = ["", "texts", "tokens", "best budget", "auto over it (95%)", "auto over plain (95%)"]
    rows = [
        [
            run["label"],
            str(run["texts"]),
            f"{run['tokens']:,}",
            f"{run['best_budget']} of {', '.join(run['budgets'])}",
            estimate_text(run["auto_over_best"], digits=3),
            estimate_text(run["auto_over_plain"], digits=3),
        ]
        for run in runs
    ]
    return "\n\n".join([table(head, rows, left=1), "\n".join(f"- `{run['command']}`" for run in runs)])


def row(cell: dict[str, Any]) -> list[str]:
    same = "other draws" if cell["identical"] is None else f"{cell['identical']} of {cell['prompts']}"
    speedup, length = (cell[figure] for figure in ("speedup", "acceptance_length"))
    return [
        name(cell),
        "-" if cell["tokens_per_second"] is None else f"{cell['tokens_per_second']:.1f}",
        "-" if speedup is None else f"{speedup['value']:.2f}",
        "-" if length is None else f"{length['value']:.2f}",
        same,
    ]


def main(arguments: list[str] | None = None, docs: Path = DOCS) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where something would change")
    options = parser.parse_args(arguments)
    stale = []
    for page in [docs.parent / "README.md", *sorted(docs.glob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        new = written(text, docs / "numbers")
        if new != text:
            stale.append(page.name)
            if not options.check:
                page.write_text(new, encoding="utf-8")
    print("\n".join(stale) if stale else "Every table is what was measured.")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
