"""A tree is built where that is sooner, which is timed once and waits for the device."""

from typing import Any

import pytest
import torch

from hf_ddtree.tree import placement
from hf_ddtree.tree.placement import builds_on_device


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Seconds that each way takes, the device's first call more; the CPU stands in for a device."""
    now = [0.0]
    seconds = {"there": 1.0, "here": 1.0}
    started: list[str] = []

    class Marginals:
        def __init__(self, *_: Any):
            pass

        def build(self, *_: Any) -> None:
            now[0] += seconds["there"] + (10.0 if "there" not in started else 0.0)
            started.append("there")

    def on_host(*_: Any, **__: Any) -> Any:
        now[0] += seconds["here"]
        started.append("here")
        return type("Tree", (), dict.fromkeys(("token_ids", "depths", "subtree_ends"), torch.zeros(1)))

    monkeypatch.setattr(placement.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(placement, "DeviceMarginals", Marginals)
    monkeypatch.setattr(placement, "build_from_scorer", on_host)
    monkeypatch.setattr(placement, "HOST_ONLY", ())
    builds_on_device.cache_clear()
    yield seconds
    builds_on_device.cache_clear()


@pytest.mark.parametrize("there, here, expected", [(1.0, 2.0, True), (2.0, 1.0, False)])
def test_the_sooner_one(clock: Any, there: float, here: float, expected: bool) -> None:
    clock.update(there=there, here=here)
    assert builds_on_device(torch.device("cpu"), 4, 8, 8) is expected
    clock.update(there=here, here=there)
    assert builds_on_device(torch.device("cpu"), 4, 8, 8) is expected, "timed once"


@pytest.mark.parametrize("name", ["cpu", "mps"])
def test_the_host_alone(name: str) -> None:
    assert not builds_on_device(torch.device(name), 4, 8, 8)


def test_both_ways_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "HOST_ONLY", ())
    builds_on_device.cache_clear()
    assert builds_on_device(torch.device("cpu"), 3, 5, 5) in (True, False)
    builds_on_device.cache_clear()
