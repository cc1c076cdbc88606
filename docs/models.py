"""Writes the matrix of tested models, for `docs/models.md` and for `hf-ddtree doctor`, from a test run's report.

pytest tests/models --models-report models.json
python docs/models.py models.json            # writes both
python docs/models.py models.json --check    # fails where what was written says other than the report
"""

import argparse
import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGE = DOCS / "models.md"
DATA = DOCS.parent / "src" / "hf_ddtree" / "cli" / "tested_models.json"
START, END = "<!-- the matrix: written by docs/models.py -->", "<!-- end of the matrix -->"

# Errors are rounded up to 1, 2 or 5 times a power of ten; another processor's arithmetic moves one by a step or two,
# seldom by three, which are a factor of ten.
ALLOWED_FACTOR = 10.1
# In fp64 too some layers compute in fp32, and whether its rounding shows in an error is chance.
LEAST = 1e-6
# In bf16 processors differ by more: the tests bound its figures, and here only the kind of verdict is compared.
ALIKE = {"equal", "equal to rounding"}
DTYPES = ("float64", "float32", "bfloat16")
COLUMNS = (
    "family",
    "class",
    "route",
    "error fp64",
    "error fp32",
    "error bf16",
    "bf16 / plain's",
    "text fp32",
    "text bf16",
)


def matrix(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table, one line a family."""
    lines = [_line(COLUMNS), "|---" * len(COLUMNS) + "|"]
    for _, group in groupby(rows, key=lambda row: row["family"]):
        of_dtype = {row["dtype"]: row for row in group}
        any_row = next(iter(of_dtype.values()))
        errors = [_error(of_dtype[dtype]["max_error"]) if dtype in of_dtype else "–" for dtype in DTYPES]
        times = f"{of_dtype['bfloat16']['times_plain']:.1f}"
        texts = [of_dtype[dtype]["generate"] for dtype in DTYPES[1:]]
        routes = ", ".join(any_row["routes"])
        lines.append(_line((any_row["title"], f"`{any_row['model_class']}`", routes, *errors, times, *texts)))
    return "\n".join(lines)


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def _error(error: float) -> str:
    return f"{error:g}" if error >= 1e-2 else f"{error:.0e}".replace("e-0", "e-")


def page(rows: list[dict[str, Any]]) -> str:
    """`docs/models.md` with the matrix in its place."""
    before, _, rest = PAGE.read_text().partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{matrix(rows)}\n\n{END}{after}"


def differences(written: list[dict[str, Any]], measured: list[dict[str, Any]]) -> list[str]:
    """What the written matrix says other than the report, errors allowed for another machine's arithmetic."""
    old, new = ({(row["family"], row["dtype"]): row for row in rows} for rows in (written, measured))
    found = [f"{key}: in one of the two only" for key in sorted(old.keys() ^ new.keys())]
    for key in sorted(old.keys() & new.keys()):
        if not _agree(dict(old[key]), dict(new[key])):
            found.append(f"{key}: written {old[key]}, measured {new[key]}")
    return found


def _agree(row: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two rows say the same; takes from them what may differ."""
    errors = [max(of_row.pop("max_error"), LEAST) for of_row in (row, other)]
    if row["dtype"] == "bfloat16":
        del row["times_plain"], other["times_plain"]
        return {row.pop("generate"), other.pop("generate")} <= ALIKE and row == other
    return row == other and max(errors) <= ALLOWED_FACTOR * min(errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    rows = json.loads(arguments.report.read_text())
    if not arguments.check:
        DATA.write_text(json.dumps(rows, ensure_ascii=False, indent=1) + "\n")
        PAGE.write_text(page(rows))
        return
    written = json.loads(DATA.read_text())
    found = differences(written, rows)
    if PAGE.read_text() != page(written):
        found.append(f"{PAGE.name} does not show {DATA.name}")
    if found:
        sys.exit("\n".join(["The matrix of models is not what the tests measured; write it anew:", *found]))
    print(f"{len(rows)} rows as written")


if __name__ == "__main__":
    main()
