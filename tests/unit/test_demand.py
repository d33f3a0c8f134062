"""Who sends how much to whom: collectives, training steps, syncs, moves, and what counters say."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.fabric.demand import (
    Backend,
    Demand,
    Served,
    nothing,
    of_collective,
    of_layout,
    of_moves,
    of_sync,
    of_training,
    total,
)
from harness.model.busbw import factor
from harness.model.degrees import Degrees
from harness.model.layout import Layout
from harness.model.scenario import Op
from harness.model.training.axes import groups_along
from harness.model.training.phase import Phase
from harness.run.rl.edges import Path, edges_of
from tests.unit.fabric_bench import bench, demand, demands

FOUR = bench(4)
SPREAD = ["t0.0", "t1.0", "t2.0", "t3.0"]
PACKED = ["t0.0", "t0.1", "t1.0", "t1.1"]
OPS: tuple[Op, ...] = get_args(Op)
BACKENDS: tuple[Backend, ...] = get_args(Backend)
nodes = st.sampled_from(list(FOUR.nodes))
ops, backends = st.sampled_from(OPS), st.sampled_from(BACKENDS)
groups = st.lists(st.lists(nodes, min_size=1, max_size=7), min_size=1, max_size=3)


# -- collectives -----------------------------------------------------------------------------------


def test_gloo_sends_what_was_seen_on_its_sockets() -> None:
    """Measured with torch 2.13 among 4 ranks on a loopback interface, in shares of the size."""
    ring_back = np.roll(np.eye(4), -1, axis=1)
    tree = np.zeros((4, 4))
    tree[0, 1] = tree[0, 2] = tree[1, 3] = 1
    seen = {
        "all_reduce": 1.5 * ring_back,
        "reduce_scatter": 1.5 * ring_back,
        "all_gather": 0.75 * ring_back.T,
        "all_to_all": 0.25 * (1 - np.eye(4)),
        "broadcast": tree,
    }
    for op, shares in seen.items():
        sent = of_collective(FOUR, op, [SPREAD], 4e6).sent_bytes  # type: ignore[arg-type]
        assert np.allclose(sent, 4e6 * shares), op


@given(op=ops, p=st.integers(2, 8))
def test_each_rank_of_nccl_sends_its_bus_bandwidths_share(op: Op, p: int) -> None:
    """busbw's factor is what a rank sends of the size; of a chain of broadcast the last is idle."""
    wide = bench(p, nodes=1)
    found = of_collective(wide, op, [list(wide.nodes)], 1e6, backend="nccl")
    sends = found.sent_bytes.sum(1) / 1e6
    if op == "broadcast":
        sends = sends[:-1]
    assert np.allclose(sends, factor(op, p))


def test_ranks_under_one_tor_cost_nothing_across() -> None:
    for op in OPS:
        assert of_collective(FOUR, op, [["t0.0", "t0.0", "t0.1"]], 1e9) == nothing(FOUR)


def test_a_ring_in_rank_order_crosses_only_where_the_tor_changes() -> None:
    ring = of_collective(FOUR, "all_reduce", [PACKED], 1e6)
    assert ring == demand(FOUR, t0_t1=1.5e6, t1_t0=1.5e6)
    mixed = of_collective(FOUR, "all_reduce", [["t0.0", "t1.0", "t0.1", "t1.1"]], 1e6)
    assert mixed == 2 * ring


def test_hierarchical_all_reduce_sends_one_size_per_tor_not_one_per_rank() -> None:
    """A size for each of 8 ranks is a published mistake; n/8 on each of 8 rails is n."""
    wide = bench(2, nodes=8)
    found = of_collective(wide, "all_reduce", [list(wide.nodes)], 1e6, hierarchical=True)
    assert found == demand(wide, t0_t1=1e6, t1_t0=1e6)


@given(op=ops, groups=groups, backend=backends)
def test_hierarchical_never_sends_more(op: Op, groups: list[list[str]], backend: Backend) -> None:
    flat = of_collective(FOUR, op, groups, 1e6, backend=backend)
    above = of_collective(FOUR, op, groups, 1e6, backend=backend, hierarchical=True)
    assert above.total_bytes <= flat.total_bytes * (1 + 1e-9)
    assert bool(above.total_bytes) == bool(flat.total_bytes)


@given(op=ops, groups=groups, backend=backends, size=st.floats(1, 1e12), times=st.integers(1, 9))
def test_bytes_grow_with_size_and_times(
    op: Op, groups: list[list[str]], backend: Backend, size: float, times: int
) -> None:
    one = of_collective(FOUR, op, groups, 1.0, backend=backend)
    all_ = of_collective(FOUR, op, groups, size, times, backend=backend)
    assert np.allclose(all_.sent_bytes, one.sent_bytes * size * times)


@given(op=ops, groups=groups, order=st.permutations(["t0", "t1", "t2", "t3"]))
def test_permuting_tors_permutes_the_demand(
    op: Op, groups: list[list[str]], order: list[str]
) -> None:
    here = of_collective(FOUR, op, groups, 1e6)
    there = of_collective(bench(order), op, groups, 1e6)
    at = [here.tors.index(tor) for tor in there.tors]
    assert np.allclose(there.sent_bytes, here.sent_bytes[np.ix_(at, at)])


# -- the value itself ------------------------------------------------------------------------------


