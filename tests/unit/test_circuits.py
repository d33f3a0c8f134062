"""Shapes become links: rings, rounds of pairs, listed circuits, and what must stay electrical."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.fabric.circuits import factor_round, plan_shape, ring_colours
from harness.fabric.links import Link
from harness.fabric.topology import Topology, topology_of
from harness.model.bench import Bench, Node, Switch, Tor
from harness.model.generated import Numbers, bench_of
from harness.model.load import load_bench
from harness.model.scenario import Shape

QUICKSTART = Path(__file__).parents[2] / "scenarios/benches/emulated-4.toml"


def topology(tors: int, switches: int, *, uplinks: int | None = None) -> Topology:
    """A bench of `tors` ToRs, each with one uplink on each of `switches` switches."""
    per_tor = uplinks or switches
    return topology_of(
        Bench(
            name="made",
            world="emulated",
            nodes={f"n{i}": Node(tor=f"t{i}") for i in range(tors)},
            tors={f"t{i}": Tor(uplinks=per_tor, driver="netlink") for i in range(tors)},
            switches={
                f"s{k}": Switch(driver="polatis-scpi", url="tcp://", ports="1-8,17-24")
                for k in range(switches)
            },
            cables={
                f"t{i}:u{u + 1}": f"s{u % switches}:{1 + i + tors * (u // switches)}"
                for i in range(tors)
                for u in range(per_tor)
            },
        )
    )


def edges(links: object) -> set[frozenset[str]]:
    return {frozenset((link.a.tor, link.b.tor)) for link in links}  # type: ignore[attr-defined]


def test_a_ring_of_four_uses_two_switches_and_rotating_it_moves_every_circuit() -> None:
    four = topology_of(load_bench(QUICKSTART))
    ring = plan_shape(four, "ring", Shape(template="ring"))
    turned = plan_shape(four, "turned", Shape(template="ring", rotate=1))
    assert not ring.unserved
    assert edges(ring.links) == edges(turned.links)
    assert len(ring.links) == 4
    assert not ring.links & turned.links


def test_an_odd_ring_needs_a_third_switch_or_leaves_an_edge_electrical() -> None:
    three_switches = plan_shape(topology(5, 3), "ring", Shape(template="ring"))
    assert len(three_switches.links) == 5
    assert not three_switches.unserved
    two_switches = plan_shape(topology(5, 2), "ring", Shape(template="ring"))
    assert len(two_switches.links) == 4
    assert two_switches.unserved == (("t0", "t4"),)


@given(st.integers(0, 9))
def test_the_edges_of_a_ring_are_dealt_into_matchings(count: int) -> None:
    tors = [f"t{i}" for i in range(count)]
    colours = ring_colours(tors)
    for colour in colours:
        ends = [tor for edge in colour for tor in edge]
        assert len(ends) == len(set(ends))
    dealt = [frozenset(edge) for colour in colours for edge in colour]
    assert len(dealt) == len(set(dealt)) == (count if count > 2 else max(0, count - 1))


@given(st.integers(2, 12))
def test_the_rounds_of_pairs_meet_everyone_exactly_once(count: int) -> None:
    tors = [f"t{i}" for i in range(count)]
    rounds = count - 1 if count % 2 == 0 else count
    met = [frozenset(pair) for r in range(rounds) for pair in factor_round(tors, r)]
    assert len(met) == len(set(met)) == count * (count - 1) // 2


def test_a_map_carries_each_link_both_ways_and_no_port_twice() -> None:
    four = topology_of(load_bench(QUICKSTART))
    ring = plan_shape(four, "ring", Shape(template="ring"))
    assert list(four.matching(ring.links, "agg0")) == [(1, 18), (2, 17), (3, 20), (4, 19)]


def test_listed_circuits_may_name_their_uplinks() -> None:
    two = topology(2, 1, uplinks=2)
    crossed = Shape(circuits=("t0:u1-t1:u2@s0", "t0:u2-t1:u1@s0"))
    plan = plan_shape(two, "crossed", crossed)
    assert {(link.a.device, link.b.device) for link in plan.links} == {("u1", "u2"), ("u2", "u1")}


@pytest.mark.parametrize("text", ["t0-t9@s0", "t0-t1@s9", "t0:u7-t1@s0"])
def test_a_listed_circuit_that_cannot_be_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match=text):
        plan_shape(topology(2, 1), "wrong", Shape(circuits=(text,)))


def test_one_uplink_carries_one_circuit() -> None:
    with pytest.raises(UsageError, match="taken"):
        plan_shape(topology(3, 1), "wrong", Shape(circuits=("t0-t1@s0", "t0-t2@s0")))


def test_routes_lead_each_way_and_tors_without_links_are_electrical() -> None:
    three = topology(3, 1)
    plan = plan_shape(three, "pair", Shape(circuits=("t0-t1@s0",)))
    routes = three.routes(plan.links)
    [there], [back] = routes["t0"], routes["t1"]
    assert there.prefix == three.tors["t1"].prefix
    assert back.prefix == three.tors["t0"].prefix
    assert there.hops[0].via == three.uplinks[1].address
    assert routes["t2"] == frozenset()


def test_parallel_links_share_flows_and_each_host_has_one_of_them() -> None:
    bench = load_bench(QUICKSTART)
    nodes = {f"n{i}": Node(tor=f"tor{i // 3}") for i in range(6)}
    topology = topology_of(msgspec.structs.replace(bench, nodes=nodes))
    both = Shape(circuits=("tor0-tor1@agg0", "tor0-tor1@agg1"))
    routes = topology.routes(plan_shape(topology, "both", both).links)
    hops = {route.prefix: route.hops for route in routes["tor0"]}
    assert len(hops.pop(topology.tors["tor1"].prefix)) == 2
    devices = [hops[f"{topology.nodes[n].address}/32"][0].device for n in ("n3", "n4", "n5")]
    assert devices == ["u1", "u2", "u1"]


def test_a_one_way_link_is_a_route_for_its_sender_only() -> None:
    three = topology(3, 1)
    a, b = three.uplinks[:2]
    routes = three.routes(frozenset({Link(a, b, both=False)}))
    assert [route.prefix for route in routes["t0"]] == [three.tors["t1"].prefix]
    assert routes["t1"] == frozenset()


def test_a_tor_that_is_not_steered_gets_no_routes() -> None:
    bench = load_bench(QUICKSTART)
    tors = {name: Tor(uplinks=2, driver="none") for name in bench.tors}
    unsteered = topology_of(msgspec.structs.replace(bench, tors=tors))
    plan = plan_shape(unsteered, "ring", Shape(template="ring"))
    assert unsteered.routes(plan.links) == {}


def test_a_live_bench_must_name_both_ports_of_a_cable() -> None:
    bench = msgspec.structs.replace(load_bench(QUICKSTART), world="live")
    with pytest.raises(UsageError, match="name both ports"):
        topology_of(bench)


def test_without_switches_everything_stays_electrical() -> None:
    bare = topology_of(
        Bench(
            name="bare",
            world="emulated",
            nodes={"a": Node(tor="t0"), "b": Node(tor="t1")},
            tors={"t0": Tor(), "t1": Tor()},
        )
    )
    assert plan_shape(bare, "ring", Shape(template="ring")).unserved == (("t0", "t1"),)


def two_pods(*, duplex: bool = True) -> Topology:
    numbers = Numbers(
        roles=("train", "generate"), tors_per_pod=2, nodes_per_tor=1, uplinks_per_tor=1,
        aggregation_planes=1, core_planes=1, trunks_per_pod=2, duplex=duplex,
    )  # fmt: skip
    return topology_of(bench_of(numbers))


def test_listed_circuits_between_pods_take_a_trunk_of_each_to_the_core() -> None:
    plan = plan_shape(two_pods(), "sync", Shape(circuits=("tor0-tor2@core0", "tor3-tor1@core0")))
    assert {link.switches for link in plan.links} == {("agg0", "core0", "agg1")}
    trunks = [trunk for link in plan.links for trunk in link.trunks]
    assert len(trunks) == len(set(trunks)) == 4
    assert len(two_pods().matching(plan.links, "core0")) == 4


def test_an_aggregation_switch_of_one_pod_joins_no_tor_of_another() -> None:
    with pytest.raises(UsageError, match="tor0-tor2@agg0"):
        plan_shape(two_pods(), "wrong", Shape(circuits=("tor0-tor2@agg0",)))


def test_under_two_tiers_shapes_are_laid_through_trunks() -> None:
    bench = load_bench(QUICKSTART.with_name("two-tier.toml"))
    two_tier = topology_of(bench)
    for shape in (Shape(template="ring"), Shape(template="pairs", rotate=1)):
        plan = plan_shape(two_tier, "shape", shape)
        assert not plan.unserved
        assert any("core0" in link.switches or "core1" in link.switches for link in plan.links)
        for switch in two_tier.switches:
            two_tier.matching(plan.links, switch)


@pytest.mark.parametrize("rotate", [0, 1, 2])
def test_under_two_tiers_of_simplex_switches_shapes_lead_both_ways(rotate: int) -> None:
    plan = plan_shape(two_pods(duplex=False), "x", Shape(template="pairs", rotate=rotate))
    assert not plan.unserved
    there = {(link.a.tor, link.b.tor) for link in plan.links}
    assert len(there) == 4
    assert there == {(b, a) for a, b in there}
