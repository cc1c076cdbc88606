"""Step 1: turn the Python standard library's source into a tokenizer, a training text and held-out prompts.

    python corpus.py --work build/demo_pair

Writes `tokenizer/`, `train.npy`, `held.npy` (token ids, files separated by the end token) and `prompts.jsonl`
(the beginnings of held-out files, which `hf-ddtree demo --full` continues).
"""

import argparse
import json
import random
import re
import sysconfig
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 2048
END, MASK = "<|end|>", "<|mask|>"
# Tables of characters and test fixtures are not source code anyone would ask a model to continue.
SKIPPED = re.compile(
    r"site-packages|pydoc_data|test_email/data|/cjk|config-|encodings/(?!__|utf|idna|punycode|aliases)|lib2to3/tests/data"
)


def read_sources() -> list[tuple[str, str]]:
    """(path relative to the standard library, text) of every source file, in a fixed random order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if SKIPPED.search(f"/{name}"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) >= 200:
            sources.append((name, text))
    random.Random(0).shuffle(sources)
    return sources


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END, MASK], initial_alphabet=alphabet, min_frequency=2
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END, mask_token=MASK)


def pick_prompts(held: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast, count: int) -> list[dict]:
    """One prompt a file: 64 tokens that start at a line, at least 200 tokens before the file ends."""
    rng, prompts = random.Random(5), []
    for name, text in held:
        ids = tokenizer(text)["input_ids"]
        if len(ids) < 400:
            continue
        start = rng.randrange(len(ids) - 264)
        prompt = tokenizer.decode(ids[start : start + 96])
        prompt = prompt[prompt.find("\n") + 1 :]
        prompt = tokenizer.decode(tokenizer(prompt)["input_ids"][:64])
        if prompt.strip():
            prompts.append({"file": name, "prompt": prompt})
        if len(prompts) == count:
            break
    return prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    work = parser.parse_args().work
    work.mkdir(parents=True, exist_ok=True)

    sources = read_sources()
    held, train = sources[: len(sources) // 25], sources[len(sources) // 25 :]
    tokenizer = train_tokenizer([text for _, text in train])
    tokenizer.save_pretrained(work / "tokenizer")

    for name, part in (("train", train), ("held", held)):
        ids: list[int] = []
        for _, text in part:
            ids += tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]
        np.save(work / f"{name}.npy", np.array(ids, dtype=np.int32))
        print(f"{name}: {len(part)} files, {len(ids):,} tokens")
    with open(work / "prompts.jsonl", "w") as file:
        for prompt in pick_prompts(held, tokenizer, 24):
            file.write(json.dumps(prompt) + "\n")


if __name__ == "__main__":
    main()
