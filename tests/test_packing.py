"""Packed weights: the same products, seen changes, and layers that are afterwards what they were."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import hf_ddtree
from hf_ddtree.packing import packable
from pairs import make_drafter, make_target, plain, prompt, tree

pytestmark = pytest.mark.skipif(not packable(nn.Linear(8, 8)), reason="this build of PyTorch has no oneDNN")


def states(model: nn.Module) -> list[Any]:
    """What the modules of a model hold, attribute by attribute."""
    return [(name, key, id(value)) for name, module in model.named_modules() for key, value in vars(module).items()]


def counting(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every weight that is packed from now on."""
    packed, real = [], torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(
        torch.ops.mkldnn, "_reorder_linear_weight", lambda weight, rows: packed.append(weight) or real(weight, rows)
    )
    return packed


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(24,), (1, 1, 24), (2, 17, 24), (1, 130, 24), (1, 0, 24)])
def test_the_product_is_the_layer_s(shape: tuple[int, ...], bias: bool) -> None:
    layer, states = nn.Linear(24, 40, bias=bias), torch.randn(shape)
    with torch.no_grad():
        expected = layer.double()(states.double()).float()
        layer.float()
        with hf_ddtree.packed_weights(layer) as packed:
            torch.testing.assert_close(layer(states), expected, rtol=1e-5, atol=1e-5)
    assert (packed.layers, packed.left, packed.bytes) == (1, 0, 24 * 40 * 4)


def test_bf16_where_the_machine_has_it() -> None:
    layer, states = nn.Linear(64, 48).bfloat16(), torch.randn(1, 9, 64).bfloat16()
    if not packable(layer):
        pytest.skip("this CPU does not compute in bf16")
    with torch.no_grad(), hf_ddtree.packed_weights(layer):
        found = layer(states).float()
        expected = nn.functional.linear(states.float(), layer.weight.float(), layer.bias.float())
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.9}])
def test_texts_are_plain_decoding_s(sampling: dict[str, Any]) -> None:
    target = make_target("llama")
    drafter, ids = make_drafter(target), prompt()
    expected, before = plain(target, ids, max_new_tokens=24, **sampling), (states(target), states(drafter))
    with hf_ddtree.packed_weights(target, drafter) as packed:
        assert packed.layers > 20
        assert torch.equal(tree(target, drafter, ids, max_new_tokens=24, **sampling), expected)
        assert torch.equal(plain(target, ids, max_new_tokens=24, **sampling), expected)
    assert (states(target), states(drafter)) == before


def test_a_packed_weight_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, states = nn.Linear(8, 8), torch.randn(3, 8)
    packed = counting(monkeypatch)
    with torch.no_grad(), hf_ddtree.packed_weights(layer):
        expected = layer(states)
        monkeypatch.setattr(nn.functional, "linear", None)
        assert torch.equal(layer(states), expected) and len(packed) == 1


def change_in_place(layer: nn.Linear) -> None:
    layer.weight.mul_(2)


def change_as_peft_merges(layer: nn.Linear) -> None:
    layer.weight.data += 1


def change_the_storage(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data * 3


def change_the_parameter(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight * 4)


def load(layer: nn.Linear) -> None:
    layer.load_state_dict({"weight": torch.randn(8, 8), "bias": torch.randn(8)})


@pytest.mark.parametrize(
    "change", [change_in_place, change_as_peft_merges, change_the_storage, change_the_parameter, load]
)
def test_a_changed_weight_is_packed_again(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, states = nn.Linear(8, 8), torch.randn(3, 8)
    packed = counting(monkeypatch)
    with torch.no_grad(), hf_ddtree.packed_weights(layer):
        layer(states)
        change(layer)
        for _ in range(2):
            torch.testing.assert_close(layer(states), nn.functional.linear(states, layer.weight, layer.bias))
    assert len(packed) == 2 and "forward" not in vars(layer)


def test_gradients_autocast_and_other_dtypes_take_the_plain_forward() -> None:
    layer, states = nn.Linear(8, 8), torch.randn(3, 8)
    with hf_ddtree.packed_weights(layer):
        layer(states).sum().backward()
        assert torch.equal(layer.weight.grad, states.sum(0).expand(8, 8))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert layer(states).dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match="dtype"):
            layer(states.double())
        with torch.no_grad():
            assert layer.double()(states.double()).dtype == torch.float64


def test_a_compiled_forward_takes_the_packed_weight_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    model, states = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False)), torch.randn(3, 8)
    run, real, products = torch.compile(model, backend="aot_eager"), torch.ops.mkldnn._linear_pointwise, []
    monkeypatch.setattr(
        torch.ops.mkldnn, "_linear_pointwise", lambda *args: products.append(args) or real(*args), raising=False
    )
    with torch.no_grad():
        for turn in range(3):
            with hf_ddtree.packed_weights(model), torch._dynamo.config.patch(error_on_recompile=turn > 0):
                torch.testing.assert_close(run(states), model[1](model[0](states)))
                model[0].weight.mul_(1.5)
                torch.testing.assert_close(run(states), model[1](model[0](states)))
        assert len(products) == 3 * 8
        assert torch.equal(run(states), nn.functional.linear(model[0](states), model[1].weight))
    assert len(products) == 3 * 8


def test_contexts_may_overlap_and_end_by_an_error() -> None:
    layer = nn.Linear(8, 8)
    outer, inner = hf_ddtree.packed_weights(layer), hf_ddtree.packed_weights(layer)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert "forward" in vars(layer)
    assert not inner.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert "forward" not in vars(layer)


def test_copies_of_a_packed_model_are_models() -> None:
    model, states = nn.Sequential(nn.Linear(8, 8)), torch.randn(3, 8)
    with torch.no_grad(), hf_ddtree.packed_weights(model):
        other, file = copy.deepcopy(model), io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for copied in (other, torch.load(file, weights_only=False)):
            copied[0].weight.zero_()
            assert torch.equal(copied(states), copied[0].bias.expand(3, 8))
        assert not torch.equal(model(states), model[0].bias.expand(3, 8))


def test_layers_that_are_run_by_hooks_or_quantised_are_left() -> None:
    class Quantised(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Quantised(8, 8))
    forward = model[1].forward
    model[1].forward = forward
    with hf_ddtree.packed_weights(model) as packed:
        assert (packed.layers, packed.left) == (1, 2)
    assert model[1].forward is forward and "forward" not in vars(model[0])


@pytest.mark.parametrize(
    ("model", "found"),
    [(nn.Embedding(4, 4), "found none"), (nn.Linear(4, 4).double(), "Parameter torch.float64 on cpu")],
)
def test_nothing_to_pack_is_refused(model: nn.Module, found: str) -> None:
    with pytest.raises(ValueError, match=found), hf_ddtree.packed_weights(model):
        pass
