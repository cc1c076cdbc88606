"""Rounds without models: trees whose nodes come true as often as they say, on a machine that costs what it is told."""

import random
from collections.abc import Callable

import torch

from hf_ddtree.generation.budget import BudgetController
from hf_ddtree.generation.calibration import Calibration, expected_tokens
from hf_ddtree.generation.cost_model import SIZES, CostModel
from hf_ddtree.tree import DraftTree, build_draft_tree

DEPTH, VOCABULARY, CONTEXT = 8, 40, 300

#: Seconds of a forward over so many rows.
Curve = Callable[[int], float]


def flat(rows: int) -> float:
    """A GPU: memory bound up to 256 rows, then in proportion."""
    return 0.010 * max(1.0, rows / 256)


def steep(rows: int) -> float:
    """Two CPU cores."""
    return 0.020 + 0.004 * rows


class Drafter:
    """Gives marginals by position, and the tokens that come, by truth.

    Args:
        sure (`float`): share of the most probable token at each position, halved from one rank to the next.
        truth (`float`, *optional*): how often that token comes; by default as often as it says.
    """

    def __init__(self, sure: float, truth: float | None = None, seed: int = 0):
        self.sure, self.truth, self.random = sure, sure if truth is None else truth, random.Random(seed)
        rest, shares = 1.0, []
        for _ in range(VOCABULARY):
            shares.append(rest * sure)
            rest *= 1 - sure
        self.shares = [share / sum(shares) for share in shares]
        self._trees: dict[int, DraftTree] = {}

    def tree(self, nodes: int) -> DraftTree:
        if nodes not in self._trees:
            self._trees[nodes] = build_draft_tree(torch.tensor([self.shares] * DEPTH).log(), nodes, anchor=0)
        return self._trees[nodes]

    def tokens(self) -> list[int]:
        """What the target chooses: rank 0 as often as is true, other ranks in the drafter's proportions."""
        ratio = (1 - self.truth) / (1 - self.shares[0])
        weights = [self.truth, *(ratio * share for share in self.shares[1:])]
        return self.random.choices(range(VOCABULARY), weights, k=DEPTH + 1)


def walked(tree: DraftTree, tokens: list[int]) -> list[int]:
    """The tokens that a round over `tree` emits."""
    node, emitted = 0, []
    for token in tokens:
        emitted.append(token)
        child = tree.children[node].get(token)
        if child is None:
            break
        node = child
    return emitted


class Machine:
    """Runs rounds of a controller, or of fixed sizes, and keeps what they gave and took.

    Args:
        curve (`Callable`): seconds of a forward.
        drafting (`float`): seconds of a drafter pass.
        noise (`float`): relative, of each time; one round in fifty takes three times as long.
    """

    def __init__(self, curve: Curve, drafting: float, noise: float = 0.05, seed: int = 0):
        self.curve, self.drafting, self.noise, self.random = curve, drafting, noise, random.Random(seed)
        self.tokens, self.seconds, self.sizes, self.gave = 0, 0.0, list[int](), list[int]()

    def took(self, seconds: float) -> float:
        burst = 3.0 if self.noise and self.random.random() < 0.02 else 1.0
        return seconds * burst * max(0.5, self.random.gauss(1.0, self.noise))

    def count(self, size: int, emitted: int, seconds: float) -> None:
        self.tokens += emitted
        self.seconds += seconds
        self.sizes.append(size)
        self.gave.append(emitted)

    def fixed(self, drafter: Drafter, size: int, rounds: int) -> float:
        """Tokens a second at one size."""
        tree = drafter.tree(size) if size else None
        for _ in range(rounds):
            emitted = len(walked(tree, drafter.tokens())) if tree is not None else 1
            self.count(size, emitted, self.took(self.curve(size + 1)) + (self.took(self.drafting) if size else 0))
        return self.tokens / self.seconds

    def run(self, controller: BudgetController, calibration: Calibration, drafter: Drafter, tokens: int) -> float:
        """Tokens a second until `tokens` more are there."""
        start = self.tokens, self.seconds
        while self.tokens < start[0] + tokens:
            plan = controller.plan(CONTEXT)
            drafting = None
            if plan.drafts:
                tree = drafter.tree(plan.nodes)
                expected = expected_tokens(tree, calibration.probabilities(tree), SIZES)
                size = controller.size(plan, CONTEXT, expected)
                emitted = walked(drafter.tree(size), drafter.tokens())
                calibration.observe(tree, emitted)
                drafting = self.took(self.drafting)
            else:
                size, emitted = 0, [0]
            verifying = self.took(self.curve(size + 1))
            controller.observe(plan, CONTEXT, size, len(emitted))
            controller.observe_seconds(CONTEXT, size, drafting, verifying)
            self.count(size, len(emitted), verifying + (drafting or 0.0))
        return (self.tokens - start[0]) / (self.seconds - start[1])


def controller(start: int = 7, largest: int = 1023) -> tuple[BudgetController, Calibration]:
    return BudgetController(CostModel(), start, largest), Calibration(DEPTH)
