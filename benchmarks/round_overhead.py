"""What a round of tree decoding costs beside its two model forwards, stage by stage, at several context lengths.

    python benchmarks/round_overhead.py --target TARGET --drafter DRAFTER --prompts prompts.jsonl

The forwards are the target's over the tree and the drafter's with its head; all else of a round is the rest, masks and
cache growth inside a forward included. Times are medians over the rounds of one generate for each context length. The
last rounds are not timed: their operations are counted, with the bytes that they write, which no other program on the
machine can change. The exit code is 1 where the rest takes more of a round than `--limit`.
"""

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_ddtree import DDTreeConfig, DFlashModel, cache
from hf_ddtree.cache import layers
from hf_ddtree.compat import ALL_MASK_ATTENTION_FUNCTIONS
from hf_ddtree.generation import acceptance, arguments, candidate_generator, decoding, verification
from hf_ddtree.round import TapCollector, TreeRound

FORWARDS = ("target forward", "drafter forward")
#: Rounds whose operations are counted, and rounds before the first that is timed.
COUNTED, WARM_UP = 3, 2


class _Enough(Exception):
    """Ends a generate whose rounds have been measured."""


class Stages(TorchDispatchMode):
    """Charges time to the innermost open stage of a round, and as a dispatch mode operations and bytes written."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self.clock = clock
        self.open: list[str] = []
        self.since = 0.0
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self.rounds: list[Counter[str]] = []

    def switch(self) -> None:
        now = self.clock()
        if self.open:
            self.seconds[self.open[-1]] += now - self.since
        self.since = now

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A stage of a round; outside of rounds, as in the prefill, nothing is charged."""
        self.switch()
        self.open.append(name)
        try:
            yield
        finally:
            self.switch()
            self.open.pop()

    def charged(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.open:
                return function(*args, **kwargs)
            with self.stage(name):
                return function(*args, **kwargs)

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls[self.open[-1]] += 1
        given = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (
                func._schema.is_mutable or tensor.untyped_storage().data_ptr() not in given
            ):
                self.written[self.open[-1]] += tensor.numel() * tensor.element_size()
        return result


@contextmanager
def watched(stages: Stages, target: Any, drafter: Any, timed: int) -> Iterator[None]:
    """Inside, rounds report to `stages`: those after the first `timed` to its counts, the others to its times."""
    session_round = decoding._Session._round

    def one_round(*args: Any) -> Any:
        counting = len(stages.rounds) >= timed
        stages.seconds = Counter()
        with stages.stage("loop"):
            if counting:
                with stages:
                    walk = session_round(*args)
            else:
                walk = session_round(*args)
        stages.rounds.append(stages.seconds)
        if len(stages.rounds) == timed + COUNTED:
            raise _Enough
        return walk

    generator, io = candidate_generator.DDTreeCandidateGenerator, candidate_generator.TargetIO
    context, verifier = candidate_generator.DrafterContext, verification.TreeVerifier
    places: list[tuple[Any, str, str]] = [
        (target, "forward", "target forward"),
        (drafter, "forward", "drafter forward"),
        (io, "logits", "drafter forward"),
        (io, "embed", "embedding"),
        (generator, "draft_states", "drafter's inputs"),
        (type(drafter), "_mask", "drafter's mask"),
        (context, "begin", "drafter's cache"),
        (context, "commit", "drafter's cache"),
        (generator, "scorer", "ranking"),
        (generator, "build", "build"),
        (verifier, "__call__", "verifier"),
        (verifier, "_next_inputs", "target's inputs"),
        (TreeRound, "packed_mask", "tree mask"),
        (layers._TreeLayer, "_reserve", "cache growth"),
        (acceptance.GreedyWalk, "__call__", "walk"),
        (cache, "begin", "commit"),
        (cache, "prune", "commit"),
        (TapCollector, "taps", "taps"),
        (context, "unread", "taps"),
        (arguments.SequenceArguments, "extend", "kwargs"),
        (arguments.SequenceArguments, "read", "kwargs"),
    ]
    with ExitStack() as stack:
        for owner, name, stage in places:
            stack.enter_context(patch.object(owner, name, stages.charged(stage, getattr(owner, name))))
        mask = stages.charged("tree mask", ALL_MASK_ATTENTION_FUNCTIONS["ddtree"])
        stack.enter_context(patch.dict(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, {"ddtree": mask}))
        stack.enter_context(patch.object(decoding._Session, "_round", one_round))
        yield


def measure(
    target: Any, drafter: Any, ids: torch.Tensor, budget: int, rounds: int, clock: Any = time.perf_counter
) -> dict[str, Any]:
    """One generate behind the prompt `ids`: milliseconds, operations and bytes of a round by stage."""
    stages, timed = Stages(clock), WARM_UP + rounds
    new = (timed + COUNTED) * drafter.config.block_size
    config = DDTreeConfig(budget=budget, max_new_tokens=new, do_sample=False)
    with watched(stages, target, drafter, timed), suppress(_Enough):
        target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=drafter, generation_config=config)
    samples = stages.rounds[WARM_UP:timed]
    names = sorted({name for sample in samples for name in sample})
    milliseconds = {name: 1000 * statistics.median(sample[name] for sample in samples) for name in names}
    share = statistics.median(1 - sum(sample[name] for name in FORWARDS) / sum(sample.values()) for sample in samples)
    return {
        "context": ids.shape[1],
        "budget": budget,
        "rounds": len(samples),
        "share": share,
        "round": statistics.median(1000 * sum(sample.values()) for sample in samples),
        "milliseconds": milliseconds,
        "calls": {name: stages.calls[name] / COUNTED for name in names},
        "kilobytes": {name: stages.written[name] / COUNTED / 1024 for name in names},
    }


