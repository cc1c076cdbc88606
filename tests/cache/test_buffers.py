"""Room for keys and values: in one tensor where their shapes agree, and moved alike where they do not."""

import pytest
import torch

from cache.rows import Rows
from hf_ddtree.cache.buffers import Buffers
from hf_ddtree.cache.path import KeptPath

PATHS = [[0, 2, 5], [0, 4, 5, 6], [0, 1, 6], [5], [0, 1], [0, 3, 4, 8, 9]]


def rows_of(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = Rows()(14)
    if kind == "narrow values":
        return keys, values[..., :2]
    return (keys, values.float()) if kind == "another dtype" else (keys, values)


@pytest.mark.parametrize(("kind", "tensors"), [("alike", 1), ("narrow values", 2), ("another dtype", 2)])
@pytest.mark.parametrize("path", PATHS)
def test_moves_bring_a_path_to_the_mark(kind: str, tensors: int, path: list[int]) -> None:
    keys, values = rows_of(kind)
    buffers, kept, mark = Buffers(keys, values, capacity=20), KeptPath(torch.tensor(path)), 4
    assert len(buffers.storages) == tensors
    for shown, rows in zip(buffers.view(0, 14), (keys, values), strict=True):
        assert torch.equal(shown, rows)
        assert shown.dtype == rows.dtype
    if kept.runs:
        # Twice, as after an interrupt.
        for target, source in buffers.moves(mark, kept) * 2:
            target.copy_(source)
    else:
        assert buffers.moves(mark, kept) == []
        buffers.write(mark, *buffers.take(mark, 14, kept))
    for shown, rows in zip(buffers.view(0, mark + len(path)), (keys, values), strict=True):
        assert torch.equal(shown, torch.cat([rows[:, :, :mark], rows[:, :, mark:][:, :, path]], dim=-2))


def test_one_operation_moves_the_rows_of_both() -> None:
    buffers = Buffers(*Rows()(14), capacity=20)
    assert len(buffers.moves(4, KeptPath(torch.tensor([0, 4, 5, 6])))) == 1
