"""What tests of several subjects in this folder share."""

import itertools
from typing import Any

import pytest

from hf_ddtree.generation.budget import BudgetController, Plan
from hf_ddtree.generation.cost_model import SIZES

SCRIPT = (15, 0, 3, 0, 0, 0, 63, 1, None, 7, 31, None, 0, 127)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes jump: to nothing drafted (0), to a drafted tree of which the root alone is verified (`None`), and back.

    Every generate begins the script anew.
    """
    chosen: list[int] = []
    script = itertools.cycle(SCRIPT)

    def begin(self: Any) -> None:
        nonlocal script
        script = itertools.cycle(SCRIPT)

    def plan(self: Any, context: int, largest: int = SIZES[-1]) -> Plan:
        size = next(script)
        self.next_size = size or 0
        return Plan(drafts=False) if size == 0 or largest < 1 else Plan(True, min(255, largest))

    def size(self: Any, plan: Plan, context: int, expected: Any) -> int:
        chosen.append(self.next_size)
        return self.next_size

    monkeypatch.setattr(BudgetController, "begin", begin)
    monkeypatch.setattr(BudgetController, "plan", plan)
    monkeypatch.setattr(BudgetController, "size", size)
    return chosen
