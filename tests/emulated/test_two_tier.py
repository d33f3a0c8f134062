"""The shipped two-tier bench: links across pods carry packets, and the electrical path is there."""

import asyncio
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pyroute2 import IPRoute

from drivers import netlink
from drivers.emulators.light import open_light
from drivers.tor.base import Hop, Route
from drivers.tor.netlink import NetlinkTor
from harness.bench.electrical import ElectricalPath
from harness.bench.leftovers import tear_down
from harness.bench.namespaces import Network, build
from harness.bench.running import RunningBench
from harness.errors import UsageError
from harness.fabric.circuits import plan_shape
from harness.fabric.links import Link
from harness.fabric.topology import Topology, topology_of
from harness.model.load import load_bench
from harness.model.scenario import Shape
from tests.emulated.lab import lab

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]
FILE = Path(__file__).parents[2] / "scenarios/benches/two-tier.toml"
BENCH = load_bench(FILE)
LIMIT_S = 5.0
NOTHING_COMES_S = 0.3
UDP = 5000
IP_RECVTTL = 12  # in Python's socket module only from 3.14 on
FIRST_TTL = 64
OVER_A_CIRCUIT, ELECTRICALLY = 2, 3
ACROSS = (
    "train0-gen0@core0",
    "train1-gen1@core1",
    "train0-gen1@core1",
    "train1-gen0@core0",
)


