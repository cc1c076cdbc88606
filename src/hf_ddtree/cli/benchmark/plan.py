"""What is measured, in which order."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hf_ddtree.cli.methods import METHODS, PLAIN, TREE


class Method(NamedTuple):
    """A way to generate, with the nodes of its tree if it is one."""

    name: str
    budget: int | str | None = None

    @property
    def label(self) -> str:
        return self.name if self.budget is None else f"{self.name} {self.budget}"


class Unit(NamedTuple):
    """One timed run."""

    dataset: str
    prompt: int
    temperature: float
    repeat: int
    method: Method

    @property
    def block(self) -> tuple[str, int, float, int]:
        """What the runs that are compared with each other have in common."""
        return self[:4]


def methods(names: Sequence[str], budgets: Sequence[int | str]) -> list[Method]:
    """Plain decoding, which all others are measured against, and the named ones; a tree for each budget.

    Raises:
        ValueError: for an unknown name.
    """
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise ValueError(f"--methods: {', '.join(unknown)} is not one of {', '.join(METHODS)}.")
    chosen = [Method(name) for name in METHODS if name in (PLAIN, *names) and name != TREE]
    in_order = sorted(set(budgets), key=nodes_of)
    return chosen + [Method(TREE, budget) for budget in in_order if TREE in names]


def nodes_of(budget: int | str | None) -> float:
    """What budgets are sorted by: none first, `"auto"` last."""
    return math.inf if isinstance(budget, str) else budget or 0


@dataclass(frozen=True)
class Grid:
    """Every combination that is measured.

    Args:
        methods (`Sequence[Method]`): compared on each prompt.
        prompts (`Mapping[str, int]`): how many each data set has.
        temperatures (`Sequence[float]`): 0 is greedy.
        repeats (`int`): runs of each method on each prompt.
        first_temperature_only (`frozenset[str]`): data sets that only the first temperature is run on.
    """

    methods: Sequence[Method]
    prompts: Mapping[str, int]
    temperatures: Sequence[float]
    repeats: int
    first_temperature_only: frozenset[str] = frozenset()

    def units(self, rank: int = 0, ranks: int = 1) -> list[Unit]:
        """The runs of one process in order: on each prompt all methods in turn, and a repeat only after all prompts.

        Each turn begins one method later than the last, so that whatever a run leaves behind or a machine's pace does
        meets all methods alike.

        Args:
            rank, ranks (`int`): the process and how many there are; every `ranks`-th prompt is a process's own.
        """
        prompts = [(name, number) for name, count in self.prompts.items() for number in range(count)][rank::ranks]
        units, turn = [], 0
        for repeat in range(self.repeats):
            for dataset, prompt in prompts:
                for temperature in self.temperatures[: 1 if dataset in self.first_temperature_only else None]:
                    shift = turn % len(self.methods)
                    order = [*self.methods[shift:], *self.methods[:shift]]
                    units += [Unit(dataset, prompt, temperature, repeat, method) for method in order]
                    turn += 1
        return units
