"""All-reduce over circuits against the electrical path, and the harness against a bare torch loop.

On the shipped quickstart's bench (four nodes, ring of circuits, electrical path 4:1), network and
light only, without units: the paths are set once. On each path both arms run interleaved on the
same links in the same run (see `collective`). Marks: circuits >= 3x electrical, harness within 3 %.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from drivers.emulators.light import open_light
from drivers.netlink import namespace_path
from drivers.tor.netlink import NetlinkTor
from harness.bench.leftovers import tear_down
from harness.bench.namespaces import Network, build
from harness.fabric.circuits import plan_shape
from harness.fabric.topology import Topology, topology_of
from harness.model.load import load_bench
from harness.model.scenario import Shape
from tests.benchmarks import collective

BENCH = Path(__file__).parents[2] / "scenarios/benches/emulated-4.toml"
RING_SIZES = {2**20: (30, 10), 16 * 2**20: (20, 4)}
ELECTRICAL_SIZES = {2**20: (15, 5), 16 * 2**20: (5, 2)}
"""Bytes -> (rounds, iterations in each arm's burst); the electrical path is four times slower."""
LEAST = 3.0
MOST = 1.03


@contextmanager
def network_of_four() -> Iterator[tuple[Topology, Network]]:
    bench = load_bench(BENCH)
    topology = topology_of(bench)
    network = build(topology, bench.links)
    try:
        yield topology, network
    finally:
        tear_down(network.record)


def light_the_ring(stack: ExitStack, topology: Topology, network: Network) -> None:
    links = plan_shape(topology, "ring", Shape(template="ring")).links
    for name, settings in network.lights.items():
        light = open_light(settings)
        stack.callback(light.close)
        light.set(dict(topology.matching(links, name).circuits))
    for name, routes in topology.routes(links).items():
        tor = NetlinkTor(name, network.netns[name])
        stack.callback(tor.close)
        tor.apply(routes)


def run() -> dict[str, Any]:
    with network_of_four() as (topology, network), ExitStack() as stack:
        places = [
            collective.Place(
                ("nsenter", f"--net={namespace_path(network.netns[name])}", "--"), "eth0"
            )
            for name in topology.nodes
        ]
        store_host = network.coordinator_address
        electrical = collective.run(places, sizes=ELECTRICAL_SIZES, store_host=store_host)
        light_the_ring(stack, topology, network)
        ring = collective.run(places, sizes=RING_SIZES, store_host=store_host)
    gains = {
        name: round(electrical[name]["harness_ms"] / row["harness_ms"], 3)
        for name, row in ring.items()
        if isinstance(row, dict) and isinstance(electrical[name], dict)
    }
    ratios = [row["ratio"] for rows in (electrical, ring) for row in _rows(rows)]
    held = min(gains.values()) >= LEAST and max(ratios) <= MOST
    return {"electrical": electrical, "ring": ring, "circuits_gain": gains, "held": held}


def _rows(rows: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from (row for row in rows.values() if isinstance(row, dict))


def table(figures: dict[str, Any]) -> str:
    lines = []
    for path in ("electrical", "ring"):
        lines += [path, collective.table(figures[path])]
    gains = ", ".join(f"{name} {gain:.2f}x" for name, gain in figures["circuits_gain"].items())
    lines.append(f"circuits over electrical: {gains}")
    told = "held" if figures["held"] else "MISSED"
    lines.append(f"marks: circuits >= {LEAST:g}x, harness within {MOST - 1:.0%} of bare: {told}")
    return "\n".join(lines)
