"""Rounds recorded from real texts, replayed at other tree sizes on a machine that is computed, not measured.

What a drafter proposed and the target accepted of a large tree tells what any smaller tree of the same scorer would
have given: its nodes are the most probable ones of the large tree. Each drafted round takes the next recorded one, at
every size, so all methods see the same rounds; plain rounds pass over as many tokens as they emit. The text is taken
round by round from its beginning when it has ended.
"""

import math
import random
from dataclasses import dataclass
from typing import Any

import torch

from hf_ddtree.configuration import AUTO_START, LARGEST_AUTO
from hf_ddtree.generation.acceptance import Walk
from hf_ddtree.generation.budget import BudgetController
from hf_ddtree.generation.calibration import Calibration
from hf_ddtree.generation.cost_model import CostModel
from hf_ddtree.generation.sizing import AutoSize
from hf_ddtree.tree import DraftTree

#: Relative spread of the times, and how often a round takes up to three times as long.
NOISE, BURSTS = 0.03, 0.01


@dataclass(frozen=True)
class Curve:
    """Seconds of a forward and a drafter pass.

    Args:
        floor (`float`): milliseconds of any forward: its weights are read, and its kernels launched.
        row (`float`): milliseconds of a row, where these are more.
        attention (`float`): milliseconds of 1000 tokens of context and 1000 rows.
        other (`float`): milliseconds of walk and commit.
        draft (`float`): milliseconds of a drafter pass and its tree.
    """

    floor: float
    row: float
    attention: float
    other: float
    draft: float

    def forward(self, rows: int, context: int) -> float:
        attention = self.attention * (context + 500) / 1000 * (rows + 40) / 1000
        return (max(self.floor, self.row * rows) + attention + self.other) / 1000


#: Qwen3-8B in bf16 on an H200, computed: 3.52 ms to read the weights, 15.1 GFLOP a row, so that 513 rows take 10.2 ms
#: behind 512 tokens and 22.6 ms behind 32k. With CUDA graphs, and launched one by one at 10 ms of host time a forward.
CURVES = {
    "h200-8b": Curve(floor=3.52, row=0.01914, attention=0.69, other=0.5, draft=0.9),
    "h200-8b-eager": Curve(floor=10.0, row=0.01914, attention=0.69, other=0.8, draft=1.9),
}


@dataclass(frozen=True)
class Recorded:
    """One round: its tree and the tokens that it gave, bonus token included."""

    tree: DraftTree
    tokens: list[int]


def recorded(output: Any, prompt_length: int) -> list[Recorded]:
    """The rounds of a generate under `output_trees`; the token before the first is the prefill's."""
    rounds, position = [], prompt_length + 1
    for verified in output.speculation.trees:
        length = len(verified.path)
        rounds.append(Recorded(verified.tree, output.sequences[0, position : position + length].tolist()))
        position += length
    return rounds


class Replay:
    """Runs one text's rounds.

    Args:
        rounds (`list[Recorded]`): of the text.
        context (`int`): tokens of its prompt.
        curve (`Curve`): what rounds cost.
        seed (`int`): of the noise.
    """

    def __init__(self, rounds: list[Recorded], context: int, curve: Curve, seed: int):
        self.rounds, self.context, self.curve = rounds, context, curve
        self.random = random.Random(seed)
        self.sizes: list[int] = []
        self._next, self._passed = 0, 0

    def _took(self, seconds: float) -> float:
        burst = self.random.uniform(1, 3) if self.random.random() < BURSTS else 1.0
        return seconds * burst * math.exp(self.random.gauss(0, NOISE))

    def _drafted(self) -> Recorded:
        round_ = self.rounds[self._next % len(self.rounds)]
        self._next, self._passed = self._next + 1, 0
        return round_

    def _plain(self) -> None:
        self._passed += 1
        if self._passed >= len(self.rounds[self._next % len(self.rounds)].tokens):
            self._next, self._passed = self._next + 1, 0

    def fixed(self, budget: int, tokens: int) -> float:
        """Seconds until `tokens` are there, at one size."""
        emitted, seconds = 0, 0.0
        while emitted < tokens:
            behind = self.context + emitted
            seconds += self._took(self.curve.forward(budget + 1, behind))
            if budget:
                drafted = self._drafted()
                emitted += len(_walk(drafted.tree.cut(budget), drafted.tokens).path)
                seconds += self._took(self.curve.draft / 1000)
            else:
                self._plain()
                emitted += 1
        return seconds * tokens / emitted

    def auto(self, size: AutoSize, tokens: int) -> float:
        """The same, at sizes chosen round by round."""
        emitted, seconds = 0, 0.0
        size.controller.begin()
        while emitted < tokens:
            behind = self.context + emitted
            nodes = size.nodes(behind, depth=15)
            stages = {}
            if nodes:
                drafted = self._drafted()
                verified = size.cut(drafted.tree.cut(nodes))
                walk = _walk(verified, drafted.tokens)
                stages["draft"] = self._took(self.curve.draft / 1000)
            else:
                self._plain()
                verified = DraftTree.root_only()
                walk = _walk(verified, [0])
            stages["verify"] = self._took(self.curve.forward(len(verified), behind))
            size.observe(walk)
            size.observe_seconds(stages)
            self.sizes.append(verified.num_drafted)
            emitted, seconds = emitted + len(walk.path), seconds + sum(stages.values())
        return seconds * tokens / emitted


def fresh_size(depth: int) -> AutoSize:
    """The automatic sizing of a pair that nothing is known of, on an accelerator."""
    largest = LARGEST_AUTO["accelerator"]
    controller = BudgetController(CostModel(), AUTO_START["accelerator"], largest)
    return AutoSize(controller, Calibration(depth), largest)


def _walk(tree: DraftTree, tokens: list[int]) -> Walk:
    node, path = 0, [0]
    for token in tokens:
        child = tree.children[node].get(token)
        if child is None or len(path) == len(tokens):
            break
        path.append(child)
        node = child
    return Walk(torch.empty(1, 0, dtype=torch.long), path, tokens[len(path) - 1], False, tree)
