"""oneDNN's products are PyTorch's own, and are asked for only where they pay."""

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hf_ddtree import products

onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


@pytest.fixture
def fresh() -> Any:
    """The measurement forgotten before and after, for tests that replace what it measures."""
    products.is_faster.cache_clear()
    yield
    products.is_faster.cache_clear()


@onednn
@pytest.mark.parametrize("rows", [(1,), (7,), (2, 5), (64,)])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(rows: tuple[int, ...], biased: bool) -> None:
    states, weight = torch.randn(*rows, 33), torch.randn(17, 33)
    bias = torch.randn(17) if biased else None
    output = products.linear(states, weight, bias)
    exact = F.linear(states.double(), weight.double(), bias.double() if biased else None)
    assert output.shape == (*rows, 17)
    assert torch.allclose(output.double(), exact, atol=1e-5)


@onednn
def test_a_weight_that_lies_transposed() -> None:
    states, weight = torch.randn(9, 40), torch.randn(40, 24)
    assert torch.allclose(products.linear(states, weight.t()), states @ weight, atol=1e-5)


def test_small_products_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "is_faster", lambda: True)
    monkeypatch.setattr(products, "available", lambda: True)
    assert products.pays(64, 576, 1536)
    assert products.pays(1, 576, 576)
    assert products.pays(128, 160, 480)
    assert not products.pays(1, 576, 192)
    assert not products.pays(16, 160, 160)
    assert products.fewest_rows(576, 576) == 1
    assert products.fewest_rows(576, 576, cached=True) == products.fewest_rows(288, 1152, cached=True) == 13


def test_nothing_pays_where_it_is_not_faster_or_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "is_faster", lambda: False)
    assert not products.pays(64, 576, 1536)
    monkeypatch.setattr(products, "is_faster", lambda: True)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not products.pays(64, 576, 1536)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("slow, expected", [("usual", True), ("other", False), ("neither", False)])
def test_the_measurement(slow: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def taking(seconds: float) -> Any:
        def function(*arguments: Any) -> None:
            clock[0] += seconds

        return function

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(F, "linear", taking(2.0 if slow == "usual" else 1.0))
    monkeypatch.setattr(products, "linear", taking(2.0 if slow == "other" else 1.0))
    assert products.is_faster() is expected
