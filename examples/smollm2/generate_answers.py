"""Step 3: let the target answer the prompts, and keep what it wrote and its hidden states.

    python generate_answers.py --work build/smollm2

Most answers are greedy, as a drafter is judged by what the target would write; some are sampled. An answer is cut
after its end token and soon after it begins to loop. Writes shards under `data/`; complete ones are kept when this is
run again, and it may be stopped at any time.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import recipe
from dataset import Text, is_complete, save_shard
from llama_target import LlamaTarget
from loops import loop_starts
from smollm2 import encode

BATCH, NEW, LONGEST_PROMPT = 128, 128, 224
# One shard in this many is sampled at temperature 1, the first of them not.
SAMPLED_EVERY, HELD_SHARDS = 7, 2
# Sorting many prompts by length before they are put into shards leaves little padding.
SORTED_AT_ONCE = 12
LOOK_EVERY, LOOP_KEPT = 8, 16


def draw(logits: torch.Tensor) -> torch.Tensor:
    """One token a row at temperature 1, `(rows, 1)`; several times as fast as `torch.multinomial`."""
    sums = logits.float().softmax(-1).cumsum(-1)
    return torch.searchsorted(sums, torch.rand(len(sums), 1) * sums[:, -1:]).clamp_(max=logits.shape[-1] - 1)


def answer(target: LlamaTarget, prompts: list[np.ndarray], end_id: int, sample: bool) -> list[Text]:
    """A text for each prompt; it leaves the batch once it has ended or loops."""
    count, widest = len(prompts), max(map(len, prompts))
    lengths = np.array([len(prompt) for prompt in prompts])
    tokens = torch.full((count, widest + NEW), end_id)
    for row, prompt in enumerate(prompts):
        tokens[row, widest - len(prompt) : widest] = torch.from_numpy(prompt)
    cache = target.new_cache(torch.from_numpy(widest - lengths), widest + NEW)
    taps = torch.zeros(count, widest + NEW, len(target.taps) * target.model.config.hidden_size, dtype=torch.float16)
    rows, texts, feed = torch.arange(count), [], tokens[:, :widest]
    for end in range(widest, widest + NEW):
        logits, tapped = target.forward(feed, cache)
        following = draw(logits) if sample else logits.argmax(-1, keepdim=True)
        taps[rows, end - feed.shape[1] : end] = tapped.half()
        tokens[rows, end] = following[:, 0]
        feed = following
        written, done = end + 1 - widest, end == widest + NEW - 1
        if written % LOOK_EVERY == 0 or done:
            # The newest token was not fed yet, so it has no taps and is left out of a text that leaves now.
            answers = tokens[rows, widest:end].numpy()
            ends, loops = (answers == end_id).any(1), loop_starts(answers)
            leaves = ends | (loops + LOOP_KEPT < answers.shape[1]) | done
            for place in np.flatnonzero(leaves).tolist():
                row = int(rows[place])
                stop = int((answers[place] == end_id).argmax()) + 1 if ends[place] else answers.shape[1]
                loop = min(stop, int(loop_starts(answers[place : place + 1, :stop])[0]))
                stop = min(stop, loop + LOOP_KEPT)
                first = widest - int(lengths[row])
                piece = slice(first, widest + stop)
                texts.append(
                    Text(
                        tokens[row, piece].numpy().astype(np.int32),
                        taps[row, piece].numpy(),
                        int(lengths[row]),
                        int(lengths[row]) + loop,
                    )
                )
            stay = torch.from_numpy(np.flatnonzero(~leaves))
            if not len(stay):
                break
            if len(stay) < len(rows):
                rows, feed = rows[stay], feed[stay]
                cache.keep(stay)
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="the folder that write_prompts.py filled")
    parser.add_argument(
        "--prompts", default="prompts", help="NAME.jsonl of the work folder; all for training if given"
    )
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    tokenizer = AutoTokenizer.from_pretrained(options.work / "target")
    model = AutoModelForCausalLM.from_pretrained(options.work / "target", dtype=torch.bfloat16).eval()
    target, end_id, folder = LlamaTarget(model, recipe.TAPS), tokenizer.eos_token_id, options.work / "data"

    lines = [
        json.loads(line)["prompt"] for line in (options.work / f"{options.prompts}.jsonl").read_text().splitlines()
    ]
    encoded = [encode(tokenizer, prompt)[0].numpy() for prompt in lines]
    encoded = [ids for ids in encoded if len(ids) <= LONGEST_PROMPT]
    shards = []
    for first in range(0, len(encoded), BATCH * SORTED_AT_ONCE):
        chunk = sorted(encoded[first : first + BATCH * SORTED_AT_ONCE], key=len)
        shards += [chunk[place : place + BATCH] for place in range(0, len(chunk), BATCH)]
    # A run that is stopped early has then seen prompts of all lengths.
    order = np.random.default_rng(0).permutation(len(shards))

    started, new = time.monotonic(), 0
    for number, place in enumerate(order):
        held = options.prompts == "prompts" and number < HELD_SHARDS
        name = f"{'held' if held else 'train'}-{number:04d}"
        if options.prompts != "prompts":
            name = f"train-{options.prompts}-{number:04d}"
        if is_complete(folder, name):
            continue
        torch.manual_seed(number)
        sample = not held and number % SAMPLED_EVERY == SAMPLED_EVERY - 1
        texts = answer(target, shards[place], end_id, sample)
        save_shard(folder, name, texts)
        new += sum(len(text) - text.prompt for text in texts)
        print(f"{name} of {len(order)}, {new:,} tokens, {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
