"""Layers of a static cache that take a tree: tensors of a fixed length, with room for nodes behind the tokens."""

import torch
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from hf_ddtree.cache.path import KeptPath


class StaticTreeLayer(StaticLayer):
    """A full-attention layer of fixed length.

    A round is `begin`, `update`, then `commit` or `rollback`. The nodes take the slots behind the committed tokens,
    and the keys and values returned are always the whole tensors, so that the mask must hide what lies behind the
    nodes. Nothing here waits for the device, and no shape depends on how many tokens there are. A commit that an
    interrupt cut short is finished by committing the same path again.

    Args:
        max_cache_len (`int`): tokens the layer can hold.
        room (`int`, defaults to 0): further slots, for a tree's nodes. `max_cache_len` of the layer includes them.
    """

    _mark: torch.Tensor | None = None
    _path_rows: tuple[torch.Tensor, torch.Tensor] | None = None

    def __init__(self, max_cache_len: int, room: int = 0):
        super().__init__(max_cache_len=max_cache_len + room)
        self.room = room

    @classmethod
    def adopt(cls, layer: StaticLayer, room: int) -> "StaticTreeLayer":
        """A layer with the same rows and at least `room` slots more; `layer` itself if it is one already."""
        length = layer.max_cache_len
        if isinstance(layer, cls):
            if layer.room >= room and (not layer.is_initialized or writable(layer.keys)):
                return layer
            length, room = length - layer.room, max(room, layer.room)
        new = cls(length, room)
        if layer.is_initialized:
            assert layer.keys is not None and layer.values is not None
            new.cumulative_length = layer.cumulative_length.clone()
            new.lazy_initialization(layer.keys, layer.values)
            new.keys[:, :, :length] = layer.keys[:, :, :length]
            new.values[:, :, :length] = layer.values[:, :, :length]
            # The rows of an offloaded layer are on the host, and its own device is another.
            new.device, new.cumulative_length = layer.device, new.cumulative_length.to(layer.device)
        return new

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes rows behind those in use and returns all slots, as the parent does."""
        self.prefetch()
        return super().update(key_states, value_states, *args, **kwargs)

    def begin(self) -> None:
        """Marks the committed end; the next `update` writes a tree's rows after it."""
        self._mark = self.cumulative_length.clone()

    def commit(self, path: KeptPath) -> None:
        """Keeps the tree rows `path`; the others are written over later."""
        if self._mark is not None and self.is_initialized:
            self._keep_path(path, self._mark.to(self.cumulative_length.device))
        self._end_round()

    def _keep_path(self, path: KeptPath, mark: torch.Tensor) -> None:
        length = len(path)
        assert self.keys is not None and self.values is not None
        if not path.in_place:
            first = mark.to(self.keys.device)
            if self._path_rows is None:
                rows = path.on(first.device) + first
                self._path_rows = self.keys.index_select(-2, rows), self.values.index_select(-2, rows)
            slots = torch.arange(length, device=first.device) + first
            self.keys[:, :, slots] = self._path_rows[0]
            self.values[:, :, slots] = self._path_rows[1]
        # A layer that did not read the tree stays as it was.
        read = self.cumulative_length > mark
        self.cumulative_length.copy_(torch.where(read, mark + length, mark))

    def rollback(self) -> None:
        """Drops all rows since `begin`."""
        if self._mark is not None:
            self.cumulative_length.copy_(self._mark)
        self._end_round()

    def _end_round(self) -> None:
        self._path_rows = self._mark = None


class StaticSlidingTreeLayer(StaticSlidingWindowLayer):
    """A sliding-window layer of fixed length: a round's nodes stay beside its rows until the commit.

    In a round it shows the last `window - 1` rows and the nodes, like a dynamic layer. Outside of one it behaves as
    its parent. A commit that an interrupt cut short is finished by committing the same path again.
    """

    _mark: int | None = None
    _nodes: tuple[torch.Tensor, torch.Tensor] | None = None
    _moved: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def adopt(cls, layer: StaticSlidingWindowLayer, room: int) -> "StaticSlidingTreeLayer":
        """A layer with the same rows, in the same tensors if they may be written; it needs no `room`."""
        new = cls(layer.max_cache_len, layer.max_cache_len)
        new.__dict__.update(layer.__dict__)
        for name in ("keys", "values", "cumulative_length"):
            tensor = getattr(new, name)
            if tensor is not None and not writable(tensor):
                setattr(new, name, tensor.clone())
        return new

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that an `update` of `query_length` tokens returns, and the position of the first."""
        if self._mark is None:
            return super().get_mask_sizes(query_length)
        kept = self._kept(self._mark)
        return kept + query_length, self._mark - kept

    def _kept(self, length: int) -> int:
        return min(length, self.max_cache_len - 1)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As in the parent; within a round returns the window before the nodes and them, and writes nothing."""
        self.prefetch()
        if self._mark is None:
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        end = min(self._mark, self.max_cache_len)
        window = slice(end - self._kept(self._mark), end)
        self._nodes = key_states, value_states
        self.cumulative_length_int = self._mark + key_states.shape[-2]
        keys = torch.cat([self.keys[:, :, window], key_states], dim=-2)
        return keys, torch.cat([self.values[:, :, window], value_states], dim=-2)

    def begin(self) -> None:
        """Starts a round; the next `update` shows a tree's rows behind the window."""
        self._mark = self.cumulative_length_int

    def commit(self, path: KeptPath) -> None:
        """Keeps the tree rows `path`, then the window's last rows."""
        if self._mark is not None and self._nodes is not None:
            assert self.keys is not None and self.values is not None
            if self._moved is None:
                self._moved = (
                    self._with_path(self.keys, self._nodes[0], path),
                    self._with_path(self.values, self._nodes[1], path),
                )
            # In place, for graphs captured on the tensors' addresses.
            self.keys[:, :, : self._moved[0].shape[-2]] = self._moved[0]
            self.values[:, :, : self._moved[1].shape[-2]] = self._moved[1]
            self.cumulative_length_int = self._mark + len(path)
            self.cumulative_length.fill_(self.cumulative_length_int)
        self._end_round()

    def _with_path(self, rows: torch.Tensor, nodes: torch.Tensor, path: KeptPath) -> torch.Tensor:
        kept = nodes.index_select(-2, path.on(nodes.device)).to(rows.device)
        return torch.cat([rows[:, :, : self._mark], kept], dim=-2)[:, :, -self.max_cache_len :]

    def rollback(self) -> None:
        """Drops all rows since `begin`."""
        if self._mark is not None:
            self.cumulative_length_int = self._mark
        self._end_round()

    def _end_round(self) -> None:
        self._moved = self._nodes = self._mark = None


def writable(tensor: torch.Tensor) -> bool:
    """Inference tensors may not be written once inference mode is left."""
    return torch.is_inference_mode_enabled() or not tensor.is_inference()
