"""A drafter that fits by shape and belongs to another target shows only in what is accepted: nearly nothing."""

import weakref
from typing import Any

from transformers.utils import logging

logger = logging.get_logger(__name__)

#: Rounds to look at, and the tokens a round below which they are at the floor: the bonus token comes in any case.
ROUNDS, FLOOR = 32, 1.05

#: A smaller tree proves little about its drafter.
LEAST_NODES = 7


class AcceptanceFloor:
    """Counts the first rounds of a pair, over any number of generates, and warns once if they stay at the floor."""

    def __init__(self) -> None:
        self._rounds = self._emitted = 0

    def observe(self, drafted: int, emitted: int) -> None:
        """
        Args:
            drafted (`int`): nodes of the round's tree, the root not counted.
            emitted (`int`): tokens the round gave, the bonus token included.
        """
        if self._rounds >= ROUNDS or drafted < LEAST_NODES:
            return
        self._rounds, self._emitted = self._rounds + 1, self._emitted + emitted
        if self._rounds == ROUNDS and self._emitted < FLOOR * ROUNDS:
            logger.warning(
                f"Of the first {ROUNDS} draft trees of this pair nearly nothing was accepted: "
                f"{self._emitted / ROUNDS:.2f} tokens a round, where 1 is the target's own. The text is right, but "
                "slower than without a drafter. Likely causes: the drafter was trained for another target of the same "
                "shape; its `target_layer_ids` are off by one; it runs in fp16; the prompt lacks the chat template "
                "or the thinking mode it was trained with; sampling is very hot. `hf-ddtree doctor` checks a pair."
            )


_floors: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, AcceptanceFloor]] = weakref.WeakKeyDictionary()


def floor_of(target: Any, drafter: Any) -> AcceptanceFloor:
    """The counter of a pair of model objects; it lives as long as both."""
    return _floors.setdefault(drafter, weakref.WeakKeyDictionary()).setdefault(target, AcceptanceFloor())
