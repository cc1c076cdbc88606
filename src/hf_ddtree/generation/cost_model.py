"""What a round costs by the nodes it verifies and the tokens before them, learned from the rounds themselves."""

import itertools
import math
from collections import deque
from collections.abc import Sequence

#: Nodes a tree may have under `budget="auto"`, the root not counted. One less than a power of two, as the root comes
#: on top and few shapes repeat.
SIZES = tuple(2**power - 1 for power in range(11))

#: Measurements kept of a size. Their lower median is robust against another process's bursts, and follows in half as
#: many rounds.
WINDOW = 15
#: What a tree's attention costs in a context grows with the nodes, and a little without any: reading the context.
CONTEXT_ROWS = 16
#: Relative spread of a measurement, and of the share that 1000 tokens of context may add.
NOISE, CONTEXT_SHARE = 0.15, 0.5
#: A first measurement this far above what the smaller sizes say may be a warm-up, and is made once more.
SURPRISE = 1.3
#: How much cheaper a size is taken to be after one measurement, and after many rounds without any, to be tried again.
DOUBT, STALE, STALE_ROUNDS = 0.08, 0.1, 500
#: The pace moves by this for each deviation in a row of the same sign, counted up to a limit.
PACE_STEP, LONGEST_STREAK = 0.01, 8


class _Samples:
    """The last measurements of one thing: lower median of the seconds, mean of the contexts."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._contexts: deque[int] = deque(maxlen=WINDOW)
        self.typical, self.context, self.count, self.seen = math.nan, 0.0, 0, 0

    def add(self, seconds: float, context: int, now: int) -> None:
        self._seconds.append(seconds)
        self._contexts.append(context)
        self.count, self.seen = self.count + 1, now
        self.typical = sorted(self._seconds)[(len(self._seconds) - 1) // 2]
        self.context = sum(self._contexts) / len(self._contexts)


class CostModel:
    """Seconds of drafting, and of verifying trees of [`SIZES`] nodes, in a context of any length.

    All seconds that go out are those of a machine at its usual pace: what slows every size alike (another process, a
    clock that falls) is followed by one factor and leaves the sizes' ratios as they are, also of those not in use.
    """

    def __init__(self) -> None:
        self._sizes = [_Samples() for _ in SIZES]
        self._draft = _Samples()
        #: How much slower the machine is now than at its usual pace.
        self.pace = 1.0
        self._streak = 0
        # Seconds for each row and token of context, and the variance of that; a scalar Kalman filter.
        self._slope, self._slope_variance = 0.0, math.nan
        self._now = 0

    def count(self, size: int) -> int:
        """Rounds measured at `SIZES[size]` nodes."""
        return self._sizes[size].count

    def age(self, size: int) -> int:
        """Rounds measured since the last one of this size."""
        return self._now - self._sizes[size].seen

    def observe(self, size: int, context: int, seconds: float) -> None:
        """A round verified about `SIZES[size]` nodes behind `context` tokens; drafting is not in `seconds`."""
        self._now += 1
        samples = self._sizes[size]
        if samples.count >= 3:
            self._follow(seconds, self._estimate(size, context))
        seconds /= self.pace
        if samples.count >= 3:
            self._learn_slope(size, context, seconds)
        samples.add(seconds, context, self._now)

    def observe_draft(self, seconds: float) -> None:
        """A round's drafter pass and tree took `seconds`."""
        if self._draft.count >= 3:
            self._follow(seconds, self._draft.typical)
        self._draft.add(seconds / self.pace, 0, self._now)

    @property
    def draft(self) -> float:
        """Seconds of drafting; 0 before the first."""
        return self._draft.typical if self._draft.count else 0.0

    def typical(self, size: int, context: int) -> float:
        """Seconds of verifying `SIZES[size]` nodes as measured, or else as [`CostModel.seconds`] has them."""
        return self._estimate(size, context) if self._sizes[size].count else self.seconds(context)[size]

    def seconds(self, context: int, allowance: float = math.inf) -> list[float]:
        """Seconds at each of [`SIZES`] at best; infinite where nothing is known that bounds them.

        A size between others is interpolated. The next one above those seen is taken for no dearer than the largest
        seen, so that it is tried, if by the last sizes' slope trying it costs no more than `allowance`.

        Args:
            context (`int`): tokens before the tree.
            allowance (`float`): seconds.
        """
        known = [size for size, samples in enumerate(self._sizes) if samples.count]
        found = [math.inf] * len(SIZES)
        for size in known:
            stale = STALE * min(1.0, self.age(size) / STALE_ROUNDS)
            doubt = DOUBT / math.sqrt(min(self._sizes[size].count, WINDOW))
            found[size] = self._estimate(size, context) * (1 - stale - doubt)
        if not known:
            return found
        # A larger size that is cheap proves the smaller ones to be no dearer.
        cheapest = math.inf
        for size in reversed(known):
            cheapest = found[size] = min(found[size], cheapest)
        for size in range(known[0]):
            found[size] = found[known[0]]
        for below, above in itertools.pairwise(known):
            for size in range(below + 1, above):
                share = (SIZES[size] - SIZES[below]) / (SIZES[above] - SIZES[below])
                found[size] = found[below] + share * (found[above] - found[below])
        largest = known[-1]
        if largest > 0 and self._sizes[largest].count == 1:
            by_slope = _next(found[:largest])
            if found[largest] > SURPRISE * by_slope and by_slope - found[largest - 1] <= allowance:
                found[largest] = found[largest - 1]
                return found
        if largest + 1 < len(SIZES):
            by_slope = _next(found[: largest + 1])
            found[largest + 1] = found[largest] if by_slope - found[largest] <= allowance else by_slope
        return found

    def _estimate(self, size: int, context: int) -> float:
        samples = self._sizes[size]
        longer = context - samples.context
        changed = samples.typical + self._slope * longer * (SIZES[size] + CONTEXT_ROWS)
        return max(changed, samples.typical / 4)

    def _follow(self, seconds: float, expected: float) -> None:
        # By signs alone, as the typical value is a median: bursts would drag the pace up without end.
        sign = 1 if seconds > expected * self.pace else -1
        self._streak = sign if self._streak * sign <= 0 else self._streak + sign
        self.pace *= math.exp(PACE_STEP * max(-LONGEST_STREAK, min(LONGEST_STREAK, self._streak)))

    def _learn_slope(self, size: int, context: int, seconds: float) -> None:
        samples = self._sizes[size]
        rows = SIZES[size] + CONTEXT_ROWS
        if math.isnan(self._slope_variance):
            self._slope_variance = (CONTEXT_SHARE * samples.typical / (1000 * rows)) ** 2
        reach = (context - samples.context) * rows
        noise = (NOISE * samples.typical) ** 2
        error = seconds - samples.typical - self._slope * reach
        limit = 2 * math.sqrt(noise)
        gain = self._slope_variance * reach / (self._slope_variance * reach**2 + noise)
        self._slope = max(0.0, self._slope + gain * max(-limit, min(limit, error)))
        self._slope_variance *= 1 - gain * reach


def _next(seconds: Sequence[float]) -> float:
    """The size after the last of `seconds` if time goes on growing with nodes as it did before: convexity's bound."""
    last = seconds[-1]
    before = seconds[-2] if len(seconds) > 1 else last
    # From 2^k to 2^(k+1) rows it is twice as far as from 2^(k-1) to 2^k.
    return last + 2 * max(0.0, last - before)


def size_of(nodes: int) -> int:
    """The index in [`SIZES`] of the size that `nodes` nodes cost about as much as."""
    return min(len(SIZES) - 1, round(math.log2(nodes + 1)))
