"""Word problems in the manner of school books, put together from random names, things and numbers."""

import random
from pathlib import Path

from recipe import WORDS

TEMPLATES = (Path(__file__).parent / "problems.txt").read_text().splitlines()
OPENINGS = [
    "{A} has {a} ", "{A} buys {a} ", "A {j} has ", "{A} and {B} ", "{A} went to {p} ", "There are {a} ", "A {v} ",
    "{A} is ", "{A} earns ", "{A} wants to ", "In a ", "Every day, {A} ", "{A}'s ", "If {A} has {a} ", "On {D}, {A} ",
    "A {j} makes ", "{A} makes {a} ", "{A} needs ", "The ", "{A} runs ", "{A} sells {a} ", "A store sells ",
    "{A} took ",
]  # fmt: skip


def fill(template: str, source: random.Random) -> str:
    first, second, third = source.sample(WORDS["names"], 3)
    one, other = source.sample(WORDS["things"], 2)
    return template.format(
        A=first, B=second, C=third, x=one, y=other, p=source.choice(WORDS["places"]), j=source.choice(WORDS["jobs"]),
        v=source.choice(WORDS["vehicles"]), r=source.choice(WORDS["ratios"]), D=source.choice(WORDS["days"]),
        a=source.randint(3, 30), b=source.randint(2, 20), c=source.randint(2, 15), d=source.randint(2, 9),
        e=source.randint(2, 6), h=source.choice([40, 50, 60, 80, 100, 120, 150, 200, 240, 300, 500, 1000]),
        q=source.choice([10, 15, 20, 25, 30, 40, 50, 60, 75]), s=source.choice([30, 40, 50, 55, 60, 65, 100, 200]),
        t=source.choice([20, 35, 45, 70, 75, 80]),
    )  # fmt: skip


def problem(source: random.Random) -> str:
    """A finished problem."""
    return fill(source.choice(TEMPLATES), source)


def opening(source: random.Random) -> str:
    """The beginning of a problem that the target is to finish writing itself."""
    return fill(source.choice(OPENINGS), source)
