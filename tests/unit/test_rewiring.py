"""From one plan to another: the same pairs are served, within the ports, and few circuits move."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from harness.fabric.greedy import greedy
from harness.fabric.matchings import Floats, Pair, Planes, Rates, count, ring, round_robin
from harness.fabric.rewiring import rewired, rewirings
from tests.unit.fabric_milp import KINDS, random_demand

RATES = Rates(1e9, 0.5e9)


def served(planes: Planes) -> Counter[Pair]:
    return Counter(pair for pairs in planes for pair in pairs)


def plans(seed: int, *, ports_max: int = 1) -> tuple[Planes, Planes, np.ndarray, bool]:
    """Two plans of demands that are somewhat alike."""
    rng = np.random.default_rng(seed)
    n, planes, duplex = int(rng.integers(2, 9)), int(rng.integers(1, 5)), bool(rng.random() < 0.5)
    ports = rng.integers(0, ports_max + 1, (n, planes)) if ports_max > 1 else np.ones((n, planes))
    ports = ports.astype(np.int64)
    now: Floats = random_demand(rng, n, KINDS[seed % len(KINDS)])
    then = now * rng.lognormal(0, 0.5, now.shape)
    before, wanted = (greedy(each, ports, RATES, duplex=duplex) for each in (now, then))
    return before, wanted, ports, duplex


@given(seed=st.integers(0, 100_000), ports_max=st.integers(1, 2))
def test_the_same_pairs_are_served_within_the_ports_by_no_more_rewirings(
    seed: int, ports_max: int
) -> None:
    now, wanted, ports, duplex = plans(seed, ports_max=ports_max)
    found = rewired(now, wanted, ports, duplex=duplex)
    assert len(found) == len(wanted)
    assert served(found) == served(wanted)
    for p, pairs in enumerate(found):
        circuits = count([pairs], len(ports), duplex=duplex)
        assert all((circuits.sum(axis) <= ports[:, p]).all() for axis in (0, 1))
    least = (served(wanted) - served(now)).total()
    assert least <= rewirings(now, found) <= rewirings(now, wanted)


@given(seed=st.integers(0, 100_000))
def test_planes_that_changed_places_are_put_back(seed: int) -> None:
    now, _, ports, duplex = plans(seed)
    order = np.random.default_rng(seed).permutation(len(now))
    assert rewired(now, tuple(now[k] for k in order), ports, duplex=duplex) == now


@given(seed=st.integers(0, 100_000), data=st.data())
def test_what_is_only_taken_away_moves_nothing(seed: int, data: st.DataObject) -> None:
    now, _, ports, duplex = plans(seed)
    left = tuple(tuple(pair for pair in pairs if data.draw(st.booleans())) for pairs in now)
    order = np.random.default_rng(seed).permutation(len(now))
    found = rewired(now, tuple(left[k] for k in order), ports, duplex=duplex)
    assert rewirings(now, found) == 0


@given(seed=st.integers(0, 100_000))
def test_never_more_than_by_the_best_order_of_whole_planes(seed: int) -> None:
    now, wanted, ports, duplex = plans(seed)
    orders = permutations(range(len(now)))
    best = min(rewirings(now, tuple(wanted[k] for k in order)) for order in orders)
    assert rewirings(now, rewired(now, wanted, ports, duplex=duplex)) <= best


def test_a_single_plane_keeps_what_both_have() -> None:
    now, wanted = (((0, 1), (2, 3)),), (((0, 1), (2, 4)),)
    assert rewired(now, wanted, np.ones((5, 1), int)) == wanted
    assert rewirings(now, wanted) == 1


def test_a_ring_that_loses_a_node_keeps_its_other_edges() -> None:
    """Six nodes on two planes; without node 5 the chain of the others stays as it is lit."""
    now = ring(6)
    assert len(now) == 2
    wanted = (((0, 1), (2, 3)), ((1, 2), (3, 4)))
    assert rewirings(now, rewired(now, wanted[::-1], np.ones((6, 2), int))) == 0


def test_a_new_pair_makes_room_by_moving_one_other() -> None:
    """0-1 fits only where one end is taken on each plane: a chain of one circuit moves."""
    now: Planes = (((0, 2),), ((1, 3),))
    wanted: Planes = (((0, 1),), ((0, 2), (1, 3)))
    found = rewired(now, wanted, np.ones((4, 2), int))
    assert rewirings(now, found) == 2
    assert served(found) == served(wanted)


def test_all_rounds_in_another_order_move_nothing() -> None:
    rounds = round_robin(8)
    assert rewired(rounds, rounds[::-1], np.ones((8, 7), int)) == rounds


def test_a_plane_that_lost_its_ports_is_left() -> None:
    now: Planes = (((0, 1),), ())
    found = rewired(now, ((), ((0, 1),)), np.array([[0, 1], [0, 1]]))
    assert found == ((), ((0, 1),))
