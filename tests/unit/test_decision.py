"""Whether circuits change: what pays, what a window hides, and the sentence that says so."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.fabric.decision import Decision, Numbers, Settings, decide, needed_ns, still_pays
from harness.fabric.demand import Demand, nothing, of_collective
from harness.fabric.links import DARK, Link, Plan, Trunk, Uplink
from harness.fabric.prediction import PAYLOAD_SHARE, finish_ns
from harness.fabric.refusals import refusal, sound
from harness.fabric.topology import Plane
from harness.fabric.windows import Window
from harness.model.scenario import Fabric
from tests.unit.fabric_bench import MS, bench, demand, demands, link, plan, plans

FOUR = bench(4)
NOTHING: frozenset[Link] = frozenset()
MEGAS = 1e9 / 8 / 1e3 * PAYLOAD_SHARE
"""Bytes that one link carries in 1 ms."""
BUSY = demand(FOUR, t0_t1=100 * MEGAS, t2_t3=100 * MEGAS)
"""200 ms over the electrical path, 100 ms over a circuit each."""
PAIRS = plan(FOUR, ("t0", "t1"), ("t2", "t3"))
CAREFUL = Settings(gain_min=0.05, steer_ns=4 * MS, settle_ns=1 * MS)
"""With 25 ms of switching a change takes 30 ms."""
STRICT = replace(CAREFUL, rule="window")
windows = st.none() | st.floats(0, 1e9).map(Window)


def decided(window_ms: float | None = 1000.0, **more: object) -> Decision:
    """On the bench of four, dark, for `BUSY`, with `PAIRS` planned; but for what is said."""
    given_ = {"lit": NOTHING, "demand": BUSY, "candidates": [PAIRS], "settings": CAREFUL} | more
    window = None if window_ms is None else Window(window_ms * MS)
    return decide(FOUR, window=window, **given_)  # type: ignore[arg-type]


# -- what pays -------------------------------------------------------------------------------------


def test_a_change_that_the_window_hides_is_free() -> None:
    found = decided(30.0)
    assert (found.action, found.plan) == ("change", PAIRS)
    assert found.numbers.needed_ns == 30 * MS
    assert found.numbers.gain_ns == pytest.approx(100 * MS)
    expected = "changed: saves 100 ms of 200 ms, its 30 ms hidden in a window of 30 ms"
    assert found.reason == expected


def test_by_the_published_rule_a_short_window_refuses() -> None:
    found = decided(29.0, settings=STRICT)
    assert (found.action, found.plan.links) == ("keep", NOTHING)
    assert found.reason == "kept: a change takes 30 ms, the window is 29 ms"


def test_by_gain_what_hangs_over_goes_on_electrically() -> None:
    """20 ms at half the rate are 10 % of it; the other 90 % take 90 ms."""
    found = decided(10.0)
    assert found.action == "change"
    assert found.numbers.overhang_ns == 20 * MS
    assert found.numbers.total_ns == pytest.approx(110 * MS)
    expected = "changed: saves 90 ms of 200 ms, of the 30 ms that it takes 10 ms are idle"
    assert found.reason == expected


def test_what_saves_too_little_is_kept() -> None:
    found = decided(
        demand=BUSY + demand(FOUR, t0_t2=96 * MEGAS), settings=replace(CAREFUL, gain_min=0.6)
    )
    assert found.reason == "kept: saves 200 ms of 392 ms, less than 60 %"
    lit = plan(FOUR, ("t0", "t1"), ("t2", "t3"), ("t0", "t1", 1))
    found = decided(lit=PAIRS.links, candidates=[lit])
    assert found.reason == "kept: a change saves nothing: 100 ms instead of 100 ms"


def test_what_moves_nothing_is_kept() -> None:
    found = decided(lit=PAIRS.links)
    assert (found.action, found.plan.links) == ("keep", PAIRS.links)
    assert found.reason == "kept: the circuits that are up are those planned"


def test_no_demand_is_kept() -> None:
    for lit in (NOTHING, PAIRS.links):
        found = decided(lit=lit, demand=nothing(FOUR))
        assert (found.action, found.plan.links) == ("keep", lit)
        assert found.reason == "kept: nothing is sent from ToR to ToR"


def test_a_demand_that_no_plane_serves_goes_electrical_and_says_so() -> None:
    unserved = Plan(NOTHING, (("t0", "t1"), ("t2", "t3")))
    found = decided(candidates=[unserved])
    assert (found.action, found.plan) == ("electrical", unserved)
    assert found.reason == "electrical: no plane serves t0-t1, t2-t3"
    assert decided(candidates=[]).action == "electrical"


def test_what_stays_electrical_under_a_plan_is_said() -> None:
    found = decided(
        candidates=[plan(FOUR, ("t0", "t1"))], demand=BUSY + demand(FOUR, t0_t1=300 * MEGAS)
    )
    assert found.reason.endswith("; 20 % of the bytes go the electrical path")


def test_circuits_slower_than_the_electrical_path_are_left() -> None:
    """8 hosts a ToR at 4:1 have an electrical path of two links' rate."""
    wide = bench(4, nodes=8)
    lit = plan(wide, ("t0", "t1"), ("t2", "t3")).links
    found = decide(wide, lit, BUSY, [], Window(100 * MS), settings=CAREFUL)
    assert (found.action, found.plan) == ("electrical", DARK)
    assert found.reason == "electrical: 50 ms without circuits, 100 ms over those that are up"
    assert found.numbers.needed_ns == 4 * MS, "no light to wait for"


