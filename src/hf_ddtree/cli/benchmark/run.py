"""Running the grid: warm-up, the timed runs, and a look at the places where a text differs from plain decoding's."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_ddtree.cli.benchmark.data import Encoded
from hf_ddtree.cli.benchmark.exactness import differences
from hf_ddtree.cli.benchmark.machine import forget_peak, peak_memory
from hf_ddtree.cli.benchmark.plan import Grid, Method, Unit
from hf_ddtree.cli.benchmark.results import Record, Results, unit_of, unit_record
from hf_ddtree.cli.comparison import top_two_gap
from hf_ddtree.cli.console import with_progress
from hf_ddtree.cli.measure import Run, generate
from hf_ddtree.cli.methods import CHAIN, COMPILED, PLAIN, TREE, strategy
from hf_ddtree.cli.pair import Pair
from hf_ddtree.cli.rounds import RoundCounter, TokenCounter
from hf_ddtree.configuration import AUTO

WARM_UP_TOKENS = 16


@dataclass
class Bench:
    """A measurement.

    Args:
        pair (`Pair`): target and drafter.
        data (`Sequence[Encoded]`): its prompts.
        grid (`Grid`): its combinations.
        results (`Results`): where it is kept.
        max_new_tokens (`int`): tokens of a run at most.
        seed (`int`): sampling of prompt `n` begins with seed `seed + n`, for every method and repeat.
        rank, ranks (`int`): this process and how many share the prompts.
    """

    pair: Pair
    data: Sequence[Encoded]
    grid: Grid
    results: Results
    max_new_tokens: int
    seed: int = 0
    rank: int = 0
    ranks: int = 1
    prompts: dict[str, list[list[int]]] = field(init=False)

    def __post_init__(self) -> None:
        self.prompts = {part.name: part.prompts for part in self.data}

    def units(self) -> list[Unit]:
        """This process's runs, those of methods that cannot run here left out."""
        failed = self.results.failed()
        return [unit for unit in self.grid.units(self.rank, self.ranks) if unit.method.name not in failed]

    def warm_up(self) -> None:
        """Runs each method once; what belongs to Transformers and cannot run here is kept as failed, with the reason.

        Raises:
            ValueError, RuntimeError: if plain decoding or a method of ours cannot run.
        """
        for method in self.grid.methods:
            if method.name in self.results.failed():
                continue
            try:
                self._warm_up(method)
            except (RuntimeError, ValueError, OSError, ImportError) as error:
                if method.name in (PLAIN, CHAIN, TREE):
                    raise
                reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
                self.results.append({"kind": "failed", "method": method.name, "reason": reason})

    def _warm_up(self, method: Method) -> None:
        texts = [prompt for part in self.data for prompt in part.prompts]
        if method.name == COMPILED:
            # The static cache keeps the size of its longest call, and another size compiles again.
            self._generate(method, max(texts, key=len), 0.0, self.max_new_tokens)
            self._generate(method, texts[0], 0.0, self.max_new_tokens)
        else:
            self._generate(method, texts[0], 0.0, min(WARM_UP_TOKENS, self.max_new_tokens))

    def measure(self, shown: bool = True) -> None:
        """Every run that the results lack, under a progress bar."""
        units, finished = self.units(), self.results.finished()
        left = [unit for unit in units if unit not in finished]
        for unit in with_progress(left, len(units) - len(left), _describe, shown):
            self.results.add_run(unit, self._figures(unit))

    def _figures(self, unit: Unit) -> Record:
        prompt = self.prompts[unit.dataset][unit.prompt]
        torch.manual_seed(self.seed + unit.prompt)
        forget_peak(self.pair.target.device)
        run = self._generate(unit.method, prompt, unit.temperature, self.max_new_tokens)
        figures: Record = {
            "prompt_tokens": len(prompt),
            "seconds": run.seconds,
            "first_seconds": run.first_seconds,
            "forwards": run.forwards,
            "acceptance_lengths": run.acceptance_lengths,
            "peak_bytes": peak_memory(self.pair.target.device),
            "token_ids": run.tokens,
        }
        if unit.method.name in (CHAIN, TREE):
            figures |= {"nodes_verified": run.stats.nodes_verified, "stage_seconds": run.stats.seconds}
            if unit.method.budget == AUTO:
                figures["tree_sizes"] = run.stats.tree_sizes
        return figures

    def _generate(self, method: Method, prompt: list[int], temperature: float, max_new_tokens: int) -> Run:
        input_ids = torch.tensor([prompt], device=self.pair.target.device)
        inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
        if temperature > 0:
            # Temperature alone, as in the paper, whatever else the model's own config asks for.
            settings |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        config, arguments = strategy(method.name, self.pair, settings, method.budget)
        counter = TokenCounter() if method.name == COMPILED else RoundCounter()
        return generate(self.pair, inputs, config, arguments, counter)

    def look_at_differences(self) -> None:
        """Keeps, for each greedy text that is not plain decoding's, how close the choice was where it left it."""
        seen = {unit_of(line) for line in self.results.lines if line["kind"] == "gap"}
        for line, place, expected in differences(self.results.lines):
            unit = unit_of(line)
            if unit in seen or unit.temperature > 0:
                continue
            gap = top_two_gap(self.pair.target, self.prompts[unit.dataset][unit.prompt] + expected[:place])
            figures = {"token": place, "gap": gap.size, "rounding": gap.rounding}
            self.results.append({"kind": "gap", **unit_record(unit), **figures})


def _describe(unit: Unit) -> str:
    return f"{unit.dataset} {unit.prompt + 1}, {unit.method.label}"
