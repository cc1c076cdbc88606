"""The processes that `accelerate launch` starts, among which the prompts are split."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path


def _nothing() -> None:
    """A process alone waits for nobody."""


@dataclass(frozen=True)
class Processes:
    """This process and its peers.

    Args:
        rank, count (`int`): its number and how many there are.
        device (`str`, *optional*): the one that is its own; `None` leaves the choice.
        wait (`Callable`): returns when every process has called it.
    """

    rank: int = 0
    count: int = 1
    device: str | None = None
    wait: Callable[[], None] = _nothing

    @classmethod
    def join(cls, device: str | None) -> "Processes":
        """The processes of `accelerate launch`, or this one alone.

        Args:
            device (`str`, *optional*): what was asked for; `"cpu"` keeps several processes off the accelerators.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls(device=device)
        from accelerate import PartialState

        # A process may be done hours before the last one.
        state = PartialState(cpu=device == "cpu", timeout=timedelta(days=7))
        return cls(state.process_index, state.num_processes, str(state.device), state.wait_for_everyone)

    def file(self, out: Path, rank: int | None = None) -> Path:
        """Where a process keeps its results."""
        if self.count == 1:
            return out
        return out.with_suffix(f".{self.rank if rank is None else rank}of{self.count}{out.suffix}")
