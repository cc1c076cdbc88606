"""What a row of the documentation's matrix of models says, measured by the tests that assert it."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from models.generating import generated_by
from models.nodes import DTYPES, NodeErrors, errors_of
from models.zoo import ALL, FAMILIES

# About what each dtype resolves: on another machine an error of 0 is as likely this large.
FLOORS = {"float64": 1e-15, "float32": 1e-6, "bfloat16": 1e-2}


@dataclass(frozen=True)
class Row:
    """A family in one dtype.

    Args:
        family (`str`): its name.
        title (`str`): what the documentation calls it.
        model_class (`str`): the class of Transformers that was run.
        dtype (`str`): of the weights.
        max_error (`float`): the largest error of a node's logit, in standard deviations of the logits, rounded up to
            1, 2 or 5 times a power of ten.
        times_plain (`float`, *optional*): in bf16 how many times plain decoding's own error it is, both as root mean
            squares, to one decimal.
        generate (`str`, *optional*): how whole generates compare, as [`models.generating.Generated`] has it; they are
            not run in fp64.
        routes (`list[str]`): the ways its layers verify a tree.
    """

    family: str
    title: str
    model_class: str
    dtype: str
    max_error: float
    times_plain: float | None
    generate: str | None
    routes: list[str]


def measure(family: str, dtype: str) -> Row:
    """The row of a family, from the figures that its tests assert.

    Args:
        family (`str`): a name of [`models.zoo.FAMILIES`].
        dtype (`str`): a name of `DTYPES`.
    """
    chosen, errors = FAMILIES[family], errors_of(family, dtype)
    return Row(
        family=family,
        title=chosen.title,
        model_class=chosen.model_class,
        dtype=dtype,
        max_error=rounded_up(errors.worst, FLOORS[dtype]),
        times_plain=times_plain(errors) if dtype == "bfloat16" else None,
        generate=None if dtype == "float64" else generated_by(family, dtype).verdict,
        routes=sorted(chosen.routes),
    )


def rounded_up(error: float, floor: float) -> float:
    """To 1, 2 or 5 times a power of ten, so that the arithmetic of another machine seldom shows; at least `floor`."""
    error = max(error, floor)
    exponent = math.floor(math.log10(error))
    steps = [float(f"{digit}e{exponent}") for digit in (1, 2, 5, 10)]
    return next(step for step in steps if error <= step)


def times_plain(errors: NodeErrors) -> float:
    """How a tree's error compares with plain decoding's; below half of bf16's step one is as good as the other."""
    least = torch.finfo(torch.bfloat16).eps / 2
    return round(max(errors.typical, least) / max(errors.plain, least), 1)


def write(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes rows, given as dictionaries, in the order of the families and of `DTYPES`."""
    families, dtypes = list(ALL), list(DTYPES)
    rows = sorted(rows, key=lambda row: (families.index(row["family"]), dtypes.index(row["dtype"])))
    path.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


def as_dictionary(row: Row) -> dict[str, Any]:
    return asdict(row)
