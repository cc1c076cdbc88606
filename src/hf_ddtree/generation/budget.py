"""`budget="auto"`: whether to draft, and how many nodes to verify, so that tokens a second come out highest."""

import math
import threading
from collections.abc import Sequence
from typing import NamedTuple

from hf_ddtree.generation.cost_model import SIZES, CostModel, size_of

#: Tokens that trying a size never seen may cost.
TRIAL_PRICE = 1.5
#: Rounds that the rate of a pair is a mean over.
RATE_ROUNDS = 48
#: Rounds in which the bound of the trees that are built falls by one size, if none is as large.
REACH_ROUNDS = 8
#: Tokens a drafter may fall behind plain decoding: a new one, one that has paid at most, and one that is tried again,
#: which may have paid once.
FIRST_CREDIT, LARGEST_CREDIT, TRIAL_CREDIT, KNOWN_TRIAL_CREDIT = 4.0, 12.0, 1.5, 2.5
#: Rounds after which a plain one is due where little credit is left: what it costs now decides whether drafting ends.
LITTLE_CREDIT, LITTLE_CREDIT_ROUNDS = 4.0, 16
#: Tokens ahead of its first credit at which a drafter has shown that it pays.
PROOF = 2.0
#: Plain rounds before drafting is tried again: at first, and at most. After each failure there are twice as many, or
#: four times, and at most more of them, if drafting has never paid.
FIRST_WAIT, LONGEST_WAIT, NEVER_PAID_WAIT = 32, 512, 4096
#: Plain rounds after which a new text is tried at once, with a drafter that has ever paid. What a new text counts for
#: with one that has not, as a share of its wait.
NEW_TEXT_WAIT, NEW_TEXT_SHARE = 64, 8
#: Rounds that drafted before their rate is believed.
SETTLED = 16
#: A trial verifies at least this many nodes: without them nothing is learned of what would be accepted.
TRIAL_NODES = 3


class Plan(NamedTuple):
    """What a round is to do.

    Args:
        drafts (`bool`): whether the drafter runs.
        nodes (`int`): of the tree to build, from which [`BudgetController.size`] keeps some.
        trial (`bool`): whether the drafter has yet to show that it pays.
    """

    drafts: bool
    nodes: int = 0
    trial: bool = False


