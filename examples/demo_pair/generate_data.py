"""Step 3: let the target continue snippets of its corpus greedily, and keep what it wrote and what it thought.

    python generate_data.py --work build/demo_pair

A drafter learns the target's own text, not the corpus. A small target ends in a loop sooner or later; a text is cut
soon after it entered one, because a drafter learns to copy loops from few examples. Writes shards under `data/`,
those for training from training files and one from held-out files; complete shards are kept when run again.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from dataset import LONGEST, TAPS, Text, is_complete, save_shard
from fast_target import FastTarget
from loops import loop_starts

BATCH, PROMPTS = 256, (16, 80)
HELD_BATCH, HELD_PROMPT = 160, 64
# Looking for loops costs a few milliseconds a batch, and a batch shrinks only at such a look.
LOOK_EVERY, LOOP_KEPT = 8, 20


def draw_prompts(corpus: np.ndarray, count: int, length: int, end_id: int, source: np.random.Generator) -> np.ndarray:
    """`(count, length)` snippets that do not cross from one file into the next."""
    prompts: list[np.ndarray] = []
    while len(prompts) < count:
        start = source.integers(len(corpus) - length)
        snippet = corpus[start : start + length]
        if end_id not in snippet:
            prompts.append(snippet)
    return np.stack(prompts)


def finish(tokens: np.ndarray, taps: np.ndarray, prompt: int, end_id: int, kept: int) -> Text:
    """Cuts a text after its end token, and `kept` tokens into the loop it ends in."""
    ends = np.flatnonzero(tokens[prompt:] == end_id)
    length = prompt + int(ends[0]) + 1 if len(ends) else len(tokens)
    loop = prompt + int(loop_starts(tokens[None, prompt:length])[0])
    length = min(length, loop + kept)
    return Text(tokens[:length], taps[:length], prompt, loop)


def continue_prompts(target: FastTarget, prompts: np.ndarray, end_id: int, kept: int = LOOP_KEPT) -> list[Text]:
    """Greedy texts of up to `LONGEST` tokens; a text leaves the batch once it has ended or loops."""
    count, prompt = prompts.shape
    tokens = torch.zeros(count, LONGEST, dtype=torch.int64)
    tokens[:, :prompt] = torch.from_numpy(prompts)
    width = len(target.taps) * target.model.config.hidden_size
    taps = torch.zeros(count, LONGEST, width, dtype=torch.float16)
    cache = target.new_cache(count, LONGEST)
    rows = torch.arange(count)
    texts: list[Text] = []
    feed = tokens[:, :prompt]
    for end in range(prompt, LONGEST):
        following, tapped = target.forward(feed, cache)
        taps[rows, end - feed.shape[1] : end] = tapped.half()
        tokens[rows, end] = following
        feed = following[:, None]
        if (end - prompt) % LOOK_EVERY == LOOK_EVERY - 1 or end == LONGEST - 1:
            # The newest token was not fed yet, so it has no taps and is left out of a text that leaves now.
            written = tokens[rows, prompt:end].numpy()
            leaves = (written == end_id).any(1) | (loop_starts(written) + kept < written.shape[1])
            leaves |= end == LONGEST - 1
            for row in rows[torch.from_numpy(leaves)].tolist():
                texts.append(finish(tokens[row, :end].numpy(), taps[row, :end].numpy(), prompt, end_id, kept))
            stay = torch.from_numpy(np.flatnonzero(~leaves))
            if not len(stay):
                break
            if len(stay) < len(rows):
                rows, feed = rows[stay], feed[stay]
                cache.keep(stay)
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="the folder that train_target.py filled")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens the target writes, prompts not counted")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)

    model = Qwen3ForCausalLM.from_pretrained(options.work / "target", dtype=torch.float32).eval()
    target, end_id = FastTarget(model, TAPS), model.config.eos_token_id
    folder = options.work / "data"

    if not is_complete(folder, "held-0000"):
        held = np.load(options.work / "held.npy")
        prompts = draw_prompts(held, HELD_BATCH, HELD_PROMPT, end_id, np.random.default_rng(7))
        texts = continue_prompts(target, prompts, end_id, kept=LONGEST)
        looped = sum(len(t) - t.loop for t in texts) / sum(len(t) - t.prompt for t in texts)
        print(f"held-out texts: {looped:.0%} of what the target wrote lies in a loop", flush=True)
        save_shard(folder, "held-0000", texts)

    train = np.load(options.work / "train.npy")
    started, new, shard = time.monotonic(), 0, 0
    while new < options.tokens:
        name = f"train-{shard:04d}"
        if is_complete(folder, name):
            rows = np.load(folder / f"{name}-rows.npy")
            new += int((rows[:, 3] - rows[:, 1]).sum())
            started, shard = time.monotonic(), shard + 1
            continue
        source = np.random.default_rng([11, shard])
        prompts = draw_prompts(train, BATCH, int(source.integers(PROMPTS[0], PROMPTS[1] + 1)), end_id, source)
        texts = continue_prompts(target, prompts, end_id)
        save_shard(folder, name, texts)
        new += sum(len(text) - text.prompt for text in texts)
        shard += 1
        if shard % 4 == 0:
            print(f"{shard} shards, {new:,} tokens, {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
