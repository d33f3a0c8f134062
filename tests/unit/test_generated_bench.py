"""The table [generated] of a bench file: what follows from few numbers, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import BadFile
from harness.fabric.topology import Topology, topology_of
from harness.model.bench import Bench, Fabric, Generated, Role, Simulation
from harness.model.bench_rules import bench_problems
from harness.model.generated_rules import expanded, generated_problems
from harness.model.load import load_bench

SHIPPED = Path(__file__).parents[2] / "scenarios/benches"
FABRICS: tuple[Fabric, ...] = get_args(Fabric)


def bench(fabric: Fabric, gpus: int = 2048, **more: object) -> Bench:
    table = Generated(fabric=fabric, gpus=gpus, **more)  # type: ignore[arg-type]
    simulation = Simulation(calibration="h800.toml")
    return Bench(name="made", world="simulated", generated=table, simulation=simulation)


def made(fabric: Fabric, gpus: int = 2048, **more: object) -> Topology:
    found = bench(fabric, gpus, **more)
    assert not list(generated_problems(found))
    return topology_of(expanded(found))


def problems(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "bench.toml"
    path.write_text(text)
    with pytest.raises(BadFile) as caught:
        load_bench(path)
    return caught.value.problems


def file(table: str, *, world: str = "simulated", rest: str = "") -> str:
    launcher = 'launcher = "namespaces"\n' if world == "emulated" else ""
    return (
        f'name = "x"\nworld = "{world}"\n{launcher}{rest}\n'
        f'[simulation]\ncalibration = "c.toml"\n[generated]\n{table}\n'
    )


# -- what follows ----------------------------------------------------------------------------------


def test_an_rfabric_has_the_proportions_of_railocs3() -> None:
    topology = made("rfabric", gpus=512)
    assert {pod: len(tors) for pod, tors in topology.pods.items()} == {"pod0": 8, "pod1": 8}
    assert {len(topology.nics_of(tor)) for tor in topology.tors} == {32}
    assert set(Counter(up.tor for up in topology.uplinks).values()) == {32}
    assert Counter(plane.tier for plane in topology.planes.values()) == {
        "aggregation": 2 * 32, "core": 8
    }  # fmt: skip
    assert len(topology.trunks) == 2 * 256
    assert set(Counter((t.aggregation, t.core) for t in topology.trunks).values()) == {1}
    assert topology.nodes["n3"].rails == tuple(f"tor{k}" for k in range(8))
    assert topology.nodes["n40"].rails == tuple(f"tor{8 + k}" for k in range(8))


def test_an_rfabric_without_rails_has_all_nics_of_a_server_on_one_tor() -> None:
    topology = made("rfabric", gpus=512, rails=1)
    assert all(len(set(place.rails)) == 1 for place in topology.nodes.values())
    assert {len(topology.nodes_of(tor)) for tor in topology.tors} == {4}
    assert {len(topology.nics_of(tor)) for tor in topology.tors} == {32}


def test_each_number_can_be_said_instead() -> None:
    topology = made(
        "rfabric", gpus=64, servers_per_pod=4, servers_per_tor=2, rails=4, uplinks_per_tor=6,
        aggregation_planes=3, trunks_per_pod=12, core_planes=2, switching_ms=0.01,
        circuits="simplex", oversubscription=2.0, link_gbit_per_s=800.0,
    )  # fmt: skip
    assert {len(tors) for tors in topology.pods.values()} == {2 * 4}
    assert {len(topology.nics_of(tor)) for tor in topology.tors} == {2 * 2}
    assert set(Counter(up.tor for up in topology.uplinks).values()) == {6}
    assert len(topology.trunks) == 2 * 12
    tiers = Counter(plane.tier for plane in topology.planes.values())
    assert tiers == {"aggregation": 2 * 3, "core": 2}
    assert {(p.switching_ns, p.duplex) for p in topology.planes.values()} == {(10_000, False)}
    assert (topology.rates.link_mbit_per_s, topology.rates.oversubscription) == (800_000.0, 2.0)


def test_without_a_core_pods_share_aggregation_switches() -> None:
    topology = made("rfabric", gpus=64, core_planes=0)
    assert not topology.trunks
    pods = {topology.tors[up.tor].pod for up in topology.by_switch["agg0"]}
    assert pods == {"pod0", "pod1"}


def test_fabrics_without_circuits() -> None:
    tree = made("fat-tree", oversubscription=4.0)
    assert {len(topology_nodes) for topology_nodes in map(tree.nodes_of, tree.tors)} == {4}
    optimised, only = made("rail-optimised"), made("rail-only")
    for topology in (optimised, only):
        assert all(len(set(place.rails)) == 8 for place in topology.nodes.values())
        assert topology.rates.oversubscription == 1.0
    assert (optimised.rates.electrical, only.rates.electrical) == ("spine", "rail")
    ideal = made("ideal")
    assert {len(ideal.nics_of(tor)) for tor in ideal.tors} == {2048}
    for topology in (tree, optimised, only, ideal):
        assert not topology.switches
        assert not topology.uplinks


def test_servers_of_topoopt_have_all_nics_on_planes_that_all_share() -> None:
    topology = made("topoopt")
    assert topology.rates.electrical == "none"
    assert topology.rates.forwarding
    assert len(topology.tors) == len(topology.nodes) == 256
    assert {len(ups) for ups in topology.by_switch.values()} == {256}
    assert set(Counter(up.tor for up in topology.uplinks).values()) == {8}


def test_servers_of_mixnet_share_out_their_nics() -> None:
    topology = made("mixnet")
    assert set(Counter(up.tor for up in topology.uplinks).values()) == {6}
    for ups in topology.by_switch.values():
        region = {topology.tors[up.tor].pod for up in ups}
        servers = {up.tor for up in ups}
        assert len(region) == 1, "no circuit leads from region to region"
        assert len(servers) * 8 == 64
    two_nics = 2 * topology.rates.link_mbit_per_s
    assert {topology.electrical_mbit_per_s(tor) for tor in topology.tors} == {two_nics}


@pytest.mark.parametrize("fabric", FABRICS)
def test_roles_are_shared_out_to_the_first_and_the_last_servers(fabric: Fabric) -> None:
    topology = made(fabric, gpus=192, roles=("train", "generate", "generate"))
    pods = [place.pod for place in topology.nodes.values()]
    assert pods == ["train"] * 8 + ["generate"] * 16


@settings(max_examples=150, deadline=None)
@given(
    fabric=st.sampled_from(FABRICS),
    per_server=st.sampled_from([1, 2, 4, 8]),
    nics=st.sampled_from([None, 1, 2, 3, 8]),
    servers=st.integers(1, 40),
    roles=st.lists(st.sampled_from(get_args(Role)), min_size=1, max_size=3),
)
def test_what_can_be_dealt_is_a_bench_without_problems(
    fabric: Fabric, per_server: int, nics: int | None, servers: int, roles: list[Role]
) -> None:
    gpus = servers * per_server * len(roles)
    asked = bench(
        fabric, gpus, gpus_per_server=per_server, nics_per_server=nics, roles=tuple(roles)
    )
    if told := list(generated_problems(asked)):
        assert all(problem.startswith("generated") for problem in told)
        return
    found = expanded(asked)
    assert not list(bench_problems(found))
    topology = topology_of(found)
    nodes = found.nodes.values()
    assert sum(node.emulated_gpus for node in nodes) == gpus
    assert Counter(node.pod for node in nodes) == Counter(r for r in roles for _ in range(servers))
    assert {len(place.nics) for place in topology.nodes.values()} == {nics or per_server}
    addresses = [nic.address for tor in topology.tors for nic in topology.nics_of(tor)]
    addresses += [up.address for up in topology.uplinks]
    assert len(set(addresses)) == len(addresses)


def test_8192_gpus_are_laid_out() -> None:
    topology = made("rfabric", gpus=8192)
    assert len(topology.nodes) == 1024
    assert len(topology.tors) == 256
    assert sum(len(ups) for ups in topology.by_switch.values()) == 8192
    assert sum(len(trunks) for trunks in topology.trunks_of.values()) == 2 * 8192
    assert {len(topology.nics_of(tor)) for tor in topology.tors} == {32}


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "gpus"), [("sim-64", 64), ("sim-2048", 2048)])
def test_shipped_benches_are_as_large_as_they_say(name: str, gpus: int) -> None:
    found = load_bench(SHIPPED / f"{name}.toml")
    assert found.name == name
    of_role = Counter(node.pod for node in found.nodes.values() for _ in range(node.emulated_gpus))
    assert of_role == {"train": gpus // 2, "generate": gpus // 2}
    assert found.simulation.calibration == str(SHIPPED / "../calibrations/h800.toml")


def test_a_generated_bench_can_be_emulated(tmp_path: Path) -> None:
    path = tmp_path / "bench.toml"
    table = 'fabric = "rfabric"\ngpus = 8\ngpus_per_server = 2\nnics_per_server = 1'
    path.write_text(file(table, world="emulated"))
    found = load_bench(path)
    assert [node.tor for node in found.nodes.values()] == ["tor0", "tor0", "tor1", "tor1"]
    assert not list(bench_problems(msgspec.structs.replace(found, generated=None)))


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ('fabric = "rfabrik"\ngpus = 64', "generated.fabric: 'rfabrik' is not one of"),
        ('fabric = "rfabric"', "generated.gpus: missing"),
        ('fabric = "rfabric"\ngpus = 64\ngpu = 1', "generated.gpu: unknown key"),
        ('fabric = "ideal"\ngpus = 0', "generated.gpus: expected 1 to 65536"),
        ('fabric = "ideal"\ngpus = 60', "gpus: 60 cannot be dealt evenly to 2 roles .*; 64 can"),
        ('fabric = "ideal"\ngpus = 8', "gpus: 8 cannot be dealt evenly to 2 roles .*; 16 can"),
        ('fabric = "ideal"\ngpus = 64\nroles = []', "generated.roles: none"),
        (
            'fabric = "fat-tree"\ngpus = 1056',
            "servers_per_pod: the 66 servers of a role .* pods of 32; servers_per_pod = 33 can",
        ),
        (
            'fabric = "fat-tree"\ngpus = 96',
            "servers_per_tor: the 6 servers of a pod .* ToRs of 4; servers_per_tor = 3 can",
        ),
        ('fabric = "rfabric"\ngpus = 64\nrails = 3', "rails: the 8 NICs .* 3; rails = 2 can"),
        (
            'fabric = "rfabric"\ngpus = 64\naggregation_planes = 3',
            "generated: uplinks_per_tor = 4 .* aggregation_planes = 3; uplinks_per_tor = 3 can",
        ),
        ('fabric = "rfabric"\ngpus = 64\ncore_planes = 5', "trunks_per_pod = 32 .* core_planes"),
        ('fabric = "rfabric"\ngpus = 64\nuplinks_per_tor = 0', "uplinks_per_tor: expected 1"),
        ('fabric = "fat-tree"\ngpus = 64\nswitching_ms = 1.0', "switching_ms: it changes nothing"),
        ('fabric = "ideal"\ngpus = 64\noversubscription = 2.0', "oversubscription: it changes"),
        ('fabric = "mixnet"\ngpus = 64\noversubscription = 2.0', "oversubscription: it changes"),
        ('fabric = "mixnet"\ngpus = 2048\nservers_per_pod = 16', "servers_per_pod: 16; 8 are the"),
        ('fabric = "mixnet"\ngpus = 64\nuplinks_per_tor = 8', "uplinks_per_tor: 8 of the 8 NICs"),
        ('fabric = "mixnet"\ngpus = 64\nnics_per_server = 1', "uplinks_per_tor: 0 of the 1 NICs"),
        ('fabric = "topoopt"\ngpus = 65536\ngpus_per_server = 1', "expected 1 to 2048"),
        ('fabric = "ideal"\ngpus = 64\nlink_gbit_per_s = 0.0', "link_gbit_per_s: expected more"),
    ],
)
def test_what_does_not_fit_is_told_with_what_would(tmp_path: Path, table: str, told: str) -> None:
    with pytest.raises(BadFile, match=told):
        raise BadFile("bench.toml", problems(tmp_path, file(table)))


@pytest.mark.parametrize(
    ("rest", "told"),
    [
        ('[nodes.n0]\ntor = "t"\n[tors.t]', "nodes: the table [generated] stands for it"),
        ("[links]\nlink_mbit_per_s = 5.0", "links.link_mbit_per_s: the table [generated] says"),
    ],
)
def test_a_file_says_a_thing_once(tmp_path: Path, rest: str, told: str) -> None:
    table = 'fabric = "ideal"\ngpus = 16'
    assert told in "\n".join(problems(tmp_path, file(table, rest=rest)))


def test_what_ports_do_can_be_said_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "bench.toml"
    path.write_text(file('fabric = "rfabric"\ngpus = 16', rest="[links]\nnic_hold_ms = 5700.0"))
    assert {plane.hold_ns for plane in topology_of(load_bench(path)).planes.values()} == {5.7e9}


@pytest.mark.parametrize(
    ("world", "table", "told"),
    [
        ("live", 'fabric = "ideal"\ngpus = 16', "a live bench says what it has, node by node"),
        ("emulated", 'fabric = "mixnet"\ngpus = 16', '"mixnet" can only be simulated'),
        ("emulated", 'fabric = "fat-tree"\ngpus = 16', "write nics_per_server = 1"),
    ],
)
def test_what_is_not_simulated_has_less(tmp_path: Path, world: str, table: str, told: str) -> None:
    assert told in "\n".join(problems(tmp_path, file(table, world=world)))


def test_a_simulated_bench_names_a_calibration(tmp_path: Path) -> None:
    text = 'name = "x"\nworld = "simulated"\n[generated]\nfabric = "ideal"\ngpus = 16\n'
    (told,) = problems(tmp_path, text)
    assert told.startswith("simulation.calibration: missing; ")
    assert 'calibration = "../calibrations/' in told
