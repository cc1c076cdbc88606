"""The kept path says what all layers of a cache ask of it, once."""

import pytest
import torch

from hf_ddtree.cache.path import KeptPath


@pytest.mark.parametrize(
    ("nodes", "in_place"), [([], True), ([0], True), ([0, 1, 2], True), ([0, 2], False), ([1], False)]
)
def test_a_path_of_the_first_rows_is_where_it_belongs(nodes: list[int], in_place: bool) -> None:
    for path in (KeptPath(nodes), KeptPath(torch.tensor(nodes, dtype=torch.long))):
        assert (path.in_place, len(path)) == (in_place, len(nodes))
        assert path.nodes.dtype == torch.long and path.nodes.tolist() == nodes


@pytest.mark.parametrize(
    ("nodes", "runs"),
    [
        ([], []),
        ([0, 1, 2], []),
        ([0, 2], [(1, 2, 1)]),
        ([0, 4, 5, 6], [(1, 4, 3)]),
        ([0, 1, 5, 9, 10], [(2, 5, 1), (3, 9, 2)]),
        ([3], [(0, 3, 1)]),
        # Node 2 stands where node 5 belongs.
        ([0, 2, 5], []),
        ([0, 1, 4, 5, 6], []),
    ],
)
def test_rows_that_move_are_told_in_runs(nodes: list[int], runs: list[tuple[int, int, int]]) -> None:
    assert KeptPath(torch.tensor(nodes, dtype=torch.long)).runs == runs


def test_it_is_copied_to_a_device_once() -> None:
    nodes = torch.tensor([0, 3])
    path, elsewhere = KeptPath(nodes), torch.device("meta")
    assert path.on(nodes.device) is nodes
    assert path.on(elsewhere).device == elsewhere
    assert path.on(elsewhere) is path.on(elsewhere)


def test_rows_are_moved_once() -> None:
    """A commit that an interrupt cut short goes on with what has been moved."""
    rows, path = torch.arange(6.0), KeptPath([0, 3, 4])

    class Layer:
        def moves(self, path: KeptPath) -> list[tuple[torch.Tensor, torch.Tensor]]:
            return [(rows[to : to + length], rows[start : start + length]) for to, start, length in path.runs]

    path.move([Layer()])
    assert path.moved and rows.tolist() == [0, 3, 4, 3, 4, 5]
    rows[3:] = 9
    path.move([Layer()])
    assert rows.tolist() == [0, 3, 4, 9, 9, 9]
