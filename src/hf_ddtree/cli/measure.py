"""The four ways to generate that the demo compares, run and added up."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig

from hf_ddtree import DDTreeConfig, SpeculationStats, record
from hf_ddtree.cli.loops import lengths_outside, loop_start
from hf_ddtree.cli.pair import Pair
from hf_ddtree.cli.rounds import RoundCounter
from hf_ddtree.generation.output import STAGES

MODES = ("plain", "lookup", "chain", "tree")
LOOKUP_TOKENS = 10


@dataclass
class Run:
    """One generate."""

    tokens: list[int]
    seconds: float
    forwards: int
    acceptance_lengths: list[int]
    stats: SpeculationStats


@dataclass
class Runner:
    """Generates greedily from a prompt in one of [`MODES`].

    Args:
        pair (`Pair`): what to generate with.
        max_new_tokens (`int`): where a run ends at the latest.
        budget (`int`, *optional*): the tree's.
    """

    pair: Pair
    max_new_tokens: int
    budget: int | None = None

    def run(self, mode: str, prompt: str, streamer: RoundCounter | None = None, **settings: Any) -> Run:
        """`settings` are further fields of the generation config."""
        counter = streamer or RoundCounter()
        inputs = self.pair.tokenizer(prompt, return_tensors="pt").to(self.pair.target.device)
        settings = {"max_new_tokens": self.max_new_tokens, "do_sample": False, **settings}
        config, assistant = self._strategy(mode, settings)
        with counter.watching(self.pair.target), record() as stats:
            start = time.perf_counter()
            output = self.pair.target.generate(**inputs, generation_config=config, streamer=counter, **assistant)
            if output.is_cuda:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
        tokens = output[0, inputs["input_ids"].shape[1] :].tolist()
        return Run(tokens, seconds, counter.forwards, counter.acceptance_lengths, stats)

    def _strategy(self, mode: str, settings: dict[str, Any]) -> tuple[GenerationConfig, dict[str, Any]]:
        if mode == "plain":
            return GenerationConfig(**settings), {}
        if mode == "lookup":
            return GenerationConfig(prompt_lookup_num_tokens=LOOKUP_TOKENS, **settings), {}
        drafter = {"assistant_model": self.pair.drafter}
        if mode == "chain":
            return GenerationConfig(speculation_type="dflash", **settings), drafter
        return DDTreeConfig(budget=self.budget, **settings), drafter


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
                if run.tokens != reference.tokens:
                    pairs = zip(run.tokens, reference.tokens, strict=False)
                    shorter = min(len(run.tokens), len(reference.tokens))
                    return number, next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), shorter)
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
