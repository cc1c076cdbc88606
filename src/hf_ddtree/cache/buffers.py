"""Room for the keys and values of a layer, filled from the front."""

import torch

from hf_ddtree.cache.path import KeptPath

# Rows a buffer has beyond what it must hold, or an eighth of those where that is more. A copy of all rows once in so
# many tokens is nothing beside the attention, which reads them in each round.
SPARE_ROWS = 256


class Buffers:
    """Keys and values, each of shape `(batch, heads, capacity, head_dim)`.

    Where their shapes are the same they lie in one tensor, so that one operation moves rows of both.

    Args:
        keys, values (`torch.Tensor` of shape `(batch, heads, rows, head_dim)`): the first rows.
        capacity (`int`): rows that there is room for.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, capacity: int):
        shapes = [(*rows.shape[:-2], capacity, rows.shape[-1]) for rows in (keys, values)]
        if shapes[0] == shapes[1] and keys.dtype is values.dtype and keys.device == values.device:
            self._hold((torch.empty((2, *shapes[0]), dtype=keys.dtype, device=keys.device),))
        else:
            pairs = zip((keys, values), shapes, strict=True)
            self._hold(tuple(torch.empty(shape, dtype=rows.dtype, device=rows.device) for rows, shape in pairs))
        self.write(0, keys, values)

    def _hold(self, storages: tuple[torch.Tensor, ...]) -> None:
        self.storages = storages
        self.keys, self.values = storages if len(storages) == 2 else (storages[0][0], storages[0][1])
        self.capacity, self.device = self.keys.shape[-2], self.keys.device
        self._forms = tuple(
            (rows.shape[:-2], rows.shape[-1], rows.stride(), rows.storage_offset())
            for rows in (self.keys, self.values)
        )

    # Pickle keeps no two tensors in one memory, so the views are made anew.
    def __getstate__(self) -> tuple[torch.Tensor, ...]:
        return self.storages

    def __setstate__(self, storages: tuple[torch.Tensor, ...]) -> None:
        self._hold(storages)

    def view(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values from `start` to `end`, in place."""
        # Each layer of a round has several views, and `narrow` takes 1.7 times as long as this. A compiled forward,
        # which sees no storage behind a tensor, needs a tensor that holds all of it.
        (sets, width, strides, first), (other_sets, other_width, other_strides, other_first) = self._forms
        storages, length = self.storages, end - start
        return (
            storages[0].as_strided((*sets, length, width), strides, first + start * strides[-2]),
            storages[-1].as_strided(
                (*other_sets, length, other_width), other_strides, other_first + start * other_strides[-2]
            ),
        )

    def write(self, at: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Fills rows from `at` on."""
        own_keys, own_values = self.view(at, at + keys.shape[-2])
        own_keys.copy_(keys)
        own_values.copy_(values)

    def take(self, start: int, end: int, path: KeptPath) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of those rows between `start` and `end` that are the path's."""
        keys, values = (rows.index_select(-2, path.on(rows.device)) for rows in self.view(start, end))
        return keys, values

    def moves(self, mark: int, path: KeptPath) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The copies, as (to, from), that bring the path's rows, whose first node is at `mark`, to `mark`."""
        return [
            (storage.narrow(-2, mark + to, length), storage.narrow(-2, mark + start, length))
            for to, start, length in path.runs
            for storage in self.storages
        ]

    def on(self, device: torch.device | str) -> "Buffers":
        """The same rows and room on `device`."""
        moved = Buffers.__new__(Buffers)
        moved._hold(tuple(storage.to(device, non_blocking=True) for storage in self.storages))
        return moved

    @property
    def usable(self) -> bool:
        """Inference tensors may not be written once inference mode is left."""
        return not self.keys.is_inference() or torch.is_inference_mode_enabled()
