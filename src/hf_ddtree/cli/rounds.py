"""Telling rounds apart from outside `generate`: a forward of the target begins one, tokens that follow end it."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation import BaseStreamer


class RoundCounter(BaseStreamer):
    """A streamer that counts the target's forwards and the tokens each one gave, in any mode of `generate`.

    Pass it as `streamer` to the generate that runs inside [`RoundCounter.watching`].
    """

    def __init__(self) -> None:
        #: Tokens after each forward of the target.
        self.emitted: list[int] = []
        #: When the first tokens came, on the clock of `time.perf_counter`.
        self.first_at = math.nan

    @contextmanager
    def watching(self, target: PreTrainedModel) -> Iterator["RoundCounter"]:
        """Hooks the target, and unhooks it whatever happens."""
        handle = target.register_forward_pre_hook(self._forward)
        try:
            yield self
        finally:
            handle.remove()

    @property
    def forwards(self) -> int:
        return len(self.emitted)

    @property
    def acceptance_lengths(self) -> list[int]:
        """Tokens of each round; the prefill, up to the first forward that gave a token, is no round."""
        prefill = next((i for i, tokens in enumerate(self.emitted) if tokens), self.forwards)
        return self.emitted[prefill + 1 :]

    def _forward(self, _module: Any, _inputs: Any) -> None:
        self.emitted.append(0)

    def put(self, value: torch.Tensor) -> None:
        # What comes before the first forward is the prompt.
        if self.emitted:
            self._count(value.numel())

    def _count(self, tokens: int) -> None:
        if math.isnan(self.first_at):
            self.first_at = time.perf_counter()
        self.emitted[-1] += tokens

    def end(self) -> None:
        """Nothing is held back."""


class TokenCounter(RoundCounter):
    """The same for plain decoding without the hook, which a compiled forward would take in: a token is a forward."""

    def __init__(self) -> None:
        super().__init__()
        self._prompt_seen = False

    @contextmanager
    def watching(self, target: PreTrainedModel) -> Iterator["RoundCounter"]:
        yield self

    def put(self, value: torch.Tensor) -> None:
        # The prompt comes first.
        if self._prompt_seen:
            self.emitted.append(0)
            self._count(value.numel())
        self._prompt_seen = True
