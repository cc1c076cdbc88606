"""Entry points of Transformers that load by name: a DFlash repository is told by its raw `config.json`.

Published drafters name another family in `model_type`, so Transformers would build that family's model around their
weights. Its mapping by architecture cannot help: it starts from the family's own configuration class, which drops
fields (Qwen3's drops the window). So the raw file decides, before any configuration class is chosen.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_ddtree.compat import DFLASH_MODEL_TYPES, is_dflash_drafter, pinned_revision
from hf_ddtree.drafters import DFlashConfig, device_of
from hf_ddtree.generation.pair import check_pair

_HUB_OPTIONS = ("revision", "subfolder", "token", "cache_dir", "local_files_only", "force_download", "proxies")
_MARKS = ("dflash", "dspark", "domino", "lilicorr", "flashmap", "dflare")
_FIELDS = ("dflash_config", "speculators_model_type", "open_spec_config_version")


def is_drafter(raw: dict[str, Any]) -> bool:
    """Whether a raw `config.json` is of the DFlash family, supported or not; Transformers' own assistants are not."""
    architectures = [name.lower() for name in raw.get("architectures") or []]
    return (
        any(field in raw for field in _FIELDS)
        or raw.get("model_type") == DFlashConfig.model_type
        or any(mark in name for name in architectures for mark in _MARKS)
    )


def load_auto(original: Callable[..., Any], source: Any, *args: Any, **kwargs: Any) -> Any:
    """`AutoModel.from_pretrained`, and [`DFlashModel.from_pretrained`] for a drafter's repository.

    With `trust_remote_code=True` a repository's own code is what was asked for, and is loaded.
    """
    if kwargs.get("trust_remote_code") or kwargs.get("gguf_file"):
        return original(source, *args, **kwargs)
    config = kwargs.get("config")
    if isinstance(config, PreTrainedConfig):
        if not is_drafter(config.to_dict()):
            return original(source, *args, **kwargs)
        if not isinstance(config, DFlashConfig):
            raise ValueError(
                f"{source} is a DFlash drafter, but `config` is a {type(config).__name__}, which drops fields of it: "
                "leave `config` out, or pass `DFlashConfig.from_pretrained(...)`."
            )
    else:
        # Everything below reads this one commit, without asking the Hub again.
        kwargs["revision"] = pinned_revision(source, kwargs)
        if not is_drafter(_raw(source, kwargs)):
            return original(source, *args, **kwargs)
    kwargs.pop("trust_remote_code", None)
    return _drafter_class().from_pretrained(source, *args, **kwargs)


def load_assistant(original: Callable[..., Any], model: Any, assistant_model: Any, assistant_tokenizer: Any) -> Any:
    """The pipelines' loader of assistants: it takes a loaded drafter as it is, and loads one by name.

    A drafter loaded here has the target's device and dtype, or bf16 beside an fp16 target.
    """
    if isinstance(assistant_model, str | os.PathLike) and model.can_generate():
        raw = _raw(assistant_model, {})
        if is_drafter(raw) or raw.get("model_type") in DFLASH_MODEL_TYPES:
            dtype = torch.bfloat16 if model.dtype == torch.float16 else model.dtype
            assistant_model = _drafter_class().from_pretrained(assistant_model, dtype=dtype).to(_device(model)).eval()
    if not is_dflash_drafter(assistant_model):
        return original(model, assistant_model, assistant_tokenizer)
    check_pair(model, assistant_model)
    # A drafter reads the target's own tokens; the library would compare special ids and ask for a second tokenizer.
    return assistant_model, None


def _raw(source: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The raw configuration, or nothing where there is none: the library then gives its own error."""
    options = {name: kwargs[name] for name in _HUB_OPTIONS if name in kwargs}
    try:
        return PreTrainedConfig.get_config_dict(source, **options)[0]
    except OSError:
        return {}


def _device(model: PreTrainedModel) -> torch.device:
    """Where the target's head is, which a drafter's states go through; a model may be spread over several devices."""
    head = model.get_output_embeddings()
    return (device_of(head) if head is not None else None) or model.device


def _drafter_class() -> Any:
    # Imported when a drafter is loaded: it pulls in a modeling file of Transformers.
    from hf_ddtree.drafters.modeling import DFlashModel

    return DFlashModel
