"""The figures made of the runs: one object a method, data set and temperature, all ratios within the same runs."""

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from hf_ddtree.cli.benchmark.exactness import differing_units, identical
from hf_ddtree.cli.benchmark.intervals import Estimate, ratio_of_medians, ratio_of_sums
from hf_ddtree.cli.benchmark.results import Record
from hf_ddtree.cli.methods import CHAIN, PLAIN, TREE
from hf_ddtree.generation.output import STAGES

Cell = tuple[str, float, str, int | str | None]


def summarise(lines: Sequence[Record]) -> Record:
    """What `hf-ddtree bench` writes and `hf-ddtree report` reads, from the lines of one or several processes.

    Raises:
        ImportError: without `scipy`.
    """
    header = next(line for line in lines if line["kind"] == "header")
    runs = [line for line in lines if line["kind"] == "run"]
    cells: dict[Cell, list[Record]] = {}
    for run in runs:
        cells.setdefault(_cell(run), []).append(run)
    different = differing_units(lines)
    contexts = {name: part.get("context") for name, part in header["configuration"]["data"].items()}
    return {
        **{name: value for name, value in header.items() if name != "kind"},
        "failed": {line["method"]: line["reason"] for line in lines if line["kind"] == "failed"},
        "cells": [
            {
                **dict(zip(("dataset", "temperature", "method", "budget"), cell, strict=True)),
                "context": contexts.get(cell[0]),
                **_figures(mine, cells.get((*cell[:2], PLAIN, None), [])),
                "identical": identical(mine, different),
            }
            for cell, mine in cells.items()
        ],
        "differences": list(different.values()),
    }


def _cell(run: Record) -> Cell:
    return run["dataset"], run["temperature"], run["method"], run["budget"]


def _figures(runs: Sequence[Record], plain: Sequence[Record]) -> Record:
    by_prompt, reference = _by_prompt(runs), _by_prompt(plain)
    shared = [prompt for prompt in by_prompt if prompt in reference]
    decoding = {prompt: _median(_seconds_per_token, by_prompt[prompt]) for prompt in by_prompt}
    whole = {prompt: _median(_whole_seconds_per_token, by_prompt[prompt]) for prompt in by_prompt}
    typical = [value for value in decoding.values() if value is not None]
    first = [run for runs in by_prompt.values() for run in runs[:1]]
    lengths = [length for run in first for length in run["acceptance_lengths"]]
    figures: Record = {
        "prompts": len(by_prompt),
        "runs": len(runs),
        "tokens": sum(len(run["token_ids"]) for run in first),
        "prompt_tokens": median(run["prompt_tokens"] for run in first),
        "tokens_per_second": 1 / median(typical) if typical else None,
        "first_seconds": median(run["first_seconds"] for run in runs),
        "speedup": _ratio(decoding, reference, shared, _seconds_per_token),
        "speedup_whole": _ratio(whole, reference, shared, _whole_seconds_per_token),
        "acceptance_length": _acceptance(first),
        "histogram": dict(sorted(Counter(length - 1 for length in lengths).items())),
        "forwards": sum(run["forwards"] for run in first),
        "peak_bytes": max((run["peak_bytes"] for run in runs if run["peak_bytes"]), default=None),
    }
    return figures | (_rounds(list(map(_middle, by_prompt.values()))) if runs[0]["method"] in (CHAIN, TREE) else {})


def _by_prompt(runs: Sequence[Record]) -> dict[int, list[Record]]:
    """The repeats of each prompt, in order."""
    found: dict[int, list[Record]] = {}
    for run in sorted(runs, key=lambda run: (run["prompt"], run["repeat"])):
        found.setdefault(run["prompt"], []).append(run)
    return found


def _seconds_per_token(run: Record) -> float | None:
    """After the first token, or `None` if that was all."""
    tokens = sum(run["acceptance_lengths"])
    return (run["seconds"] - run["first_seconds"]) / tokens if tokens else None


def _whole_seconds_per_token(run: Record) -> float | None:
    return run["seconds"] / len(run["token_ids"])


def _median(measure: Any, runs: Sequence[Record]) -> float | None:
    values = [value for value in map(measure, runs) if value is not None]
    return median(values) if values else None


def _ratio(
    ours: dict[int, float | None], reference: dict[int, list[Record]], prompts: Sequence[int], measure: Any
) -> Record | None:
    """Plain decoding's seconds a token over ours, over the prompts that both have."""
    pairs = [(_median(measure, reference[prompt]), ours[prompt]) for prompt in prompts]
    whole = [(theirs, mine) for theirs, mine in pairs if theirs is not None and mine is not None]
    return _record(ratio_of_medians(*zip(*whole, strict=True))) if whole else None


def _acceptance(runs: Sequence[Record]) -> Record | None:
    """Tokens a round, the bonus token included; the prefill and its token are no round."""
    counted = [(sum(run["acceptance_lengths"]), len(run["acceptance_lengths"])) for run in runs]
    counted = [(tokens, rounds) for tokens, rounds in counted if rounds]
    return _record(ratio_of_sums(*zip(*counted, strict=True))) if counted else None


def _middle(runs: Sequence[Record]) -> Record:
    """The repeat of median duration, the faster one of two in the middle."""
    return sorted(runs, key=lambda run: run["seconds"])[(len(runs) - 1) // 2]


def _rounds(runs: Sequence[Record]) -> Record:
    """What a round of ours takes on average, in milliseconds by stage, and the nodes it verifies."""
    rounds = sum(len(run["acceptance_lengths"]) for run in runs)
    if not rounds:
        return {"rounds": 0, "stage_ms": None, "nodes_per_round": None}
    stages = {stage: sum(run["stage_seconds"][stage] for run in runs) for stage in STAGES}
    spent = sum(run["seconds"] - run["first_seconds"] for run in runs)
    stages["other"] = max(spent - sum(stages.values()), 0.0)
    return {
        "rounds": rounds,
        "stage_ms": {stage: 1000 * seconds / rounds for stage, seconds in stages.items()},
        "nodes_per_round": sum(run["nodes_verified"] for run in runs) / rounds,
    }


def _record(estimate: Estimate) -> Record:
    return estimate._asdict()
