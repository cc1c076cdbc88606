"""The drafter's training data on disk: greedy texts of the target with the hidden states its drafter taps.

A shard is three files: `NAME-tokens.npy`, `NAME-taps.npy` (fp16, memory-mapped) and `NAME-rows.npy`, which is written
last and marks the shard as complete. A row of the last one is (start in the other two, prompt length, index of the
first looped token, length).
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

TAPS = [1, 5, 9, 13, 16]
LONGEST = 192


@dataclass(frozen=True)
class Text:
    """A prompt, the target's continuation up to `loop`, and a piece of the loop it ends in, if any."""

    tokens: np.ndarray
    taps: np.ndarray
    prompt: int
    loop: int

    def __len__(self) -> int:
        return len(self.tokens)


def is_complete(folder: Path, name: str) -> bool:
    return (folder / f"{name}-rows.npy").exists()


def save_shard(folder: Path, name: str, texts: list[Text]) -> None:
    folder.mkdir(exist_ok=True)
    np.save(folder / f"{name}-tokens.npy", np.concatenate([text.tokens for text in texts]))
    np.save(folder / f"{name}-taps.npy", np.concatenate([text.taps for text in texts]))
    starts = np.cumsum([0] + [len(text) for text in texts[:-1]])
    rows = [(start, text.prompt, text.loop, len(text)) for start, text in zip(starts, texts, strict=True)]
    np.save(folder / f"{name}-rows.npy", np.array(rows, dtype=np.int64))


def load_texts(folder: Path, prefix: str) -> list[Text]:
    """Every text of the shards whose name begins with `prefix`; taps stay on disk until they are read."""
    texts = []
    for path in sorted(folder.glob(f"{prefix}-*-rows.npy")):
        name = path.name.removesuffix("-rows.npy")
        tokens = np.load(folder / f"{name}-tokens.npy")
        taps = np.load(folder / f"{name}-taps.npy", mmap_mode="r")
        for start, prompt, loop, length in np.load(path).tolist():
            piece = slice(start, start + length)
            texts.append(Text(tokens[piece], taps[piece], prompt, loop))
    if not texts:
        raise FileNotFoundError(f"{folder} holds no complete {prefix} shard: run generate_data.py first.")
    return texts
