"""Stand-ins for CUDA streams: an offloaded cache asks for them, and on a CPU everything happens in order anyway."""

from typing import Any

import pytest
import torch

from hf_ddtree.generation import compatibility


class Stream:
    """Counts how often work was queued on it."""

    entered = 0

    def __enter__(self) -> "Stream":
        Stream.entered += 1
        return self

    def __exit__(self, *arguments: Any) -> None:
        return None

    def wait_stream(self, other: "Stream") -> None:
        assert isinstance(other, Stream)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes offloaded caches work without CUDA; rows move from the host to the host."""
    monkeypatch.setattr(compatibility, "runs_on_cuda", lambda target: True)
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream())
