"""The tree of independent marginals on the drafter's own device: fixed shapes, and no wait for the host."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch.nn.functional import pad

from hf_ddtree.tree.costs import GRID, POSITIVE_TOLERANCE, costs_of
from hf_ddtree.tree.device_tree import DeviceTree
from hf_ddtree.tree.draft_tree import DraftTree
from hf_ddtree.tree.scoring import MarginalScorer, Scorer

# In steps of the grid: 2**18 nats, beyond any softmax. The sum of 511 such tokens still fits in 63 bits.
IMPOSSIBLE = 2**54
MAX_DEPTH = 511


class DeviceBuilder:
    """
    Builds the tree of [`build_with_heap`] under marginals, node for node, on any device.

    Shapes depend on shapes alone and nothing is read on the host, so a call may be traced, compiled or captured in a
    graph. Costs are whole steps of the grid of [`costs_of`]: a device without float64 serves, and sums are exact.

    The steps are those of [`build_from_marginals`]: the cost of the last node, then every path up to it, a level at a
    time in lexicographic order of rank tuples, then the numbers in preorder. Two of them are done otherwise. The last
    node's cost comes from joining spans of positions pairwise, and the numbers from doubling pointers between levels;
    either takes as many steps as the depth has binary digits.

    Args:
        budget (`int`): Number of nodes, at least 1, the root not counted.
        device (`torch.device`): Where the log-probabilities will lie.
    """

    def __init__(self, budget: int, device: torch.device) -> None:
        self.budget = budget
        self.one, self.other = (torch.from_numpy(column).to(device) for column in _pairs(budget))

    def __call__(
        self,
        top_log_probs: torch.Tensor,
        top_token_ids: torch.Tensor,
        anchor: int | torch.Tensor,
        explain: Callable[[], None] | None = None,
        faulty: torch.Tensor | None = None,
    ) -> DeviceTree:
        """
        Args:
            top_log_probs (`torch.Tensor` of shape `(depth, width)`):
                Natural log-probabilities, each row sorted descending, at least one of each, as [`top_marginals`] gives
                them. `-inf` marks tokens that must not be drafted. No path of 2**18 nats or more is drafted.
            top_token_ids (`torch.LongTensor` of shape `(depth, width)`): The tokens they belong to.
            anchor (`int` or `torch.LongTensor` of shape `(1,)`): Token of the root.
            explain (`Callable`, *optional*): See [`DeviceTree`]; called before the table's own faults are named.
            faulty (`torch.BoolTensor` of shape `(1,)`, *optional*): Whether the caller knows a fault already.

        Returns:
            [`DeviceTree`] of `budget + 1` nodes on the device of `top_log_probs`. NaN, rows that are not sorted and
            values above 0 raise only when it is brought to the host.

        Raises:
            `ValueError`: for more than 511 draft positions.
        """
        if len(top_log_probs) > MAX_DEPTH:
            raise ValueError(f"a tree on a device is at most {MAX_DEPTH} deep, got {len(top_log_probs)} positions.")
        budget = self.budget
        wide = top_log_probs if top_log_probs.dtype == torch.float64 else top_log_probs.float()
        # Comparisons are false for NaN.
        fit = (wide[:, :1] <= POSITIVE_TOLERANCE).all() & (wide[:, :-1] >= wide[:, 1:]).all()
        fault = ~fit[None] if faulty is None else ~fit | faulty
        rows = _steps(wide[:budget, :budget], budget)
        threshold, ties = self._threshold(rows[:, :budget])
        costs, parents, ranks, firsts = _levels(rows, threshold, ties)
        positions, ends = _preorder(parents, firsts)
        depth = torch.arange(len(rows), device=rows.device)[:, None]
        tokens = top_token_ids[depth, ranks.clamp(max=top_token_ids.shape[1] - 1)]
        nodes, count = _written(costs, parents, tokens, positions, ends, threshold, ties)
        nodes[0, 0] = anchor

        def raise_fault() -> None:
            if explain is not None:
                explain()
            costs_of(top_log_probs.cpu().double().numpy())

        return DeviceTree(nodes, count, len(rows), fault, raise_fault)

    def _threshold(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        The highest of the `budget` lowest path costs, and how many of these equal it, of shape `(1,)`.

        When there are fewer possible paths, all of them count.
        """
        # Row d: the cheapest ways through the `span` positions that end at d, or through all up to d if these are few.
        ways, span = rows, 1
        while span < len(rows):
            joined = ways[span:, self.one] + ways[:-span, self.other]
            ways = torch.cat([ways[:span], joined.topk(self.budget, largest=False).values])
            span *= 2
        cheapest = ways.flatten().topk(self.budget, largest=False).values
        threshold = cheapest[-1:].clamp(max=IMPOSSIBLE - 1)
        return threshold, (cheapest == threshold).sum(0, keepdim=True)


