"""Sequences of matchings: they add up, they are few, and they end soon."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from harness.errors import UsageError
from harness.fabric.decomposition import (
    Configuration,
    birkhoff,
    busy_s,
    covered,
    double,
    few,
    makespan_s,
    stuffed,
)
from harness.fabric.matchings import Floats, Pairs, Rates, electrical_s, round_robin
from harness.fabric.schedule import Schedule, schedule
from tests.unit.fabric_milp import KINDS, random_case, random_demand, schedule_optimum_s

RATES = Rates(1e9, 0.5e9)
BYTES = st.one_of(st.just(0.0), st.floats(1e-3, 1e12))
demands = st.integers(1, 7).flatmap(lambda n: arrays(np.float64, (n, n), elements=BYTES))


def empty_diagonal(demand: Floats) -> Floats:
    return demand * (1 - np.eye(len(demand)))


def is_matching(pairs: Pairs, *, duplex: bool) -> bool:
    ends = [(node, 0 if duplex else side) for pair in pairs for side, node in enumerate(pair)]
    return len(ends) == len(set(ends)) and all(a != b for a, b in pairs)


@given(demand=demands)
def test_birkhoff_and_von_neumann_adds_up_to_the_demand(demand: Floats) -> None:
    demand = empty_diagonal(demand)
    full, n = stuffed(demand), len(demand)
    lines = [*full.sum(0), *full.sum(1)]
    assert np.allclose(lines, max(*demand.sum(0), *demand.sum(1)), rtol=1e-9)
    assert (full >= demand).all()
    found = birkhoff(demand)
    assert len(found) <= n * n - 2 * n + 2
    assert all(is_matching(each.pairs, duplex=False) for each in found)
    total, tolerance = covered(found, n, duplex=False), 1e-9 * demand.max()
    assert np.allclose(total, empty_diagonal(full), rtol=0, atol=tolerance)
    filling = empty_diagonal(full) - demand
    assert np.allclose(total - filling, demand, rtol=0, atol=tolerance)


def test_a_balanced_demand_is_what_birkhoff_and_von_neumann_adds_up_to() -> None:
    demand = np.array([[0.0, 3, 1], [1, 0, 3], [3, 1, 0]])
    assert (covered(birkhoff(demand), 3, duplex=False) == demand).all()
    assert {each.weight_bytes for each in birkhoff(demand)} == {3.0, 1.0}


@given(demand=demands, duplex=st.booleans())
def test_double_covers_the_demand_by_2n_configurations(demand: Floats, duplex: bool) -> None:
    demand = empty_diagonal(demand)
    n, found = len(demand), double(demand, duplex=duplex)
    assert len(found) <= (3 * n if duplex else 2 * n)
    assert len({each.weight_bytes for each in found}) <= 1
    assert all(is_matching(each.pairs, duplex=duplex) for each in found)
    assert (covered(found, n, duplex=duplex) >= demand * (1 - 1e-9)).all()


@given(demand=demands, duplex=st.booleans(), most=st.integers(0, 6))
def test_few_are_no_more_than_asked_for(demand: Floats, duplex: bool, most: int) -> None:
    found = few(demand, most, RATES, 0.01, duplex=duplex)
    assert len(found) <= most
    assert all(is_matching(each.pairs, duplex=duplex) and each.weight_bytes > 0 for each in found)


def test_a_dear_change_makes_configurations_fewer() -> None:
    demand = empty_diagonal(np.random.default_rng(0).lognormal(0, 1.5, (8, 8))) * 1e9
    deltas_s = (0.0, 0.1, 1.0, 10.0, 1000.0)
    found = [schedule(demand, 2, RATES, delta_s, duplex=False) for delta_s in deltas_s]
    several = [sum(map(len, each.planes)) for each in found]
    assert several == sorted(several, reverse=True)
    assert several[0] > several[2] > several[-1] == 0
    ends = [each.makespan_s for each in found]
    assert ends == sorted(ends)
    assert ends[-1] == electrical_s(demand, RATES)


@settings(max_examples=40)
@given(
    demand=st.integers(1, 4).flatmap(lambda n: arrays(np.float64, (n, n), elements=BYTES)),
    planes=st.integers(0, 3),
    delta_s=st.sampled_from([0.0, 0.01, 1.0]),
    duplex=st.booleans(),
)
def test_a_schedule_is_matchings_that_end_when_it_says(
    demand: Floats, planes: int, delta_s: float, duplex: bool
) -> None:
    found = schedule(demand, planes, RATES, delta_s, duplex=duplex)
    assert len(found.planes) == planes
    listed = [each for one in found.planes for each in one]
    assert all(is_matching(each.pairs, duplex=duplex) for each in listed)
    end_s = makespan_s(demand, found.planes, RATES, delta_s, duplex=duplex)
    assert end_s == pytest.approx(found.makespan_s)
    assert all(busy_s(one, RATES, delta_s) <= end_s * (1 + 1e-9) for one in found.planes)
    assert end_s <= electrical_s(empty_diagonal(demand), RATES)


def test_the_makespan_counts_a_dark_time_for_each_configuration() -> None:
    demand = np.array([[0.0, 2e9], [0, 0]])
    planes = ((Configuration(((0, 1),), 0.5e9),) * 2, ())
    assert makespan_s(demand, planes, RATES, 0.75, duplex=True) == 2.5  # 2 * (0.75 + 0.5)
    assert makespan_s(demand, planes, RATES, 0.1, duplex=True) == 2.0  # 1 GB electrically
    assert makespan_s(demand, ((), ()), RATES, 0.1, duplex=True) == 4.0


def test_all_to_all_without_dark_time_is_served_by_rounds() -> None:
    """Six nodes, one plane, no electrical path to speak of: each pair for as long as a round."""
    demand = empty_diagonal(np.ones((6, 6))) * 1e9
    found = schedule(demand, 1, Rates(1e9, 1e3), 0.0)
    assert found.makespan_s == pytest.approx(len(round_robin(6)), rel=1e-4)


def test_zero_demand_needs_no_configuration() -> None:
    nothing = np.zeros((3, 3))
    assert schedule(nothing, 2, RATES, 0.01) == Schedule(((), ()), 0.0)
    assert birkhoff(nothing) == double(nothing) == few(nothing, 3, RATES, 0.01) == ()


def test_only_allowed_pairs_are_scheduled() -> None:
    demand = np.array([[0.0, 9e9, 1e9], [0, 0, 2e9], [0, 0, 0]])
    allowed = np.ones((3, 3), bool)
    allowed[0, 1] = allowed[1, 0] = False
    found = schedule(demand, 2, Rates(1e9, 0.1e9), 0.01, allowed=allowed)
    pairs = {pair for one in found.planes for each in one for pair in each.pairs}
    assert pairs
    assert (0, 1) not in pairs


def test_a_switching_time_below_zero_is_refused() -> None:
    with pytest.raises(UsageError, match="not below 0"):
        schedule(np.zeros((2, 2)), 1, RATES, -0.1)


@settings(max_examples=12)
@given(seed=st.integers(0, 10_000))
def test_new_names_give_the_same_schedule_under_new_names(seed: int) -> None:
    rng = np.random.default_rng(seed)
    demand, duplex = random_demand(rng, 4, KINDS[seed % 2]), bool(seed % 3)
    named = rng.permutation(4)
    renamed = np.empty_like(demand)
    renamed[np.ix_(named, named)] = demand
    first, second = (schedule(each, 2, RATES, 0.2, duplex=duplex) for each in (demand, renamed))
    assert first.makespan_s == pytest.approx(second.makespan_s)
    for one, other in zip(first.planes, second.planes, strict=True):
        for each, then in zip(one, other, strict=True):
            moved = [(int(named[a]), int(named[b])) for a, b in each.pairs]
            assert sorted((min(p), max(p)) if duplex else p for p in moved) == [*then.pairs]
            assert each.weight_bytes == pytest.approx(then.weight_bytes)


def test_schedules_come_within_a_tenth_of_the_exact_optimum() -> None:
    """Every sixth of 200 cases; all of them in ``python -m tests.benchmarks circuits_planner``."""
    over = []
    for seed in range(0, 200, 6):
        case = random_case(seed, nodes_max=4, planes_max=2)
        found = schedule(case.demand, case.planes, case.rates, case.delta_s, duplex=case.duplex)
        best_s = schedule_optimum_s(case)
        over.append(found.makespan_s / best_s - 1 if best_s else found.makespan_s)
    assert min(over) > -1e-6, "better than the optimum: the oracle is wrong"
    assert max(over) < 0.1
