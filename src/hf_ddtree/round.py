"""What one round shares across rooms: the tree being verified, and the collector of tapped hidden states.

Both travel in context variables, so that two threads generating with one model never see each other's round.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import nn

#: Packed masks a round holds at once: more than there are kinds of layers in a model.
KEPT_MASKS = 4


def ancestors_or_self(subtree_ends: torch.Tensor) -> torch.Tensor:
    """`(nodes, nodes)` booleans: whether the row's node descends from the column's, or is it.

    In DFS preorder a subtree is an interval, so that is `column <= row < subtree_ends[column]`.
    """
    nodes = torch.arange(len(subtree_ends), device=subtree_ends.device)
    return (nodes[None] <= nodes[:, None]) & (nodes[:, None] < subtree_ends[None])


class MixerKind(Enum):
    """How a layer passes information from token to token. One layer may do both."""

    ATTENTION = "attention"
    RECURRENT = "recurrent"


class TreeRound:
    """The tree whose forward is running, as tensors on the target's device.

    Args:
        depths (`torch.LongTensor` of shape `(nodes,)`): depth of each node, the root's is 0.
        subtree_ends (`torch.LongTensor` of shape `(nodes,)`): one past the last node of each node's subtree.
        attention_route (`str`, defaults to `"auto"`): `attention_route` of the [`DDTreeConfig`].
        deepest (`int`, *optional*): no node is deeper, where that is known without a look at `depths`.
        kept_mask (`KeptMask`, *optional*): the attention's room for dense masks, from one round to the next.
    """

    def __init__(
        self,
        depths: torch.Tensor,
        subtree_ends: torch.Tensor,
        attention_route: str = "auto",
        deepest: int | None = None,
        kept_mask: Any = None,
    ):
        self.depths = depths
        self.kept_mask = kept_mask
        self._deepest = deepest
        self.subtree_ends = subtree_ends
        self.attention_route = attention_route
        #: `(layer_idx, kind)` of the layers that have read this tree, `kind` as in [`MixerKind`].
        self.mixed: set[tuple[int | None, MixerKind]] = set()
        #: Index of the layer whose keys and values a [`DDTreeCache`] took last.
        self.updated_layer: int | None = None
        #: By which route layers attended, with the reason where it was not the kernel on a device that has one.
        self.routes: Counter[str] = Counter()
        self._packed: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._taps: dict[int, torch.Tensor] = {}
        self._made: dict[Any, Any] = {}

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make()` returned the first time in this round."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    @property
    def deepest(self) -> int:
        """`int`: no node is deeper."""
        if self._deepest is None:
            self._deepest = int(self.depths.max())
        return self._deepest

    @cached_property
    def visible(self) -> torch.Tensor:
        """See [`ancestors_or_self`]; made once a round."""
        return ancestors_or_self(self.subtree_ends)

    @cached_property
    def parents(self) -> torch.Tensor:
        """`torch.LongTensor` of shape `(nodes,)`: the parent of each node; the root's is the root."""
        nodes = torch.arange(len(self.depths), device=self.depths.device)
        # In preorder the nearest ancestor is the last of them.
        return torch.where(self.visible.tril(-1), nodes, 0).amax(dim=-1)

    def taps(self, width: int) -> torch.Tensor:
        """The last `width` tokens that end in each node, oldest first, made once a round for each width.

        Args:
            width (`int`): how many, the node itself included.

        Returns:
            `torch.LongTensor` of shape `(nodes, width)`: rows of a tensor of the prefix's last `width` tokens, then
            the nodes.
        """
        if width not in self._taps:
            node, columns = torch.arange(len(self.depths), device=self.depths.device), []
            for back in range(width):
                columns.append(width + torch.where(back <= self.depths, node, self.depths - back))
                node = self.parents[node]
            self._taps[width] = torch.stack(columns[::-1], dim=-1)
        return self._taps[width]

    def packed_mask(self, mask: torch.Tensor, groups: int) -> torch.Tensor:
        """`mask` repeated for each query head of a key-value group, made once a round for each layer type."""
        key = (id(mask), groups)
        if key not in self._packed:
            # Layers on another device bring a copy of the mask each, which is used once.
            while len(self._packed) >= KEPT_MASKS:
                del self._packed[next(iter(self._packed))]
            kept = None if self.kept_mask is None else self.kept_mask.repeated(mask, groups)
            self._packed[key] = mask, mask.repeat(1, 1, groups, 1) if kept is None else kept
        return self._packed[key][1]