@given(a=demands(FOUR), b=demands(FOUR), times=st.floats(0, 100))
def test_demands_add_up_and_scale(a: Demand, b: Demand, times: float) -> None:
    assert a + b == b + a
    assert a + nothing(FOUR) == a
    assert hash(a + nothing(FOUR)) == hash(a)
    assert np.allclose(((a + b) * times).sent_bytes, (times * a + times * b).sent_bytes)
    assert total(FOUR, [a, b, a], "all") == a + b + a
    assert not np.diagonal((a + b).sent_bytes).any()


def test_a_demand_is_of_one_bench_finite_and_read_only() -> None:
    with pytest.raises(ValueError, match="different ToRs"):
        nothing(FOUR) + nothing(bench(3))
    for wrong in (np.full((4, 4), -1.0), np.full((4, 4), np.inf), np.zeros((4, 3))):
        with pytest.raises(ValueError, match="4 x 4 finite bytes from 0 on"):
            Demand("wrong", tuple(FOUR.tors), wrong)
    with pytest.raises(ValueError, match="read-only"):
        nothing(FOUR).sent_bytes[0, 1] = 1.0


# -- training --------------------------------------------------------------------------------------


def phase(op: Op, axis: str, groups: tuple[tuple[int, ...], ...], **more: int) -> Phase:
    return Phase(
        name=f"{axis} {op}",
        op=op,
        axis=axis,  # type: ignore[arg-type]
        groups=groups,
        bytes=more.get("bytes", 1_000_000),
        gap_ns=more.get("gap_ns", 5),
        times=more.get("times", 1),
    )


def test_a_training_step_by_phases() -> None:
    """DP2 TP2 PP2 with a node per TP group: TP stays inside, DP and PP cross."""
    degrees = Degrees(dp=2, tp=2, pp=2)
    node_of_rank = [f"t{rank // 2}.0" for rank in range(8)]
    tp, dp, pp = (
        of_training(FOUR, [phase(op, axis, groups_along(axis, degrees), times=3)], node_of_rank)[0]
        for op, axis in (("all_reduce", "tp"), ("all_gather", "dp"), ("send_recv", "pp"))
    )  # type: ignore[misc]
    assert tp.demand == nothing(FOUR)
    each = 2 * 0.5e6  # two groups along DP from ToR to ToR
    assert dp.demand == demand(FOUR, t0_t1=each, t1_t0=each, t2_t3=each, t3_t2=each)
    assert dp.whole == dp.demand * 3
    assert (dp.axis, dp.gap_ns, dp.times) == ("dp", 5, 3)
    assert pp.demand == demand(FOUR, t0_t2=2e6, t1_t3=2e6), "one way: first to second"


def test_phases_of_one_pattern_scale_with_their_bytes() -> None:
    both = of_training(
        FOUR,
        [phase("all_reduce", "dp", ((0, 1),)), phase("all_reduce", "dp", ((0, 1),), bytes=500_000)],
        {0: "t0.0", 1: "t2.1"},
    )
    assert both[0].demand == 2 * both[1].demand


# -- sync, moves, generation -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("chain", {"t0_t1": 8e6, "t1_t2": 8e6, "t2_t3": 8e6}),
        ("tree", {"t0_t1": 8e6, "t1_t2": 8e6, "t1_t3": 8e6}),
    ],
)
def test_a_sync_brings_the_file_to_every_receiver_once(path: Path, sent: dict[str, float]) -> None:
    found = of_sync(FOUR, edges_of(["t0.0"], ["t1.0", "t2.0", "t3.0"], path), 8e6)
    assert found == demand(FOUR, **sent)


def test_pairs_of_a_sync_go_side_by_side() -> None:
    edges = edges_of(["t0.0", "t1.0"], ["t2.0", "t3.0", "t2.1"], "pairs")
    assert of_sync(FOUR, edges, 8e6) == demand(FOUR, t0_t2=8e6, t1_t3=8e6)


def test_moves_add_up_and_stay_inside_a_tor() -> None:
    moves = [("t0.0", "t1.1", 5.0), ("t0.1", "t1.0", 6.0), ("t2.0", "t2.1", 9.0)]
    assert of_moves(FOUR, moves) == demand(FOUR, t0_t1=11.0)
    assert of_moves(FOUR, []) == nothing(FOUR)


def test_an_unknown_node_is_named() -> None:
    with pytest.raises(UsageError, match=r"node 'n9' is not of this bench.*t0\.0"):
        of_moves(FOUR, [("n9", "t0.0", 1.0)])


def test_engines_send_where_their_parallelism_spans_tors() -> None:
    within = Served(Layout(tp=2), ("t0.0", "t0.1"))
    assert of_layout(FOUR, [within], tp_bytes=1e6) == nothing(FOUR)
    spans = Served(Layout(tp=2), ("t0.0", "t1.0"))
    assert of_layout(FOUR, [spans], tp_bytes=1e6) == demand(FOUR, t0_t1=1e6, t1_t0=1e6)
    staged = Served(Layout(pp=2, tp=2), ("t0.0", "t0.1", "t1.0", "t1.1"))
    assert of_layout(FOUR, [staged], tp_bytes=1e6, pp_bytes=7.0) == demand(FOUR, t0_t1=14.0)
    experts = Served(Layout(dp=2, ep=2), ("t2.0", "t3.0"))
    found = of_layout(FOUR, [experts], tp_bytes=1e6, ep_bytes=1e3)
    assert found == demand(FOUR, t2_t3=500.0, t3_t2=500.0)
