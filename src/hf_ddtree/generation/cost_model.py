"""What a round costs by the nodes it verifies and the tokens before them, learned from the rounds themselves."""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Sequence

#: Nodes a tree may have under `budget="auto"`, the root not counted. One less than a power of two, as the root comes
#: on top and few shapes repeat.
SIZES = tuple(2**power - 1 for power in range(11))

#: Measurements that the usual seconds of a size are a mean over, those that count in any case, and how far from the
#: mean one is believed, as a logarithm.
MEMORY, FIRST, CLIP = 64, 8, 0.25
#: Rounds whose median deviation is the machine's pace: robust against bursts, and follows in half as many rounds.
PACE_ROUNDS = 9
#: What a tree's attention costs in a context grows with the nodes, and a little without any: reading the context.
CONTEXT_ROWS = 16
#: Share of a round's time that 1000 tokens of context may add, and the spread of times, at first and at most.
CONTEXT_SHARE, NOISE, MOST_NOISE = 0.5, 0.05, 0.2
#: Rounds that the spread is a mean over, and deviations in terms of it that are another thing than noise.
NOISE_ROUNDS, OUTLIER = 32, 3.0
#: A first measurement this far above what the smaller sizes say may be a warm-up, and is made once more.
SURPRISE = 1.3
#: How much cheaper a size is taken to be after many rounds without it, to be tried again.
STALE, STALE_ROUNDS = 0.5, 1000
#: Rounds after which what was measured of a size counts as one measurement.
FORGOTTEN = 100


class _Usual:
    """The usual seconds of one thing, and the contexts that they belong to."""

    def __init__(self) -> None:
        self.seconds, self.context, self.count, self.seen = math.nan, 0.0, 0, 0
        #: Measurements that count.
        self.held = 0

    def add(self, seconds: float, context: int, now: int, noise: float, weight: float = 1.0) -> None:
        self.held = 2 if self.held and now - self.seen > FORGOTTEN else self.held + 1
        self.count, self.seen = self.count + 1, now
        if self.held == 1:
            self.seconds, self.context = seconds, context
            return
        step = math.log(seconds / self.seconds)
        # What comes first may be slow for a reason that does not come again. What comes after a long time is not the
        # first: it may be low because the pace has just changed.
        if self.count == 2 and step < -OUTLIER * noise:
            gain, limit = 1.0, math.inf
        else:
            gain, limit = (1.0 if self.held <= FIRST else weight) / min(self.held, MEMORY), CLIP
        self.seconds *= math.exp(gain * max(-limit, min(limit, step)))
        self.context += gain * (context - self.context)


class CostModel:
    """Seconds of drafting, and of verifying trees of [`SIZES`] nodes, in a context of any length.

    All seconds that go out are those of a machine at its usual pace. What slows every size alike (another process, a
    clock that falls) is followed by one factor, fast, and leaves the sizes' ratios as they are, also of those that are
    not in use.
    """

    def __init__(self) -> None:
        self._sizes = [_Usual() for _ in SIZES]
        self._draft = _Usual()
        #: How much slower the machine is now than at its usual pace.
        self.pace = 1.0
        #: Relative spread of a size's times.
        self.noise = NOISE
        self._deviations: deque[tuple[int, float]] = deque([(-1, 1.0)] * PACE_ROUNDS, PACE_ROUNDS)
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
        usual, seconds = self._sizes[size], max(seconds, 1e-9)
        if usual.count >= 2:
            self._deviations.append((size, seconds / self._estimate(size, context)))
            self.pace = statistics.median(deviation for _, deviation in self._deviations)
            spread = 1.25 * abs(math.log(self._deviations[-1][1] / self.pace))
            self.noise += (min(spread, MOST_NOISE) - self.noise) / NOISE_ROUNDS
            self._learn_slope(size, context, seconds / self.pace)
        # Beside no other size it cannot be told whether this one or the machine has changed.
        others = sum(other not in (size, -1) for other, _ in self._deviations)
        usual.add(seconds / self.pace, context, self._now, self.noise, others / PACE_ROUNDS)

    def observe_draft(self, seconds: float) -> None:
        """A round's drafter pass and tree took `seconds`."""
        self._draft.add(max(seconds, 1e-9) / self.pace, 0, self._now, self.noise)

    @property
    def draft(self) -> float:
        """Seconds of drafting; 0 before the first."""
        return self._draft.seconds if self._draft.count else 0.0

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
        known = [size for size, usual in enumerate(self._sizes) if usual.count]
        found = [math.inf] * len(SIZES)
        for size in known:
            stale = STALE * min(1.0, self.age(size) / STALE_ROUNDS)
            doubt = self.noise / math.sqrt(min(self._sizes[size].held, MEMORY))
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
        usual = self._sizes[size]
        longer = (context - usual.context) * (SIZES[size] + CONTEXT_ROWS)
        return max(usual.seconds + self._slope * longer, usual.seconds / 4)

    def _learn_slope(self, size: int, context: int, seconds: float) -> None:
        usual, rows = self._sizes[size], SIZES[size] + CONTEXT_ROWS
        if math.isnan(self._slope_variance):
            self._slope_variance = (CONTEXT_SHARE * usual.seconds / (1000 * rows)) ** 2
        longer, spread = (context - usual.context) * rows, max(2 * self.noise, NOISE) * usual.seconds
        error, limit = seconds - usual.seconds - self._slope * longer, 2 * spread
        gain = self._slope_variance * longer / (self._slope_variance * longer**2 + spread**2)
        self._slope = max(0.0, self._slope + gain * max(-limit, min(limit, error)))
        self._slope_variance *= 1 - gain * longer


def _next(seconds: Sequence[float]) -> float:
    """The size after the last of `seconds` if time goes on growing with nodes as it did before: convexity's bound."""
    last = seconds[-1]
    before = seconds[-2] if len(seconds) > 1 else last
    # From 2^k to 2^(k+1) rows it is twice as far as from 2^(k-1) to 2^k.
    return last + 2 * max(0.0, last - before)


def size_of(nodes: int) -> int:
    """The index in [`SIZES`] of the size that `nodes` nodes cost about as much as."""
    return min(len(SIZES) - 1, round(math.log2(nodes + 1)))
