"""`docs/tables.py` writes what was measured where a page asks for it, and tells a stale page."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "tables.py"))


def cell(method: str, budget: Any, speed: float, identical: int | None) -> dict[str, Any]:
    estimate = {"value": speed / 10, "low": None, "high": None}
    return {
        "dataset": "code", "temperature": 0, "method": method, "budget": budget, "prompts": 4, "identical": identical,
        "tokens_per_second": speed, "speedup": estimate, "acceptance_length": estimate, "peak_bytes": None,
    }  # fmt: skip


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """A README that asks for a table, beside the measurement."""
    folder = tmp_path / "docs"
    (folder / "numbers").mkdir(parents=True)
    summary = {
        "cells": [cell("tree", 15, 25.0, 4), cell("plain", None, 10.0, 4), cell("lookup", None, 12.5, None)],
        "machine": {"cpu": "a CPU", "cores": 2, "threads": 2, "memory_gib": 4, "device": "cpu"},
        "versions": {"torch": "9.9"},
        "configuration": {"dtype": "float32", "attention": "sdpa", "repeats": 2, "max_new_tokens": 8},
        "command": "hf-ddtree bench", "started": "today", "load": None, "commit": None,
    }  # fmt: skip
    (folder / "numbers" / "pair.json").write_text(json.dumps(summary))
    page = "Before.\n\n<!-- numbers: pair -->\nold\n<!-- end of numbers -->\n\nAfter.\n"
    (tmp_path / "README.md").write_text(page)
    return folder


def test_a_table_is_written_once_and_is_then_as_it_should_be(docs: Path) -> None:
    main = SCRIPT["main"]
    assert main(["--check"], docs) == 1
    assert "old" in (docs.parent / "README.md").read_text(), "a check changes nothing"
    assert main([], docs) == 0
    text = (docs.parent / "README.md").read_text()
    assert text.startswith("Before.\n\n<!-- numbers: pair -->\n\n|") and text.endswith("-->\n\nAfter.\n")
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in text.splitlines() if "greedy" in line]
    assert rows == [
        ["code, greedy", "plain", "10.0", "1.00", "1.00", "4 of 4"],
        ["code, greedy", "prompt lookup (10)", "12.5", "1.25", "1.25", "other draws"],
        ["code, greedy", "draft tree (15)", "25.0", "2.50", "2.50", "4 of 4"],
    ]
    assert "`hf-ddtree bench`" in text and "torch 9.9" in text
    assert main(["--check"], docs) == 0


def test_a_table_of_automatic_budgets(docs: Path) -> None:
    run = {
        "label": "code", "texts": 3, "tokens": 1200, "best_budget": 15, "budgets": ["7", "15"],
        "auto_over_best": {"value": 0.99, "low": 0.975, "high": 1.01},
        "auto_over_plain": {"value": 2.0, "low": 1.9, "high": 2.125}, "command": "benchmarks/auto_budget.py --limit 3",
    }  # fmt: skip
    (docs / "numbers" / "pair.json").write_text(json.dumps([run]))
    assert SCRIPT["main"]([], docs) == 0
    text = (docs.parent / "README.md").read_text()
    cells = [part.strip() for part in next(line for line in text.splitlines() if "code" in line).split("|")[1:-1]]
    assert cells == ["code", "3", "1,200", "15 of 7, 15", "0.990 (0.975 to 1.010)", "2.000 (1.900 to 2.125)"]
    assert "- `benchmarks/auto_budget.py --limit 3`" in text


def test_a_measurement_that_is_not_there(docs: Path) -> None:
    (docs / "numbers" / "pair.json").unlink()
    with pytest.raises(FileNotFoundError):
        SCRIPT["main"](["--check"], docs)