class Fabric:
    """The network of the bench, without agents and units; its light and routes are set here."""

    def __init__(self, topology: Topology, network: Network, stack: ExitStack) -> None:
        self.topology, self.network = topology, network
        self.lights = {name: open_light(found) for name, found in network.lights.items()}
        self.tors = {name: NetlinkTor(name, network.netns[name]) for name in topology.tors}
        for found in (*self.lights.values(), *self.tors.values()):
            stack.callback(found.close)
        self.electrical = ElectricalPath(topology, BENCH.links, network.prefix)

    def links(self, *circuits: str) -> frozenset[Link]:
        return plan_shape(self.topology, "listed", Shape(circuits=circuits)).links

    def bring_up(self, links: frozenset[Link]) -> None:
        for name, light in self.lights.items():
            light.set(dict(self.topology.matching(links, name).circuits))
        for name, wanted in self.topology.routes(links).items():
            self.tors[name].apply(wanted)

    def socket(self, node: str, kind: socket.SocketKind) -> socket.socket:
        found = netlink.socket_in(self.network.netns[node], socket.AF_INET, kind)
        found.settimeout(LIMIT_S)
        return found

    def hops(self, sender: str, receiver: str, limit_s: float = LIMIT_S) -> int | None:
        """Return how many routers a packet passes; None where none arrives."""
        far = self.topology.nodes[receiver].address
        with (
            self.socket(sender, socket.SOCK_DGRAM) as out,
            self.socket(receiver, socket.SOCK_DGRAM) as into,
        ):
            out.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, FIRST_TTL)
            into.setsockopt(socket.IPPROTO_IP, IP_RECVTTL, 1)
            into.settimeout(limit_s)
            into.bind((far, UDP))
            out.sendto(b"?", (far, UDP))
            try:
                _, ancillary, _, _ = into.recvmsg(16, socket.CMSG_SPACE(4))
            except TimeoutError:
                return None
        return FIRST_TTL - int.from_bytes(ancillary[0][2], sys.byteorder)

    def await_packets(self, sender: str, receiver: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while self.hops(sender, receiver, NOTHING_COMES_S) is None:
            assert time.monotonic() < deadline


@pytest.fixture
def fabric(tmp_path: Path) -> Iterator[Fabric]:
    topology = topology_of(BENCH)
    network = build(topology, BENCH.links, folder=tmp_path)
    try:
        with ExitStack() as stack:
            yield Fabric(topology, network, stack)
    finally:
        tear_down(network.record)


def test_all_four_links_across_the_pods_carry_packets_at_once(fabric: Fabric) -> None:
    links = fabric.links(*ACROSS)
    assert all(len(link.switches) == 3 for link in links)
    fabric.bring_up(links)
    pairs = [(t, g) for t in ("t0", "t3") for g in ("g1", "g2")]
    found = {(a, b): fabric.hops(a, b) for x, y in pairs for a, b in ((x, y), (y, x))}
    assert set(found.values()) == {OVER_A_CIRCUIT}, found
    assert fabric.hops("t0", "t2") == fabric.hops("g0", "g2") == ELECTRICALLY


def test_without_the_core_switchs_part_nothing_arrives(fabric: Fabric) -> None:
    links = fabric.links("train0-gen0@core0")
    fabric.bring_up(links)
    assert fabric.hops("t0", "g0") == OVER_A_CIRCUIT
    fabric.lights["core0"].set(
        {ingress: None for link in links for ingress, _ in link.circuits_on("core0")}
    )
    assert fabric.hops("t0", "g0", NOTHING_COMES_S) is None
    assert fabric.hops("t0", "g2") == ELECTRICALLY


def test_over_a_one_way_link_a_connection_gets_its_answers_electrically(fabric: Fabric) -> None:
    (link,) = fabric.links("train0-gen0@core0")
    one_way = Link(link.a, link.b, link.trunks, both=False)
    fabric.bring_up(frozenset({one_way}))
    near, far = (fabric.topology.nodes_of(end.tor)[0].name for end in (link.a, link.b))
    assert fabric.hops(near, far) == OVER_A_CIRCUIT
    assert fabric.hops(far, near) == ELECTRICALLY
    with fabric.socket(far, socket.SOCK_STREAM) as server:
        server.bind((fabric.topology.nodes[far].address, 0))
        server.listen()
        with fabric.socket(near, socket.SOCK_STREAM) as client:
            client.connect(server.getsockname())
            accepted, _ = server.accept()
            with accepted:
                client.sendall(b"there")
                assert accepted.recv(16) == b"there"
                accepted.sendall(b"back")
                assert client.recv(16) == b"back"


def test_flows_between_two_nodes_spread_over_parallel_circuits(fabric: Fabric) -> None:
    links = fabric.links("train0-gen0@core0", "train0-gen0@core1")
    fabric.bring_up(links)
    topology = fabric.topology
    ways = (way for link in links for way in link.ways)
    hops = tuple(Hop(far.address, near.device) for near, far in ways if near.tor == "train0")
    fabric.tors["train0"].apply(frozenset({Route(topology.tors["gen0"].prefix, hops)}))
    received = fabric.topology.nodes["g0"].address
    with fabric.socket("t0", socket.SOCK_DGRAM) as out:
        for port in range(6000, 6064):
            out.sendto(b"?", (received, port))
    netns = fabric.network.netns["train0"]
    sent = netlink.run_in(netns, lambda: _sent_packets("u1", "u2"))
    assert sum(sent) == 64
    assert min(sent) > 8, "fewer than one in a million by chance"


def _sent_packets(*devices: str) -> list[int]:
    with IPRoute() as ip:
        found = {link.get_attr("IFLA_IFNAME"): link for link in ip.get_links()}
        return [found[name].get_attr("IFLA_STATS64")["tx_packets"] for name in devices]


# -- the electrical path ---------------------------------------------------------------------------


def _rates(fabric: Fabric) -> set[float]:
    """Rates of both ends of every electrical link, Mbit/s."""

    def look() -> list[float]:
        with IPRoute() as ip:
            queues = (q for q in ip.get_qdiscs() if q.get_attr("TCA_KIND") == "tbf")
            name = {link["index"]: link.get_attr("IFLA_IFNAME") for link in ip.get_links()}
            return [
                q.get_attr("TCA_OPTIONS").get_attr("TCA_TBF_PARMS")["rate"] * 8 / 1e6
                for q in queues
                if name[q["index"]][0] in "et"
            ]

    rooms = [*fabric.topology.tors, "eps"]
    found = [netlink.run_in(f"{fabric.network.prefix}-{room}", look) for room in rooms]
    assert [len(rates) for rates in found] == [1, 1, 1, 1, 4]
    return {rate for rates in found for rate in rates}


def test_the_electrical_path_can_be_made_ideal_and_is_as_before_afterwards(fabric: Fabric) -> None:
    hosts_mbit_per_s = 2 * BENCH.links.link_mbit_per_s
    assert _rates(fabric) == {hosts_mbit_per_s / BENCH.links.oversubscription}
    fabric.electrical.oversubscribe(1.0)
    assert _rates(fabric) == {hosts_mbit_per_s}
    assert fabric.hops("t0", "g0") == ELECTRICALLY
    fabric.electrical.oversubscribe(None)
    assert _rates(fabric) == {hosts_mbit_per_s / BENCH.links.oversubscription}


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan")])
def test_an_oversubscription_that_cannot_be_is_refused(fabric: Fabric, wrong: float) -> None:
    with pytest.raises(UsageError, match="more than 0"):
        fabric.electrical.oversubscribe(wrong)


def test_a_tor_whose_electrical_link_is_pulled_has_its_circuits_left(fabric: Fabric) -> None:
    fabric.bring_up(fabric.links("train0-gen0@core0"))
    fabric.electrical.plug("train0", plugged=False)
    assert fabric.hops("t0", "g2", NOTHING_COMES_S) is None
    assert fabric.hops("g2", "t0", NOTHING_COMES_S) is None
    assert fabric.hops("t0", "g0") == fabric.hops("g0", "t0") == OVER_A_CIRCUIT
    assert fabric.hops("t2", "g2") == ELECTRICALLY
    fabric.electrical.plug("train0", plugged=True)
    fabric.await_packets("t0", "g2")  # a link takes a moment to come up
    assert fabric.hops("t0", "g2") == fabric.hops("g2", "t0") == ELECTRICALLY


def test_a_running_bench_makes_its_electrical_path_ideal(fabric: Fabric) -> None:
    found = running("emulated", fabric.electrical)
    asyncio.run(found.electrical(1.0))
    assert _rates(fabric) == {2 * BENCH.links.link_mbit_per_s}
    asyncio.run(found.electrical(None))
    assert _rates(fabric) == {2 * BENCH.links.link_mbit_per_s / BENCH.links.oversubscription}


def test_where_no_electrical_path_is_ours_none_is_made_ideal() -> None:
    with pytest.raises(UsageError, match="only on an emulated bench"):
        asyncio.run(running("live", None).electrical(1.0))


def running(world: str, path: ElectricalPath | None) -> RunningBench:
    """Return a bench of which only the electrical path is used."""
    rest = dict.fromkeys(("clock", "link", "hellos", "switches", "tors", "store"))
    return RunningBench(world, topology_of(BENCH), **rest, electrical_path=path)


# -- a run, as a user makes it ---------------------------------------------------------------------

SCENARIO = f"""
question = "Do circuits across pods carry traffic, and what do they gain?"
bench = "{FILE}"

[shapes.across]
circuits = {list(ACROSS)}
[shapes.pods]
circuits = [
  "train0-train1@agg0", "train0-train1@agg1", "gen0-gen1@agg2", "gen0-gen1@agg3",
]

[[steps]]
do = "collectives"
ops = ["all_to_all"]
sizes = ["1MiB"]
iterations = 5
[[steps]]
do = "shape"
shape = "across"
[[steps]]
do = "collectives"
ops = ["all_to_all"]
sizes = ["1MiB"]
iterations = 5
[[steps]]
do = "reconfigure"
shapes = ["pods", "across"]
count = 2
size = "64KiB"
rest_ms = 20.0

[[checks]]
metric = "collective.wrong"
at_most = 0.0
[[checks]]
metric = "collective.all_to_all.busbw_gb_per_s[path=across,size=1MiB]"
ratio_to = "collective.all_to_all.busbw_gb_per_s[path=electrical,size=1MiB]"
at_least = 1.3
"""


def test_one_command_brings_the_whole_bench_up_and_restores_it(tmp_path: Path) -> None:
    with lab(tmp_path) as made:
        (made.folder / "scenario.toml").write_text(SCENARIO)
        code, out = made.run()
        assert code == 0, out
        rows = made.events("reconfigure")
        assert [(row["path_to"], row["moved"], row["error"]) for row in rows] == [
            ("pods", 4, ""),
            ("across", 4, ""),
        ]
        assert all(row["stages"]["path_verified"] for row in rows), "every far end was heard"
        assert made.snapshots() == dict.fromkeys(BENCH.switches, True)