@dataclass(frozen=True, eq=False)
class DeviceMarginals:
    """
    A drafter's most probable tokens of each position, left on its device.

    Args:
        log_probs, token_ids (`torch.Tensor` of shape `(depth, width)`): As [`DeviceBuilder`] takes them.
        faulty (`torch.BoolTensor` of shape `(1,)`, *optional*): Whether the drafter's output is known to be unfit.
        explain (`Callable`, *optional*): Raises the error that says why.
    """

    log_probs: torch.Tensor
    token_ids: torch.Tensor
    faulty: torch.Tensor | None = None
    explain: Callable[[], None] | None = None

    def build(self, budget: int, anchor: int) -> DeviceTree:
        """The tree of a budget of at least 1."""
        build = device_builder(budget, self.log_probs.device)
        return build(self.log_probs, self.token_ids, anchor, self.explain, self.faulty)


def build_as_on_device(scorer: Scorer, budget: int, width: int, anchor: int) -> DraftTree:
    """
    What [`DeviceBuilder`] gives, on the host; arguments as those of [`build_with_heap`].

    Raises:
        `ValueError`: for a scorer other than [`MarginalScorer`], and for more than 511 draft positions.
    """
    if not isinstance(scorer, MarginalScorer):
        raise ValueError(
            f"The builder 'device' reads independent marginals; for {type(scorer).__name__} use 'levelwise'."
        )
    log_probs, token_ids = (torch.from_numpy(table[:, :width]) for table in (-scorer.costs, scorer.token_ids))
    return DeviceMarginals(log_probs, token_ids).build(budget, anchor).on_host()


@lru_cache(maxsize=32)
def device_builder(budget: int, device: torch.device) -> DeviceBuilder:
    """The builder of a budget, with its tables on the device already."""
    return DeviceBuilder(budget, device)


def _pairs(budget: int) -> tuple[np.ndarray, np.ndarray]:
    """
    Pairs (i, j) with (i+1)(j+1) <= budget.

    Of two ascending lists, the sum of the elements i and j is the highest of (i+1)(j+1) sums, so others are no use.
    """
    counts = budget // np.arange(1, budget + 1)
    one = np.arange(budget).repeat(counts)
    return one, np.arange(len(one)) - (counts.cumsum() - counts)[one]


def _steps(log_probs: torch.Tensor, budget: int) -> torch.Tensor:
    """Costs in steps of the grid, `(depth, budget + 1)`. Whatever is given they ascend, which bounds indices."""
    # A power of two scales without rounding, in float32 too.
    steps = (log_probs * -GRID).round().nan_to_num(nan=float(IMPOSSIBLE)).clamp(0, float(IMPOSSIBLE)).long()
    return pad(steps.cummax(dim=-1).values, (0, budget + 1 - steps.shape[1]), value=IMPOSSIBLE)


