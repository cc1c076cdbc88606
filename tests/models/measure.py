"""What a row of the documentation's matrix of models says, measured by the tests that assert it."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from models.generating import generated_by
from models.nodes import DTYPES, errors_of
from models.zoo import ALL, FAMILIES


@dataclass(frozen=True)
class Row:
    """A family in one dtype.

    Args:
        family (`str`): its name.
        title (`str`): what the documentation calls it.
        model_class (`str`): the class of Transformers that was run.
        dtype (`str`): of the weights.
        max_error (`float`): the largest error of a node's logit, in standard deviations of the logits, rounded up to
            a power of ten.
        generate (`str`, *optional*): how whole generates compare, as [`models.generating.Generated`] has it; they are
            not run in fp64.
        routes (`list[str]`): the ways its layers verify a tree.
    """

    family: str
    title: str
    model_class: str
    dtype: str
    max_error: float
    generate: str | None
    routes: list[str]


def measure(family: str, dtype: str) -> Row:
    """The row of a family, from the figures that its tests assert.

    Args:
        family (`str`): a name of [`models.zoo.FAMILIES`].
        dtype (`str`): a name of `DTYPES`.
    """
    chosen = FAMILIES[family]
    return Row(
        family=family,
        title=chosen.title,
        model_class=chosen.model_class,
        dtype=dtype,
        max_error=power_of_ten(errors_of(family, dtype).worst),
        generate=None if dtype == "float64" else generated_by(family, dtype).verdict,
        routes=sorted(chosen.routes),
    )


def power_of_ten(error: float) -> float:
    """Rounded up, so that the arithmetic of another machine seldom shows; below fp64's resolution it is that."""
    return float(f"1e{math.ceil(math.log10(max(error, 1e-15)))}")


def write(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes rows, given as dictionaries, in the order of the families and of `DTYPES`."""
    families, dtypes = list(ALL), list(DTYPES)
    rows = sorted(rows, key=lambda row: (families.index(row["family"]), dtypes.index(row["dtype"])))
    path.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


def as_dictionary(row: Row) -> dict[str, Any]:
    return asdict(row)
