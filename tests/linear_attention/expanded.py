"""Tiny models with recurrent layers that read a tree path by path, and rounds on them."""

from typing import Any

import torch
from transformers import GenerationConfig

from hf_ddtree.cache.recurrent import TreeRecurrentLayer
from hf_ddtree.compat import recurrent_mixers
from models.paths import COARSE, FAMILIES
from models.sequence import Sequence
from models.zoo import ALL

EXPANDED = {family.name: family for family in (*FAMILIES, *COARSE) if family.present}


def make_expanded(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **fields: Any) -> Any:
    """As `pairs.make_target`, of one of the families in `EXPANDED`."""
    torch.manual_seed(seed)
    model = EXPANDED[name].build(**fields).eval()
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.25, generator=generator)
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=None)
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        # The grouped matrix product that experts default to has no fp64.
        model.set_experts_implementation("eager")
    return model.to(dtype)


def tokens(length: int, seed: int = 0) -> list[int]:
    """Random text, the same for every family."""
    return ALL["bamba"].tokens(length, seed)


def sequence_of(model: Any, prefix: list[int], padding: int = 0) -> Sequence:
    """Rounds on a model of text."""
    return Sequence(ALL["bamba"], model, prefix, padding)


def mixers_of(model: Any) -> list[Any]:
    return [mixer for mixers in recurrent_mixers(model).values() for mixer in mixers]


def layers_of(cache: Any) -> list[TreeRecurrentLayer]:
    return [layer for layer in cache.layers if isinstance(layer, TreeRecurrentLayer) and layer.holds_states]


def states_of(cache: Any) -> list[torch.Tensor]:
    """Every state of a cache, of ours or of the library's."""
    return [
        state
        for layer in cache.layers
        if hasattr(layer, "conv_states")
        for states in (layer.conv_states, layer.recurrent_states)
        for state in states.values()
        if state is not None
    ]


def hooks_of(model: Any) -> dict[str, tuple[int, int]]:
    """Hooks that hang on each module, before and after its forward."""
    return {
        name: (len(module._forward_pre_hooks), len(module._forward_hooks)) for name, module in model.named_modules()
    }
