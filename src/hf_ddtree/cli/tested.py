"""The rows of the matrix of tested models, which the test run of this release wrote."""

import json
from importlib.resources import files
from typing import Any

from transformers import PreTrainedModel


def load() -> list[dict[str, Any]]:
    """Every row: a family in one dtype; `docs/models.md` says what the fields mean."""
    text = files("hf_ddtree.cli").joinpath("tested_models.json").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = json.loads(text)
    return rows


def rows_of(model: PreTrainedModel) -> list[dict[str, Any]]:
    """The rows of the model's class."""
    classes = [cls.__name__ for cls in type(model).__mro__]
    return [row for row in load() if row["model_class"] in classes]