def test_the_best_of_several_candidates_is_taken() -> None:
    double = plan(FOUR, ("t0", "t1"), ("t2", "t3"), ("t0", "t1", 1), ("t2", "t3", 1))
    assert decided(candidates=[PAIRS, double, DARK]).plan == double


def test_soon_after_a_change_the_next_must_save_twice_as_much() -> None:
    settings = replace(CAREFUL, gain_min=0.3, rest_ns=100 * MS)
    assert decided(settings=settings, since_change_ns=None).action == "change"
    assert decided(settings=settings, since_change_ns=100 * MS).action == "change"
    soon = decided(settings=settings, since_change_ns=40 * MS)
    expected = (
        "kept: saves 100 ms of 200 ms, less than 60 % so soon after the last change, 40 ms ago"
    )
    assert (soon.action, soon.reason) == ("keep", expected)
    twice = replace(settings, gain_min=0.24)
    assert decided(settings=twice, since_change_ns=40 * MS).action == "change"


def test_with_an_unknown_begin_nobody_waits() -> None:
    found = decided(None, settings=STRICT)
    assert (found.action, found.numbers.overhang_ns) == ("change", 0.0)
    assert (
        found.reason
        == "changed: saves 100 ms of 200 ms, with 30 ms ahead of it, while nobody waits"
    )


def test_circuits_in_use_stay() -> None:
    lit = plan(FOUR, ("t0", "t2")).links
    assert decided(lit=lit).action == "change"
    found = decided(lit=lit, busy=lit)
    assert (found.action, found.plan.links) == ("keep", lit)
    assert found.reason == "kept: t0-t2@agg0 is in use"
    beside = Plan(lit | plan(FOUR, ("t0", "t1", 1), ("t2", "t3", 1)).links)
    assert decided(lit=lit, busy=lit, candidates=[beside]).action == "change"


# -- break-even ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "k"), [("all_reduce", 2.0), ("all_gather", 1.0)])
@pytest.mark.parametrize("delta_ms", [10.0, 25.0])
@pytest.mark.parametrize("waits", [True, False])
def test_the_break_even_of_the_facts(op: str, k: float, delta_ms: float, waits: bool) -> None:
    """n > delta B / (k (r - 1)) where traffic waits, delta B / (k r) where it goes on meanwhile.

    Two ranks under two ToRs: each sends (p-1)/p = 1/2 of k n.
    """
    two = bench(2, nodes=1, oversubscription=4.0, switching_ms=[delta_ms, delta_ms])
    lit, planned = NOTHING, [plan(two, ("t0", "t1"))]
    settings = Settings(gain_min=0.0, waits=waits)
    even = 2 * delta_ms * MEGAS / (k * (3.0 if waits else 4.0))
    for times, action in ((0.99, "keep"), (1.01, "change")):
        asked = of_collective(two, op, [["t0.0", "t1.0"]], times * even)  # type: ignore[arg-type]
        assert decide(two, lit, asked, planned, Window(0.0), settings=settings).action == action


def test_against_a_non_blocking_fabric_it_never_pays() -> None:
    fair = bench(2, nodes=1, oversubscription=1.0)
    asked = demand(fair, t0_t1=1e12, t1_t0=1e12)
    found = decide(
        fair, NOTHING, asked, [plan(fair, ("t0", "t1"))], None, settings=Settings(gain_min=0.0)
    )
    assert found.reason.startswith("kept: a change saves nothing")


# -- at the commit ---------------------------------------------------------------------------------


def test_a_plan_that_missed_its_window_is_dropped() -> None:
    strict = decided(100.0, settings=STRICT)
    assert still_pays(strict, 30 * MS).action == "change"
    late = still_pays(strict, 12 * MS)
    assert (late.action, late.plan.links) == ("dropped", NOTHING)
    assert late.reason == "dropped: 12 ms are left: a change takes 30 ms, the window is 12 ms"


