"""The matrix's rows: none is left out in silence, and a report of them is the same wherever it is written."""

import dataclasses
import json
from pathlib import Path

import pytest
from packaging.version import Version

from hf_ddtree.compat import OLDEST_TRANSFORMERS, TRANSFORMERS_VERSION
from models.measure import as_dictionary, measure, rounded_up, write
from models.zoo import ABSENT, ALL, FAMILIES, NEWER


def test_families_are_absent_from_old_releases_only() -> None:
    if Version("5.24.0") <= TRANSFORMERS_VERSION:
        assert ABSENT == []
    assert set(ABSENT) <= NEWER
    if Version(OLDEST_TRANSFORMERS) == TRANSFORMERS_VERSION:
        assert set(ABSENT) == NEWER & set(ALL)
    assert len(FAMILIES) == len(ALL) - len(ABSENT) > 60


def test_a_family_of_a_missing_class_is_absent() -> None:
    family = dataclasses.replace(ALL["llama"], model_class="ClassOfALaterRelease")
    assert not family.present


def test_rows_are_in_order_and_rounded(tmp_path: Path) -> None:
    rows = [as_dictionary(measure(family, "float64")) for family in ("qwen3", "llama")]
    write(rows, tmp_path / "rows.json")
    written = json.loads((tmp_path / "rows.json").read_text())
    assert [row["family"] for row in written] == ["llama", "qwen3"]
    assert written[0] == dict(
        family="llama",
        title="Llama 2, 3",
        model_class="LlamaForCausalLM",
        dtype="float64",
        max_error=written[0]["max_error"],
        times_plain=None,
        generate=None,
        routes=["attention"],
    )
    assert 1e-15 <= written[0]["max_error"] <= 1e-5


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (3.2e-7, 5e-7),
        (1e-6, 1e-6),
        (1.01e-6, 2e-6),
        (0.021, 0.05),
        (0.051, 0.1),
        (0.6, 1.0),
        (0.0, 1e-9),
        (9e-10, 1e-9),
    ],
)
def test_errors_are_rounded_up_from_a_floor(error: float, expected: float) -> None:
    assert rounded_up(error, floor=1e-9) == expected
