"""Binding a drafter to a model object, for callers of `generate` that cannot pass an assistant.

The binding lives beside the model, under a weak reference: nothing is written to the model, its configuration or its
weights, so that copying, pickling and saving see the model as it was.
"""

import copy
import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from hf_ddtree.compat import is_dflash_drafter
from hf_ddtree.configuration import DDTreeConfig, TreeSettings
from hf_ddtree.generation.compatibility import check_target
from hf_ddtree.generation.pair import check_pair

_WAY_OUT = (
    "This model has a drafter bound by `hf_ddtree.attach`: `hf_ddtree.detach(model)` gives plain `generate` back."
)


@dataclass(frozen=True)
class _Attachment:
    drafter: PreTrainedModel
    settings: dict[str, Any]


_attached: weakref.WeakKeyDictionary[Any, _Attachment] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def attach(model: PreTrainedModel, drafter: PreTrainedModel, config: DDTreeConfig | None = None) -> None:
    r"""
    Binds a drafter to a model object: every `model.generate(...)` then verifies draft trees, until [`detach`].

    For callers that cannot pass `assistant_model`: chat front ends, evaluation loops of trainers, wrappers. An
    `assistant_model` in the call takes precedence. A call that trees do not serve (beams, batches, another strategy)
    raises. A second call replaces drafter and settings.

    Nothing of the model changes: its configuration, `state_dict`, modules and attributes stay as they were. A copy of
    the model, by `deepcopy`, pickling or `save_pretrained`, has no drafter bound. Other objects that wrap the model
    (PEFT) generate with trees too, as their `generate` calls the model's.

    Args:
        model (`PreTrainedModel`): the target, or a PEFT model around it.
        drafter (`PreTrainedModel`): a [`DFlashModel`] or a native DFlash assistant, trained for this target.
        config (`DDTreeConfig`, *optional*):
            The tree's settings, such as `budget`, for calls whose own config leaves them open.

    Raises:
        ValueError: if the pair does not fit or the target cannot verify trees; both sides are named.
    """
    model = _base(model)
    if not is_dflash_drafter(drafter):
        raise ValueError(
            f"`attach` binds a DFlash drafter, but got a {type(drafter).__name__}: load one with "
            "`DFlashModel.from_pretrained(...)`."
        )
    if "generate" in vars(model):
        raise ValueError(
            f"This {type(model).__name__} object has a `generate` of its own (custom generation code, or a compiled "
            "one), which would not see the drafter. Remove it, or load the model without that code."
        )
    settings = _settings(config)
    check_target(model, model.generation_config)
    check_pair(model, drafter)
    with _lock:
        _attached[model] = _Attachment(drafter, settings)


def detach(model: PreTrainedModel) -> None:
    """Undoes [`attach`]; a model without a drafter bound is left as it is. Running generates finish as they began."""
    with _lock:
        _attached.pop(_base(model), None)


def generate(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """`GenerationMixin.generate`, with the bound drafter filled in where the call names no assistant."""
    attachment = _attached.get(model) if _attached else None
    if attachment is None:
        return original(model, *args, **kwargs)
    call = _signature(original).bind(model, *args, **kwargs)
    given = call.arguments
    if given.get("assistant_model") is not None:
        return original(model, *args, **kwargs)
    if given.get("custom_generate") is not None:
        raise ValueError(f"`custom_generate` brings its own decoding, which would not see the drafter. {_WAY_OUT}")
    given["assistant_model"] = attachment.drafter
    if attachment.settings:
        rest = given.setdefault("kwargs", {})
        given["generation_config"] = _filled(given.get("generation_config"), rest, attachment.settings)
    try:
        return original(*call.args, **call.kwargs)
    except (ValueError, NotImplementedError) as error:
        if type(error) in (ValueError, NotImplementedError):
            error.args = (f"{error} {_WAY_OUT}",)
        raise


_signature = functools.cache(inspect.signature)


def _base(model: Any) -> Any:
    """The Transformers model inside a PEFT wrapper, whose `generate` ends in that of the inner model."""
    if isinstance(model, PreTrainedModel):
        return model
    inner = getattr(model, "get_base_model", None)
    if inner is None:
        raise ValueError(
            f"`attach` takes a Transformers model, or a PEFT model around one, not {type(model).__name__}."
        )
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(
            f"{type(model).__name__} prepends learned prompts to its inputs, which draft trees do not know of. "
            "Generate without a drafter."
        )
    return inner()


def _settings(config: DDTreeConfig | None) -> dict[str, Any]:
    """What `config` sets of the tree; anything else in it belongs to a call."""
    if config is None:
        return {}
    TreeSettings.read(config)
    names = set(inspect.signature(DDTreeConfig.__init__).parameters) - {"self", "kwargs"}
    changed = config.to_diff_dict()
    foreign = sorted(set(changed) - names - {"speculation_type", "transformers_version"})
    if foreign:
        raise ValueError(
            f"`attach` takes the tree's settings ({', '.join(sorted(names))}), but its config also sets "
            f"{', '.join(f'`{name}`' for name in foreign)}. Pass that to `generate`, or set it in "
            "`model.generation_config`."
        )
    return {name: changed[name] for name in names if changed.get(name) is not None}


def _filled(config: GenerationConfig | None, kwargs: dict[str, Any], settings: dict[str, Any]) -> GenerationConfig:
    """The call's own config with the tree's settings where it leaves them open."""
    if config is None:
        config = GenerationConfig()
        # Beside a config the library deprecates further arguments; the caller passed no config.
        for name in [name for name, value in kwargs.items() if value is not None and name in vars(config)]:
            setattr(config, name, kwargs.pop(name))
    else:
        config = copy.deepcopy(config)
    for name, value in settings.items():
        if getattr(config, name, None) is None:
            setattr(config, name, value)
    return config
