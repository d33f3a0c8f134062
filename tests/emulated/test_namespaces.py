"""The emulated network: it carries packets as laid out, and nothing of it stays behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from drivers import netlink
from drivers.emulators.light import open_light
from drivers.emulators.light.abilities import probe
from drivers.tor.netlink import NetlinkTor
from harness.bench import leftovers, namespaces
from harness.bench.leftovers import add_process, keep_for, read_record, sweep, tear_down
from harness.bench.namespaces import Network, build
from harness.bench.wiring import Wiring
from harness.errors import InfrastructureError
from harness.fabric.circuits import plan_shape
from harness.fabric.topology import Topology, topology_of
from harness.model.bench import Bench, Links, Node, Switch, Tor
from harness.model.scenario import Shape
from harness.processes import Process, end

pytestmark = pytest.mark.root
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 10.0
UDP = 5000
IP_RECVTTL = 12  # in Python's socket module only from 3.14 on
LINKS = Links(link_mbit_per_s=200, oversubscription=4)


def bench(tors: int = 3) -> Bench:
    return Bench(
        name="small",
        world="emulated",
        nodes={f"node{i}": Node(tor=f"tor{i}") for i in range(tors)},
        tors={f"tor{i}": Tor(uplinks=1, driver="netlink") for i in range(tors)},
        switches={"agg0": Switch(driver="polatis-scpi", url="tcp://", ports="1-32")},
        cables={f"tor{i}:u1": f"agg0:{i + 1}" for i in range(tors)},
    )


@pytest.fixture
def topology() -> Topology:
    return topology_of(bench())


@pytest.fixture
def network(topology: Topology, tmp_path: Path) -> Iterator[Network]:
    found = build(topology, LINKS, folder=tmp_path)
    try:
        yield found
    finally:
        tear_down(found.record)


def hops(network: Network, topology: Topology, sender: str, receiver: str) -> int | None:
    """Return how many routers a packet passes from node to node; None where it does not arrive."""
    first = 64
    here, there = (network.netns[name] for name in (sender, receiver))
    far = topology.nodes[receiver].address
    with (
        netlink.socket_in(here, socket.AF_INET, socket.SOCK_DGRAM) as out,
        netlink.socket_in(there, socket.AF_INET, socket.SOCK_DGRAM) as into,
    ):
        out.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, first)
        into.setsockopt(socket.IPPROTO_IP, IP_RECVTTL, 1)
        into.bind((far, UDP))
        into.settimeout(0.3)
        out.sendto(b"?", (far, UDP))
        try:
            _, ancillary, _, _ = into.recvmsg(16, socket.CMSG_SPACE(4))
        except TimeoutError:
            return None
    return first - int.from_bytes(ancillary[0][2], sys.byteorder)


def test_nodes_reach_each_other_electrically_from_the_start(
    network: Network, topology: Topology
) -> None:
    tor_eps_tor = 3
    pairs = [(a, b) for a in topology.nodes for b in topology.nodes if a != b]
    assert {hops(network, topology, a, b) for a, b in pairs} == {tor_eps_tor}


def test_a_lit_and_steered_circuit_carries_the_packets(
    network: Network, topology: Topology
) -> None:
    shape = Shape(circuits=("tor0-tor1@agg0",))
    plan = plan_shape(topology, "one", shape)
    tors = {name: NetlinkTor(name, network.netns[name]) for name in topology.tors}
    light = open_light(network.lights["agg0"])
    try:
        for name, wanted in topology.routes(plan.links).items():
            tors[name].apply(wanted)
        assert hops(network, topology, "node0", "node1") is None, "steered into the dark"
        light.set(dict(topology.matching(plan.links, "agg0").circuits))
        tor_tor = 2
        assert hops(network, topology, "node0", "node1") == tor_tor
        assert hops(network, topology, "node1", "node0") == tor_tor
        assert hops(network, topology, "node0", "node2") == tor_tor + 1
        light.set({1: None, 2: None})
        for tor in tors.values():
            tor.apply(frozenset())
        assert hops(network, topology, "node0", "node1") == tor_tor + 1
    finally:
        light.close()
        for tor in tors.values():
            tor.close()


def test_agents_reach_the_coordinator_on_the_control_network(
    network: Network, topology: Topology
) -> None:
    with socket.create_server((network.coordinator_address, 0)) as server:
        server.settimeout(LIMIT_S)
        for name in (*topology.nodes, *topology.tors):
            client = netlink.socket_in(network.netns[name], socket.AF_INET, socket.SOCK_STREAM)
            with client:
                client.settimeout(LIMIT_S)
                client.connect(server.getsockname())
                accepted, (address, _) = server.accept()
                accepted.close()
                assert address == network.control_addresses[name]


def test_two_benches_stand_side_by_side(network: Network, topology: Topology) -> None:
    other = build(topology, LINKS, folder=network.record.parent)
    try:
        assert other.coordinator_address != network.coordinator_address
        assert not set(other.netns.values()) & set(network.netns.values())
        assert hops(other, topology, "node0", "node1") == 3
    finally:
        tear_down(other.record)
    assert hops(network, topology, "node0", "node1") == 3


def left_of(prefix: str) -> set[str]:
    """Return the namespaces and links that a bench has on this machine."""
    names = netlink.namespaces() | {name for _, name in socket.if_nameindex()}
    return {name for name in names if name.startswith(prefix)}


def descriptors() -> list[str]:
    return os.listdir("/proc/self/fd")


def test_tearing_down_leaves_nothing_and_may_be_repeated(
    topology: Topology, tmp_path: Path
) -> None:
    before = descriptors()
    network = build(topology, LINKS, folder=tmp_path)
    enter = ["nsenter", f"--net=/run/netns/{network.netns['tor0']}"]
    sleeper = subprocess.Popen(
        [*enter, "sh", "-c", "echo here; exec sleep 60"], stdout=subprocess.PIPE
    )
    try:
        assert sleeper.stdout
        assert sleeper.stdout.readline() == b"here\n"
        add_process(network.record, sleeper.pid, "sleeper")
        found = leftovers.inhabitants(read_record(network.record))
        assert found == {sleeper.pid: network.netns["tor0"]}
        tear_down(network.record)
        assert sleeper.wait(LIMIT_S) == -signal.SIGTERM
    finally:
        sleeper.kill()
        sleeper.communicate(timeout=LIMIT_S)
    assert not network.record.exists()
    assert left_of(network.prefix) == set()
    assert descriptors() == before
    tear_down(network.record)


def test_a_namespace_whose_making_was_cut_short_is_deleted_all_the_same() -> None:
    name = f"cut{os.getpid()}"
    netlink.create_namespace(f"{name}-whole")
    netlink.delete_namespace(f"{name}-whole")
    netlink.namespace_path(name).touch()
    with pytest.raises(FileExistsError):
        netlink.create_namespace(name)
    netlink.delete_namespace(name)
    netlink.delete_namespace(name)
    assert left_of(name) == set()


def test_a_build_that_fails_half_way_leaves_nothing(
    topology: Topology, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = []

    def fail(wiring: Wiring) -> None:
        links.append(wiring.control_link)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(namespaces, "_join_control", fail)
    before = descriptors()
    with pytest.raises(InfrastructureError, match="No space left"):
        build(topology, LINKS, folder=tmp_path)
    assert left_of(links[0].removesuffix("-c")) == set()
    assert descriptors() == before
    assert leftovers.records(tmp_path) == {}


BUILDER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_namespaces import LINKS, bench
from harness.bench.namespaces import build
from harness.fabric.topology import topology_of
print(build(topology_of(bench()), LINKS, folder=Path(sys.argv[1])).record, flush=True)
time.sleep(60)
"""


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[Path]:
    """The record of a bench whose owner was killed."""
    command = [sys.executable, "-c", BUILDER, str(tmp_path), str(Path(__file__).parent)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert owner.stdout
        record = Path(owner.stdout.readline().strip())
        assert sweep(tmp_path) == (), "the owner lives"
        assert set(read_record(record).namespaces) <= netlink.namespaces()
    finally:
        owner.kill()
        owner.communicate(timeout=LIMIT_S)
    yield record
    with suppress(InfrastructureError):
        tear_down(record)


def test_what_a_killed_owner_left_is_swept(killed: Path) -> None:
    names = set(read_record(killed).namespaces)
    assert names <= netlink.namespaces()
    assert sweep(killed.parent) == (killed.stem,)
    assert not names & netlink.namespaces()
    assert f"{killed.stem}-c" not in {name for _, name in socket.if_nameindex()}
    assert sweep(killed.parent) == ()


def test_a_bench_that_a_run_waits_to_recover_is_kept_until_told(
    killed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    keep_for(killed, run)
    assert sweep(killed.parent) == ()
    assert set(read_record(killed).namespaces) <= netlink.namespaces()
    assert sweep(killed.parent, include_unrecovered=True) == (killed.stem,)


def test_a_bench_whose_run_folder_is_gone_waits_for_nobody(killed: Path, tmp_path: Path) -> None:
    keep_for(killed, tmp_path / "deleted")
    assert sweep(killed.parent) == (killed.stem,)


def test_a_process_that_will_not_end_is_killed_and_a_stranger_is_not_touched() -> None:
    ignores = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(1, flush=True)\n"
        "time.sleep(60)"
    )
    stubborn = subprocess.Popen([sys.executable, "-c", ignores], stdout=subprocess.PIPE)
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        assert stubborn.stdout
        stubborn.stdout.readline()
        known = Process.of(stubborn.pid, "stubborn")
        other = Process.of(stranger.pid)
        reused = Process(pid=stranger.pid, start_ticks=other.start_ticks - 1)
        begun = time.monotonic()
        assert end([known, reused], grace_ns=200_000_000) == ()
        assert time.monotonic() - begun < LIMIT_S
        assert stubborn.wait(LIMIT_S) == -signal.SIGKILL
        assert stranger.poll() is None
    finally:
        for process in (stubborn, stranger):
            process.kill()
            process.communicate(timeout=LIMIT_S)


IN_USER_NAMESPACE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_namespaces import LINKS, bench, hops
from drivers.emulators.light import open_light
from drivers.emulators.light.abilities import probe
from harness.bench.leftovers import tear_down
from harness.bench.namespaces import build
from harness.fabric.topology import topology_of
able = probe()
topology = topology_of(bench())
network = build(topology, LINKS, able.light, folder=Path(sys.argv[1]))
light = open_light(network.lights["agg0"])
light.set({1: 18, 2: 17})
lit = light.lit() == {1: 18, 2: 17}
print(network.prefix, able.light, lit, hops(network, topology, "node0", "node1"))
light.close()
tear_down(network.record)
"""


def test_a_user_namespace_of_its_own_gives_a_command_a_network_with_mirred_light(
    tmp_path: Path,
) -> None:
    if reason := probe().user_namespaces:
        pytest.skip(reason)
    done = subprocess.run(
        [sys.executable, "-m", "drivers.userns", sys.executable, "-c", IN_USER_NAMESPACE,
         str(tmp_path), str(Path(__file__).parent)],
        capture_output=True, text=True, timeout=LIMIT_S * 3, check=False, cwd=ROOT,
    )  # fmt: skip
    prefix, *said = done.stdout.split()
    assert said == ["mirred", "True", "3"], done.stderr
    assert left_of(prefix) == set()