def table(reports: list[dict[str, Any]]) -> str:
    """Milliseconds, operations and kilobytes written of each stage, a column for each context length."""
    stages = list(FORWARDS) + sorted({name for report in reports for name in report["milliseconds"]} - set(FORWARDS))
    lines = ["| stage | " + " | ".join(f"{report['context']} tokens" for report in reports) + " |"]
    lines.append("|---" * (len(reports) + 1) + "|")

    def cell(report: dict[str, Any], names: list[str]) -> str:
        milliseconds, calls, kilobytes = (
            sum(report[kind].get(name, 0.0) for name in names) for kind in ("milliseconds", "calls", "kilobytes")
        )
        return f"{milliseconds:.2f} ms, {calls:.0f} operations, {kilobytes:.0f} KiB"

    for stage in stages:
        lines.append(f"| {stage} | " + " | ".join(cell(report, [stage]) for report in reports) + " |")
    rest = stages[len(FORWARDS) :]
    lines.append("| **rest** | " + " | ".join(cell(report, rest) for report in reports) + " |")
    lines.append("| **share** | " + " | ".join(f"{100 * report['share']:.1f} %" for report in reports) + " |")
    return "\n".join(lines)


def prompt(tokenizer: Any, path: Path, length: int) -> torch.Tensor:
    """The first `length` tokens of the prompts in `path`, one after the other, repeated if they are too few."""
    text = "\n\n".join(json.loads(line)["prompt"] for line in path.read_text().splitlines())
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    return ids.repeat(1, -(-length // ids.shape[1]))[:, :length]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", type=Path, required=True, help='JSON lines of {"prompt": ...}')
    parser.add_argument("--context", type=int, nargs="+", default=[512, 2000, 8000])
    parser.add_argument("--budget", type=int, default=63)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--cpu-time", action="store_true", help="time of the process, for one thread on a machine that is busy"
    )
    parser.add_argument("--limit", type=float, default=0.05, help="the rest's share of a round at most")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=dtype).eval()
    target.generation_config.eos_token_id = None
    drafter = DFlashModel.from_pretrained(options.drafter, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    clock = time.process_time if options.cpu_time else time.perf_counter
    reports = [
        measure(target, drafter, prompt(tokenizer, options.prompts, length), options.budget, options.rounds, clock)
        for length in options.context
    ]
    print(f"torch {torch.__version__}, {options.threads} threads, {options.dtype}, budget {options.budget}")
    print(table(reports))
    if options.json is not None:
        options.json.write_text(json.dumps(reports, indent=2))
    return int(any(report["share"] > options.limit for report in reports))


if __name__ == "__main__":
    sys.exit(main())
