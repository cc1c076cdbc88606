"""Loading a drafter's weights: layout detection, key mapping, and errors for anything left over."""

from collections.abc import Callable
from typing import Any

import torch
from transformers.utils import logging

from hf_ddtree.drafters.configuration import DFlashConfig
from hf_ddtree.drafters.formats import detect

logger = logging.get_logger(__name__)

_HUB_OPTIONS = ("revision", "subfolder", "token", "cache_dir", "local_files_only", "force_download", "proxies")


def load(cls: type, load_weights: Callable[..., Any], source: Any, *args: Any, **kwargs: Any) -> Any:
    """What [`DFlashModel.from_pretrained`] does, given the parent's loader.

    Raises:
        ValueError: if weights are missing, unknown or of another shape than the configuration says.
    """
    hub = {name: kwargs[name] for name in _HUB_OPTIONS if name in kwargs}
    raw, _ = DFlashConfig.get_config_dict(source, **hub)
    layout = detect(raw)
    config = kwargs.pop("config", None)
    if config is None:
        overrides = {name: kwargs.pop(name) for name in list(kwargs) if name in _config_fields()}
        config = DFlashConfig.from_pretrained(source, **hub, **overrides)
    want_info = kwargs.pop("output_loading_info", False)
    kwargs.setdefault("use_safetensors", True)
    # Refused below, by name; the library's own error leaves the names to a log.
    kwargs["ignore_mismatched_sizes"] = True
    try:
        model, info = load_weights(
            source, *args, config=config, key_mapping=layout.KEY_MAPPING or None, output_loading_info=True, **kwargs
        )
    except RuntimeError as error:
        raise ValueError(f"The weights of {source} do not fit its configuration: {error}") from error
    _refuse_leftovers(source, layout.__name__.rpartition(".")[2], info)
    if model.dtype == torch.float16:
        logger.warning_once(
            "The drafter is in fp16, where acceptance is known to collapse: load it with `dtype=torch.bfloat16`."
        )
    return (model, info) if want_info else model


def _config_fields() -> set[str]:
    return set(DFlashConfig.__dataclass_fields__) - {"dtype"}


def _refuse_leftovers(source: Any, layout: str, info: dict[str, Any]) -> None:
    wrong = {
        f"{key} is {tuple(stored)}, by the configuration {tuple(expected)}"
        for key, stored, expected in info.get("mismatched_keys", ())
    }
    problems = []
    for kind, keys in (
        ("missing keys", info.get("missing_keys")),
        ("unexpected keys", info.get("unexpected_keys")),
        ("wrong shapes", wrong),
    ):
        if keys:
            problems.append(f"{kind}: {', '.join(sorted(keys))}")
    if problems:
        raise ValueError(
            f"The weights of {source} are not those of a DFlash drafter in {layout} layout "
            f"({'; '.join(problems)}). A drafter with further weights belongs to another family; with fewer, it is "
            "incomplete."
        )
