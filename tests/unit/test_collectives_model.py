"""Collectives as stages: what flows from node to node, what it takes alone, and what is refused."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.fabric.demand import Floats, of_collective
from harness.model.busbw import busbw_gb_per_s
from harness.model.scenario import Op
from harness.model.simulation import Collectives, Figure
from harness.rlsim.collectives import WIRE, Interconnect, Planned, gloo, nccl, stages, time_ns
from harness.rlsim.hops import Hop, Place, double_tree
from harness.rlsim.nvlink import links_of, slowed
from harness.rlsim.tables import Key, table_of
from tests.unit.fabric_bench import bench

OPS: tuple[Op, ...] = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv",
)  # fmt: skip
MB = 1_000_000
FOUR = bench(4)
FIGURES = Collectives(
    backend="gloo", step_us=Figure(value=100.0), copy_ns_per_kb=Figure(value=200.0)
)
GLOO = gloo(FIGURES, nics=1, nic_gb_per_s=0.125)


def h100(algorithms: str = "", protocols: str = "", **more: object) -> Interconnect:
    return nccl(
        "H100", nics=8, nic_gb_per_s=50.0, algorithms=algorithms, protocols=protocols, **more
    )  # type: ignore[arg-type]


def on(*gpus: int) -> list[Place]:
    """So many ranks on each node, from its GPU 0 on."""
    return [(f"node{n}", gpu) for n, count in enumerate(gpus) for gpu in range(count)]


def sent(planned: Planned) -> float:
    return sum(hop.bytes for stage in planned.stages for hop in stage.flows)


# -- edges of the definition -----------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_one_rank_takes_no_time_and_nothing_costs_its_latency(op: Op) -> None:
    assert time_ns(op, MB, on(1), h100()) == 0
    assert stages(op, MB, on(1), h100()).stages == ()
    for places in (on(8), on(4, 4), on(5, 2, 1)):
        nothing = stages(op, 0, places, h100())
        assert sent(nothing) == 0
        assert all(stage.local_ns == 0 < stage.latency_ns for stage in nothing.stages)
        assert 0 < time_ns(op, 0, places, h100()) < time_ns(op, 64 * MB, places, h100())


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("places", [on(8), on(5, 2, 1), on(1, 1, 1), on(2, 8)])
def test_flows_cross_nodes_and_nothing_flows_on_one(op: Op, places: list[Place]) -> None:
    planned = stages(op, 8 * MB, places, h100())
    assert planned.basis == "model"
    for stage in planned.stages:
        assert all(places[a][0] != places[b][0] and size > 0 for a, b, size in stage.flows)
    assert bool(sent(planned)) == (len({node for node, _ in places}) > 1)


def test_two_ranks_on_one_gpu_are_refused() -> None:
    with pytest.raises(UsageError, match=r"ranks 0 and 2 of a group are both on GPU 0 of a"):
        stages("all_reduce", 1, [("a", 0), ("a", 1), ("a", 0)], h100())


def test_a_gpu_that_nobody_measured_is_refused_and_fewer_links_are_slower() -> None:
    with pytest.raises(UsageError, match=r"'T4'; known: a100, h100, .*h800"):
        nccl("T4", nics=1, nic_gb_per_s=1.0)
    assert links_of("NVIDIA H800").bus_gb_per_s == pytest.approx(
        tuple(rate * 200 / 450 for rate in links_of("h100_sxm").bus_gb_per_s)
    )
    assert slowed(links_of("H100"), 450.0, "").bus_gb_per_s == links_of("H100").bus_gb_per_s
    less = nccl("H800", nics=8, nic_gb_per_s=50.0)
    assert time_ns("all_gather", 1 << 30, on(8), less) > time_ns(
        "all_gather", 1 << 30, on(8), h100()
    )


# -- from node to node -----------------------------------------------------------------------------


def test_a_ring_loads_each_rail_of_each_node_alike() -> None:
    planned = stages("all_reduce", 8 * MB, on(8, 8, 8), h100("ring", "simple"))
    assert (planned.algorithm, planned.protocol) == ("ring", "simple")
    (stage,) = planned.stages
    assert len(stage.flows) == 24
    for a, b, size in stage.flows:
        assert a % 8 == b % 8
        assert size == pytest.approx(2 * 23 / 24 * 8 * MB / 8)


@pytest.mark.parametrize("protocol", ["ll", "ll128", "simple"])
def test_flags_of_a_protocol_go_over_the_wire_too(protocol: str) -> None:
    planned = stages("all_gather", MB, on(2, 2), h100("ring", protocol))
    assert planned.protocol == protocol
    assert sent(planned) == pytest.approx(2 * 3 / 4 * MB * WIRE[planned.protocol])  # type: ignore[index]


def test_across_nodes_a_hierarchical_all_reduce_carries_its_part_of_each_rail() -> None:
    """n / g, not n: what cs249r_book 1530 counted g times over."""
    size, nodes, g = 64 * MB, 4, 8
    planned = stages("all_reduce", size, on(*[g] * nodes), h100("hierarchical", "simple"))
    assert planned.algorithm == "hierarchical"
    before, across, after = planned.stages
    assert before.flows == after.flows == ()
    assert len(across.flows) == nodes * g
    for _, _, part in across.flows:
        assert part == pytest.approx(2 * (nodes - 1) / nodes * size / g)
    alone = nccl("H100", nics=8, nic_gb_per_s=50.0, algorithms="ring", protocols="simple")
    rings = stages("all_reduce", size, on(*[g] * nodes), alone).stages[0].flows[0].bytes
    assert part < rings < 1.3 * part  # a flat ring carries as much of each rail, and a little more


def test_hierarchical_parts_are_those_of_their_operations() -> None:
    def of(op: Op, places: list[Place]) -> list[bool]:
        return [bool(s.flows) for s in stages(op, MB, places, h100("hierarchical")).stages]

    assert of("all_gather", on(2, 2)) == [True, False]
    assert of("reduce_scatter", on(2, 2)) == [False, True]
    assert of("all_reduce", on(1, 1)) == [True]
    assert of("all_reduce", on(4)) == [False]


def test_groups_that_do_not_divide_are_refused_where_they_must() -> None:
    with pytest.raises(UsageError, match=r"the same GPUs of each node, not 0,1,2; 0,1"):
        stages("all_reduce", 1, on(3, 2), h100("hierarchical"))
    with pytest.raises(UsageError, match=r"no broadcast"):
        stages("broadcast", 1, on(2, 2), h100("hierarchical"))
    ring = stages("all_reduce", MB, on(3, 2), h100("ring", "simple"))
    assert sent(ring) == pytest.approx(2 * 2 * 4 / 5 * MB)
    with pytest.raises(UsageError, match=r"by nvls_tree"):
        stages("all_reduce", 1, on(8, 1), h100("nvlstree"))


def test_nodes_without_a_common_rail_still_meet() -> None:
    places = [("a", 0), ("a", 1), ("b", 2), ("b", 3)]
    (stage,) = stages("all_gather", MB, places, h100("ring", "simple")).stages
    assert stage.flows == (Hop(1, 2, 0.75 * MB), Hop(3, 0, 0.75 * MB))


@pytest.mark.parametrize("count", range(2, 18))
def test_both_trees_span_all_nodes_and_share_their_inner_ones(count: int) -> None:
    edges = double_tree(count)
    for tree in (edges[: count - 1], edges[count - 1 :]):
        parents = dict(tree)
        assert len(parents) == count - 1
        for node in range(count):
            seen = {node}
            while (node := parents.get(node, -1)) >= 0:
                assert node not in seen
                seen.add(node)
            assert max(seen) < count
    inner = [{parent for _, parent in tree} for tree in (edges[: count - 1], edges[count - 1 :])]
    assert count % 2 or not inner[0] & inner[1]


def test_over_two_nodes_a_tree_sends_each_byte_once() -> None:
    ring, tree = (
        sent(stages("all_reduce", 8 * MB, on(8, 8), h100(name, "simple")))
        for name in ("ring", "tree")
    )
    assert tree == pytest.approx(2 * 8 * MB)
    assert ring == pytest.approx(tree * 15 / 8)


def test_all_to_all_goes_by_the_rail_of_its_receiver() -> None:
    size, places = 1024 * MB, on(4, 4, 4)
    planned = stages("all_to_all", size, places, h100())
    (stage,) = planned.stages
    assert len(stage.flows) == 3 * 2 * 4
    for a, b, part in stage.flows:
        assert a % 4 == b % 4
        assert part == pytest.approx(4 * size / 12)  # of all four of the node
    flat = stages("all_to_all", size, on(4), h100()).stages[0].local_ns
    # to its 3 neighbours, and to their rails for the 2 other nodes: 9 blocks of size / 12
    assert stage.local_ns / flat == pytest.approx(1.0, abs=0.05)


def test_all_to_all_from_a_node_without_the_rail_goes_straight() -> None:
    flows = stages("all_to_all", 300 * MB, on(2, 1), h100()).stages[0].flows
    assert set(flows) == {Hop(0, 2, 200 * MB), Hop(2, 0, 100 * MB), Hop(2, 1, 100 * MB)}


def test_point_to_point_goes_one_way_between_pipeline_stages() -> None:
    (stage,) = stages("send_recv", 64 * MB, on(1, 1), h100(), one_way=True).stages
    assert stage.flows == (Hop(0, 1, 64 * MB),)
    assert time_ns("send_recv", 64 * MB, on(1, 1), h100()) == pytest.approx(64e6 / 50, rel=0.05)
    assert stages("send_recv", MB, on(2), h100()).stages[0].flows == ()


# -- times -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "low", "high"),
    [("all_reduce", 440, 500), ("all_gather", 320, 400), ("all_to_all", 280, 360)],
)
def test_an_h100_node_reaches_its_bus_bandwidth(op: Op, low: float, high: float) -> None:
    size = 16 << 30
    busbw = busbw_gb_per_s(op, size, 8, time_ns(op, size, on(8), h100()))
    assert low * 0.9 <= busbw <= high


def test_nics_bound_a_ring_over_nodes() -> None:
    size, slow = 1 << 30, nccl("H100", nics=4, nic_gb_per_s=12.5)
    busbw = busbw_gb_per_s("all_gather", size, 32, time_ns("all_gather", size, on(*[8] * 4), slow))
    assert busbw == pytest.approx(50.0, rel=0.05)


@given(
    st.sampled_from(OPS),
    st.lists(st.integers(1, 8), min_size=1, max_size=5).filter(lambda gpus: sum(gpus) > 1),
)
def test_more_bytes_take_longer_and_the_same_take_the_same(op: Op, gpus: list[int]) -> None:
    """Of one protocol: where NCCL changes to another one, times can fall."""
    simple = h100("ring", "simple")
    times = [time_ns(op, 2**k, on(*gpus), simple) for k in range(20, 32)]
    assert all(a < b for a, b in pairwise(times))
    assert stages(op, 12345, on(*gpus), h100()) == stages(op, 12345, on(*gpus), h100())


# -- tables ----------------------------------------------------------------------------------------

TABLE = table_of(
    Key("NVIDIA H100 80GB HBM3", "all_reduce", 16, 2), [(MB, 100.0), (100 * MB, 1000.0)], "a log"
)


def test_a_table_goes_before_the_model_and_the_output_says_so() -> None:
    with_table = h100(tables=[TABLE])
    planned = stages("all_reduce", 10 * MB, on(8, 8), with_table)
    assert planned.basis == "table"
    expected = 1000.0 * 10**2.5
    assert time_ns("all_reduce", 10 * MB, on(8, 8), with_table) == pytest.approx(expected, rel=1e-4)
    for op, places in (("all_reduce", on(8)), ("all_gather", on(8, 8))):
        assert stages(op, 10 * MB, places, with_table).basis == "model"  # type: ignore[arg-type]
    assert stages("all_reduce", MB, on(8, 8), h100("ring", tables=[TABLE])).basis == "model"


def test_beyond_a_table_the_model_meets_its_edge() -> None:
    with_table = h100(tables=[TABLE])
    assert stages("all_reduce", 200 * MB, on(8, 8), with_table).basis == "scaled"
    for edge, us in ((MB, 100.0), (100 * MB, 1000.0)):
        for size in (edge * (1 - 1e-6), edge * (1 + 1e-6)):
            near = time_ns("all_reduce", size, on(8, 8), with_table)
            assert near == pytest.approx(us * 1000, rel=1e-3)
    one, twice = (time_ns("all_reduce", k * 800 * MB, on(8, 8), with_table) for k in (1, 2))
    assert 1.8 < twice / one < 2.1


# -- gloo ------------------------------------------------------------------------------------------


@given(st.sampled_from(OPS), st.lists(st.sampled_from(list(FOUR.nodes)), min_size=1, max_size=7))
def test_gloo_sends_what_the_planner_of_circuits_expects(op: Op, group: list[str]) -> None:
    places = [(node, rank) for rank, node in enumerate(group)]
    found = _between_tors(stages(op, 1000, places, GLOO), places)
    assert found == pytest.approx(of_collective(FOUR, op, [group], 1000).sent_bytes)


@given(st.sampled_from(OPS), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_so_does_nccl_where_a_group_lies_node_by_node(op: Op, gpus: list[int]) -> None:
    places = [(list(FOUR.nodes)[n], gpu) for n, count in enumerate(gpus) for gpu in range(count)]
    found = _between_tors(stages(op, 1 << 30, places, h100("ring", "simple")), places)
    group = [node for node, _ in places]
    expected = of_collective(FOUR, op, [group], 1 << 30, backend="nccl").sent_bytes
    assert found == pytest.approx(expected)


def _between_tors(planned: Planned, places: Sequence[Place]) -> Floats:
    tors = list(FOUR.tors)
    found = np.zeros((len(tors), len(tors)))
    for stage in planned.stages:
        for a, b, size in stage.flows:
            ends = [tors.index(FOUR.nodes[places[rank][0]].tor) for rank in (a, b)]
            if ends[0] != ends[1]:
                found[ends[0], ends[1]] += size
    return found


def test_gloo_takes_its_steps_and_then_the_network_or_its_copies() -> None:
    planned = stages("all_reduce", MB, on(1, 1, 1, 1), GLOO)
    (stage,) = planned.stages
    assert (planned.algorithm, planned.protocol, planned.basis) == ("ring", "tcp", "model")
    assert stage.latency_ns == 6 * 100_000
    assert stage.local_ns == 1.5 * 1000 * 200
    # 1.5 MB over 1 Gbit/s
    assert time_ns("all_reduce", MB, on(1, 1, 1, 1), GLOO) == 600_000 + 12_000_000
    assert time_ns("all_reduce", MB, on(4), GLOO) == 600_000 + 300_000
    assert len(stages("broadcast", MB, on(1, 1, 1, 1, 1), GLOO).stages) == 3
