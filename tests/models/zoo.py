"""Every family that the tests run, and those of them that the installed release lacks."""

import os
from collections.abc import Iterable
from typing import Any

import pytest

from models import bounded, delta, dense, experts, images, latent, learned, paths
from models.family import Family

ALL: dict[str, Family] = {
    family.name: family
    for room in (dense, learned, bounded, experts, latent, delta, paths, images)
    for family in room.FAMILIES
}

FAMILIES: dict[str, Family] = {name: family for name, family in ALL.items() if family.present}

#: Names of families whose class the installed release does not have: no row of theirs is measured.
ABSENT: list[str] = [name for name in ALL if name not in FAMILIES]

#: Those of them that the oldest supported release, 5.20, is known to lack.
NEWER = {"lara_mini", "lfm3"}


def cases(names: Iterable[str] = FAMILIES, slow: bool = False) -> list[Any]:
    """Families to run a test with.

    Those that add no kind of layer to the others are slow tests, and with `slow` all are. A test run that reports the
    matrix runs every one.
    """
    reports = "HF_DDTREE_REPORTS_MODELS" in os.environ
    marks = {name: [pytest.mark.slow] if (slow or FAMILIES[name].further) and not reports else [] for name in names}
    return [pytest.param(name, marks=of_name) for name, of_name in marks.items()]
