"""The kernel against attention written out in float64: every feature, odd sizes, unreadable memory full of NaN."""

import dataclasses

import pytest
import torch

from problems import DEVICE, DTYPES, EXACT, LARGE, MIDDLE, SMALL, TOLERANCE, Problem, Shape, problem

pytestmark = pytest.mark.kernels_ci


def error(case: Problem, shape: Shape) -> float:
    output = case.run(shape.config, shape.splits)
    expected = case.expected()
    return float(((output.double().cpu() - expected).abs() / (1 + expected.abs())).max())


SHAPES = [
    # One node, no prefix; every tile partial; tile sizes hit and just missed.
    Shape((1,), (0,)),
    Shape((1,), (1,), splits=2),
    Shape((2,), (0,), splits=4),
    Shape((7,), (3,)),
    Shape((16,), (16,), group=1),
    Shape((17,), (15,), group=1, splits=2),
    Shape((63,), (64,), group=1, config=MIDDLE),
    Shape((65,), (127,), group=4, config=MIDDLE, splits=4),
    # Group sizes that do not divide a tile, so that a node's heads lie in two programs.
    Shape((33,), (5,), group=3, key_value_heads=2),
    Shape((21,), (40,), group=5, splits=2),
    Shape((10,), (9,), group=7),
    Shape((5,), (33,), group=20),
    # Left padding, up to the whole prefix.
    Shape((13,), (50,), (17,), splits=2),
    Shape((13,), (50,), (50,)),
    Shape((13,), (48,), (47,), splits=8),
    # Windows shorter than a path, than a tile, and longer than everything; before and after padding.
    Shape((40,), (30,), window=1),
    Shape((40,), (30,), window=3, splits=2),
    Shape((40,), (60,), window=17, config=MIDDLE),
    Shape((40,), (99,), (20,), window=34, splits=4),
    Shape((40,), (99,), (80,), window=34),
    Shape((40,), (30,), window=500, splits=2),
    # Softcap and sinks, in one program and at the merge.
    Shape((19,), (35,), softcap=0.7),
    Shape((19,), (35,), softcap=2.0, splits=4, window=9),
    Shape((19,), (35,), sinks=True, group=3),
    Shape((19,), (35,), sinks=True, splits=4, key_value_heads=2),
    Shape((19,), (0,), sinks=True, softcap=1.5, window=4, splits=2),
    # Head dimensions that are no power of two, and values of another width.
    Shape((9,), (20,), key_dim=8),
    Shape((9,), (20,), key_dim=80, splits=2),
    Shape((9,), (20,), key_dim=96, config=MIDDLE),
    Shape((9,), (20,), key_dim=128),
    Shape((9,), (20,), key_dim=256, splits=2),
    Shape((9,), (20,), key_dim=192, value_dim=128, splits=2),
    Shape((9,), (20,), key_dim=24, value_dim=72),
    # Chains, bushes, and a depth that takes more than one tile of ancestors.
    Shape((40,), (10,), max_depth=1),
    Shape((70,), (10,), max_depth=60, group=1),
    Shape((70,), (90,), max_depth=60, group=1, window=25, splits=2),
    # A ragged batch: prefixes, padding and trees of their own.
    Shape((12, 1, 7), (20, 33, 0), (3, 0, 0), splits=2),
    Shape((5, 40), (64, 7), (64, 2), key_value_heads=2, group=3, sinks=True, splits=4),
    Shape((31, 30, 29), (17, 16, 15), (0, 5, 15), window=12, softcap=3.0),
    # Sizes of real rounds.
    Shape((257,), (300,), group=4, key_dim=32, config=LARGE, splits=2),
    Shape((513,), (70,), group=2, config=LARGE),
    Shape((1024,), (33,), group=1, config=LARGE),
    Shape((60,), (2048,), group=2, config=LARGE, splits=8),
    Shape((100,), (2047,), (1,), group=1, window=1023, config=MIDDLE, splits=4),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64(shape: Shape) -> None:
    assert error(problem(shape), shape) < TOLERANCE[EXACT]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("splits", [1, 4])
def test_dtypes(dtype: torch.dtype, splits: int) -> None:
    shape = Shape(
        (45,), (130,), (7,), key_value_heads=2, group=3, key_dim=64, config=MIDDLE, splits=splits, sinks=True
    )
    assert error(problem(shape, dtype), shape) < TOLERANCE[dtype]


def test_rows_without_a_node_are_zero() -> None:
    """Those of a short tree in a batch, whichever way the row is stored."""
    shape = Shape((3, 20), (9, 9), sinks=True)
    for splits in (1, 2):
        output = problem(shape).run(SMALL, splits)
        assert not output[0, 3:].any() and not output.isnan().any()
        assert output[0, :3].any() and output[1].any(-1).all()


def test_the_poison_is_seen_where_it_may_be_read() -> None:
    """The control of every test above: a NaN in a readable slot, or in an output nobody writes, does not go unseen."""
    shape = Shape((9,), (20,))
    case = problem(shape)
    case.value[0, 0, 5] = float("nan")
    assert case.run(SMALL, 1).isnan().all()
    case = problem(shape)
    case.key[0, 0, 20 + 8] = float("nan")
    seen = case.run(SMALL, 1).isnan().flatten(2).any(-1)[0]
    assert seen.tolist() == [False] * 8 + [True]
    assert case.query.new_empty(3).isnan().all()


def test_a_node_s_value_reaches_its_subtree_alone() -> None:
    shape = Shape((50,), (11,), group=1)
    case = problem(shape)
    before = case.run(SMALL, 2)
    node = 4
    case.value[0, 0, 11 + node] += 1
    changed = (case.run(SMALL, 2) != before).flatten(2).any(-1)[0].cpu()
    subtree = torch.zeros(50, dtype=torch.bool)
    subtree[node : int(case.tree.subtree_ends[0, node])] = True
    assert 1 < int(subtree.sum()) < 40
    assert torch.equal(changed, subtree)


def test_any_strides() -> None:
    """A cache kept as `(batch, slots, heads, dim)`, queries cut out of a projection, a view into a longer buffer."""
    shape = Shape((23,), (37,), key_value_heads=3, group=2)
    case = problem(shape)
    expected = case.run(SMALL, 2)
    width = case.query.shape[-1]
    wide = torch.cat([case.query, torch.full_like(case.query, float("nan"))], -1).transpose(1, 2).contiguous()
    case.query = wide.transpose(1, 2)[..., :width]
    case.key = case.key.transpose(1, 2).contiguous().transpose(1, 2)
    case.value = torch.cat([torch.full_like(case.value, float("nan")), case.value], dim=2)[:, :, case.value.shape[2] :]
    assert not any(t.is_contiguous() for t in (case.query, case.key, case.value))
    assert torch.equal(case.run(SMALL, 2), expected)


@pytest.mark.skipif(DEVICE != "cpu", reason="the addresses lie in a sparse file, which a GPU does not read")
def test_addresses_beyond_two_to_the_31(tmp_path) -> None:
    """Slots so far apart that the last ones lie past 2**31 elements; a file with holes holds them."""
    shape = Shape((11,), (280,), group=1)
    case = problem(shape, torch.float16)
    expected = case.run(MIDDLE, 2)
    stride, slots = 2**23 - 16, case.key.shape[2]
    assert stride * 280 > 2**31
    for name in ("key", "value"):
        states = getattr(case, name)
        memory = torch.from_file(str(tmp_path / name), shared=True, size=stride * slots, dtype=torch.float16)
        far = memory.as_strided(states.shape, (0, 0, stride, 1))
        far.copy_(states)
        setattr(case, name, far)
    assert torch.equal(case.run(MIDDLE, 2), expected)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(150))
