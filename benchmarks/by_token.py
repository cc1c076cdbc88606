"""Several generates that advance token by token, each in turn, so that a machine's loads meet all of them alike.

Runs that follow one another differ by 10% and more on a machine with other tenants, which fifty of them hardly average
out. Here each stops in its streamer after a token, until the others have had theirs; their own time alone is counted.
All run in one thread, as a second one would bring threads of its own to every product: by `greenlet`, a package that
only this needs.
"""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from greenlet import getcurrent, greenlet

from hf_ddtree.generation import output


class Runner:
    """One generate, and the streamer by which it is stopped.

    Args:
        job (`Callable[[Runner], Any]`): generates with its argument as `streamer`.
    """

    def __init__(self, job: Callable[["Runner"], Any]):
        self.job, self.output = job, None
        #: Seconds that it ran, and that others ran meanwhile.
        self.seconds = self.away = 0.0
        self.greenlet, self._since = greenlet(self._run), 0.0

    def _run(self) -> None:
        self._since = time.perf_counter()
        self.output = self.job(self)
        self.seconds += time.perf_counter() - self._since

    def put(self, _value: Any) -> None:
        """Called by `generate` with the prompt, and with each token."""
        stopped = time.perf_counter()
        self.seconds += stopped - self._since
        self.greenlet.parent.switch()
        self._since = time.perf_counter()
        self.away += self._since - stopped

    def end(self) -> None:
        """Called by `generate` at its end."""


def in_turn(jobs: dict[str, Callable[[Runner], Any]]) -> dict[str, Runner]:
    """Runs all to their ends, in another order at each token; models and drafters must not be shared.

    What the package times within a generate is its own time too.
    """
    runners = {name: Runner(job) for name, job in jobs.items()}
    by_greenlet = {runner.greenlet: runner for runner in runners.values()}

    def own_time() -> float:
        runner = by_greenlet.get(getcurrent())
        return time.perf_counter() - (runner.away if runner else 0.0)

    names, token = list(runners), 0
    # Each generate leaves the thread's gradient mode as it found it, but not in the order in which they began.
    with torch.no_grad(), patch.object(output, "time", SimpleNamespace(perf_counter=own_time)):
        while any(not runner.greenlet.dead for runner in runners.values()):
            first = token % len(names)
            for name in (names[first:] + names[:first])[:: 1 if token // len(names) % 2 else -1]:
                if not runners[name].greenlet.dead:
                    runners[name].greenlet.switch()
            token += 1
    return runners
