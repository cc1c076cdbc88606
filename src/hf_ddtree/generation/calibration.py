"""How far a drafter's probabilities are right, learned from every walk."""

import itertools
import threading
from collections.abc import Sequence

import numpy as np
import torch

from hf_ddtree.tree import DraftTree

#: Ranks among siblings that share a factor: 0, 1, 2 to 3, 4 to 7, 8 and more.
_BUCKETS = np.array([0, 1, 2, 2, 3, 3, 3, 3, 4])
#: Expected events that the next more general factor counts for: all, then by rank and spine, then by depth too.
PRIOR, BROAD, NARROW = 1.0, 3.0, 12.0
#: What a walk leaves of the earlier ones' weight.
KEPT = 0.998


class Calibration:
    """
    Factors between the probabilities a drafter gives and how often they come true, by depth, rank and spine.

    A node is on the spine if every token before it is its position's most probable one. Independent marginals are
    about right there and too sure elsewhere, as they do not know which token came before. A factor that was observed
    little is drawn towards its rank's over all depths, that one towards the factor over all nodes, and this one
    towards 1.

    A walk tells about the children of the nodes it reached and of no others, and which nodes those are depends on the
    tree's size but not on what their children did. So the factors are unbiased, however small the trees.

    Args:
        depth (`int`): of the deepest node.
    """

    def __init__(self, depth: int):
        self._predicted = np.zeros((depth, _BUCKETS[-1] + 1, 2))
        self._happened = np.zeros_like(self._predicted)
        self._log_factors = np.zeros_like(self._predicted)
        self._lock = threading.Lock()
        self._placed: tuple[DraftTree, tuple[np.ndarray, np.ndarray]] | None = None
        #: `int`: rounds observed so far.
        self.rounds = 0

    @property
    def factors(self) -> np.ndarray:
        """`np.ndarray` of shape `(depth, ranks, 2)`: by depth from 1, bucket of ranks, and whether on the spine."""
        return np.exp(self._log_factors)

    def probabilities(self, tree: DraftTree) -> np.ndarray:
        """`np.ndarray` of shape `(nodes,)`: how probable it is that the target's text runs through each node."""
        parents, depths = tree.parents.numpy(), tree.depths.numpy()
        log_probs = tree.log_probs.numpy()
        ranks, spine = self._places(tree)
        steps = log_probs[1:] - log_probs[parents[1:]]
        steps = np.minimum(steps + self._log_factors[depths[1:] - 1, ranks[1:], spine[1:]], 0.0)
        sums = np.zeros(len(parents))
        by_depth = np.argsort(depths, kind="stable")
        ends = np.searchsorted(depths[by_depth], np.arange(1, depths.max() + 2))
        for start, end in itertools.pairwise(ends):
            level = by_depth[start:end]
            sums[level] = sums[parents[level]] + steps[level - 1]
        return np.exp(sums)

    def observe(self, tree: DraftTree, tokens: Sequence[int]) -> None:
        """
        Args:
            tree (`DraftTree`): as drafted, which may be larger than what was verified.
            tokens (`Sequence[int]`): what the walk emitted, bonus token included.
        """
        if len(tree) == 1:
            return
        parents, depths = tree.parents.numpy(), tree.depths.numpy()
        token_ids, log_probs = tree.token_ids.numpy(), tree.log_probs.numpy()
        ranks, spine = self._places(tree)
        with self._lock:
            self.rounds += 1
            self._predicted *= KEPT
            self._happened *= KEPT
            node = 0
            for token in tokens:
                children = np.flatnonzero(parents == node)
                if len(children) == 0:
                    break
                hits = token_ids[children] == token
                cells = depths[node], ranks[children], spine[children]
                np.add.at(self._predicted, cells, np.exp(log_probs[children] - log_probs[node]))
                np.add.at(self._happened, cells, hits)
                if not hits.any():
                    break
                node = int(children[hits.argmax()])
            self._update()

    def _places(self, tree: DraftTree) -> tuple[np.ndarray, np.ndarray]:
        """Of the tree that was asked about last, mostly: it is sized, and then observed."""
        placed = self._placed
        if placed is None or placed[0] is not tree:
            placed = self._placed = tree, _places(tree.parents.numpy(), tree.depths.numpy())
        return placed[1]

    def _update(self) -> None:
        predicted, happened = self._predicted, self._happened
        overall = (happened.sum() + PRIOR) / (predicted.sum() + PRIOR)
        broad = (happened.sum(axis=0) + BROAD * overall) / (predicted.sum(axis=0) + BROAD)
        self._log_factors = np.log((happened + NARROW * broad) / (predicted + NARROW))


def _places(parents: np.ndarray, depths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each node's bucket of ranks among its siblings, and 1 where its parent is on the spine, else 0."""
    by_parent = np.argsort(parents, kind="stable")
    sorted_parents = parents[by_parent]
    ranks = np.empty_like(parents)
    ranks[by_parent] = np.arange(len(parents)) - np.searchsorted(sorted_parents, sorted_parents)
    # In preorder the spine's nodes are the first ones, each at the depth of its number.
    return _BUCKETS[np.minimum(ranks, len(_BUCKETS) - 1)], (depths[parents] == parents).astype(np.int64)


def expected_tokens(tree: DraftTree, probabilities: np.ndarray, sizes: Sequence[int]) -> list[float]:
    """Tokens a round is expected to give with the best `sizes` nodes of a tree, up to the first that holds all.

    Args:
        tree (`DraftTree`): the largest one.
        probabilities (`np.ndarray` of shape `(nodes,)`): of [`Calibration.probabilities`].
        sizes (`Sequence[int]`): ascending numbers of nodes.
    """
    order = torch.sort(tree.log_probs[1:], descending=True, stable=True).indices.numpy()
    totals = np.concatenate(([1.0], 1.0 + np.cumsum(probabilities[1:][order])))
    useful = next((i for i, size in enumerate(sizes) if size >= len(order)), len(sizes) - 1)
    return [float(totals[min(size, len(order))]) for size in sizes[: useful + 1]]