CURRENT_ROUND: ContextVar[TreeRound | None] = ContextVar("ddtree_round", default=None)


class TapCollector:
    """Gathers the outputs of the tapped decoder layers while [`TapCollector.collect`] is open, and at no other time.

    Args:
        layers (`nn.ModuleList`): the target's decoder layers.
        layer_ids (`Sequence[int]`): the tapped ones, in the drafter's order.
        stream (`int`, *optional*): the one to tap of layers that carry several streams of states, stacked in front.
    """

    def __init__(self, layers: nn.ModuleList, layer_ids: Sequence[int], stream: int | None = None):
        self.layers, self.layer_ids, self.stream = layers, list(layer_ids), stream
        self._states: dict[int, list[torch.Tensor]] = {}
        self._handles: list[Any] = []

    @contextmanager
    def hooked(self) -> Iterator["TapCollector"]:
        """Keeps the hooks in place, and takes them out whatever happens."""
        try:
            for layer_id in dict.fromkeys(self.layer_ids):
                self._handles.append(self.layers[layer_id].register_forward_hook(self._hook(layer_id)))
            yield self
        finally:
            while self._handles:
                self._handles.pop().remove()

    def _hook(self, layer_id: int) -> Any:
        def write(_module: nn.Module, _inputs: Any, output: Any) -> None:
            # Another generate on the same model, or guidance's own forward, runs this hook too.
            if _COLLECTING.get() is self:
                state = output[0] if isinstance(output, tuple) else output
                state = state if self.stream is None else state[self.stream]
                self._states.setdefault(layer_id, []).append(state)

        write.collects = True  # type: ignore[attr-defined]
        return write

    @staticmethod
    def is_own(hook: Any) -> bool:
        """Whether a hook of a layer is one of a collector's."""
        return getattr(hook, "collects", False)

    def put(self, states: dict[int, torch.Tensor]) -> None:
        """Takes the states of layers from a forward that returned them, by the layer's number."""
        for layer_id, state in states.items():
            self._states.setdefault(layer_id, []).append(state)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Collects from the forwards inside; those of a chunked prefill follow one another."""
        self._states.clear()
        token = _COLLECTING.set(self)
        try:
            yield
        finally:
            _COLLECTING.reset(token)

    def taps(self, path: Any = None) -> torch.Tensor:
        """The collected states, taps side by side, of shape `(batch, tokens, taps * hidden_size)`, in a new tensor.

        Args:
            path (`KeptPath`, *optional*): the tokens to give, in place of all.

        Raises:
            RuntimeError: if the forward ran without its layers' hooks, as a compiled one may.
        """
        if missing := [layer_id for layer_id in self.layer_ids if layer_id not in self._states]:
            raise RuntimeError(
                f"The target's forward did not call the hooks of layers {missing}, which the drafter reads; a "
                "compiled forward skips them: generate with the uncompiled model."
            )
        chunks = [
            torch.cat(self._states[i], dim=1) if len(self._states[i]) > 1 else self._states[i][0]
            for i in self.layer_ids
        ]
        device = chunks[0].device
        if path is not None and len(path) < chunks[0].shape[1]:
            chunks = [chunk.index_select(1, path.on(chunk.device)) for chunk in chunks]
        return torch.cat([chunk.to(device) for chunk in chunks], dim=-1)


_COLLECTING: ContextVar[TapCollector | None] = ContextVar("ddtree_taps", default=None)
