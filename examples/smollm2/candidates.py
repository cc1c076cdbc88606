"""The tokens that a training step's softmax runs over; the whole vocabulary would be most of the step."""

import numpy as np
import torch

from dataset import Text
from recipe import NO_LABEL

FREQUENT, CANDIDATES = 5120, 7168


class Candidates:
    """Frequent tokens, a step's own labels, and a random sample of the rest that stands for all of it."""

    def __init__(self, vocabulary: int):
        self.vocabulary, self.frequent = vocabulary, np.arange(FREQUENT)

    def count(self, texts: list[Text]) -> None:
        """Finds the frequent tokens of what the target wrote."""
        counts = np.zeros(self.vocabulary, dtype=np.int64)
        for text in texts:
            np.add.at(counts, text.tokens[text.prompt :], 1)
        self.frequent = np.argsort(-counts, kind="stable")[:FREQUENT]
        print(f"{counts[self.frequent].sum() / counts.sum():.1%} of tokens are frequent, {(counts > 0).sum()} occur")

    def draw(self, labels: torch.Tensor, source: np.random.Generator) -> tuple[torch.Tensor, ...]:
        """Token ids `(CANDIDATES,)`, what to add to their logits, and the labels as indices into the ids."""
        place = np.full(self.vocabulary, -1)
        place[self.frequent] = np.arange(FREQUENT)
        flat = labels.numpy()
        rare = np.unique(flat[(flat >= 0) & (place[np.maximum(flat, 0)] < 0)])[: CANDIDATES - FREQUENT - 512]
        place[rare] = FREQUENT + np.arange(len(rare))
        others = source.permutation(np.flatnonzero(place < 0))
        count = CANDIDATES - FREQUENT - len(rare)
        ids = np.concatenate([self.frequent, rare, others[:count]])
        bias = np.zeros(CANDIDATES, dtype=np.float32)
        bias[-count:] = np.log(len(others) / count)
        indices = np.where(flat >= 0, place[np.maximum(flat, 0)], NO_LABEL)
        return torch.from_numpy(ids), torch.from_numpy(bias), torch.from_numpy(indices)
