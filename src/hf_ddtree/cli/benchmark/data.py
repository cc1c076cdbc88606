"""Data sets: local JSON lines, the paper's ten from the Hub, and long prompts made by repeating either."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from hf_ddtree.cli.benchmark.hub import HUB_SETS
from hf_ddtree.cli.pair import Pair, read_prompts, shipped_prompts

SHIPPED = "shipped"


@dataclass(frozen=True)
class DataSet:
    """A name and its prompts, as text."""

    name: str
    texts: list[str]


@dataclass(frozen=True)
class Encoded:
    """A data set as token ids.

    Args:
        name (`str`): the data set's.
        prompts (`list[list[int]]`): ids of each prompt, chat template included.
        context (`int`, *optional*): the length of every prompt, where they were made to one.
    """

    name: str
    prompts: list[list[int]]
    context: int | None = None


def read(sources: Sequence[str], limit: int | None = None) -> list[DataSet]:
    r"""
    Args:
        sources (`Sequence[str]`):
            files of JSON lines, names of [`HUB_SETS`], or `"shipped"` for the prompts of the package. A file whose
            lines have a `category` becomes one data set a category.
        limit (`int`, *optional*): prompts of each at most, evenly spread over it.

    Raises:
        ValueError: for an unknown name, two data sets of one name or a line that is no prompt.
        OSError: if a file or the Hub cannot be read.
    """
    found = [data for source in sources for data in _read(source)]
    names = [data.name for data in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"Two data sets are called {twice[0]!r}: rename a file, or name each source once.")
    return [DataSet(data.name, _spread(data.texts, limit)) for data in found]


def _read(source: str) -> list[DataSet]:
    if source == SHIPPED:
        return [DataSet(SHIPPED, [prompt.text for prompt in shipped_prompts()])]
    if source in HUB_SETS:
        return [DataSet(source, HUB_SETS[source].texts())]
    path = Path(source)
    if not path.exists():
        raise ValueError(
            f"--data {source}: no such file, and none of the data sets that are read from the Hub "
            f"({', '.join(HUB_SETS)})."
        )
    groups: dict[str, list[str]] = {}
    for prompt in read_prompts(path):
        name = path.stem if prompt.category is None else f"{path.stem}/{prompt.category}"
        groups.setdefault(name, []).append(prompt.text)
    return [DataSet(name, texts) for name, texts in groups.items()]


def _spread(texts: list[str], limit: int | None) -> list[str]:
    if limit is None or limit >= len(texts):
        return texts
    return [texts[number * len(texts) // limit] for number in range(limit)]


def encode(pair: Pair, data: Sequence[DataSet], chat: bool | None, thinking: bool) -> list[Encoded]:
    """The prompts as the target reads them, through its chat template unless `chat` is false or it has none.

    Args:
        pair (`Pair`): whose tokenizer reads them.
        data (`Sequence[DataSet]`): what to encode.
        chat (`bool`, *optional*): as [`Pair.inputs`].
        thinking (`bool`): what a template that asks is told of `enable_thinking`.
    """

    def ids(text: str) -> list[int]:
        encoded: list[int] = pair.inputs(text, chat, enable_thinking=thinking)["input_ids"][0].tolist()
        return encoded

    return [Encoded(part.name, [ids(text) for text in part.texts]) for part in data]


def contexts(data: Sequence[Encoded], lengths: Iterable[int]) -> list[Encoded]:
    """One prompt of exactly each length: the prompts of all data sets in a row, and again from the start."""
    tokens = [token for part in data for prompt in part.prompts for token in prompt]
    return [Encoded(f"context {length}", [list(islice(cycle(tokens), length))], length) for length in lengths]


def check_lengths(pair: Pair, data: Sequence[Encoded], max_new_tokens: int) -> None:
    """Raises `ValueError` if a prompt and its continuation pass the positions the target was made for."""
    room: Any = getattr(pair.target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    longest = max((len(prompt), part.name) for part in data for prompt in part.prompts)
    if room is not None and longest[0] + max_new_tokens > room:
        raise ValueError(
            f"A prompt of {longest[1]} has {longest[0]} tokens, and --max-new-tokens {max_new_tokens} more pass the "
            f"target's {room} positions: generate less, or leave that data set or context out."
        )


def digest(data: Sequence[Encoded]) -> str:
    """Tells whether prompts are the same."""
    return hashlib.sha256(json.dumps([[part.name, part.prompts] for part in data]).encode()).hexdigest()[:16]
