"""The path of a tree that a round keeps, as all layers of a cache need it."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import torch

from hf_ddtree.integers import long_tensor


class KeptPath:
    """The kept nodes, brought to each device once for all its layers.

    Args:
        nodes (`Sequence[int]` or `torch.LongTensor` of shape `(kept,)`): root first, increasing; a tensor that is not
            on the host is waited for.
    """

    def __init__(self, nodes: Sequence[int] | torch.Tensor):
        self._numbers: Sequence[int] = nodes.tolist() if isinstance(nodes, torch.Tensor) else nodes
        self._copies: dict[torch.device, torch.Tensor] = {}
        if isinstance(nodes, torch.Tensor):
            self._copies[nodes.device] = nodes
        self._length = len(self._numbers)
        #: Whether they are the tree's first nodes, whose rows are where they belong.
        self.in_place = not self._length or self._numbers[-1] == self._length - 1
        #: The rows that are not, as (where they belong, where they are, how many), if none is where another belongs:
        #: then they may be copied in any order, and once more.
        self.runs = [] if self.in_place else _runs(self._numbers)
        #: Whether [`KeptPath.move`] has brought them where they belong.
        self.moved = False

    def __len__(self) -> int:
        return self._length

    @cached_property
    def nodes(self) -> torch.Tensor:
        """`torch.LongTensor` of shape `(kept,)`, on the host."""
        return long_tensor(self._numbers)

    def on(self, device: torch.device) -> torch.Tensor:
        """The nodes on `device`."""
        if device not in self._copies:
            self._copies[device] = self.nodes.to(device)
        return self._copies[device]

    def move(self, layers: Iterable[Any]) -> None:
        """Moves the rows of all `layers` by one call a device, where rows may be copied in any order.

        Args:
            layers: all that commit this path and whose `moves` tell what to copy where.
        """
        if self.runs and not self.moved:
            by_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
            for layer in layers:
                if moves := layer.moves(self):
                    by_device.setdefault(moves[0][0].device, []).extend(moves)
            for moves in by_device.values():
                targets, sources = zip(*moves, strict=True)
                torch._foreach_copy_(targets, sources)
            self.moved = True


def _runs(numbers: Sequence[int]) -> list[tuple[int, int, int]]:
    """What [`KeptPath.runs`] says; empty as well if some row is where another belongs."""
    runs: list[tuple[int, int, int]] = []
    for place, node in enumerate(numbers):
        if place == node:
            continue
        if node < len(numbers):
            return []
        if runs and sum(runs[-1][1:]) == node:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((place, node, 1))
    return runs
