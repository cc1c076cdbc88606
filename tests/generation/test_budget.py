"""The controller on machines whose best size is known: how near it comes, what trying costs, that it falls back."""

import itertools
import statistics
import threading

import pytest

from hf_ddtree.generation.budget import (
    FIRST_CREDIT,
    FIRST_WAIT,
    NEVER_PAID_WAIT,
    NEW_TEXT_SHARE,
    NEW_TEXT_WAIT,
    TRIAL_CREDIT,
    TRIAL_NODES,
    BudgetController,
    Plan,
)
from hf_ddtree.generation.cost_model import SIZES, CostModel

from .rounds import CONTEXT, Curve, Drafter, Machine, controller, flat, steep

TOKENS = 512


def best_fixed(curve: Curve, drafting: float, drafter: Drafter) -> tuple[int, float]:
    """The best size and its tokens a second, without noise."""
    rates = {size: Machine(curve, drafting, 0).fixed(drafter, size, 500) for size in (0, *SIZES[3:])}
    best = max(rates, key=rates.__getitem__)
    return best, rates[best]


@pytest.mark.parametrize("curve, drafting, sure", [(flat, 0.002, 0.6), (steep, 0.004, 0.7), (steep, 0.004, 0.9)])
def test_near_the_best_size(curve: Curve, drafting: float, sure: float) -> None:
    """At least 95% of the best fixed size over the first 512 tokens, all trying included, and 98% after them."""
    _, rate = best_fixed(curve, drafting, Drafter(sure, seed=9))
    first, later = [], []
    for seed in range(3):
        machine, (auto, calibration) = Machine(curve, drafting, 0.0, seed), controller(63 if curve is flat else 7)
        first.append(machine.run(auto, calibration, Drafter(sure, seed=seed), TOKENS) / rate)
        later.append(machine.run(auto, calibration, Drafter(sure, seed=seed), 2 * TOKENS) / rate)
    assert statistics.mean(first) > 0.95, first
    assert statistics.mean(later) > 0.98, later


def test_noise_and_bursts_change_little() -> None:
    best, _ = best_fixed(steep, 0.004, Drafter(0.7, seed=9))
    ratios = []
    for seed in range(3):
        fixed = Machine(steep, 0.004, seed=seed).fixed(Drafter(0.7, seed=seed), best, 400)
        machine, (auto, calibration) = Machine(steep, 0.004, seed=seed), controller()
        machine.run(auto, calibration, Drafter(0.7, seed=seed), TOKENS)
        ratios.append(machine.run(auto, calibration, Drafter(0.7, seed=seed), 3 * TOKENS) / fixed)
    assert statistics.mean(ratios) > 0.96, ratios


def test_a_flat_curve_gives_large_trees_and_a_steep_one_small_ones() -> None:
    typical = {}
    for curve in (flat, steep):
        machine, (auto, calibration) = Machine(curve, 0.002), controller()
        machine.run(auto, calibration, Drafter(0.6), 2 * TOKENS)
        typical[curve] = statistics.median(machine.sizes[-100:])
    assert typical[flat] >= 127
    assert 1 <= typical[steep] <= 15


@pytest.mark.parametrize("sure", [0.95, 0.02])
def test_a_useless_drafter_costs_little(sure: float) -> None:
    """It is sure of tokens that never come, or of none: after a few trees the target decodes alone."""
    machine, (auto, calibration) = Machine(steep, 0.004, noise=0.0), controller()
    drafter = Drafter(sure, truth=0.0)
    assert machine.run(auto, calibration, drafter, TOKENS) > 0.97 / steep(1)
    auto.begin()
    before = len(machine.sizes)
    assert machine.run(auto, calibration, drafter, 2 * TOKENS) > 0.985 / steep(1)
    assert sum(map(bool, machine.sizes[before:])) <= 8


def test_trials_are_bounded_and_rarer_each_time() -> None:
    machine, (auto, calibration) = Machine(steep, 0.004, noise=0.0), controller()
    machine.run(auto, calibration, Drafter(0.9, truth=0.0), 2500)
    drafted = [place for place, size in enumerate(machine.sizes) if size]
    gaps = [after - before for before, after in itertools.pairwise(drafted) if after - before > 8]
    assert gaps == sorted(gaps) and gaps[0] >= FIRST_WAIT and gaps[-1] <= NEVER_PAID_WAIT + 1
    lost = machine.seconds / steep(1) - machine.tokens
    dearest = (steep(16) + 0.004) / steep(1)
    assert lost < FIRST_CREDIT + TRIAL_CREDIT * len(gaps) + dearest * (1 + len(gaps))


def test_drafting_comes_back_when_it_pays() -> None:
    machine, (auto, calibration) = Machine(steep, 0.004), controller()
    machine.run(auto, calibration, Drafter(0.9, truth=0.0), TOKENS)
    assert not any(machine.sizes[-20:])
    machine.run(auto, calibration, Drafter(0.9), NEVER_PAID_WAIT + TOKENS)
    assert sum(map(bool, machine.sizes[-40:])) > 35


def test_a_new_text_is_tried_sooner() -> None:
    """A little, where drafting has never paid: with short texts the trials of each would add up."""
    auto, calibration = controller()
    machine = Machine(steep, 0.004, noise=0.0)
    machine.run(auto, calibration, Drafter(0.9, truth=0.0), 3000)
    waits = []
    for texts in (0, 0, 1, 3):
        for _ in range(texts):
            auto.begin()
        rounds = 0
        while not (plan := auto.plan(CONTEXT)).drafts:
            auto.observe(plan, CONTEXT, 0, 1)
            rounds += 1
        # The trial fails at once.
        for _ in range(4):
            auto.observe(plan, CONTEXT, TRIAL_NODES, 1)
        waits.append(rounds)
    share = NEVER_PAID_WAIT // NEW_TEXT_SHARE
    assert [waits[1] - wait for wait in waits[2:]] == [share, 3 * share]


