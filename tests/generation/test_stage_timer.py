"""Stages are timed round by round; on CUDA nothing waits for the device, which stands in here."""

from typing import Any

import pytest
import torch

from hf_ddtree.generation import output
from hf_ddtree.generation.output import StageTimer


class Device:
    """A clock of events that the device has reached up to some point."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.reached = 0
        self.synchronised = 0

    def event(self, enable_timing: bool) -> "Event":
        assert enable_timing
        return Event(self)

    def synchronize(self) -> None:
        self.synchronised += 1
        self.reached = len(self.made)


class Event:
    def __init__(self, device: Device):
        self.device = device

    def record(self) -> None:
        self.number = len(self.device.made)
        self.device.made.append(self)

    def query(self) -> bool:
        return self.number < self.device.reached

    def elapsed_time(self, end: "Event") -> float:
        assert self.query() and end.query(), "the host would wait"
        return 1000.0 * (end.number - self.number)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(output.torch.cuda, "Event", device.event)
    monkeypatch.setattr(output.torch.cuda, "synchronize", device.synchronize)
    return device


def run_round(timer: StageTimer, *stages: str) -> None:
    for stage in stages:
        timer.lap(stage)
    timer.end_round()


def test_rounds_are_given_once_the_device_is_past_them(device: Device) -> None:
    timer = StageTimer(torch.device("cuda"))
    run_round(timer, "prefill")
    run_round(timer, "draft", "build", "verify", "accept", "commit")
    assert list(timer.finished()) == []
    # The walk of the second round has read what its forward gave, but the commit behind it is under way.
    device.reached = len(device.made) - 1
    assert list(timer.finished()) == [{"prefill": 1.0}]
    run_round(timer, "verify", "accept", "commit")
    device.reached = len(device.made) - 1
    assert list(timer.finished()) == [dict.fromkeys(("draft", "build", "verify", "accept", "commit"), 1.0)]
    assert device.synchronised == 0
    timer.lap("draft")
    assert timer.read() == {"prefill": 1.0, "draft": 2.0, "build": 1.0, "verify": 2.0, "accept": 2.0, "commit": 2.0}
    assert device.synchronised == 1
    assert list(timer.finished()) == []


def test_on_a_cpu_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: Any = iter(range(100))
    monkeypatch.setattr(output.time, "perf_counter", lambda: float(next(ticks)))
    timer = StageTimer(torch.device("cpu"))
    run_round(timer, "verify", "accept", "commit")
    assert list(timer.finished()) == [{"verify": 1.0, "accept": 1.0, "commit": 1.0}]
    assert list(timer.finished()) == []
    timer.lap("draft")
    assert timer.read() == {"verify": 1.0, "accept": 1.0, "commit": 1.0, "draft": 1.0}
