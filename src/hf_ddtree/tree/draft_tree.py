"""The draft tree: what the drafter proposes and the target verifies in one forward."""

from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch

from hf_ddtree.integers import long_tensor
from hf_ddtree.round import ancestors_or_self
from hf_ddtree.tree.ordering import best_nodes, renumber

NO_ANCHOR = -1


@cache
def _root_columns() -> tuple[torch.Tensor, ...]:
    """Parents, depths, subtree ends and log-probabilities, made once: plain rounds need them at each token."""
    with torch.inference_mode(False):
        columns = (torch.tensor([number], device="cpu") for number in (-1, 0, 1))
        return *columns, torch.zeros(1, dtype=torch.float64, device="cpu")


@dataclass(frozen=True, eq=False)
class DraftTree:
    """
    A tree of drafted tokens in depth-first preorder, the root (the anchor token) first.

    Siblings are in rank order, so a subtree is the interval `[node, subtree_ends[node])` and node `col` is an ancestor
    of node `row`, or `row` itself, exactly when `col <= row < subtree_ends[col]`. All tensors live on the CPU and have
    shape `(num_nodes,)`.

    Args:
        token_ids (`torch.LongTensor`): Each node's token; at 0 the anchor's, or -1 when it was not given.
        parents (`torch.LongTensor`): Each node's parent; -1 for the root.
        depths (`torch.LongTensor`): Distance from the root, whose depth is 0.
        subtree_ends (`torch.LongTensor`): One past the last node of each node's subtree.
        log_probs (`torch.DoubleTensor`):
            Natural log-probability of each node's path under the drafter, 0 for the root, to within 2**-36 a token.

    Raises:
        `ValueError`: when the tensors' shapes disagree or there is no root.
    """

    token_ids: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    subtree_ends: torch.Tensor
    log_probs: torch.Tensor

    def __post_init__(self) -> None:
        shape = self.token_ids.shape
        if len(shape) != 1 or shape[0] == 0:
            raise ValueError(f"a DraftTree needs tensors of shape (num_nodes,) with the root, got {tuple(shape)}.")
        for name in ("parents", "depths", "subtree_ends", "log_probs"):
            other = getattr(self, name).shape
            if other != shape:
                raise ValueError(f"DraftTree: {name} has shape {tuple(other)}, token_ids has {tuple(shape)}.")

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_drafted(self) -> int:
        """`int`: number of nodes without the root, which is what a budget counts."""
        return len(self) - 1

    @cached_property
    def children(self) -> list[dict[int, int]]:
        """`list[dict[int, int]]`: each node's children as token id -> node, in rank order. Built on first use."""
        children: list[dict[int, int]] = [{} for _ in range(len(self))]
        tokens = self.token_ids.tolist()
        parents = self.parents.tolist()
        for node in range(1, len(tokens)):
            children[parents[node]][tokens[node]] = node
        return children

    @cached_property
    def _numbers(self) -> tuple[list[int], list[int]]:
        return self.token_ids.tolist(), self.subtree_ends.tolist()

    def child(self, node: int, token_id: int) -> int | None:
        """The child of `node` that carries `token_id`, if there is one; a walk looks at few of all children."""
        tokens, ends = self._numbers
        child, end = node + 1, ends[node]
        while child < end:
            if tokens[child] == token_id:
                return child
            child = ends[child]
        return None

    @classmethod
    def root_only(cls, token_id: int = NO_ANCHOR) -> "DraftTree":
        """A tree of the root alone: nothing is drafted. All but its token is shared: do not write to it."""
        return cls(long_tensor([token_id]), *_root_columns())

    def on_host(self) -> "DraftTree":
        """This tree; as [`DeviceTree.on_host`], for a tree that is on the host already."""
        return self

    def on_host_with(self, numbers: torch.Tensor) -> tuple["DraftTree", list[int]]:
        """This tree and a vector of integers from any device."""
        return self, numbers.tolist()

    @property
    def deepest(self) -> int:
        """`int`: depth of the deepest node."""
        return int(self.depths.max())

    def with_anchor(self, token_id: int) -> "DraftTree":
        """The same tree with `token_id` at the root."""
        token_ids = self.token_ids.clone()
        token_ids[0] = token_id
        return replace(self, token_ids=token_ids)

    def visibility(self) -> torch.Tensor:
        """`torch.BoolTensor` of shape `(num_nodes, num_nodes)`: True where column is an ancestor of row, or row."""
        return ancestors_or_self(self.subtree_ends)

    def path(self, node: int) -> list[int]:
        """
        The nodes from the root to `node`, both included.

        Raises:
            `IndexError`: when `node` is not a node of this tree.
        """
        if not 0 <= node < len(self):
            raise IndexError(f"node {node} is not in a tree of {len(self)} nodes: nodes are 0 to {len(self) - 1}.")
        path = [node]
        while path[-1] != 0:
            path.append(int(self.parents[path[-1]]))
        return path[::-1]

    def most_probable_chain(self) -> list[int]:
        """The token ids met by taking the most probable child from the root down, the root excluded."""
        parents = self.parents.tolist()
        length = 0
        # In preorder with siblings by rank, a node's first child is the next node.
        while length + 1 < len(parents) and parents[length + 1] == length:
            length += 1
        return self.token_ids[1 : length + 1].tolist()

    def cut(self, budget: int) -> "DraftTree":
        """
        The tree that the same drafter output gives at a smaller budget.

        Args:
            budget (`int`): Number of nodes to keep, the root not counted.

        Raises:
            `ValueError`: when `budget` is negative.
        """
        if budget < 0:
            raise ValueError(f"a tree cannot be cut to {budget} nodes: pass 0 or more.")
        if budget >= self.num_drafted:
            return self
        token_ids, parents, depths, ends, log_probs = (
            column.numpy() for column in (self.token_ids, self.parents, self.depths, self.subtree_ends, self.log_probs)
        )
        keep = best_nodes(-log_probs, budget)
        new_parents, new_ends = renumber(keep, parents, ends)
        columns = token_ids[keep], new_parents, depths[keep], new_ends, log_probs[keep]
        return DraftTree(*map(torch.from_numpy, columns))

    def validate(self) -> None:
        """
        Checks every invariant in time proportional to the number of nodes.

        Raises:
            `ValueError`: naming the first node and the invariant it breaks.
        """
        for name in ("token_ids", "parents", "depths", "subtree_ends"):
            tensor = getattr(self, name)
            if tensor.dtype != torch.long or tensor.device.type != "cpu":
                raise ValueError(f"{name} must be a LongTensor on the CPU, got {tensor.dtype} on {tensor.device}.")
        parents, depths, ends = self.parents.tolist(), self.depths.tolist(), self.subtree_ends.tolist()
        log_probs = self.log_probs.tolist()
        if (parents[0], depths[0], ends[0], log_probs[0]) != (-1, 0, len(self), 0.0):
            raise ValueError("node 0 must be the root: parent -1, depth 0, subtree end num_nodes, log-prob 0.")
        open_path = [0]
        for node in range(1, len(self)):
            while ends[open_path[-1]] <= node:
                open_path.pop()
            parent = open_path[-1]
            if parents[node] != parent:
                raise ValueError(f"node {node} has parent {parents[node]}; its place in preorder says {parent}.")
            if depths[node] != depths[parent] + 1:
                raise ValueError(f"node {node} has depth {depths[node]}; its parent's is {depths[parent]}.")
            if not node < ends[node] <= ends[parent]:
                raise ValueError(f"node {node} has subtree end {ends[node]}, outside ({node}, {ends[parent]}].")
            if not log_probs[node] <= log_probs[parent]:
                raise ValueError(f"node {node} is more probable than its parent {parent}.")
            open_path.append(node)
        if sum(map(len, self.children)) != self.num_drafted:
            raise ValueError("two siblings carry the same token.")
