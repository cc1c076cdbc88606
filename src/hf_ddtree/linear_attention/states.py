"""The states that a recurrent layer of the cache keeps, and copies of them."""

from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer

#: What a [`~transformers.cache_utils.LinearAttentionLayer`] keeps, each a dictionary by the state's number.
STATES = (
    "conv_states",
    "recurrent_states",
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
    "conv_kernel_size",
)


def bytes_of(layer: LinearAttentionLayer) -> int:
    """Bytes that the states of a layer take."""
    states = (*layer.conv_states.values(), *layer.recurrent_states.values())
    return sum(state.nbytes for state in states if state is not None)


def copied(layer: LinearAttentionLayer, rows: torch.Tensor | None = None) -> LinearAttentionLayer:
    """A plain layer with copies of the states of all sequences, or of `rows` (`torch.LongTensor`) in their order."""

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.clone() if rows is None else value.index_select(0, rows.to(value.device))

    new = LinearAttentionLayer(number_of_states=layer.number_of_states)
    new.device, new.dtype = layer.device, layer.dtype
    for name in STATES:
        setattr(new, name, {index: copy(value) for index, value in getattr(layer, name).items()})
    return new
