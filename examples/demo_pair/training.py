"""What both training steps share: the optimiser, its schedule, and a checkpoint to resume from."""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn


class Trainer:
    """Muon for the matrices, AdamW for embeddings and norms; a linear warm-up, a plateau, then a linear decay to zero.

    A checkpoint is written every few minutes; starting the same command again continues from it.
    """

    # Names of matrices that are looked up by row.
    tables = ("embed",)

    def __init__(self, model: nn.Module, steps: int, checkpoint: Path, muon_lr: float, adam_lr: float, decay: float):
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        matrices = [p for n, p in named if p.ndim == 2 and not any(kind in n for kind in self.tables)]
        others = [p for n, p in named if p.ndim != 2 or any(kind in n for kind in self.tables)]
        self.model, self.steps, self.checkpoint, self.decay = model, steps, checkpoint, decay
        self.optimizers = [
            torch.optim.Muon(matrices, lr=muon_lr, weight_decay=0.05),
            torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]
        self.peaks = [muon_lr, adam_lr]
        self.step = 0
        self.loss: float | None = None
        self.resume()

    def resume(self) -> None:
        if self.checkpoint.exists():
            state = torch.load(self.checkpoint, weights_only=True)
            self.step = state["step"]
            self.model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)

    def rate(self) -> float:
        done = self.step / self.steps
        return min(1.0, (self.step + 1) / 40, (1 - done) / self.decay)

    def save(self) -> None:
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.checkpoint)

    def run(self, losses: Iterator[torch.Tensor]) -> None:
        """Takes one optimiser step for each loss that `losses` yields, until `steps` are done."""
        started = saved = time.monotonic()
        first = self.step
        while self.step < self.steps:
            loss = next(losses)
            loss.backward()
            for optimizer, peak in zip(self.optimizers, self.peaks, strict=True):
                optimizer.param_groups[0]["lr"] = peak * self.rate()
                optimizer.step()
                optimizer.zero_grad()
            self.loss = loss.item() if self.loss is None else 0.95 * self.loss + 0.05 * loss.item()
            self.step += 1
            now = time.monotonic()
            if self.step % 25 == 0:
                pace = (now - started) / (self.step - first)
                left = pace * (self.steps - self.step) / 60
                print(
                    f"step {self.step}/{self.steps}  loss {self.loss:.3f}  {pace:.2f} s a step, {left:.0f} min left",
                    flush=True,
                )
            if now - saved > 180:
                self.save()
                saved = now
        self.save()


def arguments(description: str | None, steps: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--work", type=Path, required=True, help="the folder that corpus.py filled")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    return options
