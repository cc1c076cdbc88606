"""Step 4: train a drafter on the answers, from an earlier one's weights.

    python train.py --work build/smollm2 --start FOLDER --minutes 60

The drafter learns from its softmax over a part of the vocabulary (`candidates.py`), and the selector on top of it from
its best tokens (`selector.py`). Writes `drafter/` (bf16, z-lab layout).
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import recipe  # noqa: F401  (finds the modules of demo_pair)
from blocks import Blocks, drafted_states, make_blocks
from candidates import Candidates
from dataset import Text, load_texts
from evaluate import acceptance_length
from hf_ddtree.drafters import DFlashModel
from recipe import BLOCK, NO_LABEL
from selector import fit_projection, selector_losses, with_selector
from training import Trainer

ROWS, ANCHORS = 16, 24
MUON, ADAM, SLOW, GAMMA, DECAY = 0.012, 1e-3, 2e-5, 3.5, 0.9
EVALUATE_EVERY, QUICK = 250, 10


def batches(texts: list[Text], source: np.random.Generator) -> Iterator[list[Text]]:
    """Every text once, `ROWS` of similar length at a time."""
    lengths = np.array([len(text) for text in texts]) + source.random(len(texts)) * 24
    order = np.argsort(lengths)
    groups = [order[i : i + ROWS] for i in range(0, len(order) - ROWS + 1, ROWS)]
    source.shuffle(groups)
    for group in groups:
        yield [texts[index] for index in group]


def pick_anchors(text: Text, source: np.random.Generator) -> np.ndarray:
    """`ANCHORS` places spread over what the target wrote before it began to loop, and a little after."""
    last = max(text.prompt + 1, min(text.loop + 4, len(text) - 2))
    spread = (np.arange(ANCHORS) + source.random(ANCHORS)) / ANCHORS
    return text.prompt + (spread * (last - text.prompt)).astype(np.int64)


class TimedTrainer(Trainer):
    """The schedule follows the clock: a constant rate, then a linear decay to zero that ends when the time does."""

    tables = ("codebook",)

    def __init__(self, model: DFlashModel, checkpoint: Path, minutes: float, peak: float):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("_conv" not in name and "hidden_projection" not in name)
        super().__init__(model, 10**9, checkpoint, muon_lr=peak * MUON, adam_lr=peak * ADAM, decay=DECAY)
        self.started, self.seconds, self.first = time.monotonic(), minutes * 60, self.step

    def resume(self) -> None:
        # Multiplied by states that are far larger than its own entries, it needs far smaller steps, all the time.
        slow = self.model.candidate_selector.hidden_projection.weight.requires_grad_()
        self.optimizers[1].add_param_group({"params": [slow], "lr": SLOW})
        super().resume()

    def rate(self) -> float:
        done = (time.monotonic() - self.started) / self.seconds
        taken = self.step - self.first + 1
        self.steps = self.step + 1 + int(taken * max(0.0, 1 / done - 1))
        return max(0.0, min(1.0, (self.step + 1) / 40, (1 - done) / self.decay))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="the folder that generate_answers.py filled")
    parser.add_argument("--start", type=Path, required=True, help="folder of the drafter to start from")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--peak", type=float, default=1, help="share of the learning rates, less for a second run")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_pretrained(options.work / "target", dtype=torch.float32)
    embedding = target.get_input_embeddings().weight.detach().clone()
    halved = embedding.bfloat16()
    del target
    drafter = with_selector(DFlashModel.from_pretrained(options.start, dtype=torch.float32), embedding).train()
    trainer = TimedTrainer(drafter, options.work / "drafter.pt", options.minutes, options.peak)
    source = np.random.default_rng(trainer.step)
    weights = torch.exp(-torch.arange(BLOCK - 1) / GAMMA)
    held = load_texts(options.work / "data", "held")
    held = held[:: max(1, len(held) // QUICK)]

    candidates = Candidates(len(embedding))

    def loss_of(blocks: Blocks) -> torch.Tensor:
        ids, bias, labels = candidates.draw(blocks.labels, source)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            states = drafted_states(drafter, embedding, *blocks.inputs())
            logits = F.linear(states, halved[ids])
        plain = F.cross_entropy(
            (logits.float() + bias).flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL, reduction="none"
        )
        labels = labels.flatten(0, 1)
        fit_projection(drafter, states)
        text = torch.cat([blocks.slots.view(-1, BLOCK)[:, :1], blocks.labels.flatten(0, 1)], dim=1)
        chosen = selector_losses(drafter, states, logits, ids, text)
        kept = weights * (labels != NO_LABEL)
        return ((plain.view_as(labels) + chosen) * kept).sum() / kept.sum()

    def losses() -> Iterator[torch.Tensor]:
        while True:
            # Read anew each time: the data may still be growing.
            texts = [text for text in load_texts(options.work / "data", "train") if text.loop > text.prompt + 4]
            print(f"{len(texts)} texts, {sum(len(t) - t.prompt for t in texts):,} tokens", flush=True)
            candidates.count(texts)
            for rows in batches(texts, source):
                blocks = make_blocks(rows, np.stack([pick_anchors(text, source) for text in rows]))
                yield loss_of(blocks)
                if trainer.step % EVALUATE_EVERY == EVALUATE_EVERY - 1:
                    drafter.eval()
                    without, chosen = (
                        acceptance_length(drafter, embedding, held, [63], plain=plain)[0] for plain in (True, False)
                    )
                    print(f"held-out texts, tree of 63: plain {without:.3f}, selector {chosen:.3f}", flush=True)
                    drafter.train()

    trainer.run(losses())
    drafter.eval()
    drafter.to(torch.bfloat16).save_pretrained(options.work / "drafter")


if __name__ == "__main__":
    main()
