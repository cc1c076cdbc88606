"""Teaching Transformers the strategy: writes its registries and wraps three of its functions, once.

No model class and no model object is changed.
"""

import functools
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, GenerationConfig, GenerationMixin
from transformers.pipelines import base as pipelines_base

from hf_ddtree.attention import NAME, ddtree_attention, ddtree_mask
from hf_ddtree.compat import GENERATION_MODES_MAPPING, ExplicitEnum, is_dflash_drafter
from hf_ddtree.configuration import SPECULATION_TYPE
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
    AttentionMaskInterface.register(NAME, ddtree_mask)
    _wrap(GenerationConfig, "get_generation_mode", _get_generation_mode)
    _wrap(GenerationMixin, "_validate_generation_mode", _validate_generation_mode)
    _wrap(pipelines_base, "load_assistant_model", _load_assistant_model)


def _wrap(owner: Any, name: str, wrapper: Any) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, call)


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
    else:
        original(model, generation_mode, generation_config, generation_mode_kwargs)


def _load_assistant_model(original: Any, model: Any, assistant_model: Any, assistant_tokenizer: Any) -> Any:
    # A drafter reads the target's own tokens; the library would compare special ids and ask for a second tokenizer.
    if is_dflash_drafter(assistant_model):
        return assistant_model, None
    return original(model, assistant_model, assistant_tokenizer)
