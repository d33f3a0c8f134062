"""Benches from a few numbers: the reference, even stripes, and numbers that do not fit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.fabric.topology import topology_of
from harness.model.bench import Bench, Simulation
from harness.model.bench_rules import bench_problems
from harness.model.generated import REFERENCE, Numbers, bench_of


def problems(bench: Bench) -> list[str]:
    """What is wrong with it, once it names a calibration, which is nothing that is generated."""
    named = msgspec.structs.replace(bench, simulation=Simulation(calibration="h800.toml"))
    return list(bench_problems(named))


def test_the_reference_has_the_published_numbers() -> None:
    bench = bench_of(REFERENCE)
    assert not problems(bench)
    topology = topology_of(bench)
    assert {pod: len(tors) for pod, tors in topology.pods.items()} == {"pod0": 8, "pod1": 8}
    gpus = Counter(node.pod for node in bench.nodes.values() for _ in range(node.emulated_gpus))
    assert gpus == {"train": 256, "generate": 256}
    assert set(Counter(up.tor for up in topology.uplinks).values()) == {32}
    pod_of = {up.switch: topology.tors[up.tor].pod for up in topology.uplinks}
    assert Counter(pod_of.values()) == {"pod0": 32, "pod1": 32}
    assert Counter(pod_of[t.aggregation] for t in topology.trunks) == {"pod0": 256, "pod1": 256}
    tiers = Counter(plane.tier for plane in topology.planes.values())
    assert tiers == {"aggregation": 64, "core": 8}
    assert {len(topology.nodes_of(tor)) for tor in topology.tors} == {32}
    assert set(Counter((t.aggregation, t.core) for t in topology.trunks).values()) == {1}


def test_without_a_core_all_pods_hang_on_the_same_planes() -> None:
    numbers = Numbers(
        roles=("train", "generate"), tors_per_pod=2, nodes_per_tor=1, uplinks_per_tor=4,
        aggregation_planes=2,
    )  # fmt: skip
    topology = topology_of(bench_of(numbers))
    assert topology.switches == ("agg0", "agg1")
    assert Counter(up.tor for up in topology.by_switch["agg0"]) == {f"tor{k}": 2 for k in range(4)}


@settings(max_examples=40, deadline=None)
@given(
    pods=st.integers(1, 3), tors=st.integers(1, 4), nodes=st.integers(1, 4),
    planes=st.integers(1, 4), per_plane=st.integers(1, 2), cores=st.integers(0, 3),
    trunks=st.integers(1, 2), duplex=st.booleans(), emulated=st.booleans(),
)  # fmt: skip
def test_what_fits_is_a_bench_without_problems_and_evenly_striped(
    pods: int, tors: int, nodes: int, planes: int, per_plane: int, cores: int, trunks: int,
    duplex: bool, emulated: bool,
) -> None:  # fmt: skip
    cores = cores if pods > 1 else 0
    numbers = Numbers(
        roles=("train",) * pods, tors_per_pod=tors, nodes_per_tor=nodes, duplex=duplex,
        uplinks_per_tor=planes * per_plane, aggregation_planes=planes, core_planes=cores,
        trunks_per_pod=trunks * planes * cores,
    )  # fmt: skip
    bench = bench_of(numbers, world="emulated" if emulated else "simulated")
    assert not problems(bench)
    topology = topology_of(bench)
    assert set(Counter((up.tor, up.switch) for up in topology.uplinks).values()) == {per_plane}
    for switch in topology.switches:
        fibres = [*topology.by_switch[switch], *topology.trunks_of[switch]]
        assert 2 * len(fibres) == len(topology.ours[switch])
        assert topology.planes[switch].duplex == duplex
    between = Counter((t.aggregation, t.core) for t in topology.trunks)
    assert set(between.values()) <= {trunks}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"roles": ()}, "roles: expected"),
        ({"roles": ("train", "rest")}, "roles: expected"),
        ({"tors_per_pod": 0}, "tors_per_pod = 0: expected 1 to 2048"),
        ({"nodes_per_tor": 0}, "nodes_per_tor = 0: expected 1 to 16384"),
        ({"nics_per_node": 8, "rails": 3}, "nics_per_node = 8 .* rails = 3; nics_per_node = 9 can"),
        ({"nics_per_node": 3, "rails": 3}, "tors_per_pod = 8 .* rails = 3; tors_per_pod = 9 can"),
        ({"gpus_per_node": -1}, "gpus_per_node = -1"),
        ({"uplinks_per_tor": 33}, "uplinks_per_tor = 33 .*uplinks_per_tor = 32 can"),
        ({"aggregation_planes": 48}, "aggregation_planes = 48"),
        ({"trunks_per_pod": 250}, "trunks_per_pod = 250 .*trunks_per_pod = 256 can"),
        ({"core_planes": 5}, "core_planes = 5; trunks_per_pod = 255 can"),
        ({"core_planes": 0}, "core_planes = 0 with trunks_per_pod = 256"),
        ({"trunks_per_pod": 0}, "core_planes = 8 with trunks_per_pod = 0"),
        ({"trunks_per_pod": -1}, "trunks_per_pod = -1: expected 0 or more"),
        ({"roles": ("train",)}, "a core joins pods"),
        ({"link_gbit_per_s": 0.0}, "link_gbit_per_s = 0.0: expected more than 0"),
        ({"oversubscription": float("nan")}, "oversubscription"),
        ({"switching_ms": -1.0}, "switching_ms"),
        ({"trunks_per_pod": 32 * 2**12}, "ports, 65535 are the most"),
    ],
)
def test_numbers_that_do_not_fit_are_named(change: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        bench_of(replace(REFERENCE, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tors_per_pod": 126}, "tors_per_pod = 126: expected 1 to 125"),
        ({"nodes_per_tor": 246}, "nodes_per_tor = 246: expected 1 to 245"),
        ({"nics_per_node": 2}, "nics_per_node = 2: expected 1 to 1"),
    ],
)
def test_an_emulated_bench_has_room_for_fewer(change: dict[str, object], told: str) -> None:
    numbers = replace(REFERENCE, **change)  # type: ignore[arg-type]
    assert topology_of(bench_of(numbers)).nodes
    with pytest.raises(UsageError, match=told):
        bench_of(numbers, world="emulated")
