"""Light that moves packets: what is lit passes, what is dark does not, the rest is untouched."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from drivers import netlink
from drivers.base import Matching, Ocs
from drivers.catalog import open_ocs
from drivers.emulators import config
from drivers.emulators.config import EmulatedSwitch, Face, Ready, Timing
from drivers.emulators.light import Light, bpf, open_light
from drivers.emulators.light.abilities import probe, smallest_dark_ns
from drivers.interfaces import End, Interfaces

pytestmark = pytest.mark.root
ROOT = Path(__file__).resolve().parents[2]
PORTS = 4
SILENCE_S = 0.05
LIMIT_S = 10.0
UDP = 5000


def address(port: int) -> str:
    return f"198.18.200.{port}"


class Lab:
    """A glass with `PORTS` fibre pairs: port k and port 16 + k lead to a namespace of their own."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.glass = f"{prefix}-glass"
        self.ends = {port: f"{prefix}-{port}" for port in range(1, PORTS + 1)}
        self.sockets: dict[int, socket.socket] = {}

    def build(self) -> None:
        for name in (self.glass, *self.ends.values()):
            netlink.create_namespace(name)
        netlink.run_in("", self._pull_wires)
        netlink.run_in(self.glass, self._light_up)
        for port, netns in self.ends.items():
            netlink.run_in(netns, partial(self._furnish, port))
            self.sockets[port] = netlink.socket_in(netns, socket.AF_INET, socket.SOCK_DGRAM)
            self.sockets[port].bind((address(port), UDP))

    def remove(self) -> None:
        for found in self.sockets.values():
            found.close()
        for name in (self.glass, *self.ends.values()):
            netlink.delete_namespace(name)

    def config(self, kind: Literal["none", "ebpf", "mirred"]) -> config.Light:
        return config.Light(
            kind=kind,
            netns=self.glass,
            tx={port: f"p{port}" for port in self.ends},
            rx={16 + port: f"p{port}" for port in self.ends},
        )

    @contextmanager
    def light(self, kind: Literal["none", "ebpf", "mirred"]) -> Iterator[Light]:
        light = open_light(self.config(kind))
        try:
            yield light
        finally:
            light.close()

    def send(self, sender: int, receiver: int, payload: bytes = b"?") -> None:
        self.sockets[sender].sendto(payload, (address(receiver), UDP))

    def hears(self, sender: int, receiver: int) -> bool:
        """Whether a packet from `sender` for `receiver` arrives."""
        self.sockets[receiver].settimeout(SILENCE_S)
        self.send(sender, receiver)
        try:
            return self.sockets[receiver].recvfrom(16)[1][0] == address(sender)
        except TimeoutError:
            return False

    def passes(self) -> set[tuple[int, int]]:
        """Return all (sender, receiver) between which packets pass."""
        return {(a, b) for a in self.ends for b in self.ends if a != b and self.hears(a, b)}

    def _pull_wires(self) -> None:
        with Interfaces() as interfaces:
            for port, netns in self.ends.items():
                mac = f"02:00:00:00:00:{port:02x}"
                interfaces.veth(End("u1", netns, mac), End(f"p{port}", self.glass), mtu=1500)

    def _light_up(self) -> None:
        netlink.write_sysctl("net.ipv6.conf.all.disable_ipv6", "1")
        with Interfaces() as interfaces:
            for port in self.ends:
                interfaces.up(f"p{port}")

    def _furnish(self, port: int) -> None:
        netlink.write_sysctl("net.ipv6.conf.all.disable_ipv6", "1")
        with Interfaces() as interfaces:
            interfaces.address("u1", address(port), 24)
            interfaces.up("u1")
            for other in self.ends:
                interfaces.neighbour("u1", address(other), f"02:00:00:00:00:{other:02x}")


@pytest.fixture
def lab() -> Iterator[Lab]:
    found = Lab(f"t{os.getpid()}")
    try:
        found.build()
        yield found
    finally:
        found.remove()


KINDS = pytest.mark.parametrize("kind", ["ebpf", "mirred"])


@KINDS
def test_packets_cross_only_what_is_lit(lab: Lab, kind: Literal["ebpf", "mirred"]) -> None:
    with lab.light(kind) as light:
        assert lab.passes() == set()
        light.set({1: 18, 2: 17, 3: 20})
        assert lab.passes() == {(1, 2), (2, 1), (3, 4)}
        light.set({1: 19, 2: None})
        assert lab.passes() == {(1, 3), (3, 4)}
        assert light.lit() == {1: 19, 3: 20}
        light.set({1: None, 3: None})
        assert lab.passes() == set()
        assert light.lit() == {}


@KINDS
def test_setting_what_is_set_and_darkening_what_is_dark_is_harmless(
    lab: Lab, kind: Literal["ebpf", "mirred"]
) -> None:
    with lab.light(kind) as light:
        light.set({4: None})
        light.set({1: 18})
        light.set({1: 18, 3: None})
        assert lab.passes() == {(1, 2)}


@KINDS
def test_ports_without_an_interface_swallow_their_light(
    lab: Lab, kind: Literal["ebpf", "mirred"]
) -> None:
    with lab.light(kind) as light:
        light.set({1: 18})
        light.set({1: 30, 9: 18})
        assert lab.passes() == set()
        assert light.lit() == {}


