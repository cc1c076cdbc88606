"""The attention function registered under `"ddtree"`: which route a layer takes."""

from typing import Any

import torch
from torch import nn

from hf_ddtree.attention.compiled import ATTEND
from hf_ddtree.attention.eager import eager_function
from hf_ddtree.attention.kernel import dense, try_kernel
from hf_ddtree.attention.packed import packed_sdpa, serves
from hf_ddtree.attention.switch import original_implementation
from hf_ddtree.compat import ALL_ATTENTION_FUNCTIONS
from hf_ddtree.round import CURRENT_ROUND, MixerKind


def ddtree_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of a tree's nodes over the prefix and their ancestors.

    The kernel serves what it can, see [`try_kernel`]; the rest is as follows. A model on `"eager"` takes its own eager
    function with the tree's mask, softcap and sinks included. One on `"sdpa"` takes the packed route, or the library's
    function where a layer passes more than that route knows: what that function leaves out, plain decoding leaves out
    too. Without a tree the call goes to the model's own implementation unchanged. A compiled forward brings its
    function along, see [`compiled_attention`].

    Args:
        query (`torch.Tensor` of shape `(batch, heads, nodes, head_dim)`): the nodes' queries.
        key, value (`torch.Tensor` of shape `(batch, key_value_heads, prefix + nodes, head_dim)`): from the cache.
        attention_mask (`torch.Tensor` of shape `(batch, 1, nodes, prefix + nodes)`): from [`ddtree_mask`].

    Returns:
        The output of shape `(batch, nodes, heads, head_dim)`, and the weights on the eager route.
    """
    if (attend := kwargs.pop(ATTEND, None)) is not None:
        return attend(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    implementation = original_implementation(module.config)
    tree = CURRENT_ROUND.get()
    if tree is not None:
        index = getattr(module, "layer_idx", None)
        # A block that several layers share does not know which one it is in; the cache has just been told.
        shared = index is None or index < 0
        tree.mixed.add((tree.updated_layer if shared else index, MixerKind.ATTENTION))
        output, reason = try_kernel(tree, module, implementation, query, key, value, attention_mask, scaling, kwargs)
        packed = implementation != "eager" and serves(attention_mask, kwargs)
        route = "kernel" if output is not None else "packed" if packed else implementation
        tree.routes[f"{route} ({reason})" if reason else route] += 1
        if output is not None:
            return output, None
        attention_mask = dense(attention_mask)
        if packed:
            return packed_sdpa(query, key, value, attention_mask, scaling, tree), None
    attend = eager_function(module) if implementation == "eager" else ALL_ATTENTION_FUNCTIONS[implementation]
    return attend(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
