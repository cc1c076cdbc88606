"""What a generate did: statistics of its rounds, always gathered, and where to read them."""

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_ddtree.compat import GenerateDecoderOnlyOutput
from hf_ddtree.tree import DraftTree

STAGES = ("draft", "build", "verify", "accept", "commit")


@dataclass
class VerifiedTree:
    """One round's draft tree and the nodes of it that were accepted, root first."""

    tree: DraftTree
    path: list[int]


@dataclass
class SpeculationStats:
    r"""
    Statistics of one generate, or of several added up.

    Args:
        acceptance_lengths (`list[int]`): tokens emitted in each round, the bonus token included. The token that the
            prefill gives is no round; a last round cut by a stop is included with what it emitted.
        nodes_verified (`int`): draft nodes the target read, roots not counted.
        tree_sizes (`list[int]`): of those, each round's; 0 where it ran the target alone.
        seconds (`dict[str, float]`): time in each stage: draft, build, verify, accept, commit.
        prefill_seconds (`float`): time until the first token.
        routes (`dict[str, int]`): how many layers of the target read trees by each route: `"attention"`, and where
            there are recurrent layers `"gated delta rule"` or, slower, `"paths"`. A layer that mixes both ways
            counts twice.
        attention_routes (`dict[str, int]`): how often a layer attended to a tree by each route: `"kernel"`, `"packed"`
            (grouped SDPA), `"sdpa"` or `"eager"`, with the reason in parentheses where the kernel did not serve;
            `"gated delta rule kernel"` likewise.
        trees (`list[VerifiedTree]`, *optional*): each round's tree, where `output_trees` asks for it.
    """

    acceptance_lengths: list[int] = field(default_factory=list)
    nodes_verified: int = 0
    tree_sizes: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    prefill_seconds: float = 0.0
    routes: dict[str, int] = field(default_factory=dict)
    attention_routes: dict[str, int] = field(default_factory=dict)
    trees: list[VerifiedTree] | None = None

    @property
    def rounds(self) -> int:
        return len(self.acceptance_lengths)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted a round, the bonus token included; 0 before the first round."""
        return sum(self.acceptance_lengths) / self.rounds if self.rounds else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Share of the verified draft nodes that became output."""
        accepted = sum(self.acceptance_lengths) - self.rounds
        return accepted / self.nodes_verified if self.nodes_verified else 0.0

    @property
    def acceptance_histogram(self) -> dict[int, int]:
        """Rounds by the number of draft tokens they accepted, the bonus token excluded."""
        return dict(sorted(Counter(length - 1 for length in self.acceptance_lengths).items()))

    def add(self, other: "SpeculationStats") -> None:
        """Adds the rounds of another generate."""
        self.acceptance_lengths += other.acceptance_lengths
        self.nodes_verified += other.nodes_verified
        self.tree_sizes += other.tree_sizes
        self.prefill_seconds += other.prefill_seconds
        self.routes = {**self.routes, **other.routes}
        for route, layers in other.attention_routes.items():
            self.attention_routes[route] = self.attention_routes.get(route, 0) + layers
        for stage, seconds in other.seconds.items():
            self.seconds[stage] += seconds
        if other.trees is not None:
            self.trees = (self.trees or []) + other.trees


@dataclass
class DDTreeDecoderOnlyOutput(GenerateDecoderOnlyOutput):
    """A [`~transformers.generation.GenerateDecoderOnlyOutput`] with [`SpeculationStats`] in `speculation`."""

    speculation: SpeculationStats | None = None


_RECORDER: ContextVar[SpeculationStats | None] = ContextVar("ddtree_recorder", default=None)
_open_recorders: list[SpeculationStats] = []
_lock = threading.Lock()


@contextmanager
def record() -> Iterator[SpeculationStats]:
    """Gathers the statistics of every tree-decoding generate inside, for callers that see only text.

    ```python
    with hf_ddtree.record() as stats:
        pipeline(prompt, generation_config=DDTreeConfig(max_new_tokens=256))
    print(stats.mean_acceptance_length)
    ```

    A generate reports to the recorder of its own context. One in a thread that has none, as with a
    `TextIteratorStreamer`, reports to every recorder that is open.
    """
    stats = SpeculationStats()
    token = _RECORDER.set(stats)
    with _lock:
        _open_recorders.append(stats)
    try:
        yield stats
    finally:
        with _lock:
            _open_recorders[:] = [other for other in _open_recorders if other is not stats]
        _RECORDER.reset(token)


def report(stats: SpeculationStats) -> None:
    """Adds a finished or interrupted generate to the recorders it belongs to."""
    own = _RECORDER.get()
    with _lock:
        for recorder in [own] if own is not None else list(_open_recorders):
            recorder.add(stats)


class StageTimer:
    """Splits a generate's time into stages; on CUDA by events, which are read when the device is past them."""

    def __init__(self, device: torch.device):
        self._on_cuda = device.type == "cuda"
        self._last = self._now()
        # Laps of the round that runs, and of rounds whose events the device may not have reached.
        self._laps: list[tuple[str, Any, Any]] = []
        self._rounds: deque[list[tuple[str, Any, Any]]] = deque()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self, stage: str) -> None:
        """Counts the time since the last lap to `stage`."""
        now = self._now()
        self._laps.append((stage, self._last, now))
        self._last = now

    def end_round(self) -> None:
        """The laps since the last call were a round's, or the prefill's."""
        self._rounds.append(self._laps)
        self._laps = []

    def finished(self) -> Iterator[dict[str, float]]:
        """Seconds of the stages of each round that has ended and was not given yet; never waits for the device."""
        while self._rounds and self._reached(self._rounds[0][-1][2]):
            yield self._read(self._rounds.popleft())

    def _reached(self, event: Any) -> bool:
        return bool(event.query()) if self._on_cuda else True

    def _read(self, laps: list[tuple[str, Any, Any]]) -> dict[str, float]:
        stages: dict[str, float] = {}
        for stage, start, end in laps:
            seconds = start.elapsed_time(end) / 1000 if self._on_cuda else end - start
            stages[stage] = stages.get(stage, 0.0) + seconds
        for stage, spent in stages.items():
            self._seconds[stage] += spent
        return stages

    def read(self) -> dict[str, float]:
        """Seconds of each stage so far."""
        if self._on_cuda:
            torch.cuda.synchronize()
        while self._rounds:
            self._read(self._rounds.popleft())
        self._read(self._laps)
        self._laps = []
        return dict(self._seconds)
