"""Flows over a network that changes: who ends when, what is left, what links have carried."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.model.advance import FOREVER_NS
from harness.rlsim import flows as flows_module
from harness.rlsim.batch import Batch
from harness.rlsim.flows import Flows
from harness.rlsim.fluid import finish_ns
from harness.rlsim.island import Island
from harness.rlsim.kernels import Floats
from tests.unit.fluid_cases import GB, Case, cases, copies, shifts
from tests.unit.fluid_exact import Exact


def run(flows: Flows) -> dict[int, int]:
    """Go from event to event until nothing ends any more; return who ended when."""
    ended: dict[int, int] = {}
    while (now_ns := flows.next_ns()) < FOREVER_NS:
        ended |= dict.fromkeys(flows.advance(now_ns), now_ns)
    return ended


def test_an_end_gives_the_others_more_at_once() -> None:
    flows = Flows([10 * GB])
    assert flows.add(0, [[0], [0]], [50, 100]) == [0, 1]
    assert flows.next_ns() == 10  # at 5 bytes per ns each
    assert flows.advance(10) == [0]
    assert run(flows) == {1: 15}


def test_a_flow_ends_at_the_first_whole_ns_at_which_all_is_there() -> None:
    flows = Flows([3 * GB])
    flows.add(7, [[0]], [10])
    assert flows.next_ns() == 7 + 4
    assert flows.advance(10) == []
    assert flows.advance(11) == [0]


def test_moments_between_whole_ns_count() -> None:
    flows = Flows([4 * GB])
    flows.add(0, [[0], [0]], [1, 5])  # the first ends at 0.5 ns, the second at 1.5
    assert run(flows) == {0: 1, 1: 2}


def test_latency_comes_after_the_last_byte_and_holds_nobody_up() -> None:
    flows = Flows([10 * GB])
    flows.add(0, [[0], [0]], [50, 100], [1000, 0])
    assert run(flows) == {1: 15, 0: 1010}


def test_nothing_to_send_takes_only_its_latency() -> None:
    flows = Flows([GB])
    assert flows.add(5, [[], [0], [0]], [100, 0, 1], 3) == [0, 1, 2]
    assert run(flows) == {0: 8, 1: 8, 2: 9}
    assert flows.carried_bytes(9).tolist() == [1]


def test_ends_are_told_in_order_and_the_oldest_first() -> None:
    flows = Flows([GB] * 3)
    flows.add(0, [[2], [1]], [20, 10])
    flows.add(0, [[0]], [20])
    assert flows.advance(100) == [1, 0, 2]


def test_in_the_dark_flows_pause_and_go_on_when_it_is_lit() -> None:
    flows = Flows([10 * GB])
    flows.add(0, [[0]], [100])
    flows.set_capacity(4, 0, 0)
    assert flows.next_ns() == FOREVER_NS
    assert flows.advance(1000) == []
    flows.set_capacity(1000, 0, 20 * GB)
    assert run(flows) == {0: 1003}


def test_what_is_on_a_link_can_be_lost() -> None:
    flows = Flows([10 * GB, 10 * GB])
    flows.add(0, [[0], [0, 1], [1]], [100, 100, 100])
    assert flows.crossing(2, 0) == [0, 1]
    assert flows.lose(2, 0) == {0: 90, 1: 90}
    assert flows.crossing(2, 0) == []
    assert run(flows) == {2: 11}
    assert flows.carried_bytes(11).tolist() == [20, 110]


def test_a_flow_takes_what_is_left_of_it_to_another_path() -> None:
    flows = Flows([10 * GB, 2 * GB])
    flows.add(0, [[0]], [100])
    flows.reroute(8, {0: [1]})
    assert run(flows) == {0: 18}
    assert flows.carried_bytes(18).tolist() == [80, 20]


def test_who_is_removed_is_not_told_to_have_ended_even_if_all_was_sent() -> None:
    flows = Flows([10 * GB])
    flows.add(0, [[0], [0], [0]], [10, 10, 100], [500, 0, 0])
    assert flows.remove(10, [0]) == [0]  # on its way
    assert flows.remove(10, [1]) == [0]  # arrived, not told
    assert flows.remove(10, [2]) == [100 - 10 - 70]
    assert flows.advance(1000) == []
    assert flows.next_ns() == FOREVER_NS


def test_changes_of_one_moment_come_to_what_they_are_together() -> None:
    flows = Flows([10 * GB] * 2)
    flows.add(0, [[0]], [100])
    flows.reroute(0, {0: [1]})
    flows.add(0, [[1]], [50])
    flows.set_capacity(0, 1, 0)
    flows.set_capacity(0, 1, 10 * GB)
    flows.reroute(0, {0: [0]})
    assert run(flows) == {0: 10, 1: 5}


def test_counters_can_be_read_at_any_moment() -> None:
    flows = Flows([10 * GB])
    flows.add(0, [[0]], [100])
    assert [flows.carried_bytes(now_ns).tolist() for now_ns in (0, 3, 3, 8)] == [
        [0], [30], [30], [80]
    ]  # fmt: skip


def test_idle_links_wait_for_ever() -> None:
    flows = Flows([GB])
    assert flows.next_ns() == FOREVER_NS
    assert flows.advance(10) == []
    assert flows.add(10, [], []) == []
    assert flows.next_ns() == FOREVER_NS


# -- only what hangs together is reckoned anew ----------------------------------------------------


def test_a_change_leaves_flows_alone_that_share_nothing_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[list[int]] = []

    class Watched(Island):
        def __init__(self, began_ns: int, batch: Batch, capacity: Floats) -> None:
            begun.append(batch.ids.tolist())
            super().__init__(began_ns, batch, capacity)

    monkeypatch.setattr(flows_module, "Island", Watched)
    flows = Flows([10 * GB] * 4)
    flows.add(0, [[0, 1], [1], [2], [2, 3]], [100] * 4)
    assert flows.next_ns() == 20
    flows.set_capacity(10, 0, 1 * GB)
    flows.add(11, [[3]], [500])
    flows.remove(12, [4])
    assert run(flows) == {1: 16, 2: 20, 3: 20, 0: 60}
    assert begun == [[0, 1, 2, 3], [0, 1], [2, 3, 4], [2, 3]]


# -- the same as exact arithmetic, whatever is changed --------------------------------------------


@given(cases(), st.data())
def test_whatever_is_changed_it_ends_as_exact_arithmetic_says(
    case: Case, data: st.DataObject
) -> None:
    flows, exact, now_ns = Flows(case.bytes_per_s), Exact(case.capacity), 0
    told: list[int] = []
    removed: dict[int, float] = {}
    link = st.integers(0, len(case.capacity) - 1)
    path = st.lists(link, min_size=1, max_size=4)
    pick = st.integers(0, 10**6)
    start(flows, exact, 0, case.paths, case.sizes)
    for _ in range(data.draw(st.integers(0, 6))):
        now_ns += data.draw(st.integers(0, 15))
        exact.advance(now_ns)
        going = sorted(exact.paths)
        kind = data.draw(st.sampled_from(["add", "width", "reroute", "remove", "look", "ask"]))
        if kind == "add":
            start(flows, exact, now_ns, [data.draw(path)], [data.draw(st.integers(1, 99))])
        elif kind == "width":
            turned, width = data.draw(link), data.draw(st.integers(0, 9))
            flows.set_capacity(now_ns, turned, width * GB)
            exact.capacity[turned] = Fraction(width)
        elif kind == "reroute" and going:
            flow = going[data.draw(pick) % len(going)]
            exact.paths[flow] = data.draw(path)
            flows.reroute(now_ns, {flow: exact.paths[flow]})
        elif kind == "remove" and going:
            flow = going[data.draw(pick) % len(going)]
            (removed[flow],) = flows.remove(now_ns, [flow])
            assert removed[flow] == pytest.approx(float(exact.left[flow]), abs=1e-4)
            del exact.paths[flow]
        elif kind == "look":
            carried = [float(value) for value in exact.carried]
            assert flows.carried_bytes(now_ns) == pytest.approx(carried, abs=1e-3)
        elif kind == "ask":
            told += flows.advance(now_ns)
    for lit in range(len(case.capacity)):
        flows.set_capacity(now_ns, lit, 5 * GB)
        exact.capacity[lit] = Fraction(5)
    exact.advance(None)
    told += flows.advance(now_ns)
    late = run(flows)
    assert sorted([*told, *late]) == sorted(exact.ended)
    assert all(near(late[flow], exact.ended[flow]) for flow in late)
    assert all(exact.ended[flow] <= now_ns + Fraction(1, 1000) for flow in told)
    assert all(a < b + 1 for a, b in pairwise(exact.ended[flow] for flow in told))
    carried = [float(value) for value in exact.carried]
    end_ns = max([now_ns, *late.values()])
    assert flows.carried_bytes(end_ns) == pytest.approx(carried, abs=1e-3)


def start(
    flows: Flows, exact: Exact, now_ns: int, paths: list[list[int]], sizes: list[int]
) -> None:
    for flow, path, size in zip(flows.add(now_ns, paths, sizes), paths, sizes, strict=True):
        exact.add(flow, path, size)


def near(end_ns: int, exact: Fraction) -> bool:
    """Whether it is the whole ns at which an exact end is there, or is so but for rounding."""
    return end_ns in (ceil(exact - Fraction(1, 1000)), ceil(exact + Fraction(1, 1000)))


@given(copies(), st.data())
def test_symmetry_that_is_broken_on_the_way_breaks_nothing(
    given_: tuple[Case, list[int]], data: st.DataObject
) -> None:
    case, _ = given_
    flows, exact = Flows(case.bytes_per_s), Exact(case.capacity)
    start(flows, exact, 0, case.paths, case.sizes)
    now_ns = data.draw(st.integers(1, 60))
    exact.advance(now_ns)
    told = flows.advance(now_ns)
    link = data.draw(st.integers(0, len(case.capacity) - 1))
    flows.set_capacity(now_ns, link, 20 * GB)
    exact.capacity[link] = Fraction(20)
    late = run(flows)
    exact.advance(None)
    assert sorted([*told, *late]) == sorted(exact.ended)
    assert all(near(late[flow], exact.ended[flow]) for flow in late)


@given(cases(flows_max=30))
def test_one_by_one_at_one_moment_is_all_at_once(case: Case) -> None:
    once, each = Flows(case.bytes_per_s), Flows(case.bytes_per_s)
    once.add(3, case.paths, case.sizes)
    for path, size in zip(case.paths, case.sizes, strict=True):
        each.add(3, [path], size)
    assert run(once) == run(each)


def test_a_step_of_a_collective_ends_as_it_does_alone() -> None:
    case = shifts(256, [1, 2, 4], [1e6, 2e6, 5e6])
    flows = Flows(case.bytes_per_s)
    ids = flows.add(1000, case.paths, case.sizes, 250)
    ends = finish_ns(case.paths, case.sizes, case.bytes_per_s)
    ended = run(flows)
    assert [ended[flow] for flow in ids] == (1250 + np.ceil(ends - 1e-3)).tolist()
    assert flows.carried_bytes(max(ended.values())) == pytest.approx([8e6] * 512)


# -- what can't be asked for ----------------------------------------------------------------------


def test_what_makes_no_sense_is_refused() -> None:
    flows = Flows([GB, GB])
    flows.add(10, [[0]], [100])
    with pytest.raises(ValueError, match="it is 10 ns already, not 9"):
        flows.advance(9)
    with pytest.raises(ValueError, match="there is no link 2"):
        flows.set_capacity(10, 2, GB)
    with pytest.raises(ValueError, match="there is no link -1"):
        flows.crossing(10, -1)
    with pytest.raises(ValueError, match="finite bytes per s"):
        flows.set_capacity(10, 0, -1)
    with pytest.raises(ValueError, match="needs links"):
        flows.reroute(10, {0: []})
    with pytest.raises(ValueError, match="a latency is 0 ns or more"):
        flows.add(10, [[0]], [1], -1)
    with pytest.raises(KeyError):
        flows.remove(10, [1])
    assert run(flows) == {0: 110}
    with pytest.raises(KeyError):
        flows.remove(110, [0])
