"""Costs learned from rounds: medians, unseen sizes, context, pace."""

import math
import random

import pytest

from hf_ddtree.generation.cost_model import SIZES, CostModel, size_of


def learned(costs: dict[int, float], context: int = 300, times: int = 9) -> CostModel:
    model = CostModel()
    for _ in range(times):
        for size, seconds in costs.items():
            model.observe(size, context, seconds)
    return model


def test_sizes_are_those_whose_rows_are_powers_of_two() -> None:
    assert SIZES[:5] == (0, 1, 3, 7, 15) and SIZES[-1] == 1023
    assert [size_of(nodes) for nodes in SIZES] == list(range(len(SIZES)))
    assert [size_of(nodes) for nodes in (2, 5, 6, 50, 2000)] == [2, 3, 3, 6, 10]


def test_nothing_is_known_at_first() -> None:
    assert CostModel().seconds(100) == [math.inf] * len(SIZES)
    assert CostModel().draft == 0.0


def test_between_and_above_what_was_seen() -> None:
    model = learned({0: 0.020, 3: 0.048, 4: 0.044}, times=64)
    free = model.seconds(300)
    assert model.typical(3, 300) == pytest.approx(0.048, rel=0.01)
    assert free[3] == free[4] == pytest.approx(0.044, rel=0.03), "what 15 nodes show, 7 cannot exceed"
    assert free[0] < free[1] < free[2] < free[3]
    assert free[5] == free[4] and free[6] == math.inf, "the next size is tried as if it were free"
    careful = model.seconds(300, allowance=0.0)
    assert careful[5] >= careful[4]
    rising = learned({3: 0.030, 4: 0.050})
    assert rising.seconds(300, allowance=0.02)[5] == pytest.approx(rising.seconds(300)[4] * 1.8, rel=0.05)


def test_bursts_do_not_count() -> None:
    model, noise = CostModel(), random.Random(0)
    for turn in range(200):
        for size, seconds in ((0, 0.02), (3, 0.05)):
            burst = 10 if turn % 10 == 5 else 1
            model.observe(size, 300, seconds * burst * noise.uniform(0.95, 1.05))
    assert model.typical(3, 300) / model.typical(0, 300) == pytest.approx(2.5, rel=0.05)
    assert model.pace == pytest.approx(1.0, rel=0.15)


def test_a_first_forward_that_is_slow_is_not_believed() -> None:
    """As where a size is compiled: it costs little at once, and is tried once more."""
    model = learned({0: 0.010, 5: 0.010, 6: 0.010})
    model.observe(7, 300, 4.0)
    assert model.seconds(300, allowance=0.01)[7] < 0.011
    model.observe(7, 300, 0.010)
    assert model.typical(7, 300) == pytest.approx(0.010, rel=0.05)


def test_the_pace_of_the_machine_leaves_the_ratios() -> None:
    model = learned({0: 0.02, 2: 0.03, 3: 0.05})
    for _ in range(30):
        model.observe(3, 300, 0.10)
    assert model.pace == pytest.approx(2.0, rel=0.1)
    assert model.typical(3, 300) / model.typical(0, 300) == pytest.approx(2.5, rel=0.1)
    assert model.typical(2, 300) / model.typical(0, 300) == pytest.approx(1.5, rel=0.1)


def test_one_size_alone_does_not_wander() -> None:
    """Thousands of plain rounds with bursts leave the ratio to a size that is not in use."""
    model, noise = learned({0: 0.02, 3: 0.05}), random.Random(1)
    for _ in range(3000):
        model.observe(0, 300, 0.02 * math.exp(noise.gauss(0, 0.08)) * (3 if noise.random() < 0.05 else 1))
    assert model.typical(3, 300) / model.typical(0, 300) == pytest.approx(2.5, rel=0.1)


def test_context_costs_large_trees_more() -> None:
    model, noise = CostModel(), random.Random(0)
    true = lambda size, context: 0.010 + 4e-9 * context * (SIZES[size] + 16)  # noqa: E731
    for _ in range(6):
        for context in (500, 8000):
            for turn in range(60):
                size = 8 if turn % 3 else 0
                model.observe(size, context, true(size, context) * noise.uniform(0.95, 1.05))
    ratios = [model.typical(8, context) / model.typical(0, context) for context in (500, 8000)]
    for ratio, context in zip(ratios, (500, 8000), strict=True):
        assert ratio == pytest.approx(true(8, context) / true(0, context), rel=0.25)
    assert ratios[1] > 1.4 * ratios[0]


def test_what_has_not_been_tried_for_long_looks_cheaper() -> None:
    model = learned({0: 0.02, 3: 0.05, 4: 0.06}, times=40)
    before = model.seconds(300)[4]
    for _ in range(200):
        model.observe(3, 300, 0.05)
    assert 0.85 * before < model.seconds(300)[4] < 0.95 * before
    assert model.typical(4, 300) == pytest.approx(0.06, rel=0.03)
    # A few measurements then count for much.
    for turn in range(24):
        model.observe(*((4, 300, 0.04) if turn % 3 == 0 else (3, 300, 0.05)))
    assert model.typical(4, 300) == pytest.approx(0.04, rel=0.1)
    assert model.typical(3, 300) == pytest.approx(0.05, rel=0.05)


def test_load_that_ends_makes_nothing_look_cheap() -> None:
    """What is measured first after it is divided by a pace that is still that of the load."""
    model = learned({0: 0.02, 3: 0.05}, times=40)
    for _ in range(150):
        model.observe(0, 300, 0.04)
    assert model.pace == pytest.approx(2.0, rel=0.05)
    model.observe(3, 300, 0.05)
    assert model.typical(3, 300) > 0.85 * 0.05
