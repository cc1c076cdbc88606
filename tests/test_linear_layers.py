"""Linear layers are computed by the faster library inside a generate, and are as they were after it."""

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_ddtree import linear_layers, products
from hf_ddtree.linear_layers import fast_linear_layers
from pairs import make_drafter, make_target, plain, prompt, tree

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the weights that oneDNN was asked for, which counts as the faster one."""
    made: list[tuple[int, ...]] = []
    original = products.linear

    def counted(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        made.append(tuple(weight.shape))
        return original(states, weight, bias)

    monkeypatch.setattr(products, "linear", counted)
    monkeypatch.setattr(products, "is_faster", lambda: True)
    return made


@pytest.fixture
def calls(asked: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The same, however small the weights are."""
    monkeypatch.setattr(products, "fewest_rows", lambda inner, columns, cached: 2)
    monkeypatch.setattr(products, "LEAST_LAYER", 0)
    return asked


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 4, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(states))


@torch.no_grad()
def test_the_same_output_by_the_other_library(calls: list[Any]) -> None:
    model, states = Model(), torch.randn(2, 3, 6)
    plain = model(states)
    with fast_linear_layers(model):
        assert torch.allclose(model(states), plain, atol=1e-6)
        assert calls == [(5, 6), (4, 5)]
        assert torch.equal(model(states[:1, :1]), model.second(model.first(states[:1, :1])))
        assert len(calls) == 2, "the rest goes the usual way"
    assert torch.equal(model(states), plain)
    assert len(calls) == 2
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert not linear_layers._held


@torch.no_grad()
def test_errors_and_nesting_leave_nothing(calls: list[Any]) -> None:
    model, states = Model(), torch.randn(3, 6)
    with pytest.raises(KeyboardInterrupt), fast_linear_layers(model):
        with fast_linear_layers(model):
            pass
        model(states)
        assert len(calls) == 2, "the outer one still holds"
        raise KeyboardInterrupt
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert not linear_layers._held


@torch.no_grad()
def test_another_thread_is_unchanged(calls: list[Any]) -> None:
    model, states, seen = Model(), torch.randn(3, 6), []
    with fast_linear_layers(model):
        thread = threading.Thread(target=lambda: seen.append(torch.no_grad()(model)(states)))
        thread.start()
        thread.join()
        assert not calls
    assert torch.equal(seen[0], model(states))


def test_gradients_take_the_usual_way(calls: list[Any]) -> None:
    model = Model()
    with fast_linear_layers(model):
        model(torch.randn(3, 6)).sum().backward()
    assert not calls
    assert model.first.weight.grad is not None


class Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


@torch.no_grad()
def test_layers_of_another_kind_stay(calls: list[Any]) -> None:
    """A forward of the module's own, a subclass, another dtype, a weight that is made anew at each use."""
    hooked, other, low, made = nn.Linear(6, 6), Scaled(6, 6), nn.Linear(6, 6).bfloat16(), nn.Linear(6, 6)
    own = hooked.forward
    hooked.forward = lambda input: own(input) + 1  # type: ignore[method-assign]
    mine = hooked.forward
    torch.nn.utils.parametrizations.weight_norm(made)
    model = nn.ModuleList([hooked, other, low, made])
    states = torch.randn(3, 6)
    with fast_linear_layers(model):
        for module in (hooked, other, made):
            module(states)
        low(states.bfloat16())
    assert not calls
    assert hooked.forward is mine


def test_small_layers_are_left_alone(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "LEAST_LAYER", 30)
    model = Model()
    with fast_linear_layers(model):
        assert "forward" in model.first.__dict__ and "forward" not in model.second.__dict__


def test_nothing_is_touched_where_it_is_not_faster(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "is_faster", lambda: False)
    model = Model()
    with fast_linear_layers(model):
        assert all("forward" not in module.__dict__ for module in model.modules())


@torch.no_grad()
def test_hooks_of_a_layer_still_fire(calls: list[Any]) -> None:
    model, seen = Model(), []
    model.first.register_forward_hook(lambda module, arguments, output: seen.append(output.shape))
    with fast_linear_layers(model):
        model(torch.randn(3, 6))
    assert seen == [(3, 5)]
    assert len(calls) == 2


@torch.no_grad()
def test_a_weight_that_is_no_parameter_for_the_length_of_a_forward(calls: list[Any]) -> None:
    """As under FSDP1, which takes the parameter out and puts a plain tensor in its place."""
    model, states = Model(), torch.randn(3, 6)
    expected = model(states)
    with fast_linear_layers(model):
        weight = model.first._parameters.pop("weight")
        assert weight is not None
        model.first.weight = weight.data  # type: ignore[assignment]
        assert torch.allclose(model(states), expected, atol=1e-6)
    assert calls == [(4, 5)]


@torch.no_grad()
def test_a_bias_that_is_no_parameter(calls: list[Any]) -> None:
    model, states = Model(), torch.randn(3, 6)
    bias = model.first._parameters.pop("bias")
    assert bias is not None
    model.first.register_buffer("bias", bias.data)
    expected = model(states)
    with fast_linear_layers(model):
        assert torch.equal(model.first(states), F.linear(states, model.first.weight, model.first.bias))
        assert torch.allclose(model(states), expected, atol=1e-6)
    assert calls == [(4, 5)]


@torch.no_grad()
def test_autocast_decides_itself(calls: list[Any]) -> None:
    model, states = Model(), torch.randn(3, 6)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(states)
        with fast_linear_layers(model):
            assert torch.equal(model(states), expected)
    assert not calls


@torch.no_grad()
def test_a_weight_that_is_gone_goes_the_usual_way(calls: list[Any]) -> None:
    """Sharded weights are there for the length of a forward only, and may be of another type by then."""
    model = Model()
    with fast_linear_layers(model):
        whole = model.first.weight
        model.first.weight = nn.Parameter(torch.empty(0))
        with pytest.raises(RuntimeError):
            model(torch.randn(3, 6))
        model.first.weight = whole
    assert not calls


@pytest.mark.parametrize("settings", [dict(do_sample=False), dict(do_sample=True, temperature=1.2)])
def test_whole_generates(settings: dict[str, Any], calls: list[Any]) -> None:
    """Target and drafter both, attention included, give plain decoding's text."""
    target = make_target("llama")
    drafter = make_drafter(target)
    expected = plain(target, prompt(), max_new_tokens=24, **settings)
    assert not calls
    assert torch.equal(tree(target, drafter, prompt(), max_new_tokens=24, **settings), expected)
    assert {tuple(layer.weight.shape) for layer in target.modules() if isinstance(layer, nn.Linear)} <= set(calls)
    assert tuple(drafter.fc.weight.shape) in calls
    assert not linear_layers._held


@torch.no_grad()
@pytest.mark.parametrize(("held", "expected"), [(True, []), (False, [(512, 512)])])
def test_one_row_goes_the_usual_way_where_the_caches_hold_the_model(
    held: bool, expected: list[Any], asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "CACHED_WEIGHTS", 512 * 512 + held)
    layer = nn.Linear(512, 512)
    states = torch.randn(16, 512)
    with fast_linear_layers(layer):
        layer(states[:1])
        assert asked == expected
        layer(states)
    assert asked == [*expected, (512, 512)]
