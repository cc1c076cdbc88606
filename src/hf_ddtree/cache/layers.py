"""Cache layers that take a tree's keys and values and keep one path of them, without copying the context."""

import copy

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_ddtree.cache.path import KeptPath

# Rows a buffer starts with beyond what it must hold; it then grows by half, so that copies are rare.
SPARE_ROWS = 256


class _Buffer:
    """Room for rows of shape `(batch, heads, capacity, head_dim)`, filled from the front."""

    def __init__(self, rows: torch.Tensor, capacity: int):
        shape = (*rows.shape[:-2], capacity, rows.shape[-1])
        self.storage = torch.empty(shape, dtype=rows.dtype, device=rows.device)
        self.storage[..., : rows.shape[-2], :] = rows

    # `narrow`, for an index with slices takes three times as long, and each layer of a round has several.
    def view(self, start: int, end: int) -> torch.Tensor:
        return self.storage.narrow(-2, start, end - start)

    def write(self, at: int, rows: torch.Tensor) -> None:
        self.storage.narrow(-2, at, rows.shape[-2]).copy_(rows)

    def take(self, start: int, end: int, path: KeptPath) -> torch.Tensor:
        """Copies of those rows between `start` and `end` that are the path's."""
        return self.view(start, end).index_select(-2, path.on(self.storage.device))

    def on(self, device: torch.device | str) -> "_Buffer":
        """The same rows and room on `device`."""
        moved = copy.copy(self)
        moved.storage = self.storage.to(device, non_blocking=True)
        return moved

    @property
    def capacity(self) -> int:
        return self.storage.shape[-2]

    @property
    def usable(self) -> bool:
        """Inference tensors may not be written once inference mode is left."""
        return not self.storage.is_inference() or torch.is_inference_mode_enabled()


