"""Light: how fast circuits move, how exactly they stay dark, what they carry, what steering costs.

Dark times are measured on packets: numbered UDP between ToR uplinks while the emulated unit is
reconfigured by its real driver over TCP SCPI. Marks: p50 within 1 ms of the set time, p99 within
5 ms, no packet lost on circuits that stay. Needs root; takes about a minute.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from drivers.apply import apply
from drivers.base import Matching
from drivers.catalog import open_ocs
from drivers.emulators.config import EmulatedSwitch, Face, Ready, Timing
from drivers.emulators.light import open_light
from drivers.emulators.light.abilities import timer_lateness
from drivers.netlink import socket_in
from drivers.tor.base import Route
from drivers.tor.netlink import NetlinkTor
from harness.bench.leftovers import tear_down
from harness.bench.namespaces import Network, build
from harness.clock import NS_PER_MS, NS_PER_S
from harness.fabric.circuits import plan_shape
from harness.fabric.topology import Topology, topology_of
from harness.model.bench import Bench, Links, Node, Switch, Tor
from harness.model.scenario import Shape
from tests.benchmarks import numbered

ROOT = Path(__file__).parents[2]
LIMIT_NS = 10 * NS_PER_S
DARK_MS = {25.0: 200, 10.0: 1_000}
"""Set dark time -> reconfigurations."""
REST_S = 0.008
INTERVAL_NS = NS_PER_MS // 2
LINK_MBIT_PER_S = 1_000.0
FLOW_S = 3.0
CHUNK = 1 << 18


def run() -> dict[str, object]:
    """Return all figures: times in ms or us as named, rates in Mbit/s."""
    figures: dict[str, object] = {"load": os.getloadavg()[0]}
    late = timer_lateness(200)
    figures["timer_lateness_us"] = _spread([x / 1e3 for x in late])
    figures |= _on_ring(_steady_state)
    for dark_ms, count in DARK_MS.items():
        figures |= _reconfigure(dark_ms, count)
    return figures


def table(figures: dict[str, object]) -> str:
    lines = []
    for name, row in figures.items():
        if isinstance(row, dict):
            told = "  ".join(
                f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}"
                for key, value in row.items()
            )
            lines.append(f"{name:28} {told}")
        else:
            lines.append(f"{name:28} {row}")
    return "\n".join(lines)


# -- what is set up once -------------------------------------------------------------------------


def _bench(tors: int, uplinks: int) -> Bench:
    return Bench(
        name="light",
        world="emulated",
        nodes={f"node{i}": Node(tor=f"tor{i}") for i in range(tors)},
        tors={f"tor{i}": Tor(uplinks=uplinks, driver="netlink") for i in range(tors)},
        switches={
            f"agg{k}": Switch(driver="polatis-scpi", url="tcp://", ports="1-32")
            for k in range(uplinks)
        },
        cables={f"tor{i}:u{k + 1}": f"agg{k}:{i + 1}" for i in range(tors) for k in range(uplinks)},
    )


@contextmanager
def _network(topology: Topology, figures: dict[str, object]) -> Iterator[Network]:
    begun = time.perf_counter()
    network = build(topology, Links(link_mbit_per_s=LINK_MBIT_PER_S))
    built = time.perf_counter()
    try:
        yield network
    finally:
        ended = time.perf_counter()
        tear_down(network.record)
        gone = time.perf_counter()
        size = len(topology.nodes) + len(topology.tors) + len(topology.switches)
        figures["network"] = {
            "namespaces": size + 2,
            "build_ms": (built - begun) * 1e3,
            "tear_down_ms": (gone - ended) * 1e3,
        }


def _on_ring(
    measure: Callable[[Topology, Network], dict[str, object]],
) -> dict[str, object]:
    figures: dict[str, object] = {}
    topology = topology_of(_bench(4, 2))
    with _network(topology, figures) as network:
        figures |= measure(topology, network)
    return figures


# -- map updates, steering, throughput -----------------------------------------------------------


def _steady_state(topology: Topology, network: Network) -> dict[str, object]:
    plan = plan_shape(topology, "ring", Shape(template="ring"))
    figures: dict[str, object] = {}
    with ExitStack() as stack:
        lights = {name: open_light(found) for name, found in network.lights.items()}
        tors = {name: NetlinkTor(name, network.netns[name]) for name in topology.tors}
        for found in (*lights.values(), *tors.values()):
            stack.callback(found.close)
        routes = topology.routes(plan.links)
        figures["electrical_tcp_mbit_per_s"] = _flows(topology, network)
        one, four = {1: 18}, {1: 18, 2: 17, 3: 20, 4: 19}
        for name, lit in (("map_update_1_port_us", one), ("map_update_4_ports_us", four)):
            dark = dict.fromkeys(lit)
            figures[name] = _timed_us(
                lambda i, lit=lit, dark=dark: lights["agg0"].set(dark if i % 2 else lit)
            )
        for name, light in lights.items():
            light.set(dict(topology.matching(plan.links, name).circuits))
        prefixes = [f"198.19.{100 + i}.0/24" for i in range(4)]
        via = topology.uplinks[-1].address
        to_and_fro = [
            frozenset(Route.one(prefix, via, device) for prefix in prefixes)
            for device in ("u1", "u2")
        ]
        figures["steer_4_routes_us"] = _timed_us(lambda i: tors["tor0"].apply(to_and_fro[i % 2]))
        for name, wanted in routes.items():
            tors[name].apply(wanted)
        figures["circuit_tcp_mbit_per_s"] = _flows(topology, network)
    return figures


def _flows(topology: Topology, network: Network) -> dict[str, object]:
    """Every node sends to the next for `FLOW_S`, all at once; returns the goodput of each flow."""
    names = list(topology.nodes)
    rates: dict[str, float] = {}
    busy_before = _cpu_busy()
    threads = [
        threading.Thread(target=_flow, args=(topology, network, a, b, rates))
        for a, b in zip(names, names[1:] + names[:1], strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(FLOW_S + LIMIT_NS / NS_PER_S)
    busy = [after - before for before, after in zip(busy_before, _cpu_busy(), strict=True)]
    if len(rates) < len(names):
        raise RuntimeError(f"flows that did not end: {set(names) - set(rates)}")
    share = 100 * busy[0] / busy[1]
    return {**{f"from_{name}": rates[name] for name in names}, "machine_busy_pct": share}


def _flow(
    topology: Topology, network: Network, sender: str, receiver: str, rates: dict[str, float]
) -> None:
    with socket_in(network.netns[receiver], socket.AF_INET, socket.SOCK_STREAM) as server:
        server.bind((topology.nodes[receiver].address, 0))
        server.listen(1)
        out = socket_in(network.netns[sender], socket.AF_INET, socket.SOCK_STREAM)
        out.settimeout(LIMIT_NS / NS_PER_S)
        out.connect(server.getsockname())
        into, _ = server.accept()
    with out, into:
        into.settimeout(LIMIT_NS / NS_PER_S)
        pump = threading.Thread(target=_pump, args=(out, time.monotonic() + FLOW_S))
        pump.start()
        begun, got, buffer = time.monotonic(), 0, bytearray(CHUNK)
        while count := into.recv_into(buffer):
            got += count
        rates[sender] = got * 8 / 1e6 / (time.monotonic() - begun)
        pump.join()


def _pump(out: socket.socket, until: float) -> None:
    chunk = bytes(CHUNK)
    while time.monotonic() < until:
        out.sendall(chunk)
    out.shutdown(socket.SHUT_WR)


def _cpu_busy() -> tuple[int, int]:
    """Return (busy, all) ticks of all cores."""
    ticks = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _timed_us(act: Callable[[int], object], count: int = 2_000) -> dict[str, object]:
    times = []
    for i in range(count):
        begun = time.perf_counter_ns()
        act(i)
        times.append((time.perf_counter_ns() - begun) / 1e3)
    return _spread(times)


# -- dark times on packets -----------------------------------------------------------------------


def _reconfigure(dark_ms: float, count: int) -> dict[str, object]:
    """Move tor0 between tor1 and tor2 `count` times while tor3 and tor4 stay joined."""
    figures: dict[str, object] = {}
    topology = topology_of(_bench(5, 1))
    stay = {(4, 21), (5, 20)}
    first, second = ({(1, 18), (2, 17), *stay}, {(1, 19), (3, 17), *stay})
    shapes = (Matching.of(first), Matching.of(second))
    with _network(topology, {}) as network, tempfile.TemporaryDirectory() as folder:
        sent, heard = Path(folder, "sent"), Path(folder, "heard")
        with ExitStack() as stack:
            url = stack.enter_context(_unit(network, Path(folder), dark_ms))
            ocs = open_ocs("polatis-scpi", url, name="agg0", exchange_timeout_ns=LIMIT_NS)
            stack.callback(ocs.close)
            ours = topology.ours["agg0"]

            def move(i: int) -> None:
                apply(ocs, shapes[i % 2], ours, deadline_ns=time.monotonic_ns() + LIMIT_NS)
                time.sleep(dark_ms / 1e3 + REST_S)

            move(0)
            ends = [network.netns[f"tor{i}"] for i in (1, 2, 4)]
            stack.enter_context(_traffic("hear", heard, ends))
            starts = [network.netns[f"tor{i}"] for i in (0, 3)]
            stack.enter_context(_traffic("send", sent, starts))
            for i in range(1, count + 1):
                move(i)
        name = f"dark_{dark_ms:.0f}_ms"
        figures[name], figures[f"{name}_circuits_that_stay"] = _verdict(sent, heard, dark_ms, count)
    return figures


def _verdict(
    sent: Path, heard: Path, dark_ms: float, count: int
) -> tuple[dict[str, object], dict[str, object]]:
    stamps: dict[int, dict[int, int]] = {0: {}, 1: {}}
    for stream, number, stamp in numbered.read(sent):
        stamps[stream][number] = stamp
    arrived: dict[int, set[int]] = {0: set(), 1: set()}
    for stream, number, _ in numbered.read(heard):
        arrived[stream].add(number)
    runs = list(numbered.lost_runs(stamps[0], arrived[0]))
    middles = [(longest + shortest) / 2 / NS_PER_MS for longest, shortest in runs]
    widths = [(longest - shortest) / 2 / NS_PER_MS for longest, shortest in runs]
    found = _spread(middles)
    error_p50 = abs(float(str(found["p50"])) - dark_ms)
    error_p99 = sorted(abs(middle - dark_ms) for middle in middles)[int(0.99 * len(middles))]
    moved = {
        **found,
        "reconfigurations": count,
        "off_p50_ms": error_p50,
        "off_p99_ms": error_p99,
        "plus_minus_ms": sorted(widths)[len(widths) // 2],
        "met": error_p50 <= 1 and error_p99 <= 5 and len(runs) == count,
    }
    lost = len(stamps[1].keys() - arrived[1])
    stayed = {"sent": len(stamps[1]), "lost": lost, "reconfigurations": count, "met": lost == 0}
    return moved, stayed


@contextmanager
def _unit(network: Network, folder: Path, dark_ms: float) -> Iterator[str]:
    """Start the emulated unit that moves the network's light; yield its URL."""
    config = EmulatedSwitch(
        name="agg0",
        timing=Timing(switch_ms=dark_ms),
        faces=(Face(protocol="scpi", server="tcp"),),
        light=network.lights["agg0"],
    )
    path = folder / "agg0.json"
    path.write_bytes(msgspec.json.encode(config))
    with _process(["drivers.emulators", str(path)]) as process:
        assert process.stdout
        yield msgspec.json.decode(process.stdout.readline(), type=Ready).urls[0]


@contextmanager
def _traffic(role: str, log: Path, namespaces: list[str]) -> Iterator[None]:
    command = ["tests.benchmarks.numbered", role, str(log), str(INTERVAL_NS), *namespaces]
    with _process(command) as process:
        assert process.stdin
        assert process.stdout
        process.stdout.readline()
        yield
        process.stdin.close()
        process.wait(LIMIT_NS / NS_PER_S)


@contextmanager
def _process(module: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", *module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    with process:
        try:
            yield process
        finally:
            process.terminate()


def _spread(values: list[float]) -> dict[str, object]:
    ordered = sorted(values)
    at = {"min": 0.0, "p50": 0.5, "p99": 0.99, "max": 1.0}
    last = len(ordered) - 1
    found = {key: ordered[min(last, int(share * len(ordered)))] for key, share in at.items()}
    return {"n": len(ordered), **found}
