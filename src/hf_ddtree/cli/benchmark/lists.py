"""Lists on the command line."""

from collections.abc import Callable
from typing import TypeVar

from hf_ddtree.configuration import AUTO

Number = TypeVar("Number", int, float)


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def budgets(text: str, option: str) -> list[int | str]:
    """Numbers of nodes as [`numbers`] reads them, and `auto` behind them where it is listed.

    Raises:
        ValueError: for anything else.
    """
    listed = words(text)
    nodes = [word for word in listed if word != AUTO]
    if not nodes and AUTO in listed:
        return [AUTO]
    try:
        found = numbers(",".join(nodes), option, int)
    except ValueError as error:
        raise ValueError(
            f"{option} takes whole numbers from 0 up and {AUTO} with commas between them, got {text!r}."
        ) from error
    return [*found, *([AUTO] if AUTO in listed else [])]


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
