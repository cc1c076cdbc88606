"""Teaching Transformers the strategy: writes its registries and wraps a few of its functions, once.

No model class and no model object is changed.
"""

import functools
from typing import Any

from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModel,
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
)

from hf_ddtree import attachment, auto
from hf_ddtree.after_import import after_import
from hf_ddtree.attention import NAME, ddtree_attention, planned_mask
from hf_ddtree.compat import GENERATION_MODES_MAPPING, ExplicitEnum, is_dflash_drafter
from hf_ddtree.configuration import SPECULATION_TYPE
from hf_ddtree.drafters import check_native_chain
from hf_ddtree.experts import keep_trees_grouped
from hf_ddtree.generation.compatibility import check_request
from hf_ddtree.generation.decoding import ddtree_decoding

METHOD = "_ddtree_decoding"


class DDTreeMode(ExplicitEnum):
    """The generation mode that `generate` dispatches on, beside [`~transformers.generation.GenerationMode`]."""

    DDTREE = "ddtree"


def register() -> None:
    """Writes the registries; a second call changes nothing."""
    if hasattr(GenerationMixin, METHOD):
        return
    setattr(GenerationMixin, METHOD, ddtree_decoding)
    GENERATION_MODES_MAPPING[DDTreeMode.DDTREE] = METHOD
    AttentionInterface.register(NAME, ddtree_attention)
    AttentionMaskInterface.register(NAME, planned_mask)
    keep_trees_grouped()
    _wrap(GenerationConfig, "get_generation_mode", _get_generation_mode)
    _wrap(GenerationMixin, "_validate_generation_mode", _validate_generation_mode)
    _wrap(GenerationMixin, "generate", attachment.generate)
    after_import(
        "transformers.pipelines.base", lambda module: _wrap(module, "load_assistant_model", auto.load_assistant)
    )
    for auto_class in (AutoModel, AutoModelForCausalLM):
        _wrap_loader(auto_class)


def _wrap(owner: Any, name: str, wrapper: Any) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, call)


def _wrap_loader(auto_class: Any) -> None:
    original = vars(auto_class)["from_pretrained"].__func__

    @functools.wraps(original)
    def from_pretrained(cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        # Bound to the class of the call, which may be a subclass.
        return auto.load_auto(functools.partial(original, cls), pretrained_model_name_or_path, *args, **kwargs)

    auto_class.from_pretrained = classmethod(from_pretrained)


def _get_generation_mode(original: Any, config: GenerationConfig, assistant_model: Any = None) -> Any:
    # `model.generation_config = DDTreeConfig(...)` and reloaded files reach here as plain configs with the
    # saved field.
    if config.speculation_type == SPECULATION_TYPE:
        return DDTreeMode.DDTREE
    if config.speculation_type is None and is_dflash_drafter(assistant_model):
        return DDTreeMode.DDTREE
    return original(config, assistant_model)


def _validate_generation_mode(
    original: Any, model: Any, generation_mode: Any, generation_config: GenerationConfig, generation_mode_kwargs: Any
) -> None:
    if generation_mode is DDTreeMode.DDTREE:
        check_request(model, generation_config, generation_mode_kwargs)
        return
    drafter = generation_mode_kwargs.get("assistant_model")
    if generation_config.speculation_type == "dflash" and is_dflash_drafter(drafter):
        check_native_chain(drafter)
    original(model, generation_mode, generation_config, generation_mode_kwargs)