def test_a_drafter_that_has_paid_is_tried_at_once_in_a_new_text() -> None:
    """But not in each of many short ones that follow: each trial costs a token or two."""
    auto, calibration = controller()
    machine = Machine(steep, 0.004, noise=0.0)
    machine.run(auto, calibration, Drafter(0.9), TOKENS)
    machine.run(auto, calibration, Drafter(0.9, truth=0.0), 2 * TOKENS)
    while auto.plan(CONTEXT).drafts:
        machine.run(auto, calibration, Drafter(0.9, truth=0.0), 8)
    waits = []
    for _ in range(3):
        for _ in range(NEW_TEXT_WAIT):
            assert not auto.plan(CONTEXT).drafts
        auto.begin()
        plan = auto.plan(CONTEXT)
        assert plan.drafts and plan.trial
        for _ in range(4):
            auto.observe(plan, CONTEXT, TRIAL_NODES, 1)
        auto.begin()
        waits.append(auto.plan(CONTEXT).drafts)
    assert not any(waits)


def test_plain_decoding_is_measured_anew_before_drafting_ends() -> None:
    """What it cost long ago may have been another machine's pace."""
    machine, (auto, calibration) = Machine(steep, 0.004, noise=0.0), controller()
    machine.run(auto, calibration, Drafter(0.9), TOKENS)
    machine.sizes.clear()
    machine.run(auto, calibration, Drafter(0.9, truth=0.0), 40)
    last = max(place for place, size in enumerate(machine.sizes) if size)
    assert last < 20 and machine.sizes[:last].count(0) == 1


def test_one_plain_round_is_enough_where_its_seconds_come_late() -> None:
    machine, (auto, calibration) = Machine(steep, 0.004, noise=0.0), controller()
    machine.run(auto, calibration, Drafter(0.9), TOKENS)
    plain = []
    for _ in range(20):
        plan = auto.plan(CONTEXT)
        plain.append(not plan.drafts)
        # No seconds of any of these rounds are known yet.
        auto.observe(plan, CONTEXT, TRIAL_NODES if plan.drafts else 0, 1 if sum(plain) == 0 else 3)
    assert sum(plain) == 1


def test_a_drafter_that_has_paid_has_a_longer_trial() -> None:
    lengths = []
    for truth in (0.0, 0.9):
        machine, (auto, calibration) = Machine(steep, 0.004, noise=0.0), controller()
        machine.run(auto, calibration, Drafter(0.9, truth=truth), TOKENS)
        machine.run(auto, calibration, Drafter(0.9, truth=0.0), TOKENS)
        while not (plan := auto.plan(CONTEXT)).drafts:
            auto.observe(plan, CONTEXT, 0, 1)
        rounds = 0
        while plan.drafts:
            auto.observe(plan, CONTEXT, TRIAL_NODES, 1)
            plan, rounds = auto.plan(CONTEXT), rounds + 1
        lengths.append(rounds)
    assert lengths[0] < lengths[1] <= 2 * lengths[0]


def test_another_process_slows_every_size_alike() -> None:
    """While the machine runs at half its pace the size stays, and nothing falls back."""
    machine, (auto, calibration) = Machine(steep, 0.004), controller()
    machine.run(auto, calibration, Drafter(0.8), 2 * TOKENS)
    before = statistics.median(machine.sizes[-60:])
    machine.curve, machine.drafting = lambda rows: 2 * steep(rows), 0.008
    start = len(machine.sizes)
    machine.run(auto, calibration, Drafter(0.8, seed=1), TOKENS)
    assert statistics.median(machine.sizes[start:]) == before
    assert machine.sizes[start:].count(0) <= 6


def test_a_machine_that_has_changed_is_learned_anew() -> None:
    """A curve that becomes flat, as where a compiled forward takes over: larger trees follow."""
    machine, (auto, calibration) = Machine(steep, 0.004), controller()
    machine.run(auto, calibration, Drafter(0.7), TOKENS)
    machine.curve = lambda rows: 0.02 + 0.0001 * rows
    machine.run(auto, calibration, Drafter(0.7), 6 * TOKENS)
    assert statistics.median(machine.sizes[-100:]) >= 31


def test_the_first_round_has_the_starting_size_and_the_bound_holds() -> None:
    for start, largest in ((7, 1023), (63, 255), (63, 15)):
        auto = BudgetController(CostModel(), start, largest)
        plan = auto.plan(CONTEXT)
        assert plan.drafts and plan.nodes <= largest
        assert auto.size(plan, CONTEXT, [1.0 + size / 10 for size in SIZES if size <= plan.nodes]) == min(
            start, largest
        )
    assert auto.plan(CONTEXT, largest=0) == Plan(drafts=False)
    assert auto.plan(CONTEXT, largest=5).nodes == 5


def test_threads_share_a_controller() -> None:
    auto, calibration = controller()
    machines = [Machine(steep, 0.004, seed=seed) for seed in range(4)]
    threads = [
        threading.Thread(target=machine.run, args=(auto, calibration, Drafter(0.7, seed=seed), 300))
        for seed, machine in enumerate(machines)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(machine.tokens >= 300 for machine in machines)
    assert sum(map(auto.costs.count, range(len(SIZES)))) == sum(len(machine.sizes) for machine in machines)