def test_by_gain_a_late_plan_is_dropped_when_too_little_traffic_is_left() -> None:
    found = decided(100.0)
    assert still_pays(found, 0.0).action == "change"
    assert still_pays(found, -100 * MS).numbers.keep_ns == pytest.approx(100 * MS)
    late = still_pays(found, -180 * MS)
    assert (late.action, late.numbers.keep_ns) == ("dropped", pytest.approx(20 * MS))
    assert late.reason.startswith("dropped: the window is over: a change saves nothing")
    assert still_pays(found, -300 * MS).action == "dropped"


def test_what_was_kept_stays_kept() -> None:
    for found in (decided(29.0, settings=STRICT), decided(candidates=[])):
        assert still_pays(found, -1e9) == found


@given(first=windows, left_ns=st.floats(-1e9, 1e9), asked=demands(FOUR), planned=plans(FOUR))
def test_more_window_left_never_drops_what_less_would_not(
    first: Window | None, left_ns: float, asked: Demand, planned: Plan
) -> None:
    found = decide(FOUR, NOTHING, asked, [planned], first, settings=CAREFUL)
    if found.action == "change" and still_pays(found, left_ns).action == "change":
        assert still_pays(found, left_ns + 1e6).action == "change"


# -- what must not be made -------------------------------------------------------------------------


def test_ports_that_are_not_ours_are_refused() -> None:
    foreign = replace(FOUR, ours={"agg0": frozenset({1, 2, 3, 5, 6, 7}), "agg1": frozenset()})
    found = decide(foreign, NOTHING, BUSY, [PAIRS], None, settings=CAREFUL)
    assert (found.action, found.plan) == ("electrical", DARK)
    assert found.reason == "electrical: port 4 of agg0 is not ours"
    lit = plan(FOUR, ("t0", "t1")).links
    found = decide(foreign, lit, BUSY, [PAIRS], None, settings=CAREFUL)
    assert (found.action, found.plan.links) == ("keep", lit)


@pytest.mark.parametrize("broken", ["t0:u0", "agg0", "t0"])
def test_broken_parts_are_never_planned_with(broken: str) -> None:
    assert refusal(FOUR, PAIRS.links, [broken]) == f"{broken} is broken"
    assert decided(broken=[broken]).action == "electrical"
    beside = plan(FOUR, ("t2", "t3", 1))
    asked = demand(FOUR, t2_t3=100 * MEGAS)
    found = decided(demand=asked, broken=[broken], candidates=[PAIRS, beside])
    assert found.plan == beside


def test_lit_circuits_that_broke_carry_nothing() -> None:
    found = decided(lit=PAIRS.links, broken=["t0:u0"], candidates=[])
    assert found.lit == {link(FOUR, "t2", "t3")}
    assert found.numbers.keep_ns == pytest.approx(200 * MS)


def test_wrong_links_are_refused_by_name() -> None:
    a, b = FOUR.uplink("t0", "agg0"), FOUR.uplink("t1", "agg1")
    assert a is not None
    assert b is not None
    itself = Link(a, replace(a, device="u9", ingress=2, egress=6))
    elsewhere = Link(a, Uplink("t1", "u0", "agg0", 4, 8, ""))
    trunk = Trunk("agg0", 3, 7, "core0", 1, 5)
    for links, why in (
        ({Link(a, b)}, "no light gets from t0:u0 to t1:u1"),
        ({itself}, "joins t0 with itself"),
        ({elsewhere}, "t1:u0 is not cabled so"),
        ({Link(a, b, (trunk,))}, "no light gets"),
        ({link(FOUR, "t0", "t1", both=False)}, "leads one way, but circuits of agg0 are duplex"),
        ({link(FOUR, "t0", "t1"), link(FOUR, "t0", "t2")}, "port 1 of agg0 is used twice"),
    ):
        assert why in refusal(FOUR, links)
    assert not refusal(bench(4, duplex=False), {link(FOUR, "t0", "t1", both=False)})


@pytest.mark.parametrize("broken", ["agg0:7", "core0:1", "core0", "agg1:7"])
def test_a_trunk_breaks_by_either_end(broken: str) -> None:
    trunks = tuple(Trunk(f"agg{k}", 7, 8, "core0", 1 + k, 5 + k) for k in (0, 1))
    ours = {**FOUR.ours, "core0": frozenset({1, 2, 5, 6})}
    tiered = replace(FOUR, trunks=trunks, ours=ours)
    a, b = tiered.uplink("t0", "agg0"), tiered.uplink("t1", "agg1")
    assert a is not None
    assert b is not None
    over = Link(a, b, trunks)
    assert not refusal(tiered, {over})
    assert refusal(tiered, {over}, [broken]) == f"{broken} is broken"


