"""A draft tree that still lies on the device that built it, until the walk needs it on the host."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_ddtree.tree.costs import GRID
from hf_ddtree.tree.draft_tree import DraftTree

#: Rows of `DeviceTree.nodes`.
TOKEN, PARENT, DEPTH, END, COST = range(5)


@dataclass(frozen=True, eq=False)
class DeviceTree:
    """
    A draft tree of a fixed number of nodes on an accelerator, whose values the host has not seen.

    Where there are fewer possible paths than the budget, the last nodes are padding: leaves below the root that repeat
    its most probable token and have depth 1. A target reads them as it reads any node, no real node sees them, and
    [`DeviceTree.on_host`] drops them, so that no walk can enter them. All other nodes have the numbers, parents,
    depths and subtree ends of the tree on the host; the root's subtree alone ends earlier there.

    Args:
        nodes (`torch.LongTensor` of shape `(5, num_nodes)`):
            Tokens, parents (the root's is -1), depths, subtree ends, and path costs in steps of the builders' grid.
        count (`torch.LongTensor` of shape `(1,)`): Nodes that are no padding, the root included.
        deepest (`int`): No node is deeper.
        faulty (`torch.BoolTensor` of shape `(1,)`): Whether what the tree was built from is unfit to rank nodes by.
        explain (`Callable`): Called on the host for a faulty tree; raises the error that says why.
    """

    nodes: torch.Tensor
    count: torch.Tensor
    deepest: int
    faulty: torch.Tensor
    explain: Callable[[], None]

    def __len__(self) -> int:
        return self.nodes.shape[1]

    @property
    def token_ids(self) -> torch.Tensor:
        """`torch.LongTensor` of shape `(num_nodes,)`: each node's token."""
        return self.nodes[TOKEN]

    @property
    def depths(self) -> torch.Tensor:
        """`torch.LongTensor` of shape `(num_nodes,)`: distance from the root."""
        return self.nodes[DEPTH]

    @property
    def subtree_ends(self) -> torch.Tensor:
        """`torch.LongTensor` of shape `(num_nodes,)`: one past the last node of each node's subtree."""
        return self.nodes[END]

    def on_host(self) -> DraftTree:
        """
        The tree on the CPU without its padding; waits for the device once.

        Raises:
            `ValueError`: when the tree was built from NaN, or from a table that holds no log-probabilities.
        """
        return self._unpacked(self._packed().cpu())

    def on_host_with(self, numbers: torch.Tensor) -> tuple[DraftTree, list[int]]:
        """[`DeviceTree.on_host`], and a vector of integers from any device, by one wait for both."""
        packed = self._packed()
        both = torch.cat([packed.to(numbers.device), numbers]).cpu()
        return self._unpacked(both[: len(packed)]), both[len(packed) :].tolist()

    def _packed(self) -> torch.Tensor:
        return torch.cat([self.count, self.faulty.long(), self.nodes.flatten()])

    def _unpacked(self, packed: torch.Tensor) -> DraftTree:
        count, faulty = packed[:2].tolist()
        if faulty:
            self.explain()
        nodes = packed[2:].view(5, -1)[:, :count]
        nodes[END, 0] = count
        token_ids, parents, depths, subtree_ends, costs = nodes
        return DraftTree(token_ids, parents, depths, subtree_ends, 0.0 - costs.double() / GRID)