def test_random_problems(seed: int) -> None:
    """What nobody thought of: sizes, features and tile sizes drawn at random."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(0, len(choices), (), generator=generator))]

    def number(low: int, high: int) -> int:
        """Small numbers as often as large ones."""
        span = float(torch.rand((), generator=generator))
        return low + round((high - low + 1) ** span) - 1

    batch = pick(1, 1, 2, 3)
    prefix = tuple(number(0, 2048) for _ in range(batch))
    shape = Shape(
        nodes=tuple(number(1, 1024 if batch == 1 else 100) for _ in range(batch)),
        prefix=prefix,
        start=tuple(pick(0, number(0, p)) for p in prefix),
        key_value_heads=pick(1, 2),
        group=pick(1, 2, 3, 4, 5, 8),
        key_dim=pick(8, 16, 24, 64),
        value_dim=pick(0, 0, 16, 40),
        window=pick(None, None, number(1, 2100)),
        softcap=pick(None, None, 0.9),
        sinks=pick(False, False, True),
        splits=pick(1, 2, 4, 16),
        config=pick(SMALL, MIDDLE, MIDDLE, LARGE),
        max_depth=pick(1, 7, 15, 15, 40),
    )
    if max(shape.nodes) * shape.group > 1024:
        shape = dataclasses.replace(shape, config=LARGE, key_value_heads=1)
    assert error(problem(shape, seed=seed), shape) < TOLERANCE[EXACT], str(shape)
