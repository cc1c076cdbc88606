"""Step 4: train the drafter on the target's own texts.

    python train_drafter.py --work build/demo_pair

A block is an anchor and masks; the drafter names all masked tokens at once, from the anchor and the target's hidden
states before it. An early miss ends the round, so early slots weigh more. Writes `drafter/` (bf16, z-lab layout).
"""

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from transformers import Qwen3ForCausalLM

from dataset import Text, load_texts
from drafting import BLOCK, NO_LABEL, build_drafter, draft, make_blocks
from evaluate_drafter import acceptance_length
from training import Trainer, arguments

ROWS, ANCHORS = 16, 16
LOOP_SHARE = 0.15
EVALUATE_EVERY, QUICK = 1000, 48


def pick_anchors(text: Text, source: np.random.Generator) -> np.ndarray:
    """`ANCHORS` places spread over what the target wrote, a few of them in the loop the text ends in."""
    last = len(text) - 2
    looped = min(text.loop, last)
    spread = (np.arange(ANCHORS) + source.random(ANCHORS)) / ANCHORS
    places = text.prompt + (spread * max(1, looped - text.prompt)).astype(np.int64)
    if last > looped:
        chosen = source.random(ANCHORS) < LOOP_SHARE
        places[chosen] = source.integers(looped, last + 1, size=int(chosen.sum()))
    return places


def main() -> None:
    options = arguments(__doc__, steps=8000)
    target = Qwen3ForCausalLM.from_pretrained(options.work / "target", dtype=torch.float32).eval()
    embedding = target.get_input_embeddings().weight.detach()
    drafter = build_drafter(target)
    texts = [text for text in load_texts(options.work / "data", "train") if len(text) > text.prompt + 1]
    held = load_texts(options.work / "data", "held")
    written = np.array([text.loop - text.prompt for text in texts], dtype=np.float64)
    print(f"{sum(p.numel() for p in drafter.parameters()):,} parameters, {int(written.sum()):,} tokens outside loops")
    trainer = Trainer(drafter, options.steps, options.work / "drafter.pt", muon_lr=0.015, adam_lr=2e-3, decay=0.6)
    source = np.random.default_rng(trainer.step)
    weights = torch.exp(-torch.arange(BLOCK - 1) / 5.0)

    def loss_of(*tensors: torch.Tensor) -> torch.Tensor:
        *inputs, labels = tensors
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = draft(drafter, embedding, *inputs)
        losses = F.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL, reduction="none"
        )
        weighted = weights * (labels != NO_LABEL)
        return (losses.view_as(labels) * weights).sum() / weighted.sum()

    compiled = torch.compile(loss_of)

    def losses() -> Iterator[torch.Tensor]:
        while True:
            chosen = source.choice(len(texts), size=ROWS, p=written / written.sum())
            rows = [texts[index] for index in chosen]
            blocks = make_blocks(rows, np.stack([pick_anchors(text, source) for text in rows]))
            yield compiled(*blocks.tensors())
            if trainer.step % EVALUATE_EVERY == EVALUATE_EVERY - 1:
                chain = acceptance_length(drafter, embedding, held[:QUICK], BLOCK - 1, chain=True)
                tree = acceptance_length(drafter, embedding, held[:QUICK], 63, chain=False)
                print(f"held-out texts outside loops: chain {chain:.2f}, tree of 63 {tree:.2f}", flush=True)

    trainer.run(losses())
    drafter.eval()
    drafter.to(torch.bfloat16).save_pretrained(options.work / "drafter")


if __name__ == "__main__":
    main()
