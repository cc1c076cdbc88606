"""Which tile sizes a problem takes: data, and a choice that depends on sizes alone."""

import pytest

from ddtree_attention import configs


def test_every_list_serves_from_one_row_on() -> None:
    for sizes in configs.table().values():
        for entries in sizes.values():
            rows = [fewest for fewest, _ in entries]
            assert rows[0] == 0 and rows == sorted(set(rows))
            # Tiles of fewer rows or keys than 16 do not fill a tensor core's instruction.
            assert all(c.block_m >= 16 and c.block_n >= 16 and c.warps in (4, 8) for _, c in entries)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(8, 8), (64, 64), (80, 80), (96, 128), (192, 128), (256, 256)])
def test_choice(architecture: str, key_dim: int, value_dim: int) -> None:
    small, large = (configs.choose(architecture, key_dim, value_dim, rows) for rows in (1, 100_000))
    assert small.block_m <= large.block_m
    assert configs.choose(architecture, key_dim, value_dim, 1) is small


@pytest.mark.parametrize(
    ("capability", "gcn_name", "expected"),
    [
        ((7, 5), "", None), ((8, 0), "", "sm_80"), ((8, 6), "", "sm_89"), ((8, 9), "", "sm_89"), ((9, 0), "", "sm_90"),
        ((10, 0), "", "sm_100"), ((12, 0), "", "sm_89"), (None, "gfx942:sramecc+:xnack-", "gfx942"),
        (None, "gfx950", "gfx942"), (None, "gfx1100", None), (None, "", None),
    ],
)  # fmt: skip
def test_architectures(capability: tuple[int, int] | None, gcn_name: str, expected: str | None) -> None:
    assert configs.table_of(capability, gcn_name) == expected


def test_splits() -> None:
    """Until the device is full, never into pieces of fewer than four tiles, always a power of two."""
    assert configs.splits_for(programs=8, slots=32_768, block_n=64, processors=132) == 32
    assert configs.splits_for(programs=40, slots=32_768, block_n=64, processors=132) == 4
    assert configs.splits_for(programs=300, slots=32_768, block_n=64, processors=132) == 1
    assert configs.splits_for(programs=8, slots=600, block_n=64, processors=132) == 2
    assert configs.splits_for(programs=8, slots=10, block_n=64, processors=132) == 1
    assert configs.splits_for(programs=1, slots=10**6, block_n=64, processors=0) == 1
