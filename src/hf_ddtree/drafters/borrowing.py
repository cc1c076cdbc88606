"""Modules that a drafter borrows of its target: called as they are, however their weights are held.

A target's embedding and head may be quantised, split over processes, wrapped by an adapter, or loaded only for the
length of a call. Their forward knows how; their `weight` may have another shape or dtype, or no values.
"""

import itertools
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from hf_ddtree.compat import text_config

# What sums are computed in; weights of other dtypes are packed or quantised.
_COMPUTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def embedding_shape(target: PreTrainedModel) -> tuple[int, int]:
    """`(rows, hidden_size)` of the target's input embedding."""
    return _shape(target, target.get_input_embeddings(), "num_embeddings", "embedding_dim")


def head_shape(target: PreTrainedModel) -> tuple[int, int]:
    """`(rows, hidden_size)` of the target's output embedding."""
    return _shape(target, target.get_output_embeddings(), "out_features", "in_features")


def _shape(target: PreTrainedModel, module: Any, rows: str, width: str) -> tuple[int, int]:
    layer = unwrapped(module)
    if isinstance(getattr(layer, rows, None), int):
        return getattr(layer, rows), getattr(layer, width)
    weight = getattr(layer, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.dtype in _COMPUTED:
        return weight.shape[0], weight.shape[1]
    config = text_config(target)
    return config.vocab_size, config.hidden_size


def unwrapped(module: Any) -> Any:
    """The target's own layer inside the wrappers that PEFT puts around it."""
    while True:
        if hasattr(module, "get_base_layer"):
            module = module.get_base_layer()
        elif isinstance(getattr(module, "original_module", None), nn.Module):
            module = module.original_module
        else:
            return module


def plain_weight(module: Any) -> torch.Tensor | None:
    """The module's `(rows, width)` weight, if its values are all here and can be read row by row."""
    weight: Any = getattr(module, "weight", None)
    plain = isinstance(module, nn.Embedding) and type(weight) in (torch.Tensor, nn.Parameter)
    if not plain or weight.device.type == "meta" or weight.dtype not in _COMPUTED:
        return None
    return weight if weight.shape == (module.num_embeddings, module.embedding_dim) else None


def device_of(module: nn.Module) -> torch.device | None:
    """Where the module takes its inputs; `None` where it moves them itself, as an offloaded one does."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return next((tensor.device for tensor in tensors if tensor.device.type != "meta"), None)


def dtype_of(module: Any, target: PreTrainedModel) -> torch.dtype:
    """The dtype of the states that the module takes."""
    weight: Any = getattr(module, "weight", None)
    known = isinstance(weight, torch.Tensor) and weight.dtype in _COMPUTED
    return weight.dtype if known else target.dtype


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 shards the model's weights over several processes."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    # Weights are sharded over a process group, and all modules are many to look at in each generate.
    if fsdp is None or not (dist.is_available() and dist.is_initialized()):
        return False
    return any(isinstance(module, fsdp.FSDPModule) for module in model.modules())


def borrowed(owner: PreTrainedModel, module: Any) -> Any:
    """`module`, or a copy of it with whole weights where FSDP2 shards its owner.

    There a module may be called only inside its owner's forward. Its weights are gathered once, by every process.
    """
    return _gathered(module) if is_sharded(owner) else module


def _gathered(module: Any) -> Any:
    # FSDP2 makes classes that cannot be copied or constructed.
    whole: Any = object.__new__(type(module))
    vars(whole).update(vars(module))
    for hooks in ("_forward_hooks", "_forward_pre_hooks"):
        setattr(whole, hooks, type(getattr(module, hooks))())
    # Tensor parallelism replaces `forward` by one for a part of the weight.
    vars(whole).pop("forward", None)
    whole._parameters = {name: _whole(parameter) for name, parameter in module._parameters.items()}
    whole._modules = {name: _gathered(child) for name, child in module._modules.items()}
    return whole


def _whole(parameter: Any) -> Any:
    if parameter is None:
        return None
    # Between its forwards FSDP2 may keep a parameter whole, in memory that it takes back later.
    full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach().clone()
    return nn.Parameter(full.detach(), requires_grad=False)
