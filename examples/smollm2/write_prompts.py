"""Step 2: the prompts whose answers are the training data; some the target writes itself, as a user would.

    python write_prompts.py --work build/smollm2

Writes `prompts.jsonl`, one `{"kind", "prompt"}` a line, in random order. Nothing here comes from a test set.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from llama_target import LlamaTarget
from prompts_code import library_prompts, sampled_openings
from prompts_composed import composed
from prompts_math import opening, problem

LIBRARY, COMPOSED, SAMPLED_CODE, TEMPLATE_MATH, SAMPLED_MATH, PROSE = 1200, 2400, 800, 2400, 1200, 500
BATCH, NEW, TOP = 200, 80, 40
DOCSTRING = '"""'
PROSE_OPENINGS = [
    "What is", "What are", "How do", "How can I", "Why", "Explain", "Describe", "Write a", "Give me", "Can you",
    "List", "Tell me", "Is it", "Compare", "Summarize", "Create a", "Name", "Who", "When", "Suggest", "Identify",
]  # fmt: skip


def continue_turns(
    target: LlamaTarget, tokenizer: PreTrainedTokenizerBase, openings: list[str], temperature: float
) -> list[str]:
    """User turns that begin with `openings`, as the target samples them; unfinished ones are left out."""
    head = tokenizer.apply_chat_template([{"role": "user", "content": "@"}], tokenize=False).split("@")[0]
    rows = [tokenizer(head + text)["input_ids"] for text in openings]
    width, end_id = max(map(len, rows)), tokenizer.eos_token_id
    padding = torch.tensor([width - len(row) for row in rows])
    feed = torch.tensor([[end_id] * (width - len(row)) + row for row in rows])
    cache = target.new_cache(padding, width + NEW)
    rows, turns = list(range(len(openings))), []
    written = torch.empty(len(openings), 0, dtype=torch.long)
    for step in range(NEW):
        logits, _ = target.forward(feed, cache)
        best = logits.topk(TOP)
        feed = best.indices.gather(1, torch.multinomial((best.values.float() / temperature).softmax(-1), 1))
        written = torch.cat([written, feed], dim=1)
        # A batch shrinks only now and then, as that copies its cache.
        if step % 8 == 7:
            stay = []
            for place, (row, tokens) in enumerate(zip(rows, written.tolist(), strict=True)):
                ended = end_id in tokens
                turn = openings[row] + tokenizer.decode(tokens[: tokens.index(end_id)] if ended else tokens)
                if ended or turn.count(DOCSTRING) >= 2:
                    turns.append(turn)
                else:
                    stay.append(place)
            if not stay:
                break
            rows, feed, written = [rows[place] for place in stay], feed[stay], written[stay]
            cache.keep(torch.tensor(stay))
    return turns


def cut_code(turn: str) -> str | None:
    """A turn up to the end of its docstring."""
    parts = turn.split(DOCSTRING)
    if len(parts) < 3 or len(parts[1]) < 20:
        return None
    return DOCSTRING.join([*parts[:2], "\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="the folder with `target/`, from `smollm2.py fetch`")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(options.seed)
    source = random.Random(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.work / "target")
    model = AutoModelForCausalLM.from_pretrained(options.work / "target", dtype=torch.bfloat16).eval()
    target = LlamaTarget(model, taps=[0])

    prompts = [("library", prompt) for prompt in source.sample(library_prompts(), LIBRARY)]
    prompts += [("composed", composed(source)) for _ in range(COMPOSED)]
    prompts += [("template", problem(source)) for _ in range(TEMPLATE_MATH)]
    openings = [("code", sampled_openings(source)) for _ in range(SAMPLED_CODE)]
    openings += [("math", opening(source)) for _ in range(SAMPLED_MATH)]
    openings += [("prose", source.choice(PROSE_OPENINGS)) for _ in range(PROSE)]
    for first in range(0, len(openings), BATCH):
        batch = openings[first : first + BATCH]
        for kind in ("code", "math", "prose"):
            texts = [text for name, text in batch if name == kind]
            for turn in continue_turns(target, tokenizer, texts, 0.9) if texts else []:
                finished = cut_code(turn) if kind == "code" else turn.strip()
                if finished is not None and 20 <= len(finished) <= 900:
                    prompts.append((kind, finished))
        print(f"{first + len(batch)} openings, {len(prompts)} prompts", flush=True)
    source.shuffle(prompts)
    with open(options.work / "prompts.jsonl", "w") as file:
        for kind, prompt in prompts:
            file.write(json.dumps({"kind": kind, "prompt": prompt}) + "\n")


if __name__ == "__main__":
    main()
