"""The first line of a file of results: what is measured, with what, on what."""

import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime

from hf_ddtree.cli.benchmark.data import Encoded, digest
from hf_ddtree.cli.benchmark.machine import commit, fingerprint, load, machine, versions
from hf_ddtree.cli.benchmark.plan import Grid
from hf_ddtree.cli.benchmark.results import Record
from hf_ddtree.cli.pair import Pair
from hf_ddtree.compat import attention_implementation


def header_of(
    pair: Pair, data: Sequence[Encoded], grid: Grid, max_new_tokens: int, seed: int, processes: int
) -> Record:
    """Everything that a figure depends on, and which command asked for it."""
    target, drafter = pair.target, pair.drafter
    parts = {part.name: {"prompts": len(part.prompts), "context": part.context} for part in data}
    configuration: Record = {
        "target": fingerprint(target),
        "drafter": fingerprint(drafter),
        "dtype": str(target.dtype).removeprefix("torch."),
        "drafter_dtype": str(drafter.dtype).removeprefix("torch."),
        "attention": attention_implementation(target.config),
        "methods": [method.label for method in grid.methods],
        "temperatures": list(grid.temperatures),
        "repeats": grid.repeats,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "processes": processes,
        "prompts": digest(data),
        "data": parts,
    }
    return {
        "command": shlex.join(["hf-ddtree", *sys.argv[1:]]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "load": load(),
        "commit": commit(),
        "versions": versions(),
        "machine": machine(target.device),
        "configuration": configuration,
    }
