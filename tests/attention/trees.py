"""Random trees in depth-first preorder, made by hand rather than by the builder, and attention problems on them."""

from dataclasses import dataclass

import torch

from hf_ddtree.round import TreeRound
from hf_ddtree.tree import DraftTree


def random_tree(nodes: int, seed: int, max_depth: int = 7, vocabulary: int = 16, anchor: int = 3) -> DraftTree:
    """A tree whose every node hangs under a random node of the path to the node before it."""
    generator = torch.Generator().manual_seed(seed)

    def pick(count: int) -> int:
        return int(torch.randint(0, count, (), generator=generator))

    parents, depths, tokens = [-1], [0], [anchor]
    used: list[set[int]] = [set()]
    path = [0]
    while len(parents) < nodes:
        # Deep trees are the interesting ones: four times in five the next node goes under the last.
        keep = len(path) if pick(5) else 1 + pick(len(path))
        path = path[: min(keep, max_depth)]
        free = [token for token in range(vocabulary) if token not in used[path[-1]]]
        if not free:
            continue
        token = free[pick(len(free))]
        used[path[-1]].add(token)
        parents.append(path[-1])
        depths.append(len(path))
        tokens.append(token)
        used.append(set())
        path.append(len(parents) - 1)
    ends = list(range(1, nodes + 1))
    for node in range(nodes - 1, 0, -1):
        ends[parents[node]] = max(ends[parents[node]], ends[node])
    tree = DraftTree(
        token_ids=torch.tensor(tokens),
        parents=torch.tensor(parents),
        depths=torch.tensor(depths),
        subtree_ends=torch.tensor(ends),
        log_probs=-torch.tensor(depths, dtype=torch.float64),
    )
    tree.validate()
    return tree


def chain(nodes: int) -> DraftTree:
    """A tree without branches."""
    return DraftTree(
        token_ids=torch.arange(nodes),
        parents=torch.arange(-1, nodes - 1),
        depths=torch.arange(nodes),
        subtree_ends=torch.full((nodes,), nodes),
        log_probs=-torch.arange(nodes, dtype=torch.float64),
    )


def round_of(tree: DraftTree) -> TreeRound:
    return TreeRound(tree.depths, tree.subtree_ends)


def ancestors(tree: DraftTree) -> list[set[int]]:
    """For each node, itself and its ancestors, by following parents."""
    return [set(tree.path(node)) for node in range(len(tree))]


@dataclass
class Problem:
    """Queries of a tree's nodes, keys and values of a prefix and the nodes, and what each node may read."""

    tree: DraftTree
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    visible: torch.Tensor

    @property
    def additive(self) -> torch.Tensor:
        mask = torch.zeros(self.visible.shape, dtype=self.query.dtype)
        return mask.masked_fill(~self.visible, torch.finfo(mask.dtype).min)


def random_problem(
    nodes: int, prefix: int, seed: int, groups: int = 1, kv_heads: int = 2, head_dim: int = 8, padding: int = 0
) -> Problem:
    """The visibility is written out node by node; the first `padding` prefix keys are unreadable."""
    generator = torch.Generator().manual_seed(seed)
    tree = random_tree(nodes, seed)
    visible = torch.zeros(1, 1, nodes, prefix + nodes, dtype=torch.bool)
    for node, seen in enumerate(ancestors(tree)):
        visible[0, 0, node, padding:prefix] = True
        visible[0, 0, node, [prefix + other for other in seen]] = True

    def normal(heads: int, length: int) -> torch.Tensor:
        return torch.randn(1, heads, length, head_dim, generator=generator, dtype=torch.float64)

    keys = prefix + nodes
    return Problem(tree, normal(groups * kv_heads, nodes), normal(kv_heads, keys), normal(kv_heads, keys), visible)
