"""The four ways to generate that the demo compares, run and added up."""

import time
from dataclasses import dataclass, field
from typing import Any

from transformers import GenerationConfig

from hf_ddtree import SpeculationStats, record
from hf_ddtree.cli.loops import lengths_outside, loop_start
from hf_ddtree.cli.methods import LOOKUP, NATIVE, PLAIN, TREE, strategy, synchronize
from hf_ddtree.cli.pair import Pair
from hf_ddtree.cli.rounds import RoundCounter
from hf_ddtree.generation.output import STAGES

#: The demo's modes; its chain is the one that Transformers has.
MODES = ("plain", "lookup", "chain", "tree")
_METHODS = {"plain": PLAIN, "lookup": LOOKUP, "chain": NATIVE, "tree": TREE}


@dataclass
class Run:
    """One generate.

    Args:
        tokens (`list[int]`): what it emitted.
        seconds (`float`): the whole call.
        first_seconds (`float`): of those, until the first token or, with a draft made of the prompt, the first tokens.
        forwards (`int`): of the target.
        acceptance_lengths (`list[int]`): tokens of each round; the prefill is none.
        stats (`SpeculationStats`): of our own methods, empty for the others.
    """

    tokens: list[int]
    seconds: float
    first_seconds: float
    forwards: int
    acceptance_lengths: list[int]
    stats: SpeculationStats


def generate(
    pair: Pair, inputs: Any, config: GenerationConfig, arguments: dict[str, Any], counter: RoundCounter
) -> Run:
    """One timed call of the target's `generate`.

    Args:
        pair (`Pair`): what to generate with.
        inputs (`dict`): `input_ids` of shape `(1, length)` and their `attention_mask`, on the target's device.
        config (`GenerationConfig`), arguments (`dict`): of [`~hf_ddtree.cli.methods.strategy`].
        counter (`RoundCounter`): the streamer.
    """
    device = pair.target.device
    with counter.watching(pair.target), record() as stats:
        synchronize(device)
        start = time.perf_counter()
        output = pair.target.generate(**inputs, generation_config=config, streamer=counter, **arguments)
        synchronize(device)
        end = time.perf_counter()
    tokens = output[0, inputs["input_ids"].shape[1] :].tolist()
    first = counter.first_at - start
    return Run(tokens, end - start, first, counter.forwards, counter.acceptance_lengths, stats)


@dataclass
class Runner:
    """Generates greedily from a prompt in one of [`MODES`].

    Args:
        pair (`Pair`): what to generate with.
        max_new_tokens (`int`): where a run ends at the latest.
        budget (`int` or `str`, *optional*): the tree's.
    """

    pair: Pair
    max_new_tokens: int
    budget: int | str | None = None

    def run(self, mode: str, prompt: str, streamer: RoundCounter | None = None, **settings: Any) -> Run:
        """`settings` are further fields of the generation config."""
        inputs = self.pair.tokenizer(prompt, return_tensors="pt").to(self.pair.target.device)
        settings = {"max_new_tokens": self.max_new_tokens, "do_sample": False, **settings}
        config, arguments = strategy(_METHODS[mode], self.pair, settings, self.budget)
        return generate(self.pair, inputs, config, arguments, streamer or RoundCounter())


def first_difference(tokens: list[int], expected: list[int]) -> int | None:
    """The first place where two texts differ, the shorter one's end included; `None` where they are equal."""
    if tokens == expected:
        return None
    pairs = zip(tokens, expected, strict=False)
    return next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(tokens), len(expected)))


@dataclass
class Tally:
    """A mode's runs, several for each prompt; a prompt's time is its best run's."""

    mode: str
    runs: list[list[Run]] = field(default_factory=list)

    def add(self, prompt: int, run: Run) -> None:
        """`prompt` is the number of a prompt seen before, or the next one."""
        if prompt == len(self.runs):
            self.runs.append([])
        self.runs[prompt].append(run)

    @property
    def tokens(self) -> int:
        return sum(len(runs[0].tokens) for runs in self.runs)

    @property
    def seconds(self) -> float:
        return sum(min(run.seconds for run in runs) for runs in self.runs)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def forwards(self) -> int:
        return sum(runs[0].forwards for runs in self.runs)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a round, the target's own included; the prefill and its token are no round."""
        return _mean([length for runs in self.runs for length in runs[0].acceptance_lengths]) or 1.0

    def mean_outside_loops(self, plain: "Tally") -> float | None:
        """The same over the rounds that begin before the text starts to loop; `None` if there are none."""
        lengths: list[int] = []
        for (run, *_), (reference, *_) in zip(self.runs, plain.runs, strict=True):
            prefilled = len(run.tokens) - sum(run.acceptance_lengths)
            lengths += lengths_outside(run.acceptance_lengths, prefilled, loop_start(reference.tokens))
        return _mean(lengths)

    def difference(self, plain: "Tally") -> tuple[int, int] | None:
        """The first prompt, and the place in its text, where any run differs from plain decoding."""
        for number, (runs, (reference, *_)) in enumerate(zip(self.runs, plain.runs, strict=True)):
            for run in runs:
                place = first_difference(run.tokens, reference.tokens)
                if place is not None:
                    return number, place
        return None

    @property
    def rounds(self) -> int:
        """Rounds of every run, which the stages' seconds are the sum over."""
        return sum(run.stats.rounds for runs in self.runs for run in runs)

    @property
    def stage_seconds(self) -> dict[str, float]:
        """Seconds of every run by stage, the prefill first and what no stage accounts for last."""
        runs = [run for runs in self.runs for run in runs]
        seconds = {"prefill": sum(run.stats.prefill_seconds for run in runs)}
        seconds |= {stage: sum(run.stats.seconds[stage] for run in runs) for stage in STAGES}
        return seconds | {"other": sum(run.seconds for run in runs) - sum(seconds.values())}


def _mean(lengths: list[int]) -> float | None:
    return sum(lengths) / len(lengths) if lengths else None