class _TreeLayer(DynamicLayer):
    """What full and sliding layers share: a buffer behind `keys` and `values`, and a mark to return to.

    `_start` and `_end` bound the rows in use. A round is `begin`, `update`, then `commit` or `rollback`. A commit
    that an interrupt cut short is finished by committing the same path again.
    """

    _buffers: tuple[_Buffer, _Buffer] | None = None
    _views: tuple[torch.Tensor, torch.Tensor] | None = None
    _shown: tuple[int, int] | None = None
    _start = 0
    _end = 0
    _mark: int | None = None
    _path_rows: tuple[torch.Tensor, torch.Tensor] | None = None

    def _owns_rows(self) -> bool:
        # Other code of the library may have replaced the tensors (`crop`, `reorder_cache`, `reset`).
        return (
            self._buffers is not None
            and self._views is not None
            and self.keys is self._views[0]
            and self.values is self._views[1]
            and self._buffers[0].usable
        )

    def _reserve(self, new: int, keep: int) -> None:
        """Makes room for `new` rows after the last `keep`, moving them only when the end is reached."""
        if self._owns_rows() and self._buffers is not None and self._end + new <= self._buffers[0].capacity:
            return
        keys, values = (t[..., t.shape[-2] - keep :, :] if keep else t[..., :0, :] for t in (self.keys, self.values))
        capacity = keep + new + max(SPARE_ROWS, (keep + new) // 2)
        buffers = _Buffer(keys, capacity), _Buffer(values, capacity)
        # Until the new buffers are shown, an interrupt leaves the old rows, which are then moved again.
        self._views = self._shown = None
        self._buffers = buffers
        self._start, self._end = 0, keep
        self._show()

    def _show(self) -> None:
        rows = self._start, self._end
        if self._shown == rows and self._owns_rows():
            return
        assert self._buffers is not None
        keys, values = self._buffers
        views = keys.view(*rows), values.view(*rows)
        # An interrupt before the end leaves it open which rows are shown.
        self._shown = None
        # One statement without a call, so that no interrupt comes between the rows and the mark of owning them.
        self.keys, self.values = self._views = views
        self._shown = rows

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        assert self._buffers is not None
        keys, values = self._buffers
        keys.write(self._end, key_states)
        values.write(self._end, value_states)
        self._end += key_states.shape[-2]
        self._show()

    def _keep_path(self, path: KeptPath) -> None:
        """Moves the rows of `path` to the mark."""
        assert self._mark is not None and self._buffers is not None
        if not path.in_place:
            keys, values = self._buffers
            if self._path_rows is None:
                self._path_rows = keys.take(self._mark, self._end, path), values.take(self._mark, self._end, path)
            keys.write(self._mark, self._path_rows[0])
            values.write(self._mark, self._path_rows[1])
        self._end = self._mark + len(path)

    def _end_round(self) -> None:
        self._path_rows = self._mark = None

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
        elif self._buffers is not None and self._buffers[0].storage.device != self.device:
            self._move(self.device)
        elif self._shown is None:
            # An interrupt came between the move and what is shown.
            self._show()

    def _move(self, device: torch.device | str) -> None:
        assert self._buffers is not None
        self._shown = None
        # Both at once: an interrupt leaves the rows where they were.
        self._buffers = self._buffers[0].on(device), self._buffers[1].on(device)
        self._show()


class GrowingLayer(_TreeLayer):
    """A full-attention layer: rows of the whole context, with spare capacity behind them."""

    @classmethod
    def adopt(cls, layer: DynamicLayer) -> "GrowingLayer":
        """A layer with the same rows; `layer` is not changed."""
        new = cls()
        if layer.is_initialized and layer.keys is not None and layer.keys.numel():
            new.lazy_initialization(layer.keys, layer.values)
            new.keys, new.values, new.device = layer.keys, layer.values, layer.device
        return new

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends rows and returns all of them, as the parent does, in place."""
        self.prefetch()
        if self._mark is None and torch.is_grad_enabled() and key_states.requires_grad:
            # Rows written in place would change what an earlier forward saved for its backward.
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized or self.keys.numel() == 0:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
        self._reserve(key_states.shape[-2], self.keys.shape[-2])
        self._append(key_states, value_states)
        return self.keys, self.values

    def begin(self) -> None:
        """Marks the committed end; the next `update` appends a tree's rows after it."""
        self._mark = self.get_seq_length()

    def commit(self, path: KeptPath) -> None:
        """Keeps the tree rows `path` and drops the others."""
        if self._mark is not None and self.get_seq_length() > self._mark:
            self._keep_path(path)
            self._show()
        self._end_round()

    def rollback(self) -> None:
        """Drops all rows since `begin`."""
        # The rows in use, not those shown: an interrupt may have come between the two.
        if self._mark is not None and self._owns_rows():
            self._end = self._mark
            self._show()
        self._end_round()

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last `abs(tokens_to_remove)` rows; a negative number, as in the parent."""
        if tokens_to_remove < 0 and self._owns_rows():
            self._end = max(0, self._end + tokens_to_remove)
            self._show()
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
            new.lazy_initialization(layer.keys, layer.values)
            new.keys, new.values, new.device = layer.keys, layer.values, layer.device
            new.cumulative_length = layer.cumulative_length
        return new

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends rows and returns the window before them and them, as the parent does."""
        self.prefetch()
        if not self._in_round:
            return DynamicSlidingWindowLayer.update(self, key_states, value_states, *args, **kwargs)
        if not self.is_initialized or self.keys.numel() == 0:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
        kept = min(self.keys.shape[-2], self.sliding_window - 1)
        self._reserve(key_states.shape[-2], kept)
        self._start, self._mark = self._end - kept, self._end
        self.cumulative_length += key_states.shape[-2]
        self._append(key_states, value_states)
        return self.keys, self.values

    def begin(self) -> None:
        """Starts a round; the next `update` appends a tree's rows and keeps the window before them."""
        self._in_round, self._committed_length = True, self.cumulative_length

    def commit(self, path: KeptPath) -> None:
        """Keeps the tree rows `path`, then the window's last rows."""
        if self._mark is not None:
            self._keep_path(path)
            self.cumulative_length = self._committed_length + len(path)
            self._start = max(self._start, self._end - (self.sliding_window - 1))
            self._show()
        self._in_round = False
        self._end_round()

    def rollback(self) -> None:
        """Drops all rows since `begin`."""
        if self._mark is not None:
            self._end, self.cumulative_length = self._mark, self._committed_length
            self._show()
        self._in_round = False
        self._end_round()
