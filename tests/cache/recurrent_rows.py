"""Recurrent cache layers of ours beside the library's, under a recurrence simple enough to be exact."""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import (
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from cache.rows import Rows, pick
from hf_ddtree.cache.recurrent import (
    TreeRecurrentAndGrowingLayer,
    TreeRecurrentAndGrowingSlidingLayer,
    TreeRecurrentLayer,
)

CHANNELS, KERNEL, WINDOW = 3, 4, 6

# Ours, the library's, and what both are made with.
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "recurrent": (TreeRecurrentLayer, LinearAttentionLayer, {}),
    "with_attention": (TreeRecurrentAndGrowingLayer, LinearAttentionAndFullAttentionLayer, {}),
    "with_sliding": (
        TreeRecurrentAndGrowingSlidingLayer,
        LinearAttentionAndSlidingWindowAttentionLayer,
        {"sliding_window": WINDOW},
    ),
}


@dataclass
class Halving:
    """Pending inputs of `state = state / 2 + input`; whole numbers below `2 ** 30` stay exact for long enough."""

    inputs: torch.Tensor

    def state_after(self, path: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        for node in path.tolist():
            state = state / 2 + self.inputs[..., node]
        return state


@dataclass
class Tokens:
    """What a layer gets of a few tokens: inputs of its convolution and of its recurrence, keys and values."""

    length: int
    seed: int
    inputs: torch.Tensor = field(init=False)
    rows: tuple[torch.Tensor, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.inputs = torch.randint(1, 999, (1, CHANNELS, self.length), generator=generator).double()
        self.rows = Rows()(self.length)

    def read(self, layer: Any, nodes: list[int], state_idx: int = 0) -> None:
        """Plain decoding: one token after the other into a layer that has no round."""
        for node in nodes:
            layer.update_conv_state(self.inputs[..., [node]], state_idx, conv_kernel_size=KERNEL)
            state = layer.recurrent_states[state_idx]
            before = torch.zeros(1, CHANNELS, dtype=torch.float64) if state is None else state
            layer.update_recurrent_state(before / 2 + self.inputs[..., node], state_idx)
        if hasattr(layer, "keys") and state_idx == 0:
            for node in nodes:
                layer.update(*pick(self.rows, [node]))

    def as_tree(self, layer: Any, replayed: bool = False, state_idx: int = 0) -> None:
        """A round's forward: the tokens are nodes, which the layer takes itself or is to read again at the commit."""
        if replayed:
            layer.pend(lambda path, scratch: self.read(scratch, path.tolist(), state_idx))
        else:
            before = layer.conv_states[state_idx].clone()
            both = layer.update_conv_state(self.inputs, state_idx, conv_kernel_size=KERNEL)
            assert torch.equal(both, torch.cat([before, self.inputs], dim=-1))
            layer.update_recurrent_state(Halving(self.inputs), state_idx)
        if hasattr(layer, "keys") and state_idx == 0:
            layer.update(*self.rows)


def twins(kind: str, prefix: int = 9, **kwargs: Any) -> tuple[Any, Any]:
    """A layer of ours and the library's own that have read the same tokens."""
    ours, theirs, arguments = KINDS[kind]
    layers = ours(**arguments, **kwargs), theirs(**arguments, **kwargs)
    for layer in layers:
        for state_idx in range(layer.number_of_states):
            Tokens(prefix, seed=1 + state_idx).read(layer, list(range(prefix)), state_idx)
    return layers


def states(layer: Any) -> list[torch.Tensor]:
    return [*layer.conv_states.values(), *layer.recurrent_states.values()]


def assert_equal(ours: Any, theirs: Any) -> None:
    assert all(map(torch.equal, states(ours), states(theirs)))
    assert ours.has_previous_state == theirs.has_previous_state
    assert not ours.record_past
    if hasattr(theirs, "keys"):
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
