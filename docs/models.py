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

# Errors are rounded up to a power of ten; another processor's arithmetic may move them by one.
ALLOWED_FACTOR = 10.5
# What the report says for no error at all, which is fp64's resolution.
LEAST_ERROR = 1e-15
DTYPES = ("float64", "float32", "bfloat16")


def matrix(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table, one line a family."""
    lines = [
        "| family | class | route | error fp64 | error fp32 | error bf16 | text fp32 | text bf16 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for _, group in groupby(rows, key=lambda row: row["family"]):
        of_dtype = {row["dtype"]: row for row in group}
        any_row = next(iter(of_dtype.values()))
        errors = [_error(of_dtype.get(dtype)) for dtype in DTYPES]
        texts = [(of_dtype.get(dtype) or {}).get("generate") or "–" for dtype in DTYPES[1:]]
        routes = ", ".join(any_row["routes"])
        lines.append(
            " | ".join([f"| {any_row['title']}", f"`{any_row['model_class']}`", routes, *errors, *texts]) + " |"
        )
    return "\n".join(lines)


def _error(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    if row["max_error"] <= LEAST_ERROR and row["dtype"] != "float64":
        return "0"
    return f"{row['max_error']:.0e}".replace("e-0", "e-").replace("e+00", "")


def page(rows: list[dict[str, Any]]) -> str:
    """`docs/models.md` with the matrix in its place."""
    before, _, rest = PAGE.read_text().partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{matrix(rows)}\n\n{END}{after}"


def differences(written: list[dict[str, Any]], measured: list[dict[str, Any]]) -> list[str]:
    """What the written matrix says other than the report, errors allowed for another machine's arithmetic."""
    old, new = ({(row["family"], row["dtype"]): row for row in rows} for rows in (written, measured))
    found = [f"{key}: in one of the two only" for key in sorted(old.keys() ^ new.keys())]
    for key in old.keys() & new.keys():
        row, other = dict(old[key]), dict(new[key])
        errors = row.pop("max_error"), other.pop("max_error")
        if row != other or not max(errors) <= ALLOWED_FACTOR * min(errors):
            found.append(f"{key}: written {old[key]}, measured {new[key]}")
    return found


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
