"""Circuits that change within a training step: the best candidates, never worse than none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.fabric.course import Course, Segment, best_path, course
from harness.fabric.decision import Links, Settings, needed_ns
from harness.fabric.demand import Comm, Demand, Floats, nothing
from harness.fabric.links import DARK, Plan
from harness.fabric.prediction import PAYLOAD_SHARE, finish_ns
from tests.unit.fabric_bench import MS, bench, demand, demands, plan, plans

FOUR = bench(4)
MEGAS = 1e9 / 8 / 1e3 * PAYLOAD_SHARE
"""Bytes that one link carries in 1 ms."""
FREELY = Settings(gain_min=0.0, steer_ns=4 * MS, settle_ns=1 * MS)
"""A change takes 30 ms."""
DP = demand(FOUR, t0_t1=100 * MEGAS, t1_t0=100 * MEGAS, t2_t3=100 * MEGAS, t3_t2=100 * MEGAS)
PP = demand(FOUR, t0_t2=100 * MEGAS, t1_t3=100 * MEGAS)
FOR_DP, FOR_PP = plan(FOUR, ("t0", "t1"), ("t2", "t3")), plan(FOUR, ("t0", "t2"), ("t1", "t3"))
SINGLE = bench(4, planes=1)
"""One plane: a ToR has a circuit to one other at a time."""


def by_size(asked: Demand, lit: Links) -> Plan:
    """A planner for one plane: pairs by falling bytes, what is lit first among equals."""
    names, links = list(asked.tors), set()
    left = set(names)
    both = asked.sent_bytes + asked.sent_bytes.T
    for i, j in sorted(zip(*np.triu_indices(len(names), 1), strict=True), key=lambda e: -both[e]):
        a, b = names[i], names[j]
        if both[i, j] and {a, b} <= left:
            left -= {a, b}
            links |= plan(SINGLE, (a, b)).links
    return Plan(frozenset(links))


def comm(asked: Demand, axis: str, gap_ms: float, times: int = 1) -> Comm:
    return Comm(asked.name, axis, asked, gap_ms * MS, times)  # type: ignore[arg-type]


def run(comms: Sequence[Comm], lit: Links = DARK.links, **more: object) -> Course:
    settings = more.pop("settings", FREELY)
    return course(SINGLE, lit, comms, by_size, settings=settings, **more)  # type: ignore[arg-type]


# -- a step ----------------------------------------------------------------------------------------


def test_circuits_follow_where_gaps_hide_the_change() -> None:
    found = run([comm(DP, "dp", 30), comm(PP, "pp", 30), comm(DP, "dp", 40)])
    assert found.segments == (Segment(0, FOR_DP), Segment(1, FOR_PP), Segment(2, FOR_DP))
    assert found.course_ns == pytest.approx(300 * MS)
    assert found.never_ns == pytest.approx(600 * MS)
    assert found.whole_ns == pytest.approx(400 * MS)


def test_what_a_gap_does_not_hide_is_paid_where_it_pays() -> None:
    found = run([comm(DP, "dp", 30), comm(PP, "pp", 10), comm(DP, "dp", 0)])
    assert [segment.plan for segment in found.segments] == [FOR_DP, FOR_PP, FOR_DP]
    assert found.course_ns == pytest.approx(350 * MS)
    short = run([comm(DP, "dp", 30), comm(PP * 0.2, "pp", 10), comm(DP, "dp", 0)])
    assert [segment.plan for segment in short.segments] == [FOR_DP]


def test_by_the_published_rule_changes_fit_in_gaps_or_are_not_made() -> None:
    strict = replace(FREELY, rule="window")
    comms = [comm(DP, "dp", 30), comm(PP, "pp", 29), comm(DP, "dp", 29)]
    found = run(comms, settings=strict)
    assert [segment.plan for segment in found.segments] == [FOR_DP]
    never = run([comm(DP, "dp", 29)] * 3, settings=strict)
    assert never == Course((Segment(0, DARK),), *[pytest.approx(600 * MS)] * 3)


def test_what_stays_under_the_tors_belongs_to_the_window() -> None:
    """The change begins as soon as nothing crosses: before the first of those phases."""
    inside = comm(nothing(FOUR), "tp", 7, times=3)
    found = run([comm(DP, "dp", 30), inside, comm(PP, "pp", 9)])
    assert found.segments == (Segment(0, FOR_DP), Segment(1, FOR_PP))
    assert found.course_ns == pytest.approx(200 * MS)


def test_repetitions_count() -> None:
    one = run([comm(DP, "dp", 30, times=5), comm(PP, "pp", 0)])
    assert [segment.plan for segment in one.segments] == [FOR_DP, FOR_PP]
    assert one.course_ns == pytest.approx((500 + 100 + 30) * MS)


def test_a_step_that_sends_nothing_changes_nothing() -> None:
    for comms in ([], [comm(nothing(FOUR), "tp", 5)]):
        found = run(comms, FOR_DP.links)
        assert found == Course((Segment(0, Plan(FOR_DP.links)),), 0.0, 0.0, 0.0)


def test_several_steps_on_end_do_not_leave_the_next_a_bad_start() -> None:
    """A small gain at the end of a step is no gain if the next one must change back."""
    comms = [comm(DP, "dp", 0), comm(PP * 0.4, "pp", 0)]
    one, many = run(comms, FOR_DP.links), run(comms, FOR_DP.links, steps=5)
    assert [segment.plan for segment in one.segments] == [Plan(FOR_DP.links), FOR_PP]
    assert [segment.plan for segment in many.segments] == [Plan(FOR_DP.links)]


def test_too_small_a_gain_is_not_worth_a_change() -> None:
    comms = [comm(DP, "dp", 30), comm(PP * 0.4, "pp", 20)]
    assert len(run(comms).segments) == 2
    careful = replace(FREELY, gain_min=0.25)
    assert [segment.plan for segment in run(comms, settings=careful).segments] == [FOR_DP]
    lazy = replace(FREELY, gain_min=0.6)
    assert [segment.plan for segment in run(comms, settings=lazy).segments] == [DARK]


def test_broken_parts_are_not_in_any_plan() -> None:
    found = run([comm(DP, "dp", 30)], FOR_DP.links, broken=["t0:u0"])
    assert found.segments == (Segment(0, plan(FOUR, ("t2", "t3"))),)
    assert found.never_ns == found.course_ns == pytest.approx(200 * MS)


def test_a_demand_that_no_plane_serves_stays_electrical() -> None:
    found = course(FOUR, DARK.links, [comm(DP, "dp", 30)], lambda *_: DARK, settings=FREELY)
    assert found == Course((Segment(0, DARK),), *[pytest.approx(200 * MS)] * 3)


# -- optimal over the candidates -------------------------------------------------------------------


def brute_ns(over_ns: Floats, change_ns: Floats) -> float:
    """Try every sequence of plans."""
    count, kinds = over_ns.shape
    return min(
        sum(
            change_ns[t, path[t - 1] if t else 0, path[t]] + over_ns[t, path[t]]
            for t in range(count)
        )
        for path in product(range(kinds), repeat=count)
    )


@st.composite
def tables(draw: st.DrawFn) -> tuple[Floats, Floats]:
    count, kinds = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    each = st.sampled_from([0.0, 1.0, 2.0, 5.0, 30.0, np.inf])
    over = st.lists(st.floats(0, 100), min_size=count * kinds, max_size=count * kinds)
    change = st.lists(each, min_size=count * kinds**2, max_size=count * kinds**2)
    change_ns = np.array(draw(change)).reshape(count, kinds, kinds)
    change_ns[:, np.arange(kinds), np.arange(kinds)] = 0.0
    return np.array(draw(over)).reshape(count, kinds), change_ns


@given(tables())
def test_no_sequence_of_plans_is_better(case: tuple[Floats, Floats]) -> None:
    over_ns, change_ns = case
    path, best_ns = best_path(over_ns, change_ns)
    assert best_ns == pytest.approx(brute_ns(over_ns, change_ns))
    before = [0, *path[:-1]]
    at = range(len(path))
    assert best_ns == pytest.approx(change_ns[at, before, path].sum() + over_ns[at, path].sum())


@given(tables(), st.integers(2, 3))
def test_nor_over_several_steps(case: tuple[Floats, Floats], steps: int) -> None:
    over_ns, change_ns = (table[:2] for table in case)
    _, best_ns = best_path(over_ns, change_ns, steps)
    brute = brute_ns(np.tile(over_ns, (steps, 1)), np.tile(change_ns, (steps, 1, 1)))
    assert best_ns * steps == pytest.approx(brute)


def takes_ns(comms: Sequence[Comm], lit: Links, found: Course) -> float:
    """What a course costs, reckoned anew from its segments."""
    turns, total_ns, idle_ns, up = dict(found.segments), 0.0, 0.0, lit
    wanted = up
    for i, each in enumerate(comms):
        wanted = turns[i].links if i in turns else wanted
        idle_ns += each.gap_ns
        if not each.demand.total_bytes:
            idle_ns += each.gap_ns * (each.times - 1)
            continue
        total_ns += max(0.0, needed_ns(FOUR, up, wanted, FREELY) - idle_ns)
        total_ns += each.times * finish_ns(FOUR, each.demand, wanted)
        up, idle_ns = wanted, 0.0
    return total_ns


comm_lists = st.lists(
    st.builds(
        comm,
        st.sampled_from([DP, PP, nothing(FOUR)]) | demands(FOUR),
        st.sampled_from(["dp", "pp", "tp"]),
        st.sampled_from([0.0, 10.0, 29.0, 31.0, 100.0]),
        st.integers(1, 3),
    ),
    max_size=6,
)


@given(comms=comm_lists, lit=plans(SINGLE), gain_min=st.sampled_from([0.0, 0.05]))
def test_a_course_is_never_predicted_worse_than_any_other(
    comms: list[Comm], lit: Plan, gain_min: float
) -> None:
    found = run(comms, lit.links, settings=replace(FREELY, gain_min=gain_min))
    assert found.course_ns <= found.never_ns * (1 + 1e-9)
    assert found.course_ns * (1 - gain_min) <= found.whole_ns * (1 + 1e-9)
    assert takes_ns(comms, lit.links, found) == pytest.approx(found.course_ns)
    never = Course((Segment(0, lit),), 0, 0, 0)
    assert takes_ns(comms, lit.links, never) == pytest.approx(found.never_ns)
    firsts = [segment.first for segment in found.segments]
    assert firsts[0] == 0
    assert firsts == sorted({*firsts})


@given(comms=comm_lists, order=st.permutations(["t0", "t1", "t2", "t3"]))
def test_permuting_tors_changes_no_time(comms: list[Comm], order: list[str]) -> None:
    """With one plan for each pattern given, whatever the ToRs are called and in which order."""
    at = [list(FOUR.tors).index(tor) for tor in order]
    turned = [
        each._replace(demand=Demand("turned", tuple(order), each.demand.sent_bytes[np.ix_(at, at)]))
        for each in comms
    ]
    there = replace(FOUR, tors={tor: FOUR.tors[tor] for tor in order})

    def two_planes(asked: Demand, lit: Links) -> Plan:
        sent = asked.sent_bytes[asked.tors.index("t0"), asked.tors.index("t1")]
        return FOR_DP if sent else FOR_PP

    a = course(FOUR, DARK.links, comms, two_planes, settings=FREELY)
    b = course(there, DARK.links, turned, two_planes, settings=FREELY)
    assert (b.course_ns, b.never_ns, b.whole_ns) == pytest.approx(
        (a.course_ns, a.never_ns, a.whole_ns)
    )
