"""Which texts are plain decoding's own, and which of the others nothing excuses."""

from collections.abc import Sequence

from hf_ddtree.cli.benchmark.plan import Unit
from hf_ddtree.cli.benchmark.results import Record, unit_of, unit_record
from hf_ddtree.cli.measure import first_difference
from hf_ddtree.cli.methods import CHAIN, PLAIN, TREE, matches_plain


def differences(lines: Sequence[Record]) -> list[tuple[Record, int, list[int]]]:
    """Runs whose text should be plain decoding's of the same turn and is not, the first place, and plain's text."""
    runs = [line for line in lines if line["kind"] == "run"]
    plain = {unit_of(line).block: line["token_ids"] for line in runs if line["method"] == PLAIN}
    found = []
    for line in runs:
        expected = plain.get(unit_of(line).block)
        if expected is None or not matches_plain(line["method"], line["temperature"]):
            continue
        place = first_difference(line["token_ids"], expected)
        if place is not None:
            found.append((line, place, expected))
    return found


def differing_units(lines: Sequence[Record]) -> dict[Unit, Record]:
    """Every run whose text should be plain decoding's and is not, with the gap there where it was looked at."""
    gaps = {unit_of(line): line for line in lines if line["kind"] == "gap"}
    found = {}
    for run, place, _ in differences(lines):
        unit = unit_of(run)
        gap = gaps.get(unit, {})
        figures = {"token": place, "gap": gap.get("gap"), "rounding": gap.get("rounding", False)}
        found[unit] = {**unit_record(unit), **figures}
    return found


def identical(runs: Sequence[Record], different: dict[Unit, Record]) -> int | None:
    """Prompts with plain decoding's own text in every repeat; `None` for methods that do not promise it.

    Args:
        runs (`Sequence[dict]`): of one method, data set and temperature.
        different (`dict[Unit, dict]`): of [`differing_units`].
    """
    if not matches_plain(runs[0]["method"], runs[0]["temperature"]):
        return None
    off = {run["prompt"] for run in runs if unit_of(run) in different}
    return len({run["prompt"] for run in runs}) - len(off)


def unexplained(summary: Record) -> list[str]:
    """A sentence for each text of ours that is not plain decoding's where rounding does not explain it."""
    sentences = []
    exact = summary["configuration"]["dtype"] == "float32"
    for place in summary["differences"]:
        sampled = place["temperature"] > 0
        # In half precision sampled texts part by rounding, and no gap between two logits tells it.
        if place["method"] not in (CHAIN, TREE) or place["rounding"] or (sampled and not exact):
            continue
        where = f"new token {place['token']} of prompt {place['prompt']} of {place['dataset']}"
        gap = "" if place["gap"] is None else f", where the target's two best logits are {place['gap']:.1e} apart"
        budget = "" if place["budget"] is None else f" {place['budget']}"
        sentences.append(
            f"{place['method']}{budget} differs from plain decoding at temperature {place['temperature']:g}, first at "
            f"{where}{gap}."
        )
    return sentences
