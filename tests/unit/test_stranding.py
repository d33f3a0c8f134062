"""A ToR whose electrical link is down: what it sends and gets takes circuits, or is told."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.fabric.decision import Settings, decide
from harness.fabric.demand import Demand
from harness.fabric.links import Plan
from harness.fabric.planner import plan_demand
from harness.fabric.prediction import capacity
from harness.fabric.stranding import stranded
from harness.fabric.windows import Window
from tests.unit.fabric_bench import MS, bench, demand, link, plan

WHOLE = bench(4)
CUT = replace(WHOLE, cut=frozenset({"t3"}))
MB = 1e6
SIZES = st.just(0) | st.integers(10**5, 10**9)
"""Bytes: whatever is sent is not next to nothing."""


def test_only_pairs_of_a_cut_tor_without_a_link_are_stranded() -> None:
    asked = demand(CUT, t0_t1=9 * MB, t0_t3=1 * MB, t3_t2=2 * MB)
    assert stranded(WHOLE, asked, ()) == ()
    assert stranded(CUT, asked, ()) == (("t3", "t2"), ("t0", "t3"))
    assert stranded(CUT, asked, {link(CUT, "t2", "t3")}) == (("t0", "t3"),)
    one_way = link(CUT, "t3", "t0", both=False)
    assert stranded(CUT, asked, {one_way}) == (("t3", "t2"), ("t0", "t3"))


def test_a_cut_tor_gets_a_circuit_where_it_had_none() -> None:
    asked = demand(CUT, t0_t1=90 * MB, t0_t2=90 * MB, t0_t3=1 * MB)
    assert ("t0", "t3") in plan_demand(WHOLE, asked.sent_bytes).unserved
    planned = plan_demand(CUT, asked.sent_bytes)
    assert stranded(CUT, asked, planned.links) == ()
    assert len(planned.unserved) == 1


@given(st.lists(SIZES, min_size=16, max_size=16), st.sampled_from(range(3)))
def test_nobody_is_stranded_who_need_not_be(sizes: list[int], alone: int) -> None:
    """Two uplinks, two peers: whatever others send, a cut ToR has its circuits."""
    sent = np.reshape(np.array(sizes, np.float64), (4, 4)) * (1 - np.eye(4))
    sent[alone, 3] = sent[3, alone] = 0.0
    asked = Demand("any", tuple(CUT.tors), sent)
    assert stranded(CUT, asked, plan_demand(CUT, sent).links) == ()


@given(st.lists(st.integers(0, 10**9), min_size=16, max_size=16))
def test_where_nothing_is_cut_it_changes_nothing(sizes: list[int]) -> None:
    sent = np.reshape(np.array(sizes, np.float64), (4, 4)) * (1 - np.eye(4))
    nobody = replace(WHOLE, cut=frozenset({"somewhere else"}))
    assert plan_demand(nobody, sent) == plan_demand(WHOLE, sent)
    found, wanted = (capacity(topology, ()).finish_ns(sent) for topology in (nobody, WHOLE))
    assert found == wanted


@pytest.mark.parametrize("rule", ["gain", "window"])
def test_a_change_that_frees_what_is_stranded_waits_for_no_window(rule: str) -> None:
    asked = demand(CUT, t0_t1=90 * MB, t0_t3=1 * MB)
    lit = plan(CUT, ("t0", "t1", 0), ("t0", "t1", 1))
    wanted = plan(CUT, ("t0", "t1", 0), ("t0", "t3", 1))
    settings = Settings(rule=rule, gain_min=0.05)  # type: ignore[arg-type]
    decided = decide(CUT, lit.links, asked, [wanted], Window(1 * MS), settings=settings)
    assert decided.action == "change"
    assert "changed: t0-t3 would be stranded, of the 25 ms" in decided.reason
    uncut = decide(WHOLE, lit.links, asked, [wanted], Window(1 * MS), settings=settings)
    assert uncut.action == "keep"


def test_who_cannot_be_helped_is_named() -> None:
    asked = demand(CUT, t0_t1=90 * MB, t0_t3=1 * MB)
    lit = plan(CUT, ("t0", "t1", 0))
    decided = decide(CUT, lit.links, asked, [Plan(lit.links)], None, settings=Settings())
    assert decided.action == "keep"
    assert decided.reason.endswith("; t0-t3 stranded: no electrical link")
