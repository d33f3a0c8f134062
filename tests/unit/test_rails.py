"""Servers of several NICs: which GPU uses which, on which ToR, and what that makes of demands."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import BadFile, UsageError
from harness.fabric.demand import (
    Backend,
    Demand,
    nothing,
    of_collective,
    of_moves,
    of_sync,
    of_training,
)
from harness.fabric.links import Link
from harness.fabric.prediction import capacity, electrical_ns, finish_ns
from harness.fabric.topology import Topology, topology_of
from harness.model.bench import Bench, Links, Node, Switch, Tor
from harness.model.bench_rules import bench_problems
from harness.model.load import load_bench
from harness.model.scenario import Op
from harness.model.training.phase import Phase
from harness.run.fabric.work import gather_part, places_of

OPS: tuple[Op, ...] = get_args(Op)
BACKENDS: tuple[Backend, ...] = get_args(Backend)


def bench(rails: list[list[str]], *, gpus: int = 8, **links: object) -> Bench:
    """Nodes ``n0``, ``n1``, ... by the ToRs of their NICs; links carry 1 Gbit/s."""
    return Bench(
        name="rails",
        world="simulated",
        nodes={
            f"n{i}": Node(rails=tuple(tors), emulated_gpus=gpus) for i, tors in enumerate(rails)
        },
        tors={tor: Tor() for tor in dict.fromkeys(tor for tors in rails for tor in tors)},
        links=Links(**links),  # type: ignore[arg-type]
    )


def railed(nodes: int = 4, rails: int = 4, groups: int = 2, **more: object) -> Topology:
    """A ToR for each rail of each group of nodes: ``g0.r0``, ``g0.r1``, ..., ``g1.r0``, ..."""
    of_group = nodes // groups
    plan = [[f"g{i // of_group}.r{k}" for k in range(rails)] for i in range(nodes)]
    return topology_of(bench(plan, **more))  # type: ignore[arg-type]


def rail(tor: str) -> str:
    return tor.partition(".")[2]


def sent(demand: Demand) -> dict[str, float]:
    """Bytes by "from to", where there are any."""
    return {
        f"{demand.tors[i]} {demand.tors[j]}": float(demand.sent_bytes[i, j])
        for i, j in np.argwhere(demand.sent_bytes)
    }


FOUR = railed()
NODES = st.sampled_from(list(FOUR.nodes))
ENDPOINTS = st.one_of(NODES, st.builds(lambda n, k: f"{n}/{k}", NODES, st.integers(0, 3)))
GROUPS = st.lists(st.lists(ENDPOINTS, min_size=1, max_size=9), min_size=1, max_size=3)


# -- who is where ----------------------------------------------------------------------------------


def test_gpus_share_nics_evenly_and_in_order() -> None:
    place = FOUR.nodes["n3"]
    assert [place.nic_of(gpu) for gpu in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert place.endpoint(5) == "n3/2"
    assert place.nics[2].tor == "g1.r2"
    few = railed(rails=8, gpus=4).nodes["n0"]
    assert [few.nic_of(gpu) for gpu in range(4)] == [0, 2, 4, 6]
    assert few.nic_of(4) == 0, "more ranks than GPUs go round again"


def test_a_node_with_one_nic_is_its_own_endpoint() -> None:
    topology = topology_of(bench([["a"], ["b"]]))
    assert topology.nodes["n1"].endpoint(7) == "n1"
    assert [nic.name for nic in topology.nics_of("b")] == ["n1"]


def test_a_tor_has_nics_as_hosts_each_with_an_address() -> None:
    topology = topology_of(bench([["a", "a"], ["a", "b"]]))
    assert [nic.name for nic in topology.nics_of("a")] == ["n0/0", "n0/1", "n1/0"]
    assert [place.name for place in topology.nodes_of("a")] == ["n0", "n1"]
    nics = [nic for tor in topology.tors for nic in topology.nics_of(tor)]
    assert len({nic.address for nic in nics}) == 4
    assert topology.electrical_mbit_per_s("a") == 3 * 1000 / 4
    nics_mbit = capacity(topology, ()).nics
    assert nics_mbit[0] == pytest.approx(3 * nics_mbit[1])


def test_routes_over_parallel_links_are_given_to_nics_in_turn() -> None:
    tors = {tor: Tor(driver="netlink") for tor in ("a", "b")}
    switch = Switch(driver="polatis-scpi", url="tcp://", ports="1-32")
    cables = {f"{tor}:u{k}": f"o:{k + 2 * i}" for i, tor in enumerate(tors) for k in (1, 2)}
    nodes = {"n0": Node(tor="a"), "n1": Node(rails=("b", "b"))}
    topology = topology_of(
        Bench(
            name="x", world="simulated", nodes=nodes, tors=tors, switches={"o": switch},
            cables=cables,
        )
    )  # fmt: skip
    a, b = ([up for up in topology.uplinks if up.tor == tor] for tor in tors)
    routes = topology.routes(frozenset(Link(*pair) for pair in zip(a, b, strict=True)))["a"]
    way_of = {route.prefix: {hop.device for hop in route.hops} for route in routes}
    first, second = (f"{nic.address}/32" for nic in topology.nics_of("b"))
    assert way_of == {topology.tors["b"].prefix: {"u1", "u2"}, first: {"u1"}, second: {"u2"}}


@pytest.mark.parametrize(
    ("endpoint", "told"),
    [
        ("n9", "node 'n9' is not of this bench, whose nodes are n0, n1, n2, n3$"),
        ("n9/1", "node 'n9' is not of this bench"),
        ("n1/4", "'n1/4': n1 has NICs 0 to 3"),
        ("n1/", "'n1/': n1 has NICs 0 to 3"),
        ("n1/-1", "'n1/-1': n1 has NICs 0 to 3"),
    ],
)
def test_an_endpoint_that_is_not_there_is_named(endpoint: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        of_moves(FOUR, [(endpoint, "n0", 1.0)])


# -- demands ---------------------------------------------------------------------------------------


def test_a_node_sends_over_all_rails_each_within_itself() -> None:
    assert sent(of_sync(FOUR, [("n0", "n2")], 8e6)) == {f"g0.r{k} g1.r{k}": 2e6 for k in range(4)}
    assert of_moves(FOUR, [("n0", "n1", 8e6)]) == nothing(FOUR), "both are on the same ToRs"


def test_a_rank_sends_over_its_own_rail() -> None:
    assert sent(of_moves(FOUR, [("n0/1", "n2/1", 5.0)])) == {"g0.r1 g1.r1": 5.0}


def test_nothing_changes_rails_on_the_network() -> None:
    assert sent(of_moves(FOUR, [("n0/1", "n2/3", 5.0)])) == {"g0.r3 g1.r3": 5.0}
    assert of_moves(FOUR, [("n0/1", "n0/3", 5.0)]) == nothing(FOUR), "NVLink has it"


def test_gathered_weights_come_over_all_rails() -> None:
    part = gather_part(FOUR, ["n0", "n1", "n2", "n3"], ["n0"], 16e6)
    assert sent(part.comms[0].demand) == {f"g1.r{k} g0.r{k}": 2e6 for k in range(4)}


def test_nodes_of_fewer_nics_share_each_of_them() -> None:
    topology = topology_of(bench([["a0", "a1", "a2", "a3"], ["b0", "b1"], ["c"]]))
    assert sent(of_moves(topology, [("n0", "n1", 8.0)])) == {
        "a0 b0": 2.0, "a1 b0": 2.0, "a2 b1": 2.0, "a3 b1": 2.0
    }  # fmt: skip
    assert sent(of_moves(topology, [("n0/3", "n2", 8.0)])) == {"a3 c": 8.0}
    assert sent(of_moves(topology, [("n2", "n0", 8.0)])) == {f"c a{k}": 2.0 for k in range(4)}


def test_ranks_of_a_training_step_are_on_their_rails() -> None:
    """DP over four nodes of two GPUs: a ring for each GPU, on its own NIC."""
    topology = railed(rails=2, gpus=2)
    places = places_of(topology, {f"n{i}": (2 * i, 2 * i + 1) for i in range(4)})
    assert places[5] == "n2/1"
    groups = ((0, 2, 4, 6), (1, 3, 5, 7))
    phase = Phase(
        name="grads", op="all_reduce", axis="dp", groups=groups, bytes=4_000_000, gap_ns=0, times=1
    )
    (comm,) = of_training(topology, [phase], places, backend="nccl")
    ring = {f"g0.r{k} g1.r{k}": 6e6 for k in range(2)}
    assert sent(comm.demand) == {**ring, **{f"g1.r{k} g0.r{k}": 6e6 for k in range(2)}}


def test_a_ring_of_nccl_over_whole_nodes_has_a_channel_for_each_nic() -> None:
    ranks = [f"n{i}/{k}" for i in (0, 2) for k in range(4)]
    ring = of_collective(FOUR, "all_reduce", [ranks], 8e6, backend="nccl")
    there = {f"g0.r{k} g1.r{k}": 2 * 7 / 8 * 2e6 for k in range(4)}
    assert sent(ring) == {**there, **{" ".join(key.split()[::-1]): n for key, n in there.items()}}
    assert len(sent(of_collective(FOUR, "all_reduce", [ranks], 8e6, backend="gloo"))) == 2


def test_hierarchical_all_reduce_sends_a_share_of_the_size_on_each_rail() -> None:
    ranks = [f"n{i}/{k}" for i in range(4) for k in range(4)]
    found = of_collective(FOUR, "all_reduce", [ranks], 8e6, hierarchical=True)
    assert found.total_bytes == 2 * 8e6
    assert set(sent(found).values()) == {2e6}


@given(op=st.sampled_from(OPS), groups=GROUPS, backend=st.sampled_from(BACKENDS))
def test_demands_stay_on_their_rails(op: Op, groups: list[list[str]], backend: Backend) -> None:
    for hierarchical in (False, True):
        found = of_collective(FOUR, op, groups, 1e6, backend=backend, hierarchical=hierarchical)
        assert all(rail(a) == rail(b) for a, b in map(str.split, sent(found)))


@given(op=st.sampled_from(OPS), groups=GROUPS, backend=st.sampled_from(BACKENDS))
def test_rails_share_out_what_one_nic_would_send(
    op: Op, groups: list[list[str]], backend: Backend
) -> None:
    """All that goes from server to server is as much as where each has one NIC on one ToR."""
    one = topology_of(bench([["g0"], ["g0"], ["g1"], ["g1"]]))
    nodes = [[end.partition("/")[0] for end in group] for group in groups]
    there = of_collective(one, op, nodes, 1e6, backend=backend)
    here = of_collective(FOUR, op, groups, 1e6, backend=backend).sent_bytes
    assert np.allclose(here.reshape(2, 4, 2, 4).sum((1, 3)), there.sent_bytes)


# -- electrical paths ------------------------------------------------------------------------------


def test_without_an_electrical_path_next_to_nothing_crosses() -> None:
    dark = railed(electrical="none", oversubscription=1.0)
    lit = railed(oversubscription=1.0)
    moved = of_moves(lit, [("n0", "n2", 1e6)])
    assert not dark.has_electrical("g0.r0")
    assert electrical_ns(dark, moved) == pytest.approx(1e6 * electrical_ns(lit, moved))


def ring_of_four(*, forwarding: bool) -> tuple[Topology, list[Link]]:
    """Four servers of two NICs, each a ToR of its own, in a ring of circuits."""
    nodes = {f"n{i}": Node(rails=(f"t{i}",) * 2) for i in range(4)}
    cables = {f"t{i}:u{k + 1}": f"o{(i + k) % 2}:{i + 1}" for i in range(4) for k in range(2)}
    switches = {
        name: Switch(driver="polatis-scpi", url="tcp://", ports="1-32") for name in ("o0", "o1")
    }
    topology = topology_of(
        Bench(
            name="ring", world="simulated", nodes=nodes, tors={f"t{i}": Tor() for i in range(4)},
            switches=switches, cables=cables,
            links=Links(electrical="none", forwarding=forwarding, oversubscription=1.0),
        )
    )  # fmt: skip
    pairs = [("t0", "t1", "o0"), ("t1", "t2", "o1"), ("t2", "t3", "o0"), ("t3", "t0", "o1")]
    links = []
    for a, b, switch in pairs:
        ends = topology.uplink(a, switch), topology.uplink(b, switch)
        assert ends[0] is not None
        assert ends[1] is not None
        links.append(Link(ends[0], ends[1]))
    return topology, links


def test_hosts_that_forward_take_the_shortest_way_over_circuits() -> None:
    topology, links = ring_of_four(forwarding=True)
    near = of_moves(topology, [("n0", "n1", 1e6)])
    far = of_moves(topology, [("n0", "n2", 1e6)])
    assert finish_ns(topology, far, links) == pytest.approx(finish_ns(topology, near, links))
    through = near + far + of_moves(topology, [("n1", "n2", 1e6)])
    assert finish_ns(topology, through, links) == pytest.approx(
        2 * finish_ns(topology, near, links)
    )
    still, links = ring_of_four(forwarding=False)
    assert finish_ns(still, far, links) > 1e5 * finish_ns(still, near, links)


def test_forwarding_of_a_stack_is_that_of_each() -> None:
    topology, links = ring_of_four(forwarding=True)
    demands = [of_moves(topology, [("n0", f"n{k}", k * 1e6), ("n3", "n1", 2e6)]) for k in (1, 2, 3)]
    whole = capacity(topology, links).finish_ns(np.stack([each.sent_bytes for each in demands]))
    assert whole.tolist() == [finish_ns(topology, each, links) for each in demands]


# -- bench files -----------------------------------------------------------------------------------

EMULATED = (Path(__file__).parents[2] / "scenarios/benches/emulated-4.toml").read_text()


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            'tor = "tor1"',
            'rails = ["tor1", "tor2"]',
            "nodes.n1.rails: 2 NICs, which only a node of",
        ),
        ('tor = "tor1"', "", "nodes.n1.tor: missing; name the ToR"),
        (
            'tor = "tor1"',
            'tor = "tor1"\nrails = ["tor1"]',
            "nodes.n1.rails: the node names tor, too",
        ),
        ('tor = "tor1"', 'rails = ["tor9"]', "nodes.n1.rails: no ToR 'tor9'; did you mean"),
        ("[links]", '[links]\nelectrical = "none"', 'links.electrical: "none" is for simulated'),
        ("[links]", "[links]\nforwarding = true", "links.forwarding: only a simulated bench"),
    ],
)
def test_what_an_emulated_bench_cannot_have_is_told(
    tmp_path: Path, old: str, new: str, told: str
) -> None:
    assert old in EMULATED
    path = tmp_path / "bench.toml"
    path.write_text(EMULATED.replace(old, new, 1))
    with pytest.raises(BadFile) as caught:
        load_bench(path)
    assert told in "\n".join(caught.value.problems)


def test_a_tor_is_of_one_rail_where_the_electrical_path_joins_rails() -> None:
    assert not [
        p for p in bench_problems(bench([["a", "b"]] * 2, electrical="rail")) if "rail" in p
    ]
    told = "\n".join(bench_problems(bench([["a", "b"], ["b", "a"]], electrical="rail")))
    assert "nodes.n1.rails: NIC 0 is on b, which has NICs 1 of others" in told
