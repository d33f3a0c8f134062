"""How long a demand takes over circuits, the electrical path, and an ideal fabric."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.fabric.demand import Demand, nothing
from harness.fabric.links import Link, Plan
from harness.fabric.matchings import Rates, finish_s
from harness.fabric.prediction import (
    BYTES_PER_NS_OF_A_MBIT,
    PAYLOAD_SHARE,
    capacity,
    electrical_ns,
    finish_ns,
    ideal_ns,
)
from tests.unit.fabric_bench import MS, bench, demand, demands, link, plan, plans

FOUR = bench(4)
PAYLOAD_10_MS = 1e9 / 8 * 0.01 * PAYLOAD_SHARE
"""Bytes that one link of 1 Gbit/s carries in 10 ms."""


def test_one_pair_by_every_way() -> None:
    """2 hosts a ToR of 1 Gbit/s each, 4:1 electrical: circuit 1, electrical 0.5, NICs 2 Gbit/s."""
    asked = demand(FOUR, t0_t1=PAYLOAD_10_MS)
    assert electrical_ns(FOUR, asked) == pytest.approx(20 * MS)
    assert finish_ns(FOUR, asked, {link(FOUR, "t0", "t1")}) == pytest.approx(10 * MS)
    both = plan(FOUR, ("t0", "t1", 0), ("t0", "t1", 1))
    assert finish_ns(FOUR, asked, both.links) == pytest.approx(5 * MS)
    assert ideal_ns(FOUR, asked) == pytest.approx(5 * MS)


def test_frames_take_their_part_of_the_rate() -> None:
    assert 0.95 < PAYLOAD_SHARE < 0.96
    mega = demand(FOUR, t0_t1=1e6)
    assert finish_ns(FOUR, mega, {link(FOUR, "t0", "t1")}) == pytest.approx(8e6 / PAYLOAD_SHARE)


def test_what_has_no_circuit_shares_the_electrical_path_out_and_in_apart() -> None:
    asked = demand(FOUR, t0_t1=PAYLOAD_10_MS, t0_t2=PAYLOAD_10_MS, t3_t0=PAYLOAD_10_MS)
    assert electrical_ns(FOUR, asked) == pytest.approx(40 * MS)
    lit = {link(FOUR, "t0", "t1")}
    assert finish_ns(FOUR, asked, lit) == pytest.approx(20 * MS)


def test_hosts_bind_where_circuits_are_many() -> None:
    lone = bench(3, nodes=1, oversubscription=1.0)
    asked = demand(lone, t0_t1=PAYLOAD_10_MS, t0_t2=PAYLOAD_10_MS)
    both = plan(lone, ("t0", "t1", 0), ("t0", "t2", 1))
    assert finish_ns(lone, asked, both.links) == pytest.approx(20 * MS)
    assert ideal_ns(lone, asked) == pytest.approx(20 * MS)


def test_a_one_way_link_serves_one_way() -> None:
    one_way = {link(FOUR, "t0", "t1", both=False)}
    there, back = demand(FOUR, t0_t1=PAYLOAD_10_MS), demand(FOUR, t1_t0=PAYLOAD_10_MS)
    assert finish_ns(FOUR, there, one_way) == pytest.approx(10 * MS)
    assert finish_ns(FOUR, back, one_way) == pytest.approx(20 * MS)


def test_nothing_takes_no_time() -> None:
    for links in (frozenset[Link](), plan(FOUR, ("t0", "t1")).links):
        assert finish_ns(FOUR, nothing(FOUR), links) == 0
    assert ideal_ns(FOUR, nothing(FOUR)) == electrical_ns(FOUR, nothing(FOUR)) == 0


@given(asked=demands(FOUR), lit=plans(FOUR), times=st.floats(0, 50))
def test_no_way_beats_the_ideal_and_time_grows_with_bytes(
    asked: Demand, lit: Plan, times: float
) -> None:
    takes = finish_ns(FOUR, asked, lit.links)
    assert takes >= ideal_ns(FOUR, asked) * (1 - 1e-9)
    assert finish_ns(FOUR, asked * times, lit.links) == pytest.approx(takes * times)


@given(asked=demands(FOUR), more=demands(FOUR), lit=plans(FOUR))
def test_more_bytes_never_take_less(asked: Demand, more: Demand, lit: Plan) -> None:
    apart = [finish_ns(FOUR, each, lit.links) for each in (asked, more)]
    together = finish_ns(FOUR, asked + more, lit.links)
    assert max(apart) * (1 - 1e-9) <= together <= sum(apart) * (1 + 1e-9)


@given(asked=demands(FOUR), lit=plans(FOUR), order=st.permutations(["t0", "t1", "t2", "t3"]))
def test_permuting_tors_changes_no_time(asked: Demand, lit: Plan, order: list[str]) -> None:
    at = [asked.tors.index(tor) for tor in order]
    turned = Demand("turned", tuple(order), asked.sent_bytes[np.ix_(at, at)])
    takes = finish_ns(bench(order), turned, lit.links)
    assert takes == pytest.approx(finish_ns(FOUR, asked, lit.links))


@given(asked=demands(FOUR), lit=plans(FOUR))
def test_it_agrees_with_what_planners_reckon_with(asked: Demand, lit: Plan) -> None:
    """`matchings.finish_s` knows no NICs: give the ToRs enough of them."""
    wide = bench(4, nodes=100, oversubscription=400.0)
    found = capacity(wide, lit.links)
    circuits = np.rint(found.circuits / (1000 * BYTES_PER_NS_OF_A_MBIT)).astype(np.int64)
    each = 1000 * BYTES_PER_NS_OF_A_MBIT * 1e9
    reckoned = finish_s(asked.sent_bytes, circuits, Rates(each, each / 4)) * 1e9
    assert finish_ns(wide, asked, lit.links) == pytest.approx(reckoned)


@given(several=st.lists(demands(FOUR), min_size=1, max_size=4), lit=plans(FOUR))
def test_a_stack_is_reckoned_as_one_by_one(several: list[Demand], lit: Plan) -> None:
    stack = np.stack([each.sent_bytes for each in several])
    together = capacity(FOUR, lit.links).finish_ns(stack)
    assert together.tolist() == [finish_ns(FOUR, each, lit.links) for each in several]
