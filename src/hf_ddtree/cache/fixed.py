"""The sliding layer of a static cache whose rounds have one shape, whatever it holds: for compiled forwards."""

import torch
from transformers.cache_utils import StaticSlidingWindowLayer

from hf_ddtree.cache.path import KeptPath
from hf_ddtree.cache.static import StaticSlidingTreeLayer, writable


class FixedSlidingTreeLayer(StaticSlidingTreeLayer):
    """A sliding-window layer that always shows all its slots in a round, and takes the nodes behind the rows in use.

    A forward that was compiled for one round serves all: nothing that it reads is a number of Python, and the tensors
    stay where they are. The mask must hide what lies behind the nodes. Outside of a round it is its parent.

    Args:
        max_cache_len, sliding_window (`int`): as in the parent.
        nodes (`int`): nodes of a tree at most, the root included.
    """

    keys: torch.Tensor | None
    values: torch.Tensor | None
    _in_round = False
    _appended = 0
    _storage: tuple[torch.Tensor, torch.Tensor] | None = None
    _first: torch.Tensor
    _window: tuple[int, torch.Tensor, torch.Tensor] | None = None

    def __init__(self, max_cache_len: int, sliding_window: int, nodes: int):
        super().__init__(max_cache_len, sliding_window)
        self.nodes = nodes

    @classmethod
    def adopt(cls, layer: StaticSlidingWindowLayer, room: int) -> "FixedSlidingTreeLayer":
        """A layer with the same rows, for trees of `room` nodes beside the root; `layer` itself if it is one."""
        if isinstance(layer, cls) and layer.nodes > room and (layer.keys is None or writable(layer.keys)):
            return layer
        new = cls(layer.max_cache_len, layer.max_cache_len, max(room + 1, getattr(layer, "nodes", 0)))
        for name in ("_is_croppable", "cumulative_length_int", "is_initialized", "device", "dtype"):
            if hasattr(layer, name):
                setattr(new, name, getattr(layer, name))
        new.cumulative_length = layer.cumulative_length.clone()
        if layer.is_initialized:
            assert layer.keys is not None and layer.values is not None
            new.keys, new.values = layer.keys, layer.values
            new._make_room()
        return new

    def _make_room(self) -> None:
        """Puts the rows into tensors with room behind them, of which `keys` and `values` show the window."""
        assert self.keys is not None and self.values is not None
        storage = []
        for rows in (self.keys, self.values):
            roomy = rows.new_zeros((*rows.shape[:2], self.max_cache_len + self.nodes, rows.shape[-1]))
            roomy[:, :, : self.max_cache_len] = rows
            storage.append(roomy)
        self._storage = storage[0], storage[1]
        self._first = torch.zeros((), dtype=torch.long, device=self.keys.device)
        self.keys, self.values = (roomy[:, :, : self.max_cache_len] for roomy in storage)
        for tensor in (*storage, self._first, self.keys, self.values, self.cumulative_length):
            torch._dynamo.mark_static_address(tensor)

    def _has_room(self) -> bool:
        # Other code of the library or of ours may have replaced the tensors.
        return self._storage is not None and self.keys is not None and self.keys._base is self._storage[0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that an `update` returns, all slots, and the position of the first."""
        if not self._in_round:
            return StaticSlidingWindowLayer.get_mask_sizes(self, query_length)
        return self.max_cache_len + self.nodes, max(self.cumulative_length_int - self.max_cache_len, 0)

    def get_seq_length(self) -> int:
        """Tokens read, with those of a round that is open."""
        return self.cumulative_length_int + self._appended

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As in the parent; within a round writes the nodes behind the rows in use and returns all slots."""
        if not self._in_round:
            return StaticSlidingWindowLayer.update(self, key_states, value_states, *args, **kwargs)
        if self._storage is None:
            self.lazy_initialization(key_states, value_states)
            self._make_room()
        assert self._storage is not None
        keys, values = self._storage
        slots = torch.arange(key_states.shape[-2], device=keys.device) + self._first
        keys[:, :, slots] = key_states
        values[:, :, slots] = value_states
        self._appended = key_states.shape[-2]
        return keys, values

    def begin(self) -> None:
        """Starts a round; the next `update` writes a tree's rows behind those in use."""
        if self.is_initialized:
            if not self._has_room():
                self._make_room()
            self._first.fill_(self._rows())
        self._in_round, self._appended = True, 0

    def _rows(self) -> int:
        return min(self.cumulative_length_int, self.max_cache_len)

    def commit(self, path: KeptPath) -> None:
        """Keeps the tree rows `path`, then the window's last rows."""
        if self._in_round and self._appended:
            if self._window is None:
                self._window = self._committed(path)
            start, keys, values = self._window
            assert self.keys is not None and self.values is not None
            self.keys[:, :, start : start + keys.shape[-2]] = keys
            self.values[:, :, start : start + values.shape[-2]] = values
            length = self.cumulative_length_int + len(path)
            self.cumulative_length.fill_(length)
            # In one step: an interrupt between two would count the path twice.
            self.__dict__.update(cumulative_length_int=length, _in_round=False, _appended=0)
        self._end_round()

    def _committed(self, path: KeptPath) -> tuple[int, torch.Tensor, torch.Tensor]:
        """The first slot that changes, and the keys and values from there on."""
        assert self._storage is not None
        first, window, kept = self._rows(), self.max_cache_len, len(path)
        nodes = path.on(self._first.device) + first
        # What stays of the rows before the nodes moves only where the window is full.
        before = torch.arange(min(max(first + kept - window, 0), first), first, device=nodes.device)
        start = 0 if first + kept > window else first
        rows = (torch.cat([before, nodes]) if start == 0 else nodes)[-window:]
        keys, values = self._storage
        return start, keys.index_select(-2, rows), values.index_select(-2, rows)

    def rollback(self) -> None:
        """Drops all rows since `begin`."""
        self._end_round()

    def _end_round(self) -> None:
        self._in_round, self._appended, self._window = False, 0, None
