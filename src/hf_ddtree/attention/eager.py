"""The eager attention function of a layer's own file, and what it computes."""

import functools
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import nn


def eager_function(module: nn.Module) -> Any:
    """The `eager_attention_forward` of the file that defines the layer, with its softcap, sinks and dtypes.

    Raises:
        ValueError: if there is none.
    """
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise ValueError(
        f"{type(module).__name__} has no eager attention function to verify a draft tree with; "
        'load the model with `attn_implementation="sdpa"`.'
    )


@functools.cache
def eager_features(function: Callable[..., Any]) -> frozenset[str] | None:
    """Arguments that an eager function honours beside query, key, value, mask and scaling; `None` if it is unknown.

    Model files of the library hold copies of a few functions. One is known if its code is that of a family for which
    the kernel is tested: Llama's (nothing more), Gemma 2's (`softcap`) or gpt-oss' (`s_aux`, its sinks).
    """
    for family, features in _KNOWN.items():
        known = import_module(f"transformers.models.{family}.modeling_{family}").eager_attention_forward
        if _code(function) == _code(known):
            return features
    return None


_KNOWN = {"llama": frozenset[str](), "gemma2": frozenset({"softcap"}), "gpt_oss": frozenset({"s_aux"})}


def _code(function: Any) -> tuple[Any, ...]:
    code = function.__code__
    return code.co_code, code.co_consts, code.co_names, code.co_varnames