@KINDS
def test_moving_one_circuit_costs_the_other_no_packet(
    lab: Lab, kind: Literal["ebpf", "mirred"]
) -> None:
    moves, numbers = 200, []
    receiver = lab.sockets[4]
    receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    receiver.settimeout(0.5)
    done = threading.Event()
    sent = 0

    def send() -> None:
        nonlocal sent
        while not done.is_set():
            lab.send(3, 4, str(sent).encode())
            sent += 1
            time.sleep(0.0002)

    def receive() -> None:
        try:
            while True:
                numbers.append(int(receiver.recv(16)))
        except TimeoutError:
            return

    with lab.light(kind) as light:
        light.set({1: 18, 3: 20})
        threads = [threading.Thread(target=act) for act in (send, receive)]
        for thread in threads:
            thread.start()
        for i in range(moves):
            light.set({1: None})
            light.set({1: 18 if i % 2 else 17})
            time.sleep(0.001)
        done.set()
        for thread in threads:
            thread.join(LIMIT_S)
    assert sent > moves
    assert numbers == list(range(sent))


@KINDS
def test_light_outlives_a_killed_process_and_the_next_one_takes_it_over(
    lab: Lab, kind: Literal["ebpf", "mirred"]
) -> None:
    program = (
        "import sys, time\n"
        "from drivers.emulators import config\n"
        "from drivers.emulators.light import open_light\n"
        "light = open_light(config.Light(kind=sys.argv[1], netns=sys.argv[2],"
        " tx={1: 'p1', 2: 'p2'}, rx={17: 'p1', 18: 'p2'}))\n"
        "light.set({1: 18, 2: 17})\n"
        "print('lit', flush=True)\n"
        "time.sleep(60)\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, kind, lab.glass], stdout=subprocess.PIPE, cwd=ROOT
    )
    try:
        assert holder.stdout
        assert holder.stdout.readline() == b"lit\n"
        holder.send_signal(signal.SIGKILL)
        holder.wait(LIMIT_S)
    finally:
        holder.kill()
        holder.communicate(timeout=LIMIT_S)
    assert lab.passes() == {(1, 2), (2, 1)}
    with lab.light(kind) as light:
        assert light.lit() == {1: 18, 2: 17}
        assert lab.passes() == {(1, 2), (2, 1)}
        light.set({1: None, 2: None, 3: 20})
        assert lab.passes() == {(3, 4)}


def test_a_dead_socket_says_so_without_moving_anything(lab: Lab) -> None:
    with lab.light("mirred") as light:
        light.set({1: 18})
    with pytest.raises(OSError, match="Bad file descriptor"):
        light.set({1: None})
    assert lab.passes() == {(1, 2)}


def test_control_plane_only_moves_nothing_and_remembers(lab: Lab) -> None:
    with lab.light("none") as light:
        light.set({1: 18, 2: 17})
        light.set({2: None})
        assert light.lit() == {1: 18}
        assert lab.passes() == set()


@KINDS
def test_a_missing_interface_is_named_and_leaves_no_descriptor(
    lab: Lab, kind: Literal["ebpf", "mirred"]
) -> None:
    before = os.listdir("/proc/self/fd")
    wrong = config.Light(kind=kind, netns=lab.glass, tx={1: "p1", 9: "p9"}, rx={})
    with pytest.raises(OSError, match=f"port 9: no interface 'p9' in namespace {lab.glass}"):
        open_light(wrong)
    assert os.listdir("/proc/self/fd") == before


@KINDS
def test_opening_and_closing_leaks_nothing(lab: Lab, kind: Literal["ebpf", "mirred"]) -> None:
    with lab.light(kind) as light:
        light.set({1: 18})
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with lab.light(kind):
            pass
    assert os.listdir("/proc/self/fd") == before


def test_the_verifier_says_why_it_refuses() -> None:
    without_a_result = bpf.instruction(0x95)
    with pytest.raises(OSError, match="R0 !read_ok"):
        bpf.load_classifier(without_a_result)


def test_this_machine_is_found_able_by_trying() -> None:
    found = probe()
    assert (found.namespaces, found.ebpf, found.mirred) == ("", "", "")
    assert found.light == "ebpf"
    assert found.smallest_dark_ns == smallest_dark_ns(found.lateness_p99_ns) >= 1_000_000


@contextmanager
def unit(lab: Lab, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Ocs]]:
    """Run an emulated unit whose light is the lab's, and its driver."""
    settings = EmulatedSwitch(
        name="agg0",
        timing=Timing(switch_ms=1.0),
        faces=(Face(protocol="scpi", server="tcp"),),
        light=lab.config("ebpf"),
    )
    path = folder / "agg0.json"
    path.write_bytes(msgspec.json.encode(settings))
    command = [sys.executable, "-m", "drivers.emulators", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        try:
            assert process.stdout
            ready = msgspec.json.decode(process.stdout.readline(), type=Ready)
            url, limit_ns = ready.urls[0], int(LIMIT_S * 1e9)
            ocs = open_ocs("polatis-scpi", url, name="agg0", exchange_timeout_ns=limit_ns)
            try:
                yield process, ocs
            finally:
                ocs.close()
        finally:
            process.kill()


def test_a_unit_that_is_killed_keeps_its_map_and_its_successor_knows_it(
    lab: Lab, tmp_path: Path
) -> None:
    made = Matching.of({(1, 18), (2, 17)})
    with unit(lab, tmp_path) as (process, ocs):
        ocs.connect(list(made))
        _until(lambda: lab.hears(1, 2))
        process.kill()
        process.wait(LIMIT_S)
    assert lab.passes() == {(1, 2), (2, 1)}
    with unit(lab, tmp_path) as (_, ocs):
        assert ocs.read() == made
        assert lab.passes() == {(1, 2), (2, 1)}
        ocs.disconnect([(1, 18)])
        assert lab.passes() == {(2, 1)}


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
