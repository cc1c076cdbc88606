"""How far a drafter's probabilities are right, learned from every walk."""

import itertools
import math
import threading
from collections.abc import Sequence

import numpy as np

from hf_ddtree.tree import DraftTree

#: Ranks among siblings that share a factor: 0, 1, 2 to 3, 4 to 7, 8 and more.
_BUCKETS = np.array([0, 1, 2, 2, 3, 3, 3, 3, 4])
_BUCKET_OF, _LAST_RANK = _BUCKETS.tolist(), len(_BUCKETS) - 1
#: Expected events that the next more general factor counts for: all, then by rank and spine, then by depth too.
PRIOR, BROAD, NARROW = 1.0, 3.0, 12.0
#: What a walk leaves of the earlier ones' weight.
KEPT = 0.998
#: Up to this many nodes plain Python is done before array operations have paid for their calls.
PYTHON_NODES = 128


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
        self._table: list[list[list[float]]] = self._log_factors.tolist()
        self._lock = threading.Lock()
        #: `int`: rounds observed so far.
        self.rounds = 0

    @property
    def factors(self) -> np.ndarray:
        """`np.ndarray` of shape `(depth, ranks, 2)`: by depth from 1, bucket of ranks, and whether on the spine."""
        return np.exp(self._log_factors)

    def probabilities(self, tree: DraftTree) -> list[float]:
        """How probable it is that the target's text runs through each node, the root's 1."""
        if len(tree) <= PYTHON_NODES:
            return self._by_node(tree)
        return self._by_level(tree)

    def _by_node(self, tree: DraftTree) -> list[float]:
        parents, depths, log_probs = tree.parents.tolist(), tree.depths.tolist(), tree.log_probs.tolist()
        table, found, children = self._table, [0.0] * len(parents), [0] * len(parents)
        for node in range(1, len(parents)):
            parent = parents[node]
            rank, depth = children[parent], depths[parent]
            children[parent] = rank + 1
            # In preorder the spine's nodes are the first ones, each at the depth of its number.
            factor = table[depth][_BUCKET_OF[min(rank, _LAST_RANK)]][depth == parent]
            found[node] = found[parent] + min(log_probs[node] - log_probs[parent] + factor, 0.0)
        return [math.exp(log_prob) for log_prob in found]

    def _by_level(self, tree: DraftTree) -> list[float]:
        parents, depths, log_probs = tree.parents.numpy(), tree.depths.numpy(), tree.log_probs.numpy()
        ranks, spine = _places(parents, depths)
        steps = log_probs[1:] - log_probs[parents[1:]]
        steps = np.minimum(steps + self._log_factors[depths[1:] - 1, ranks[1:], spine[1:]], 0.0)
        sums = np.zeros(len(parents))
        by_depth = np.argsort(depths, kind="stable")
        ends = np.searchsorted(depths[by_depth], np.arange(1, depths.max() + 2))
        for start, end in itertools.pairwise(ends):
            level = by_depth[start:end]
            sums[level] = sums[parents[level]] + steps[level - 1]
        found: list[float] = np.exp(sums).tolist()
        return found

    def observe(self, tree: DraftTree, tokens: Sequence[int]) -> None:
        """
        Args:
            tree (`DraftTree`): as drafted, which may be larger than what was verified.
            tokens (`Sequence[int]`): what the walk emitted, bonus token included.
        """
        if len(tree) == 1:
            return
        log_probs = tree.log_probs.tolist()
        with self._lock:
            self.rounds += 1
            self._predicted *= KEPT
            self._happened *= KEPT
            node = 0
            for depth, token in enumerate(tokens):
                for rank, child in enumerate(tree.children[node].values()):
                    cell = depth, _BUCKET_OF[min(rank, _LAST_RANK)], int(depth == node)
                    self._predicted[cell] += math.exp(log_probs[child] - log_probs[node])
                    self._happened[cell] += child == tree.children[node].get(token)
                if token not in tree.children[node]:
                    break
                node = tree.children[node][token]
            self._update()

    def _update(self) -> None:
        predicted, happened = self._predicted, self._happened
        overall = (happened.sum() + PRIOR) / (predicted.sum() + PRIOR)
        broad = (happened.sum(axis=0) + BROAD * overall) / (predicted.sum(axis=0) + BROAD)
        self._log_factors = np.log((happened + NARROW * broad) / (predicted + NARROW))
        self._table = self._log_factors.tolist()


def _places(parents: np.ndarray, depths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each node's bucket of ranks among its siblings, and 1 where its parent is on the spine, else 0."""
    by_parent = np.argsort(parents, kind="stable")
    sorted_parents = parents[by_parent]
    ranks = np.empty_like(parents)
    ranks[by_parent] = np.arange(len(parents)) - np.searchsorted(sorted_parents, sorted_parents)
    # In preorder the spine's nodes are the first ones, each at the depth of its number.
    return _BUCKETS[np.minimum(ranks, len(_BUCKETS) - 1)], (depths[parents] == parents).astype(np.int64)


def expected_tokens(tree: DraftTree, probabilities: Sequence[float], sizes: Sequence[int]) -> list[float]:
    """Tokens a round is expected to give with the best `sizes` nodes of a tree, up to the first that holds all.

    Args:
        tree (`DraftTree`): the largest one.
        probabilities (`Sequence[float]`): of [`Calibration.probabilities`].
        sizes (`Sequence[int]`): ascending numbers of nodes.
    """
    log_probs = tree.log_probs.tolist()
    # Stable, so that equal ones stay in preorder.
    order = sorted(range(1, len(log_probs)), key=log_probs.__getitem__, reverse=True)
    totals = list(itertools.accumulate((probabilities[node] for node in order), initial=1.0))
    useful = next((i for i, size in enumerate(sizes) if size >= len(order)), len(sizes) - 1)
    return [totals[min(size, len(order))] for size in sizes[: useful + 1]]
