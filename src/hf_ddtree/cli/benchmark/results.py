"""The file of results: a header, then a line for every finished run, so that an interrupted run goes on from it."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hf_ddtree.cli.benchmark.plan import Method, Unit

FORMAT = 1

#: Parts of the header that all runs of a file must share.
COMPARED = ("configuration", "versions", "machine", "commit")

Record = dict[str, Any]
_START = b'{"kind":"header"'


class Results:
    """Lines of `{"kind": ...}`: one `header`, then `run`, `failed` (a method that cannot run here) and `gap`.

    Args:
        path (`Path`): the file; it need not exist.
        header (`dict`): what is about to be measured, on what.

    Raises:
        ValueError: if the file holds results of something else; the message names what differs.
    """

    def __init__(self, path: Path, header: Record):
        self.path = path
        # As it will be read: lists for tuples, and so on.
        self.header = json.loads(json.dumps({"kind": "header", "format": FORMAT, **header}))
        self.lines: list[Record] = []
        lines, whole = read_lines(path) if path.exists() else ([], 0)
        if any(line["kind"] == "run" for line in lines):
            self.lines = lines
            check_same(path, lines[0], self.header, self.failed())
            os.truncate(path, whole)
            self.header = lines[0]
        else:
            # A start that came to nothing.
            path.unlink(missing_ok=True)
            self.append(self.header)

    def append(self, record: Record) -> None:
        """Adds a line, whole on the disk when this returns."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, separators=(",", ":")) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.lines.append(record)

    def add_run(self, unit: Unit, figures: Record) -> None:
        self.append({"kind": "run", **unit_record(unit), **figures})

    def finished(self) -> set[Unit]:
        return {unit_of(line) for line in self.lines if line["kind"] == "run"}

    def failed(self) -> dict[str, str]:
        """Methods that cannot run here, with the reason."""
        return {line["method"]: line["reason"] for line in self.lines if line["kind"] == "failed"}


def unit_record(unit: Unit) -> Record:
    return {**unit._asdict(), "method": unit.method.name, "budget": unit.method.budget}


def unit_of(line: Record) -> Unit:
    method = Method(line["method"], line["budget"])
    return Unit(line["dataset"], line["prompt"], line["temperature"], line["repeat"], method)


def read_lines(path: Path) -> tuple[list[Record], int]:
    """The records of a file and the length in bytes of its whole lines; a last line cut short is left out.

    Raises:
        ValueError: if it is no file of results.
    """
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if not whole and not content.startswith(_START[: len(content)]):
        raise ValueError(f"{path} is no file of results: {content[:60]!r}.")
    lines: list[Record] = []
    for number, line in enumerate(content[:whole].splitlines(), 1):
        try:
            record = json.loads(line)
            kind = record["kind"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number} is no line of results: {line[:60]!r}.") from error
        if (kind == "header") != (number == 1) or record.get("format", FORMAT) != FORMAT:
            raise ValueError(f"{path}, line {number}: not the results of this version of `hf-ddtree bench`.")
        lines.append(record)
    return lines, whole


def check_same(path: Path, old: Record, new: Record, failed: Iterable[str] = ()) -> None:
    """Raises `ValueError`, naming what differs, unless two headers are of the same measurement.

    Args:
        path (`Path`): where the old one is.
        old, new (`dict`): headers.
        failed (`Iterable[str]`): methods that may be in one and not in the other, as they cannot run anyway.
    """
    sides = [dict(_flat({name: side.get(name) for name in COMPARED})) for side in (old, new)]
    for side in sides:
        listed = side.get("configuration.methods", [])
        side["configuration.methods"] = [method for method in listed if method not in failed]
    was, now = sides
    differing = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    if differing:
        named = "; ".join(
            f"{name.removeprefix('configuration.')} was {was.get(name)!r}, is {now.get(name)!r}" for name in differing
        )
        raise ValueError(
            f"{path} holds results of another measurement, which this one would be mixed with: {named}. Write to "
            "another file with --out, or remove that one."
        )


def _flat(record: Record, prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
