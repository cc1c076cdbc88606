"""Cache layers that hand a tree their recurrent states, keep these as they are, and move them along one path after."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn import functional as F
from transformers.cache_utils import (
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from hf_ddtree.cache.layers import GrowingLayer, GrowingSlidingLayer
from hf_ddtree.cache.path import KeptPath
from hf_ddtree.linear_attention.states import STATES, copied


class Pending(Protocol):
    """What a recurrence over a tree leaves behind, from which the state after any of its paths is computed."""

    def state_after(self, path: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The state after the nodes `path` (`torch.LongTensor`, root first), as a new tensor.

        Args:
            state (`torch.Tensor`): the state before the root; it is not written.
        """
        ...


Finish = Callable[[torch.Tensor, LinearAttentionLayer], None]


class TreeRecurrentLayer(LinearAttentionLayer):
    """States of a recurrence and of the short convolution before it.

    A round is `begin`, the tree's forward, then `commit` or `rollback`. Within it the states are only read: the
    convolution's inputs and what the recurrence left pending are kept beside them, and a commit computes from those
    the states after the accepted path. Outside of a round the layer behaves as its parent.
    """

    # Names of its own: the layers of keys and values that it is combined with have their round too.
    _reading = False
    _finish: Finish | None = None
    # What the commit under way writes where: (state, its new value).
    _moves: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._inputs: dict[int, torch.Tensor] = {}
        self._pending: dict[int, Pending] = {}

    @classmethod
    def adopt(cls, layer: LinearAttentionLayer) -> "TreeRecurrentLayer":
        """A layer with the same states, in the same tensors; `layer` itself is not changed."""
        new = cls(number_of_states=layer.number_of_states)
        new._share(layer)
        return new

    def _share(self, layer: LinearAttentionLayer) -> None:
        self.number_of_states = layer.number_of_states
        for name in STATES:
            setattr(self, name, dict(getattr(layer, name)))
        self.device, self.dtype = layer.device, layer.dtype

    @property
    def holds_states(self) -> bool:
        """Whether the layer has read any token; some layers that the library makes never do."""
        return any(self.has_previous_state.values())

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Appends inputs `(batch, channels, tokens)` to the state and returns both, as the parent does.

        Within a round the state is not changed, and the nodes' inputs are kept until the commit.
        """
        if not self._reading:
            return super().update_conv_state(conv_states, state_idx, conv_kernel_size=conv_kernel_size, **kwargs)
        self._check_prefix(state_idx)
        self._inputs[state_idx] = conv_states
        return torch.cat([self.conv_states[state_idx], conv_states], dim=-1)

    def update_recurrent_state(self, recurrent_states: Any, state_idx: int = 0, **kwargs: Any) -> Any:
        """Takes the recurrence's last state, as the parent does; within a round, what it left [`Pending`].

        Raises:
            ValueError: within a round, for a tensor: the recurrence took the tree for a row of tokens.
        """
        if not self._reading:
            return super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
        if isinstance(recurrent_states, torch.Tensor):
            raise ValueError(
                "A recurrent layer of the target read the draft tree as a row of tokens: its forward is compiled, or "
                "its recurrence is not one that hf_ddtree can run over a tree. Generate with the uncompiled model, or "
                "without `assistant_model`."
            )
        self._check_prefix(state_idx)
        self._pending[state_idx] = recurrent_states
        return None

    def _check_prefix(self, state_idx: int) -> None:
        if not self.has_previous_state[state_idx]:
            raise RuntimeError("A round follows a prefix, but this recurrent layer has not read a token.")

    def pend(self, finish: Finish) -> None:
        """Leaves the commit to `finish(path, layer)`.

        Args:
            finish (`Callable`): reads the tokens of `path` (`torch.LongTensor`, root first) into `layer`, a plain
                `LinearAttentionLayer` with copies of the committed states, which the commit then takes over.
        """
        self._finish = finish

    def begin(self) -> None:
        """Starts a round: until its end the states are only read."""
        for index, kernel in self.conv_kernel_size.items():
            state = self.conv_states[index]
            if state is not None and state.shape[-1] != kernel:
                # A recorded past (`activate_past_recording`) is longer, or shorter after a short prompt.
                self.conv_states[index] = F.pad(state, (max(0, kernel - state.shape[-1]), 0))[..., -kernel:]
        # A model that sees its past recorded avoids the kernels that move the state of the convolution in place.
        self._reading = self.record_past = True

    def commit(self, path: KeptPath) -> None:
        """Moves the states along the nodes `path`.

        Committing the same path again finishes a commit that an interrupt cut short.
        """
        if self._reading:
            if self._moves is None:
                self._moves = self._moved(path) + self._replayed(path)
            for state, new in self._moves:
                # In place, for graphs captured on the state's address.
                state.copy_(new)
        self._stop_reading()

    def _moved(self, path: KeptPath) -> list[tuple[torch.Tensor, torch.Tensor]]:
        moves = []
        for index, inputs in self._inputs.items():
            state = self.conv_states[index]
            accepted = inputs.index_select(-1, path.on(inputs.device))
            moves.append((state, torch.cat([state, accepted], dim=-1)[..., -state.shape[-1] :]))
        for index, pending in self._pending.items():
            state = self.recurrent_states[index]
            moves.append((state, pending.state_after(path.nodes, state)))
        return moves

    def _replayed(self, path: KeptPath) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if self._finish is None:
            return []
        scratch = copied(self)
        self._finish(path.nodes, scratch)
        # A layer may keep several states, and only some of them by replaying tokens.
        return [
            (state, getattr(scratch, name)[index])
            for name, moved in (("conv_states", self._inputs), ("recurrent_states", self._pending))
            for index, state in getattr(self, name).items()
            if state is not None and index not in moved
        ]

    def rollback(self) -> None:
        """Ends the round as if it had not been."""
        self._stop_reading()

    def _stop_reading(self) -> None:
        self._reading = self.record_past = False
        self._inputs, self._pending, self._finish, self._moves = {}, {}, None, None


def saved_states(layer: LinearAttentionLayer) -> Callable[[], None]:
    """A function that gives a layer back the states it has now, in the tensors they are in now.

    Outside of rounds the library writes states in place, so what they hold is copied.
    """
    held = {name: dict(getattr(layer, name)) for name in STATES}
    copies = {
        name: {index: None if state is None else state.clone() for index, state in held[name].items()}
        for name in ("conv_states", "recurrent_states")
        if any(layer.has_previous_state.values())
    }

    def restore() -> None:
        for name, values in held.items():
            setattr(layer, name, values)
        for name, states in copies.items():
            for index, state in states.items():
                if state is not None:
                    held[name][index].copy_(state)

    return restore


class TreeRecurrentAndGrowingLayer(TreeRecurrentLayer, GrowingLayer, LinearAttentionAndFullAttentionLayer):
    """A layer with recurrent states, and keys and values of the whole context."""

    @classmethod
    def adopt(cls, layer: Any) -> "TreeRecurrentAndGrowingLayer":
        """A layer with the same states and rows; `layer` itself is not changed."""
        new: Any = super(TreeRecurrentLayer, cls).adopt(layer)
        new._share(layer)
        return new

    def begin(self) -> None:
        TreeRecurrentLayer.begin(self)
        GrowingLayer.begin(self)

    def commit(self, path: KeptPath) -> None:
        TreeRecurrentLayer.commit(self, path)
        GrowingLayer.commit(self, path)

    def rollback(self) -> None:
        TreeRecurrentLayer.rollback(self)
        GrowingLayer.rollback(self)

    def crop(self, tokens_to_remove: int) -> None:
        """As in the parent, which raises where recurrent states cannot lose their last tokens."""
        LinearAttentionAndFullAttentionLayer.crop(self, tokens_to_remove)


class TreeRecurrentAndGrowingSlidingLayer(
    TreeRecurrentLayer, GrowingSlidingLayer, LinearAttentionAndSlidingWindowAttentionLayer
):
    """A layer with recurrent states, and keys and values of a sliding window."""

    @classmethod
    def adopt(cls, layer: Any) -> "TreeRecurrentAndGrowingSlidingLayer":
        """A layer with the same states and rows; `layer` itself is not changed."""
        new: Any = super(TreeRecurrentLayer, cls).adopt(layer)
        new._share(layer)
        return new

    def begin(self) -> None:
        TreeRecurrentLayer.begin(self)
        GrowingSlidingLayer.begin(self)

    def commit(self, path: KeptPath) -> None:
        TreeRecurrentLayer.commit(self, path)
        GrowingSlidingLayer.commit(self, path)

    def rollback(self) -> None:
        TreeRecurrentLayer.rollback(self)
        GrowingSlidingLayer.rollback(self)

    def crop(self, tokens_to_remove: int) -> None:
        """As in the parent, which raises where recurrent states cannot lose their last tokens."""
        LinearAttentionAndSlidingWindowAttentionLayer.crop(self, tokens_to_remove)
