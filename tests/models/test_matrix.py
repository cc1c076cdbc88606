"""`docs/models.py --check`: what may differ on another machine passes, and anything else is named."""

import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "models.py"))
ROW: dict[str, Any] = dict(
    family="llama",
    title="Llama 2, 3",
    model_class="LlamaForCausalLM",
    dtype="bfloat16",
    max_error=0.1,
    times_plain=1.0,
    generate="equal",
    routes=["attention"],
)
EXACT = ROW | dict(dtype="float32", max_error=1e-5, times_plain=None)
DOUBLE = EXACT | dict(dtype="float64", max_error=1e-15)


def differences(row: dict[str, Any], other: dict[str, Any]) -> list[str]:
    found: list[str] = SCRIPT["differences"]([row], [other])
    return found


@pytest.mark.parametrize(
    ("row", "change"),
    [
        (EXACT, dict(max_error=1e-6)),
        (EXACT, dict(max_error=1e-4)),
        (DOUBLE, dict(max_error=1e-7)),
        (ROW, dict(max_error=0.5, times_plain=2.0)),
        (ROW, dict(generate="equal to rounding")),
    ],
)
def test_another_processor_may_measure(row: dict[str, Any], change: dict[str, Any]) -> None:
    assert differences(row, row | change) == differences(row | change, row) == differences(row, row) == []


@pytest.mark.parametrize(
    ("row", "change"),
    [
        (EXACT, dict(max_error=2e-4)),
        (DOUBLE, dict(max_error=2e-5)),
        (EXACT, dict(generate="equal to rounding")),
        (ROW, dict(generate=None)),
        (ROW, dict(routes=["attention", "paths"])),
        (ROW, dict(title="Llama")),
    ],
)
def test_what_differs_is_named(row: dict[str, Any], change: dict[str, Any]) -> None:
    (found,) = differences(row, row | change)
    assert found.startswith(f"('llama', '{row['dtype']}')") and str(change)[1:-1] in found


def test_a_row_of_one_side_alone_is_named() -> None:
    assert differences(ROW, EXACT) == [
        "('llama', 'bfloat16'): in one of the two only",
        "('llama', 'float32'): in one of the two only",
    ]


def test_the_page_shows_the_matrix() -> None:
    table = SCRIPT["matrix"]([DOUBLE, EXACT, ROW | dict(max_error=0.2)])
    assert table.splitlines()[-1] == (
        "| Llama 2, 3 | `LlamaForCausalLM` | attention | 1e-15 | 1e-5 | 0.2 | 1.0 | equal | equal |"
    )
    assert len({line.count("|") for line in table.splitlines()}) == 1
