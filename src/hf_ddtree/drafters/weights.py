"""A checkpoint's weights by name, type and shape, from the headers of its safetensors files; no tensor is read."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

_FLOATS = ("F64", "F32", "F16", "BF16")
#: Of the weights of a DFlash drafter these alone are whole numbers: vocabulary maps.
_WHOLE_NUMBERS = ("d2t", "t2d")
_QUANTISED = ("weight_scale", "weight_scale_2", "input_scale", "weight_packed", "qweight", "qzeros")


class Tensor(NamedTuple):
    """The type (as safetensors spells it: `"BF16"`) and shape of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]


def headers(source: Any, hub: dict[str, Any], variant: str | None = None) -> dict[str, Tensor]:
    """Every weight of a checkpoint, under its stored name.

    Args:
        source (`str` or `os.PathLike`): a repository of the Hub, or a folder.
        hub (`dict`): `revision`, `token` and the other options of a download.
        variant (`str`, *optional*): part of the file names, as in `model.fp32.safetensors`.

    Raises:
        OSError: if there are no safetensors files; pickled weights are not read, as they can run code.
        ValueError: if a file is damaged.
    """
    stored: dict[str, Tensor] = {}
    for file in _files(source, hub, variant):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - no dictionary
                    part = opened.get_slice(name)
                    stored[name] = Tensor(part.get_dtype(), tuple(part.get_shape()))
        except SafetensorError as error:
            raise ValueError(
                f"{Path(file).name} of {source} is damaged or incomplete ({error}): download it again."
            ) from error
    return stored


def refuse_quantised(source: Any, hub: dict[str, Any], stored: dict[str, Tensor]) -> None:
    """Raises `ValueError` for the weights of a quantised drafter, whose `config.json` may not say that it is one."""
    scales = [name for name in stored if name.rpartition(".")[2] in _QUANTISED]
    packed = [
        f"{name} in {tensor.dtype}"
        for name, tensor in stored.items()
        if tensor.dtype not in _FLOATS and name.rpartition(".")[2] not in _WHOLE_NUMBERS
    ]
    reason = next(iter(scales + packed), None)
    if reason is None and Path(source, hub.get("subfolder") or "", "hf_quant_config.json").is_file():
        reason = "hf_quant_config.json"
    if reason is not None:
        raise ValueError(
            f"The drafter {source} is quantised ({reason}), which is not supported: use its bf16 checkpoint."
        )


def _files(source: Any, hub: dict[str, Any], variant: str | None) -> list[str]:
    single = SAFE_WEIGHTS_NAME if variant is None else f"model.{variant}.safetensors"
    index = SAFE_WEIGHTS_INDEX_NAME if variant is None else f"model.safetensors.index.{variant}.json"
    try:
        return [cached_file(source, single, **hub)]
    except OSError as missing:
        try:
            listed = cached_file(source, index, **hub)
        except OSError:
            raise OSError(
                f"{missing}\nA drafter's weights are read from safetensors files only; pickles (`.bin`) can run code "
                "and are refused."
            ) from missing
    try:
        shards = set(json.loads(Path(listed).read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{index} of {source} is damaged ({error!r}): download it again.") from error
    return [cached_file(source, shard, **hub) for shard in sorted(shards)]
