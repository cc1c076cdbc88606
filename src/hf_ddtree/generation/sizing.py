"""How large each round's tree is: as large as a number says, or as large as pays."""

import weakref
from collections import deque
from typing import Any, Protocol

import torch

from hf_ddtree.configuration import AUTO_START, LARGEST_AUTO
from hf_ddtree.generation.acceptance import Walk
from hf_ddtree.generation.budget import BudgetController, Plan
from hf_ddtree.generation.calibration import Calibration, expected_tokens
from hf_ddtree.generation.cost_model import SIZES, CostModel
from hf_ddtree.tree import DeviceTree, DraftTree

#: Stages whose seconds are those of drafting.
DRAFTING = ("draft", "build")

#: Rounds of a pair that all teach what is accepted, and the share of later ones that do: what is known well changes
#: slowly, and each lesson costs a tenth of a millisecond or two.
WELL_KNOWN, THEN_EVERY = 96, 4

#: Plain rounds that all teach what one costs, before one in `THEN_EVERY` does.
PLAIN_KNOWN = 16


class Sizing(Protocol):
    """Asked in each round for `nodes`, if some are drafted to `cut` them, and told what came of it."""

    #: Nodes of a tree at most.
    largest: int

    def nodes(self, context: int, depth: int) -> int:
        """Nodes of the tree to draft behind `context` tokens, no deeper than `depth`; 0 to run no drafter."""
        ...

    def cut(self, tree: DraftTree | DeviceTree) -> DraftTree | DeviceTree:
        """What to verify of the drafted tree."""
        ...

    def observe(self, walk: Walk) -> None:
        """What the round verified, which may be another process's tree, and what it emitted."""
        ...

    def observe_seconds(self, stages: dict[str, float]) -> None:
        """The stages of the earliest round whose times have not been told yet."""
        ...


class FixedSize:
    """A budget given by number.

    Args:
        largest (`int`): nodes of every tree, the root not counted.
    """

    def __init__(self, largest: int):
        self.largest = largest

    def nodes(self, context: int, depth: int) -> int:
        return self.largest if depth > 0 else 0

    def cut(self, tree: DraftTree | DeviceTree) -> DraftTree | DeviceTree:
        return tree

    def observe(self, walk: Walk) -> None:
        pass

    def observe_seconds(self, stages: dict[str, float]) -> None:
        pass


class AutoSize:
    """`budget="auto"` in one generate.

    Args:
        controller (`BudgetController`), calibration (`Calibration`): what is known of this pair.
        largest (`int`): nodes of a tree at most.
        agreed (`bool`): whether the tree that is verified may be another process's.
    """

    def __init__(self, controller: BudgetController, calibration: Calibration, largest: int, agreed: bool = False):
        self.controller, self.calibration, self.largest, self.agreed = controller, calibration, largest, agreed
        self._context, self._plan = 0, Plan(drafts=False)
        self._drafted: DraftTree | None = None
        self._turn = self._plain = 0
        # Rounds whose times are yet to come: context, nodes, whether the drafter ran.
        self._untimed: deque[tuple[int, int, bool]] = deque()
        controller.begin()

    def nodes(self, context: int, depth: int) -> int:
        self._context, self._drafted = context, None
        self._plan = self.controller.plan(context, self.largest if depth > 0 else 0)
        return self._plan.nodes

    def cut(self, tree: DraftTree | DeviceTree) -> DraftTree | DeviceTree:
        # The choice is made on the host: on an accelerator one more wait than a fixed budget's round has.
        tree = self._drafted = tree.on_host()
        expected = expected_tokens(tree, self.calibration.probabilities(tree), SIZES)
        return tree.cut(self.controller.size(self._plan, self._context, expected))

    def observe(self, walk: Walk) -> None:
        verified = walk.tree
        # Processes that share a target draft when the first one means to.
        plan = self._plan._replace(drafts=self._drafted is not None)
        if self._drafted is not None:
            self._turn += 1
            if self.calibration.rounds < WELL_KNOWN or self._turn % THEN_EVERY == 0:
                tokens = [*verified.token_ids[walk.path[1:]].tolist(), walk.last_token]
                self.calibration.observe(verified if self.agreed else self._drafted, tokens)
        self.controller.observe(plan, self._context, verified.num_drafted, len(walk.path))
        self._untimed.append((self._context, verified.num_drafted, plan.drafts))

    def observe_seconds(self, stages: dict[str, float]) -> None:
        context, nodes, drafts = self._untimed.popleft()
        if not drafts:
            self._plain += 1
            if self._plain > PLAIN_KNOWN and self._plain % THEN_EVERY:
                return
        drafting = sum(stages.get(stage, 0.0) for stage in DRAFTING)
        self.controller.observe_seconds(context, nodes, drafting if drafts else None, sum(stages.values()) - drafting)


class _Pair:
    """What rounds have taught of a target and a drafter: times in any case, acceptance apart for sampling."""

    def __init__(self, depth: int, device_type: str):
        side = "cpu" if device_type == "cpu" else "accelerator"
        costs = CostModel()
        self.controllers = [BudgetController(costs, AUTO_START[side], LARGEST_AUTO[side]) for _ in range(2)]
        self.calibrations = [Calibration(depth) for _ in range(2)]


_pairs: "weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, dict[Any, _Pair]]]" = (
    weakref.WeakKeyDictionary()
)


def auto_size(target: Any, drafter: Any, device: torch.device, sampled: bool, largest: int, agreed: bool) -> AutoSize:
    """The automatic sizing of a generate; what it learns lives as long as both models.

    Args:
        target, drafter (`PreTrainedModel`): the pair.
        device (`torch.device`): the target's.
        sampled (`bool`): whether the target's tokens are drawn.
        largest (`int`): nodes of a tree at most.
        agreed (`bool`): see [`AutoSize`].
    """
    kinds = _pairs.setdefault(drafter, weakref.WeakKeyDictionary()).setdefault(target, {})
    kind = device.type, target.dtype
    pair = kinds.setdefault(kind, _Pair(drafter.config.block_size, device.type))
    return AutoSize(pair.controllers[sampled], pair.calibrations[sampled], largest, agreed)
