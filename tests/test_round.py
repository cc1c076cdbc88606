"""What a round shares: who descends from whom, and hidden states that reach one collector and no other."""

import threading
from typing import Any

import pytest
import torch
from torch import nn

from attention.trees import ancestors, random_tree, round_of
from hf_ddtree.compat import decoder_layers
from hf_ddtree.round import TapCollector
from pairs import make_target, prompt


class Layers(nn.Module):
    """Three layers that add 1, 10, 100; the last returns a tuple, as some families do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Add(1), Add(10), Add(100, in_tuple=True)])

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            output = layer(states)
            states = output[0] if isinstance(output, tuple) else output
        return states


class Add(nn.Module):
    def __init__(self, number: int, in_tuple: bool = False):
        super().__init__()
        self.number, self.in_tuple = number, in_tuple

    def forward(self, states: torch.Tensor) -> Any:
        return (states + self.number, None) if self.in_tuple else states + self.number


def states(length: int) -> torch.Tensor:
    return torch.arange(length).reshape(1, length, 1).float() * 1000


@pytest.mark.parametrize("nodes", [1, 2, 3, 17, 64, 129])
def test_visible_is_ancestors_and_self(nodes: int) -> None:
    tree = random_tree(nodes, seed=nodes)
    visible = round_of(tree).visible
    assert torch.equal(visible, tree.visibility())
    for node, expected in enumerate(ancestors(tree)):
        assert set(visible[node].nonzero().flatten().tolist()) == expected


def test_taps_are_side_by_side_in_the_drafter_s_order() -> None:
    model = Layers()
    taps = TapCollector(model.layers, [2, 0])
    with taps.hooked(), taps.collect():
        model(states(3))
    assert torch.equal(taps.taps(), torch.cat([states(3) + 111, states(3) + 1], dim=-1))


def test_forwards_of_one_collection_follow_one_another() -> None:
    model = Layers()
    taps = TapCollector(model.layers, [1])
    with taps.hooked():
        with taps.collect():
            model(states(5)[:, :2])
            model(states(5)[:, 2:])
        assert torch.equal(taps.taps(), states(5) + 11)
        with taps.collect():
            model(states(1))
        assert torch.equal(taps.taps(), states(1) + 11)


def test_nothing_is_collected_outside() -> None:
    model = Layers()
    taps, other = TapCollector(model.layers, [0]), TapCollector(model.layers, [0])
    with taps.hooked(), other.hooked():
        with taps.collect():
            model(states(2))
        model(states(4))
        assert taps.taps().shape[1] == 2
        with other.collect():
            model(states(3))
        assert (taps.taps().shape[1], other.taps().shape[1]) == (2, 3)


def test_another_thread_s_forward_is_not_collected() -> None:
    model = Layers()
    taps = TapCollector(model.layers, [0])
    with taps.hooked(), taps.collect():
        model(states(2))
        thread = threading.Thread(target=model, args=(states(7),))
        thread.start()
        thread.join(timeout=60)
    assert taps.taps().shape[1] == 2


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_hooks_are_taken_out_whatever_happens(error: type[BaseException]) -> None:
    model = Layers()
    taps = TapCollector(model.layers, [0, 2])
    with pytest.raises(error), taps.hooked(), taps.collect():
        raise error
    assert not any(layer._forward_hooks for layer in model.layers)
    with taps.hooked():
        model(states(2))
    with pytest.raises(RuntimeError, match=r"\[0, 2\]"):
        taps.taps()


def test_a_layer_that_does_not_exist_leaves_no_hook() -> None:
    model = Layers()
    with pytest.raises(IndexError), TapCollector(model.layers, [0, 9]).hooked():
        pass
    assert not model.layers[0]._forward_hooks


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_taps_of_a_model_are_before_its_last_norm(family: str) -> None:
    """`hidden_states[i + 1]` for every layer but the last, where the library's tuple holds the normed states."""
    model = make_target(family)
    taps = TapCollector(decoder_layers(model), [0, 2, 3])
    with torch.no_grad(), taps.hooked(), taps.collect():
        hidden = model(prompt(), output_hidden_states=True).hidden_states
    first, middle, last = taps.taps().split(32, dim=-1)
    assert torch.equal(first, hidden[1])
    assert torch.equal(middle, hidden[3])
    with torch.no_grad():
        assert torch.equal(model.get_decoder().norm(last), hidden[4])
    assert not torch.allclose(last, hidden[4], atol=1e-2)