def _levels(rows: torch.Tensor, threshold: torch.Tensor, ties: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """
    Every path up to the threshold, in lexicographic order of rank tuples, but of a level no more than `ties` at it.

    Returns:
        Costs, parents and ranks, of shape `(depth, budget)`. A parent is a node's index in the level above, `budget`
        for an unused slot. And `(depth, budget + 1)` indices of the first child of each node of the level above.
    """
    budget = rows.shape[1] - 1
    slots = torch.arange(budget, device=rows.device)
    limits = torch.cat([threshold, threshold + 1])[:, None]
    # The root alone; the last place is the parent of unused slots.
    level = torch.where(torch.arange(budget + 1, device=rows.device) == 0, 0, IMPOSSIBLE)
    found = []
    for row in rows:
        # How many children cost less than the threshold, and how many no more, summed up over the parents.
        below, within = torch.searchsorted(row, limits - level[:-1]).cumsum(dim=-1)
        ends = below + (within - below).minimum(ties)
        firsts = pad(ends, (1, 0))
        parents = torch.searchsorted(ends, slots, right=True)
        ranks = slots - firsts[parents]
        costs = level[parents] + row[ranks]
        level = pad(costs, (0, 1), value=IMPOSSIBLE)
        found.append((costs, parents, ranks, firsts))
    return tuple(map(torch.stack, zip(*found, strict=True)))


def _preorder(parents: torch.Tensor, firsts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Preorder numbers of the nodes of [`_levels`] and one past the last of their subtrees; the root has number 0."""
    depth, budget = parents.shape
    slots = torch.arange(budget + 1, device=parents.device)
    base = torch.arange(depth, device=parents.device)[:, None]
    # Nodes of this level and deeper ones that are, or hang below, the first i of this level: i, and the same one
    # level deeper for the first children of node i.
    deeper = (base[1:] * (budget + 1) + firsts[1:]).flatten()
    before = _sums_along(slots.repeat(depth), pad(deeper, (0, budget + 1), value=depth * (budget + 1)), depth)
    before = before.view(depth, budget + 1)
    # A node's number is its parent's, one, and the sizes of the siblings before it.
    steps = 1 + before[:, :-1] - before.gather(1, firsts.gather(1, parents))
    above = torch.where(parents[1:] < budget, base[:-1] * budget + parents[1:], depth * budget).flatten()
    positions = _sums_along(steps.flatten(), pad(above, (budget, 0), value=depth * budget), depth).view(depth, budget)
    return positions, positions + before[:, 1:] - before[:, :-1]


def _sums_along(values: torch.Tensor, following: torch.Tensor, length: int) -> torch.Tensor:
    """Sums of the at most `length` values met by following pointers from each index; one past the last ends a way."""
    values, following = pad(values, (0, 1)), pad(following, (0, 1), value=len(values))
    for _ in range((length - 1).bit_length()):
        values, following = values + values[following], following[following]
    return values[:-1]


def _written(
    costs: torch.Tensor,
    parents: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    ends: torch.Tensor,
    threshold: torch.Tensor,
    ties: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(5, budget + 1)` nodes in preorder, of those at the threshold the first `ties`, and how many are no padding."""
    depth, budget = costs.shape
    size, device = depth * budget, costs.device
    used = parents < budget
    # In preorder, without the root; what is not used goes to a place past the end.
    place = torch.where(used, positions - 1, size).flatten()
    ordered = torch.full((size + 1,), IMPOSSIBLE, device=device).scatter(0, place, costs.flatten())
    tied = ordered == threshold
    keep = (ordered < threshold) | (tied & (tied.cumsum(0) <= ties))
    # How many of the first p nodes are kept: the new number of node p, if it is one of them.
    kept = pad(keep.cumsum(0), (1, 0))
    numbers = torch.where(used & keep[place.view(depth, budget)], kept[positions.clamp(0, size)], budget + 1)
    above = numbers[:-1].gather(1, parents[1:].clamp(max=budget - 1))
    levels = torch.arange(1, depth + 1, device=device)[:, None].expand(depth, budget)
    columns = torch.stack([tokens, pad(above, (0, 0, 1, 0)), levels, 1 + kept[(ends - 1).clamp(0, size)], costs])
    # Padding: leaves below the root.
    slots = torch.arange(budget + 2, device=device)
    zeros = torch.zeros_like(slots)
    fill = torch.stack([tokens[0, :1].expand_as(slots), zeros, zeros + 1, slots + 1, zeros + IMPOSSIBLE])
    nodes = fill.scatter(1, numbers.view(1, size).expand(5, size), columns.view(5, size))[:, :-1]
    root = torch.stack([zeros, zeros - 1, zeros, zeros + budget + 1, zeros])[:, :-1]
    return torch.where(slots[:-1] == 0, root, nodes), 1 + kept[-1:]
