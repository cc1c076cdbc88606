"""Reading a tree in rows: what a layer that can only continue sequences is given, and where each node then lies."""

from dataclasses import dataclass

import torch

from hf_ddtree.round import TreeRound


@dataclass(frozen=True)
class Step:
    """Rows that are read in one call, each going on from the state of a row before.

    Args:
        nodes (`torch.LongTensor` of shape `(rows, length)`): the nodes that a row reads, one after the other.
        origins (`torch.LongTensor` of shape `(rows,)`): the row of the step before whose state a row starts from; in
            a first step all start from the prefix's, which is row 0.
    """

    nodes: torch.Tensor
    origins: torch.Tensor


@dataclass(frozen=True)
class Part:
    """Some leaves and their paths, read in steps. The nodes that no part before has read are an interval.

    Args:
        steps (`list[Step]`): in their order.
        read (`torch.LongTensor` of shape `(nodes,)`): for each node of the interval, which of the tokens of all steps
            it is, these being numbered step by step and row by row.
    """

    steps: list[Step]
    read: torch.Tensor


class Paths:
    """The root-to-leaf paths of a tree, in preorder.

    Args:
        tree (`TreeRound`): the round's tree.
    """

    def __init__(self, tree: TreeRound):
        self.depths: list[int] = tree.depths.tolist()
        self.longest = max(self.depths) + 1
        #: The path of each leaf, from the root to it.
        self.leaves: list[list[int]] = []
        path: list[int] = []
        for node, (depth, following) in enumerate(zip(self.depths, [*self.depths[1:], 0], strict=True)):
            path = [*path[:depth], node]
            # In preorder what follows a node is its first child, if it has any.
            if following <= depth:
                self.leaves.append(path)

    def in_rows(self, at_once: int, device: torch.device) -> list[Part]:
        """One step for every `at_once` leaves: each path is a row, with its leaf repeated where others are longer."""
        parts = []
        for paths, first, last in self._split(at_once):
            length = max(map(len, paths))
            rows = [path + path[-1:] * (length - len(path)) for path in paths]
            row_of = {node: row for row, path in reversed(list(enumerate(paths))) for node in path}
            read = [row_of[node] * length + self.depths[node] for node in range(first, last)]
            parts.append(_part([(rows, [0] * len(rows))], read, device))
        return parts

    def in_levels(self, at_once: int, device: torch.device) -> list[Part]:
        """One step for every depth: each node is a row of its own, and goes on from its parent's state.

        A part of the tree has at most `at_once` leaves; later parts read the ancestors of theirs once more.
        """
        parts = []
        for paths, first, last in self._split(at_once):
            steps: list[tuple[list[list[int]], list[int]]] = []
            read: dict[int, int] = {}
            above, count = {-1: 0}, 0
            for depth in range(max(map(len, paths))):
                parents = {path[depth]: path[depth - 1] if depth else -1 for path in paths if depth < len(path)}
                steps.append(([[node] for node in parents], [above[parent] for parent in parents.values()]))
                above = {node: row for row, node in enumerate(parents)}
                read |= {node: count + row for node, row in above.items()}
                count += len(above)
            parts.append(_part(steps, [read[node] for node in range(first, last)], device))
        return parts

    def _split(self, at_once: int) -> list[tuple[list[list[int]], int, int]]:
        """`at_once` leaves each time: their paths, and the first and one past the last of the nodes that they add."""
        first, split = 0, []
        for start in range(0, len(self.leaves), at_once):
            paths = self.leaves[start : start + at_once]
            split.append((paths, first, paths[-1][-1] + 1))
            first = paths[-1][-1] + 1
        return split


def _part(steps: list[tuple[list[list[int]], list[int]]], read: list[int], device: torch.device) -> Part:
    return Part(
        [Step(torch.tensor(nodes, device=device), torch.tensor(origins, device=device)) for nodes, origins in steps],
        torch.tensor(read, device=device),
    )
