"""What attends in a compiled forward of a tree: a function that the forward is given, and that a graph can hold.

A graph cannot read the tree of the current context. It needs none where its masks are made outside and it is told by
an argument what to attend with.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_ddtree.attention.eager import eager_function
from hf_ddtree.attention.packed import packed_sdpa, serves
from hf_ddtree.attention.switch import original_implementation
from hf_ddtree.compat import ALL_ATTENTION_FUNCTIONS, decoder_layers, text_config

#: The forward's argument that says what to attend with.
ATTEND = "ddtree_attend"


def compiled_attention(model: PreTrainedModel) -> tuple[str, Callable[..., Any]]:
    """The route by which the layers of `model` attend to trees in a compiled forward, and the function that does it.

    It is the packed route for a model on `"sdpa"`, and its own eager function for one on `"eager"`.
    """
    if original_implementation(text_config(model)) == "eager":
        return "eager", eager_function(decoder_layers(model)[0])
    return "packed", packed_or_sdpa


def packed_or_sdpa(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The packed route where it serves, the library's SDPA elsewhere; arguments as those of [`ddtree_attention`]."""
    if attention_mask is not None and serves(attention_mask, kwargs):
        return packed_sdpa(query, key, value, attention_mask, scaling, None), None
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return sdpa(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
