"""Cache layers that take a tree's keys and values and keep one path of them, without copying the context."""

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_ddtree.cache.buffers import SPARE_ROWS, Buffers
from hf_ddtree.cache.path import KeptPath


class _TreeLayer(DynamicLayer):
    """What full and sliding layers share: buffers behind `keys` and `values`, and a mark to return to.

    `_start` and `_end` bound the rows in use; `keys` and `values` show them when they are asked for. A round is
    `begin`, `update`, then `commit` or `rollback`. A commit that an interrupt cut short is finished by committing the
    same path again.
    """

    _buffers: Buffers | None = None
    _keys: torch.Tensor | None = None
    _values: torch.Tensor | None = None
    _views: tuple[torch.Tensor, torch.Tensor] | None = None
    # Whether the rows in use may be others than those that the views show.
    _behind = False
    _start = 0
    _end = 0
    _mark: int | None = None
    _path_rows: tuple[torch.Tensor, torch.Tensor] | None = None
    # Rows that the round under way may append without further questions, which were asked of all layers at its start:
    # amid a forward each of them costs several times as much.
    _room = 0

    @property
    def keys(self) -> Any:
        """`torch.Tensor` of shape `(batch, heads, rows, head_dim)`, or `None`."""
        self._catch_up()
        return self._keys

    @keys.setter
    def keys(self, rows: torch.Tensor | None) -> None:
        self._catch_up()
        self._keys, self._room = rows, 0

    @property
    def values(self) -> Any:
        """`torch.Tensor` of shape `(batch, heads, rows, head_dim)`, or `None`."""
        self._catch_up()
        return self._values

    @values.setter
    def values(self, rows: torch.Tensor | None) -> None:
        self._catch_up()
        self._values, self._room = rows, 0

    def _take_over(self, layer: DynamicLayer) -> None:
        """Takes the rows of an initialised layer."""
        self._keys, self._values = layer.keys, layer.values
        self.device, self.is_initialized = layer.device, True
        if hasattr(layer, "dtype"):
            self.dtype = layer.dtype

    def _catch_up(self) -> None:
        if self._behind and self._owns_rows():
            self._show()

    def _owns_rows(self) -> bool:
        # Other code of the library may have replaced the tensors (`crop`, `reorder_cache`, `reset`).
        return (
            self._buffers is not None
            and self._views is not None
            and self._keys is self._views[0]
            and self._values is self._views[1]
        )

    def _initialize(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Begins with no rows, in the form of these, if there are none."""
        if not self.is_initialized or self.keys.numel() == 0:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]

    def _rows(self) -> int:
        """How many rows are in use, of an initialised layer."""
        return self._end - self._start if self._owns_rows() else self.keys.shape[-2]

    def _has_room(self, new: int) -> bool:
        """Whether `new` rows can be written where they belong; every layer of every forward asks."""
        buffers = self._buffers
        return (
            buffers is not None
            and self._owns_rows()
            and 0 < self._end <= buffers.capacity - new
            and buffers.device == self.device
            and buffers.usable
        )

    def _reserve(self, new: int, keep: int) -> None:
        """Moves the last `keep` rows to where there is room for `new` behind them."""
        keys, values = (t[..., t.shape[-2] - keep :, :] if keep else t[..., :0, :] for t in (self.keys, self.values))
        buffers = Buffers(keys, values, keep + new + max(SPARE_ROWS, (keep + new) // 8))
        # Until the new buffers are shown, an interrupt leaves the old rows, which are then moved again.
        self._views = None
        self._buffers = buffers
        self._start, self._end = 0, keep
        self._show()

    def _show(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Shows the rows in use, and returns them."""
        assert self._buffers is not None
        views = self._buffers.view(self._start, self._end)
        # One statement without a call, so that no interrupt comes between the rows and the mark of owning them.
        self._keys, self._values = self._views = views
        self._behind = False
        return views

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._buffers is not None
        self._buffers.write(self._end, key_states, value_states)
        self._behind = True
        self._end += key_states.shape[-2]
        return self._show()

    def moves(self, path: KeptPath) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What [`KeptPath.move`] is to copy, as (to, from)."""
        if self._mark is None or self._buffers is None or not self._end > self._mark:
            return []
        return self._buffers.moves(self._mark, path)

    def _keep_path(self, path: KeptPath) -> None:
        """Leaves the rows of `path` at the mark."""
        assert self._mark is not None and self._buffers is not None
        if not (path.in_place or path.moved):
            if self._path_rows is None:
                self._path_rows = self._buffers.take(self._mark, self._end, path)
            self._buffers.write(self._mark, *self._path_rows)
        self._behind = True
        self._end = self._mark + len(path)

    def _end_round(self) -> None:
        self._path_rows = self._mark = None
        self._room = 0

    def offload(self) -> None:
        """Moves the rows to the host, room included."""
        if self._owns_rows():
            self._move("cpu")
        else:
            super().offload()

    def prefetch(self) -> None:
        """Moves offloaded rows back."""
        if not self._owns_rows():
            super().prefetch()
        elif self._buffers is not None and self._buffers.device != self.device:
            self._move(self.device)

    def _move(self, device: torch.device | str) -> None:
        assert self._buffers is not None
        self._behind, self._room = True, 0
        # Both at once: an interrupt leaves the rows where they were.
        self._buffers = self._buffers.on(device)
        self._show()


class GrowingLayer(_TreeLayer):
    """A full-attention layer: rows of the whole context, with spare capacity behind them."""

    @classmethod
    def adopt(cls, layer: DynamicLayer) -> "GrowingLayer":
        """A layer with the same rows; `layer` is not changed."""
        new = cls()
        if layer.is_initialized and layer.keys is not None and layer.keys.numel():
            new._take_over(layer)
        return new

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends rows and returns all of them, as the parent does, in place."""
        new = key_states.shape[-2]
        if new <= self._room:
            self._room -= new
            return self._append(key_states, value_states)
        if self._mark is None and torch.is_grad_enabled() and self._differentiable(key_states, value_states):
            # Rows written in place would change what an earlier forward saved for its backward.
            self.prefetch()
            return super().update(key_states, value_states, *args, **kwargs)
        if not self._has_room(new):
            self.prefetch()
            self._initialize(key_states, value_states)
            if not self._has_room(new):
                self._reserve(new, self._rows())
        return self._append(key_states, value_states)

    def _differentiable(self, *new: torch.Tensor) -> bool:
        """Whether a gradient reaches the `new` rows, or those there are."""
        return any(rows is not None and rows.requires_grad for rows in (*new, self._keys, self._values))

    def get_seq_length(self) -> int:
        """Rows in use, as in the parent."""
        return self._end if self._owns_rows() else super().get_seq_length()

    def begin(self) -> None:
        """Marks the committed end; the next `update` appends a tree's rows after it."""
        self._mark = self.get_seq_length()
        buffers = self._buffers
        self._room = buffers.capacity - self._end if buffers is not None and self._has_room(1) else 0

    def commit(self, path: KeptPath) -> None:
        """Keeps the tree rows `path` and drops the others."""
        if self._mark is not None and self.get_seq_length() > self._mark:
            self._keep_path(path)
        self._end_round()

    def rollback(self) -> None:
        """Drops all rows since `begin`."""
        if self._mark is not None and self._owns_rows():
            self._behind = True
            self._end = self._mark
        self._end_round()

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last `abs(tokens_to_remove)` rows; a negative number, as in the parent."""
        if tokens_to_remove < 0 and self._owns_rows():
            self._behind = True
            self._end = max(0, self._end + tokens_to_remove)
        else:
            super().crop(tokens_to_remove)


class GrowingSlidingLayer(_TreeLayer, DynamicSlidingWindowLayer):
    """A sliding-window layer: a round sees the last `window - 1` rows and the tree; only those are kept.

    Outside a round it behaves as its parent, so prefills and other generation modes are unchanged.
    """

    _in_round = False
    _committed_length = 0

    @classmethod
    def adopt(cls, layer: DynamicSlidingWindowLayer) -> "GrowingSlidingLayer":
        """A layer with the same rows; `layer` is not changed."""
        new = cls(sliding_window=layer.sliding_window)
        if layer.is_initialized and layer.keys is not None:
            new._take_over(layer)
            new.cumulative_length = layer.cumulative_length
            new._sliding_window_tensor = layer._sliding_window_tensor
        return new

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends rows and returns the window before them and them, as the parent does."""
        if not self._in_round:
            self.prefetch()
            return DynamicSlidingWindowLayer.update(self, key_states, value_states, *args, **kwargs)
        if not self._has_room(key_states.shape[-2]):
            self.prefetch()
            self._initialize(key_states, value_states)
            if not self._has_room(key_states.shape[-2]):
                self._reserve(key_states.shape[-2], min(self._rows(), self.sliding_window - 1))
        kept = min(self._rows(), self.sliding_window - 1)
        self._start, self._mark = self._end - kept, self._end
        self.cumulative_length += key_states.shape[-2]
        return self._append(key_states, value_states)

    def begin(self) -> None:
        """Starts a round; the next `update` appends a tree's rows and keeps the window before them."""
        self._in_round, self._committed_length = True, self.cumulative_length

    def commit(self, path: KeptPath) -> None:
        """Keeps the tree rows `path`, then the window's last rows."""
        if self._mark is not None:
            self._keep_path(path)
            self.cumulative_length = self._committed_length + len(path)
            self._start = max(self._start, self._end - (self.sliding_window - 1))
        self._in_round = False
        self._end_round()

    def rollback(self) -> None:
        """Drops all rows since `begin`."""
        if self._mark is not None:
            self._behind = True
            self._end, self.cumulative_length = self._mark, self._committed_length
        self._in_round = False
        self._end_round()
