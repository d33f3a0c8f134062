"""What is wrong with a trace is told at the door: all of it, with ranks and nodes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_bench import compute, recv, reduce, send, trace

from harness.errors import BadFile
from harness.rlsim.traces.checks import checked
from harness.rlsim.traces.graph import graph_of
from harness.rlsim.traces.meetings import lay
from harness.rlsim.traces.model import Compute, Trace, depends
from harness.rlsim.traces.standing import deadlock, run_through


def problems(of: Trace) -> list[str]:
    with pytest.raises(BadFile) as caught:
        checked(of)
    return caught.value.problems


def told(*programs: list[dict[str, Any]], groups: Any = None, **head: Any) -> str:
    of = trace({str(rank): nodes for rank, nodes in enumerate(programs)}, groups, **head)
    return "\n".join(problems(of))


# -- one rank --------------------------------------------------------------------------------------


def test_an_empty_trace_has_nothing_in_it() -> None:
    assert problems(trace({})) == ["no ranks: there is nothing in it"]
    assert problems(trace({"0-1": []})) == ["ranks 0-1: no nodes: there is nothing in it"]


def test_a_cycle_is_named_from_node_to_node() -> None:
    nodes = [compute(1), compute(2, deps=(1, 9)), compute(5, deps=(2,)), compute(9, deps=(5,))]
    named = "node 2 'b' -> node 5 -> node 9 -> node 2 'b'"
    nodes[1]["name"] = "b"
    assert told(nodes) == f"rank 0: a cycle of dependencies: {named}"
    assert "node 1 -> node 1" in told([compute(1, deps=(1,)), compute(2)])


def test_a_cycle_through_a_control_dependency_counts_too() -> None:
    assert "cycle" in told([compute(1, ctrl_deps=[2]), compute(2, deps=(1,))])


def test_all_that_is_wrong_with_a_node_is_told_at_once() -> None:
    found = told(
        [
            compute(1, -4, name="before time"),
            compute(1, deps=(8,)),
            compute(2, 10**17),
            reduce(3, -1),
            {"kind": "compute", "id": 4},
            {"kind": "compute", "id": 5, "flops": 9, "bytes": 9},
            {"kind": "memory", "id": 6, "to": "load"},
        ]
    )
    for text in (
        "rank 0: node 1: 2 nodes have this id",
        "rank 0: node 1 'before time': duration_ns = -4; expected 0 to",
        "rank 0: node 1: depends on node 8, which is not there",
        "rank 0: node 2: duration_ns = 100000000000000000; expected 0 to 86400000000000, a day",
        "rank 0: node 3: bytes = -1; expected 0 to 1e+15",
        "rank 0: node 4: takes no time that is stated; expected duration_ns, flops or bytes",
        "rank 0: node 5: states flops, but nothing says at what rate: --tflop-per-s",
        "rank 0: node 5: states bytes, but nothing says at what rate: --memory-gb-per-s",
        "rank 0: node 6: takes no time that is stated; expected duration_ns or bytes",
    ):
        assert text in found


def test_ranks_that_do_the_same_are_told_of_once() -> None:
    assert problems(trace({"0-2,4": [compute(1, -1)], "3": [compute(1)]})) == [
        "ranks 0-2,4: node 1: duration_ns = -1; expected 0 to 86400000000000, a day"
    ]


def test_every_rank_has_one_program() -> None:
    found = "\n".join(problems(trace({"0-1": [compute(1)], "1,4": [compute(1)]})))
    assert "rank 1: more than one program" in found
    assert "ranks 2-3: no program, though ranks go up to 4" in found


@st.composite
def tangles(draw: st.DrawFn) -> list[dict[str, Any]]:
    count = draw(st.integers(1, 12))
    ids = st.integers(0, count - 1)
    return [compute(i, deps=tuple(draw(st.sets(ids, max_size=2)))) for i in range(count)]


@given(tangles())
def test_nodes_are_in_order_exactly_where_there_is_no_cycle(nodes: list[dict[str, Any]]) -> None:
    of = trace({"0": nodes})
    graph = graph_of(of.programs[0].nodes)
    nth = {at: n for n, at in enumerate(graph.order)}
    for at, node in enumerate(of.programs[0].nodes):
        assert at not in nth or all(nth[before] < nth[at] for before in depends(node))
    if len(nth) == len(nodes):
        checked(of)
        return
    waits = {node.id: depends(node) for node in of.programs[0].nodes}
    seen: set[int] = set()
    for problem in problems(of):
        cycle = [int(word) for word in problem.replace("->", "").split() if word.isdigit()]
        assert cycle[0] == cycle[-1]
        assert all(before in waits[after] for before, after in pairwise(cycle))
        assert not seen & {*cycle}, "each is told once"
        seen |= {*cycle}
    rest = [node for node in nodes if node["id"] not in seen]
    for node in rest:
        node["data_deps"] = tuple(i for i in node["data_deps"] if i not in seen)
    if rest:
        checked(trace({"0": rest}))


# -- between ranks ---------------------------------------------------------------------------------


def test_sends_and_receives_meet_by_peer_tag_and_bytes() -> None:
    found = told(
        [send(1, 1), send(2, 1, tag=1), send(3, 7), send(4, 0)],
        [recv(1, 0, size=3), recv(2, 0, tag=2)],
    )
    way = "from rank 0 to rank 1 with tag"
    assert found.splitlines() == [
        f"{way} 0: rank 0 node 1 sends 4 bytes, rank 1 node 1 receives 3",
        f"{way} 1: nobody receives what is in rank 0 node 2 (1 sent, 0 received)",
        "rank 0: node 3: its peer is rank 7, not there",
        "rank 0: node 4: is its own peer",
        f"{way} 2: nobody sends what is in rank 1 node 2 (0 sent, 1 received)",
    ]


def test_a_collective_that_a_rank_does_not_enter_is_named() -> None:
    found = told([reduce(1), reduce(2, name="last")], [reduce(1)], [reduce(1)])
    assert found == (
        "group 'world' of ranks 0-2: the 2nd that is entered: node 2 'last' of rank 0"
        " (all_reduce of 4 bytes) is not entered by ranks 1-2"
    )


@pytest.mark.parametrize("other", [{"bytes": 8}, {"op": "all_gather"}])
def test_ranks_that_enter_different_collectives_are_told_apart(other: dict[str, Any]) -> None:
    first, second = reduce(1), reduce(2, 16)
    found = told([first, second], [first, second], [{**first, **other}, second])
    assert (
        "the 1st that is entered differs, so that it would never end: ranks 0-1: all_reduce"
        in found
    )
    assert f"rank 2: {other.get('op', 'all_reduce')} of {other.get('bytes', 4)} bytes" in found


def test_the_order_of_entering_follows_dependencies_before_the_list() -> None:
    late = [reduce(1, 8, deps=(2,)), reduce(2, 4)]  # listed the other way round
    laid = checked(trace({"0": late, "1": [reduce(1, 4), reduce(2, 8)]}))
    assert [meeting.bytes for meeting in laid.meetings.all] == [4, 8]


def test_groups_name_ranks_that_are_there_once() -> None:
    found = told(
        [reduce(1, group="a")], [reduce(1, group="b")], [compute(1)], [reduce(3, group="a")],
        groups={"a": {"ranks": [[0, 1, 1], [9]]}},
    )  # fmt: skip
    for text in (
        "group 'a': rank 9 not there; there are 0-3",
        "group 'a': rank 1 listed more than once",
        "rank 3: node 3: not in group 'a'",
        "rank 1: no group 'b'; there are: a",
    ):
        assert text in found


def test_two_groups_entered_in_different_orders_are_a_deadlock() -> None:
    groups = {"a": {"size": 2}, "b": {"size": 2}}
    a, b = reduce(1, group="a", name="A"), reduce(2, group="b", name="B")
    crossed = told([a, {**b, "data_deps": [1]}], [b, {**a, "data_deps": [2]}], groups=groups)
    assert crossed == (
        "a deadlock, in which ranks 0-1 would wait for ever:"
        " rank 0 waits in node 1 'A' for rank 1, rank 1 waits in node 2 'B' for rank 0"
    )
    at_once = {"0": [a, b], "1": [b, a]}  # nobody waits with one before entering the other
    checked(trace(at_once, groups))


def test_two_ranks_that_both_send_first_are_a_deadlock() -> None:
    found = told([send(1, 1), recv(2, 1, deps=(1,))], [send(1, 0), recv(2, 0, deps=(1,))])
    assert "rank 0 waits in node 1 for rank 1, rank 1 waits in node 1 for rank 0" in found
    checked(trace({"0": [send(1, 1), recv(2, 1)], "1": [send(1, 0), recv(2, 0)]}))


GROUPS = {"a": {"ranks": [[0, 1], [2, 3]]}, "b": {"ranks": [[0, 2], [1, 3]]}, "c": {"size": 4}}


@given(st.lists(st.permutations("aabbc"), min_size=4, max_size=4))
@settings(max_examples=60)
def test_a_deadlock_is_told_exactly_where_somebody_waits_for_ever(orders: list[list[str]]) -> None:
    def chain(order: list[str]) -> list[dict[str, Any]]:
        return [reduce(i, group=group, deps=(i - 1,) if i else ()) for i, group in enumerate(order)]

    of = trace({str(rank): chain(order) for rank, order in enumerate(orders)}, GROUPS)
    assert any(run_through(lay(of)).left.values()) == _sticks(orders)
    assert bool(list(deadlock(lay(of)))) == _sticks(orders)


def _sticks(orders: list[list[str]]) -> bool:
    """Tell whether four ranks, each entering its groups one by one, do not all get to the end."""
    lists = {"a": [(0, 1), (2, 3)], "b": [(0, 2), (1, 3)], "c": [(0, 1, 2, 3)]}
    at = [0] * 4
    while True:
        ready = [
            ranks
            for group, all_ in lists.items()
            for ranks in all_
            if all(at[r] < 5 and orders[r][at[r]] == group for r in ranks)
        ]
        if not ready:
            return at != [5] * 4
        for rank in ready[0]:
            at[rank] += 1


@st.composite
def rubbish(draw: st.DrawFn) -> Trace:
    """Draw a trace of which next to nothing can be relied on."""
    few = st.integers(-1, 4)
    node = st.one_of(
        st.builds(compute, few, few, st.lists(few, max_size=2).map(tuple)),
        st.builds(
            reduce, few, few, st.lists(few, max_size=2).map(tuple),
            group=st.sampled_from(["a", "b", "world", "", "none"]),
        ),
        st.builds(send, few, few, st.integers(4, 5)),
        st.builds(recv, few, few, st.integers(4, 5), st.lists(few, max_size=1).map(tuple)),
    )  # fmt: skip
    ranks = st.lists(st.integers(0, 3), min_size=1, max_size=3).map(lambda r: ",".join(map(str, r)))
    programs = draw(st.dictionaries(ranks, st.lists(node, max_size=5), max_size=3))
    lists = st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=2)
    names = st.sampled_from(["a", "b", "world", ""])
    groups = draw(st.dictionaries(names, lists.map(lambda found: {"ranks": found}), max_size=3))
    return trace(programs, groups)


def test_a_rank_that_a_group_lists_twice_is_told_and_nobody_looks_for_a_circle() -> None:
    said = told([], [reduce(0, group="a")], groups={"a": {"ranks": [[1, 1]]}})
    assert "group 'a': rank 1 listed more than once" in said


@given(rubbish())
@settings(max_examples=400)
def test_whatever_a_trace_says_it_is_sound_or_told_what_is_wrong(of: Trace) -> None:
    try:
        laid = checked(of)
    except BadFile:
        return
    assert not any(run_through(laid).left.values())


def test_many_problems_are_counted_not_all_told() -> None:
    nodes = [compute(i, -1) for i in range(300)]
    found = problems(trace({"0": nodes}))
    assert len(found) == 101
    assert found[-1] == "... and 200 more"


def test_an_idle_node_of_no_time_is_no_problem() -> None:
    node = trace({"0": [compute(1, 0)]}).programs[0].nodes[0]
    assert isinstance(node, Compute)
    checked(trace({"0": [compute(1, 0), reduce(2, 0)]}))
