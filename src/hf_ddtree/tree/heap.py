"""The reference builder: a plain best-first heap."""

import heapq
import math

import torch

from hf_ddtree.tree.draft_tree import DraftTree
from hf_ddtree.tree.scoring import MarginalScorer, Scorer, expand_costs


def build_with_heap(scorer: Scorer, budget: int, width: int, anchor: int) -> DraftTree:
    """
    Algorithm 1 of DDTree (hf.co/papers/2604.12989): pop the best node, push its next sibling and its first child.

    Nodes come out by falling path log-probability; equal ones by their rank tuple, lexicographically (a rank tuple
    lists the rank of each token of the path among its siblings, so an ancestor precedes its descendants).

    Args:
        scorer ([`Scorer`]): Ranks continuations; asked about one node at a time.
        budget (`int`): Number of nodes, the root not counted.
        width (`int`): Number of children a node may have.
        anchor (`int`): Token of the root.

    Raises:
        `ValueError`: when the scorer's log-probabilities are NaN, unsorted or above 0.
    """
    frontier = _Frontier(scorer, width, anchor)
    frontier.expand(0)
    while frontier.waiting and len(frontier.tokens) <= budget:
        frontier.take_best()
    return frontier.tree()


class _Frontier:
    """The nodes taken so far, in the order taken, and the heap of those that may come next."""

    def __init__(self, scorer: Scorer, width: int, anchor: int) -> None:
        self.scorer = scorer
        self.width = width
        self.tokens = [anchor]
        self.parents = [-1]
        self.costs = [0.0]
        self.ranks: list[tuple[int, ...]] = [()]
        self.waiting: list[tuple[float, tuple[int, ...], int]] = []
        # Per node taken: its children's costs and tokens, and the state they need.
        self.children: list[tuple[list[float], list[int], torch.Tensor | None]] = []
        # Marginals offer the same children to every node of a depth.
        self.shared: list[tuple[list[float], list[int], None]] = []
        if isinstance(scorer, MarginalScorer):
            costs, token_ids = scorer.costs[:, :width].tolist(), scorer.token_ids[:, :width].tolist()
            self.shared = [(row, ids, None) for row, ids in zip(costs, token_ids, strict=True)]

    def expand(self, node: int) -> None:
        depth = len(self.ranks[node])
        if depth == self.scorer.depth:
            self.children.append(([], [], None))
        elif self.shared:
            self.children.append(self.shared[depth])
        else:
            token = torch.tensor([self.tokens[node]])
            state = self.children[self.parents[node]][2] if node else None
            table, table_ids, states = expand_costs(self.scorer, depth, token, state, self.width)
            self.children.append((table[0].tolist(), table_ids[0].tolist(), states))
        self.push(node, 0)

    def push(self, parent: int, rank: int) -> None:
        costs = self.children[parent][0]
        if rank < len(costs) and costs[rank] < math.inf:
            heapq.heappush(self.waiting, (self.costs[parent] + costs[rank], (*self.ranks[parent], rank), parent))

    def take_best(self) -> None:
        cost, ranks, parent = heapq.heappop(self.waiting)
        self.costs.append(cost)
        self.ranks.append(ranks)
        self.parents.append(parent)
        self.tokens.append(self.children[parent][1][ranks[-1]])
        self.push(parent, ranks[-1] + 1)
        self.expand(len(self.tokens) - 1)

    def tree(self) -> DraftTree:
        # Depth-first preorder is the lexicographic order of rank tuples.
        order = sorted(range(len(self.ranks)), key=self.ranks.__getitem__)
        number = {node: position for position, node in enumerate(order)}
        parents = [number[self.parents[node]] if node else -1 for node in order]
        ends = list(range(1, len(order) + 1))
        for position in range(len(order) - 1, 0, -1):
            ends[parents[position]] = max(ends[parents[position]], ends[position])
        # Whatever the default device is.
        return DraftTree(
            token_ids=torch.tensor([self.tokens[node] for node in order], device="cpu"),
            parents=torch.tensor(parents, device="cpu"),
            depths=torch.tensor([len(self.ranks[node]) for node in order], device="cpu"),
            subtree_ends=torch.tensor(ends, device="cpu"),
            log_probs=torch.tensor([0.0 - self.costs[node] for node in order], dtype=torch.float64, device="cpu"),
        )