class BudgetController:
    """
    Decides for the rounds of one pair, over any number of generates, and learns from each.

    Every round gives `tokens` and takes `seconds`. In the long run most tokens a second come from taking, in each
    round, the size with the highest `expected tokens - rate * seconds`, where `rate` is what the rounds before gave
    (Dinkelbach's rule for a ratio of two sums; the highest ratio of each single round would favour small trees too
    much). Drafting itself is judged by what it has brought against plain decoding of the same time: a running sum of
    `tokens - seconds / seconds of a plain token`, bounded above, ends drafting when it is used up. Plain rounds
    follow, and after ever more of them a trial.

    Args:
        costs (`CostModel`): of this target and drafter, shared with other controllers of the pair.
        start (`int`): nodes of the first tree.
        largest (`int`): nodes of a tree at most.
    """

    def __init__(self, costs: CostModel, start: int, largest: int):
        self.costs = costs
        self._start, self._largest = size_of(start), size_of(largest)
        self._lock = threading.Lock()
        self._tokens = self._seconds = 0.0
        self._credit, self._proved, self._drafting = FIRST_CREDIT, False, True
        self._ever_proved, self._drafted = False, 0
        self._wait, self._waited = FIRST_WAIT, 0
        # Largest size that two rounds in a row had lately, which bounds the tree that is built; the last round's.
        self._reach, self._last = float(self._start), self._start
        # Rounds planned since a plain one, whose seconds may come later.
        self._since_plain = 0

    def begin(self) -> None:
        """A new text: where drafting did not pay before it may pay now, so the wait for a trial is shorter or over."""
        with self._lock:
            if not self._ever_proved:
                self._waited += self._wait // NEW_TEXT_SHARE
            elif self._waited >= NEW_TEXT_WAIT:
                self._waited = self._wait
            else:
                self._waited = max(self._waited, self._wait - self._wait // 4)

    def plan(self, context: int, largest: int = SIZES[-1]) -> Plan:
        """
        Args:
            context (`int`): tokens before the round.
            largest (`int`): nodes that this round may verify at most.
        """
        with self._lock:
            self._since_plain += 1
            if largest < 1 or self._plain_is_unsure(context):
                self._since_plain = 0
                return Plan(drafts=False)
            if not self._drafting:
                self._waited += 1
                if self._waited < self._wait:
                    return Plan(drafts=False)
                credit = KNOWN_TRIAL_CREDIT if self._ever_proved else TRIAL_CREDIT
                self._drafting, self._credit, self._proved = True, credit, False
            nodes = min(SIZES[min(math.ceil(self._reach) + 1, self._largest)], largest)
            return Plan(True, nodes, not self._proved)

    def size(self, plan: Plan, context: int, expected: Sequence[float]) -> int:
        """How many of the drafted nodes to verify.

        Args:
            plan (`Plan`): of this round.
            context (`int`): tokens before it.
            expected (`Sequence[float]`): tokens that the round would give at each of [`SIZES`], as far as there are
                nodes.
        """
        with self._lock:
            if not any(map(self.costs.count, range(1, len(SIZES)))):
                return SIZES[min(self._start, len(expected) - 1)]
            rate = self._rate(context)
            seconds = self.costs.seconds(context, TRIAL_PRICE / rate)
            gains = [tokens - rate * time for tokens, time in zip(expected, seconds, strict=False)]
            size = max(range(len(gains)), key=gains.__getitem__)
            if plan.trial:
                size = max(size, min(size_of(TRIAL_NODES), len(expected) - 1))
            self._reach, self._last = max(min(size, self._last), self._reach - 1 / REACH_ROUNDS), size
            return SIZES[size]

    def observe(self, plan: Plan, context: int, nodes: int, emitted: int) -> None:
        """What a round gave.

        Args:
            plan (`Plan`): of this round.
            context (`int`): tokens before it.
            nodes (`int`): that were verified, the root not counted.
            emitted (`int`): tokens, bonus token included.
        """
        with self._lock:
            if not plan.drafts:
                return
            spent = self.costs.draft + self.costs.typical(size_of(nodes), context)
            if not spent < math.inf:
                return
            self._drafted += 1
            self._tokens += (emitted - self._tokens) / RATE_ROUNDS
            self._seconds += (spent - self._seconds) / RATE_ROUNDS
            if self.costs.count(0):
                self._judge(emitted - spent / self.costs.typical(0, context))

    def observe_seconds(self, context: int, nodes: int, drafting: float | None, verifying: float) -> None:
        """What a round took, which may be known only rounds later.

        Args:
            context (`int`): tokens before it.
            nodes (`int`): that were verified, the root not counted.
            drafting (`float`, *optional*): seconds of drafter pass and building; `None` for a plain round.
            verifying (`float`): seconds of all the rest.
        """
        with self._lock:
            if drafting is not None:
                self.costs.observe_draft(drafting)
            self.costs.observe(size_of(nodes), context, verifying)

    def _judge(self, gain: float) -> None:
        limit = LARGEST_CREDIT if self._proved else FIRST_CREDIT + PROOF
        self._credit = min(self._credit + gain, limit)
        if not self._proved and self._credit >= FIRST_CREDIT + PROOF:
            self._proved = self._ever_proved = True
            self._wait = FIRST_WAIT
        if self._credit < 0:
            if not self._proved and self._waited:
                factor, longest = (2, LONGEST_WAIT) if self._ever_proved else (4, NEVER_PAID_WAIT)
                self._wait = min(factor * self._wait, longest)
            self._drafting, self._waited = False, 0

    def _rate(self, context: int) -> float:
        """Tokens a second: of the last rounds that drafted, or of plain decoding where that gives more."""
        plain = self.costs.typical(0, context)
        drafted = self._tokens / self._seconds if self._seconds else 0.0
        return max(drafted, 1 / plain)

    def _plain_is_unsure(self, context: int) -> bool:
        """Whether a plain round is due: the closer drafting is to it, the better its seconds must be known."""
        measured = self.costs.count(0)
        if not self._drafting or not self._seconds:
            return False
        if measured == 0:
            return True
        if self._drafted < SETTLED:
            return False
        unseen = min(self.costs.age(0), self._since_plain)
        if self._proved and self._credit < LITTLE_CREDIT and unseen > LITTLE_CREDIT_ROUNDS:
            return True
        ahead = self._rate(context) * self.costs.typical(0, context)
        if ahead < 1.5:
            return measured < 4 or self.costs.age(0) > 100
        return ahead < 2.5 and measured < 2
