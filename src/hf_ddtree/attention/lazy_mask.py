"""A mask that is a plan for the kernel, and a tensor only for whoever reads it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ddtree_attention import TreeTables


@dataclass(frozen=True)
class Plan:
    """What the kernel needs of a mask, or why it cannot serve it.

    Args:
        tables (`TreeTables`): of the round's tree, a row for each sequence.
        prefix (`torch.IntTensor` of shape `(batch,)`): rows of the layer's keys before the tree's.
        start (`torch.IntTensor` of shape `(batch,)`, *optional*): how many of them are left padding.
        window (`int`, *optional*): the sliding window, in positions.
    """

    tables: TreeTables
    prefix: torch.Tensor
    start: torch.Tensor | None
    window: int | None

    def to(self, device: torch.device) -> "Plan":
        return replace(
            self,
            tables=TreeTables(*(table.to(device) for table in self.tables)),
            prefix=self.prefix.to(device),
            start=self.start.to(device) if self.start is not None else None,
        )


class TreeMask(torch.Tensor):
    """The additive mask of a tree, made when an operation first asks for its numbers.

    A model that hands its mask on to the attention never pays for it. One that slices or adds to it gets an ordinary
    tensor, from which the attention learns that there is more to the mask than the plan says.

    Args:
        plan (`Plan` or `str`): what the kernel needs, or why it cannot serve this mask.
        build (`Callable`): makes the dense mask.
        shape, dtype, device: of the dense mask.
    """

    plan: Plan | str

    @staticmethod
    def __new__(
        cls,
        plan: Plan | str,
        build: Callable[[], torch.Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> "TreeMask":
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    def __init__(self, plan: Plan | str, build: Callable[[], torch.Tensor], *_: Any):
        self.plan = plan
        self._build = build
        self._dense: torch.Tensor | None = None

    def dense(self) -> torch.Tensor:
        """The mask with its numbers; the same tensor each time."""
        if self._dense is None:
            self._dense = self._build()
        return self._dense

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"TreeMask({self.plan}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].dtype == kwargs.get("dtype", args[0].dtype):
            return args[0]._moved(torch.device(kwargs.get("device", args[0].device)))

        def read(mask: "TreeMask") -> torch.Tensor:
            # Whatever is done to the numbers, in place too, the plan does not know of it.
            mask.plan = "a mask that the model reads or changes"
            return mask.dense()

        return func(*tree_map_only(TreeMask, read, args), **tree_map_only(TreeMask, read, kwargs))

    def _moved(self, device: torch.device) -> "TreeMask":
        """The same on another device, as for the layers of a model that is spread over several."""
        plan = self.plan if isinstance(self.plan, str) else self.plan.to(device)
        return TreeMask(plan, lambda: self.dense().to(device), tuple(self.shape), self.dtype, device)
