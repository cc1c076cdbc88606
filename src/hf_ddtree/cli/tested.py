"""The rows of the matrix of tested models, which the test run of this release wrote."""

import json
from importlib.resources import files
from typing import Any

from transformers import PreTrainedModel


def rows_of(model: PreTrainedModel) -> list[dict[str, Any]]:
    """The rows of the model's class, each a family in one dtype; `docs/models.md` says what they mean."""
    text = files("hf_ddtree.cli").joinpath("tested_models.json").read_text(encoding="utf-8")
    classes = [cls.__name__ for cls in type(model).__mro__]
    return [row for row in json.loads(text) if row["model_class"] in classes]