@given(planned=plans(FOUR))
def test_matchings_of_what_is_cabled_are_never_refused(planned: Plan) -> None:
    assert not refusal(FOUR, planned.links)
    assert sound(FOUR, planned.links) == planned.links


# -- how long a change takes -----------------------------------------------------------------------


def test_the_slowest_plane_that_moves_counts() -> None:
    mixed = bench(4, switching_ms=[10.0, 60.0])
    planes = {**mixed.planes, "agg0": replace(mixed.planes["agg0"], hold_ns=int(7 * MS))}
    mixed = replace(mixed, planes=planes)
    slow, fast = plan(mixed, ("t0", "t1", 1)).links, plan(mixed, ("t0", "t1", 0)).links
    assert needed_ns(mixed, NOTHING, fast, CAREFUL) == 22 * MS
    assert needed_ns(mixed, slow, slow | fast, CAREFUL) == 22 * MS, "what stays is not waited for"
    assert needed_ns(mixed, NOTHING, slow | fast, CAREFUL) == 65 * MS
    assert needed_ns(mixed, slow | fast, fast, CAREFUL) == 4 * MS, "only steered off"
    assert needed_ns(mixed, slow, slow, CAREFUL) == 0


def test_settings_of_a_scenario() -> None:
    assert Settings.of(Fabric(), 3 * MS) == Settings(
        "gain", 0.05, rest_ns=100 * MS, steer_ns=3 * MS, settle_ns=10 * MS
    )
    assert Plane("agg0").switching_ns == 25 * MS


# -- whatever comes --------------------------------------------------------------------------------


@given(
    asked=demands(FOUR),
    lit=plans(FOUR),
    candidates=st.lists(plans(FOUR), max_size=3),
    window=windows,
    rule=st.sampled_from(["window", "gain"]),
    waits=st.booleans(),
    since_ns=st.none() | st.floats(0, 1e9),
)
def test_a_decision_never_costs_time_and_says_why(
    asked: Demand,
    lit: Plan,
    candidates: list[Plan],
    window: Window | None,
    rule: str,
    waits: bool,
    since_ns: float | None,
) -> None:
    settings = replace(CAREFUL, rule=rule, waits=waits, rest_ns=1e8)  # type: ignore[arg-type]
    found = decide(
        FOUR, lit.links, asked, candidates, window, settings=settings, since_change_ns=since_ns
    )
    numbers = found.numbers
    assert numbers.ideal_ns <= numbers.total_ns * (1 + 1e-9)
    assert found.reason.startswith(
        {"change": "changed: ", "keep": "kept: ", "electrical": "electrical: "}[found.action]
    )
    if found.plan.links != lit.links:
        assert numbers.gain_ns >= 0.05 * numbers.keep_ns
        assert numbers.change_ns == finish_ns(FOUR, asked, found.plan.links)
        assert found.plan in [*candidates, DARK]
        if rule == "window":
            assert not numbers.overhang_ns
    if found.action == "keep":
        assert found.plan.links == lit.links


@given(asked=demands(FOUR), lit=plans(FOUR), planned=plans(FOUR), window=st.floats(0, 1e8))
def test_more_window_never_costs(asked: Demand, lit: Plan, planned: Plan, window: float) -> None:
    found = decide(FOUR, lit.links, asked, [planned], Window(window), settings=CAREFUL)
    longer = decide(FOUR, lit.links, asked, [planned], Window(2 * window), settings=CAREFUL)

    def takes_ns(decision: Decision) -> float:
        numbers = decision.numbers
        return numbers.keep_ns if decision.action == "keep" else numbers.total_ns

    assert takes_ns(longer) <= takes_ns(found) * (1 + 1e-9)


def test_a_change_as_long_as_all_traffic_changes_nothing_of_it() -> None:
    numbers = Numbers(0.0, 300.0, 200.0, 50.0, 200.0, 40.0, meanwhile_ns=200.0)
    assert numbers.total_ns == 200.0
    assert replace(numbers, waits=True).total_ns == 350.0


@given(
    asked=demands(FOUR),
    lit=plans(FOUR),
    planned=plans(FOUR),
    window=windows,
    order=st.permutations(["t0", "t1", "t2", "t3"]),
)
def test_permuting_tors_changes_no_decision(
    asked: Demand, lit: Plan, planned: Plan, window: Window | None, order: list[str]
) -> None:
    at = [asked.tors.index(tor) for tor in order]

    turned = Demand("turned", tuple(order), asked.sent_bytes[np.ix_(at, at)])
    tors = {tor: FOUR.tors[tor] for tor in order}
    here = decide(FOUR, lit.links, asked, [planned], window, settings=CAREFUL)
    there = decide(replace(FOUR, tors=tors), lit.links, turned, [planned], window, settings=CAREFUL)
    assert (there.action, there.plan, there.reason) == (here.action, here.plan, here.reason)
