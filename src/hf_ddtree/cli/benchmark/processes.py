"""The processes that `accelerate launch` starts, among which the prompts are split."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from hf_ddtree.cli.pair import default_device

#: Where the launchers that accelerate knows say how many processes there are.
_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


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

        Raises:
            ValueError: if there are several that accelerate does not join.
        """
        started = max(int(os.environ.get(name, "1")) for name in _SIZES)
        if started == 1:
            return cls(device=device)
        from accelerate import PartialState

        on_cpu = (device or default_device()) == "cpu"
        # A process may be done hours before the last one.
        state = PartialState(cpu=on_cpu, timeout=timedelta(days=7))
        if state.num_processes != started:
            raise ValueError(
                f"{started} processes were started, but they cannot talk to each other on {device or state.device}: "
                "start one, or name their device with --device."
            )
        return cls(state.process_index, state.num_processes, str(state.device), state.wait_for_everyone)

    def file(self, out: Path, rank: int | None = None) -> Path:
        """Where a process keeps its results."""
        if self.count == 1:
            return out
        return out.with_suffix(f".{self.rank if rank is None else rank}of{self.count}{out.suffix}")
