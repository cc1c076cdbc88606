"""Loading a drafter's weights: layout detection, key mapping, and errors for anything left over."""

import re
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from transformers.utils import logging

from hf_ddtree.compat import pinned_revision
from hf_ddtree.drafters.configuration import DFlashConfig
from hf_ddtree.drafters.formats import detect, family_of_weights
from hf_ddtree.drafters.weights import headers, refuse_quantised

logger = logging.get_logger(__name__)

_HUB_OPTIONS = ("revision", "subfolder", "token", "cache_dir", "local_files_only", "force_download", "proxies")


def load(cls: type, load_weights: Callable[..., Any], source: Any, *args: Any, **kwargs: Any) -> Any:
    """What [`DFlashModel.from_pretrained`] does, given the parent's loader.

    Raises:
        ValueError: if weights are missing, unknown, quantised or of another shape than the configuration says.
        OSError: if the checkpoint has no safetensors files.
    """
    if kwargs.setdefault("use_safetensors", True) is False:
        raise ValueError("Pickled weights can run code and are refused: drop `use_safetensors=False`.")
    # Configuration and weights come from one commit, whatever is pushed meanwhile.
    kwargs["revision"] = pinned_revision(source, kwargs)
    hub = {name: kwargs[name] for name in _HUB_OPTIONS if name in kwargs}
    raw, _ = DFlashConfig.get_config_dict(source, **hub)
    layout = detect(raw)
    stored = headers(source, hub, kwargs.get("variant"))
    refuse_quantised(source, hub, stored)
    names = [_mapped(name, layout) for name in stored]
    config = kwargs.pop("config", None)
    if config is None:
        overrides = {name: kwargs.pop(name) for name in list(kwargs) if name in _config_fields()}
        if hasattr(layout, "of_weights"):
            overrides = layout.of_weights(layout.convert(raw), names) | overrides
        config = DFlashConfig.from_pretrained(source, **hub, **overrides)
    want_info = kwargs.pop("output_loading_info", False)
    # Refused below, by name; the library's own error leaves the names to a log.
    kwargs["ignore_mismatched_sizes"] = True
    try:
        model, info = load_weights(
            source, *args, config=config, key_mapping=layout.KEY_MAPPING or None, output_loading_info=True, **kwargs
        )
    except RuntimeError as error:
        raise ValueError(f"The weights of {source} do not fit its configuration: {error}") from error
    unexpected = {name for name in names if name not in model.state_dict() and not _dropped(name, layout)}
    _refuse_leftovers(source, layout.__name__.rpartition(".")[2], info, unexpected)
    _check_token_map(source, model)
    if model.dtype == torch.float16:
        logger.warning_once(
            "The drafter is in fp16, where acceptance is known to collapse: load it with `dtype=torch.bfloat16`."
        )
    return (model, info) if want_info else model


def _config_fields() -> set[str]:
    return set(DFlashConfig.__dataclass_fields__) - {"dtype"}


def _mapped(name: str, layout: ModuleType) -> str:
    for pattern, replacement in layout.KEY_MAPPING.items():
        name = re.sub(pattern, replacement, name)
    return name


def _dropped(name: str, layout: ModuleType) -> bool:
    return any(re.search(pattern, name) for pattern in getattr(layout, "DROPPED", ()))


def _refuse_leftovers(source: Any, layout: str, info: dict[str, Any], unexpected: Iterable[str]) -> None:
    wrong = {
        f"{key} is {tuple(stored)}, by the configuration {tuple(expected)}"
        for key, stored, expected in info.get("mismatched_keys", ())
    }
    problems = []
    for kind, keys in (
        ("missing keys", info.get("missing_keys")),
        ("unexpected keys", unexpected),
        ("wrong shapes", wrong),
    ):
        if keys:
            problems.append(f"{kind}: {', '.join(sorted(keys))}")
    if problems:
        family = family_of_weights(unexpected)
        hint = f"Its weights are those of the {family} family. " if family else ""
        raise ValueError(
            f"The weights of {source} are not those of a DFlash drafter in {layout} layout "
            f"({'; '.join(problems)}). {hint}A drafter with further weights belongs to another family; with fewer, it "
            "is incomplete."
        )


def _check_token_map(source: Any, model: Any) -> None:
    """Raises `ValueError` unless every draft token is a token of the target, and no two are the same."""
    if model.config.draft_vocab_size is None or model.d2t.is_meta:
        return
    ids = torch.arange(len(model.d2t)) + model.d2t.cpu()
    low, high, distinct = int(ids.min()), int(ids.max()), len(ids.unique())
    if low < 0 or high >= model.config.vocab_size or distinct < len(ids):
        raise ValueError(
            f"The vocabulary map `d2t` of {source} gives its {len(ids)} draft tokens {distinct} different ids from "
            f"{low} to {high}, but they must be different ones of the target's {model.config.vocab_size}: entries are "
            "offsets, target id = draft id + d2t."
        )
