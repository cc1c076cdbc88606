"""Lists on the command line."""

from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(text: str, option: str, kind: Callable[[str], Number], lowest: int = 0) -> list[Number]:
    """Ascending numbers between commas, each once.

    Raises:
        ValueError: for anything else, and for a number below `lowest`.
    """
    try:
        values = sorted({kind(word) for word in words(text)})
    except ValueError:
        values = []
    if not values or not lowest <= values[0] <= values[-1] < float("inf"):
        what = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"{option} takes {what} from {lowest} up with commas between them, got {text!r}.")
    return values
