"""Weight sync over the network: chain, tree and pairs against a bare broadcast of the bytes.

Four nodes on a ToR each, network and light only, of which n0 and n3 train: over the electrical path
4:1, over one that is 1:1, and over a ring of circuits, where n0 and n1 are neighbours, n1 and n2,
and n2 and n3; whoever is no neighbour is reached electrically, 4:1. 64 MiB go to two nodes (n1 and
n2), and from n0 alone to all others. Arms are interleaved over the same links: gloo's
``torch.distributed.broadcast``, which verifies nothing, and porters on each path of
`harness.run.rl.edges`. Our time is that until every answer is here; what of it was no transfer
(orders, answers, opening files) is told apart as RPC. In pairs the file lies on both sources
before: that is the gather's business. Agents are in this process: what the wire to a coordinator
adds is `coordinator`'s to say. The three networks come one after the other.

Mark: the best path reaches >= 0.8 of the bare broadcast's rate. Needs root.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from msgspec.structs import replace

from agents.weights import PROGRAM, Weights
from drivers.netlink import namespace_path
from harness.bench.leftovers import tear_down
from harness.bench.namespaces import Network, build
from harness.clock import NS_PER_MS, NS_PER_S
from harness.fabric.topology import Topology, topology_of
from harness.memory import MEMORY
from harness.model.load import load_bench
from harness.run.rl.edges import Edge, children_of, edges_of, sources_of
from harness.run.rl.edges import Path as Shape
from harness.wire.messages import Failure, Message
from harness.wire.weights import (
    ExpectWeights,
    OpenPorter,
    PorterOpen,
    SendWeights,
    WeightsArrived,
    WeightsSent,
)
from tests.benchmarks.circuits import BENCH, light_the_ring

SIZE_BYTES = 64 << 20
BUCKET_BYTES = 1 << 20
ROUNDS = 3
TRAINERS = {2: ("n0", "n3"), 3: ("n0",)}
RECEIVERS = {2: ("n1", "n2"), 3: ("n1", "n2", "n3")}
SHAPES: dict[int, tuple[Shape, ...]] = {2: ("chain", "pairs"), 3: ("chain", "tree")}
"""By the number of receivers; a tree of two is a chain."""
LEAST = 0.8
LIMIT_NS = 120 * NS_PER_S

BARE = """
import os, sys, time
rank, world, store, interface, size = sys.argv[1:]
os.environ["GLOO_SOCKET_IFNAME"] = interface
import torch, torch.distributed as dist
torch.set_num_threads(1)
host, port = store.rsplit(":", 1)
keys = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
dist.init_process_group("gloo", store=dist.PrefixStore("bare", keys), rank=int(rank),
                        world_size=int(world))
groups = {n: dist.new_group(list(range(n + 1))) for n in range(2, int(world))}
tensor = torch.full((int(size),), 1 + int(rank), dtype=torch.uint8)
print("ready", flush=True)
for line in sys.stdin:
    receivers = int(line)
    if int(rank) > receivers:
        print(0, 0, flush=True)
        continue
    dist.barrier(group=groups[receivers])
    begin = time.monotonic_ns()
    dist.broadcast(tensor, 0, group=groups[receivers])
    print(begin, time.monotonic_ns(), flush=True)
    assert tensor[-1] == 1
"""
BARE_ARGV = (sys.executable, "-c", BARE)


class Bare:
    """One process of the bare broadcast on each node."""

    def __init__(self, stack: ExitStack, enters: Sequence[Sequence[str]], store: str) -> None:
        world = str(len(enters))
        self._children = [
            _started(
                stack,
                [*enter, *BARE_ARGV, str(rank), world, store, "eth0", str(SIZE_BYTES)],
            )
            for rank, enter in enumerate(enters)
        ]
        for child in self._children:
            assert _pipe(child.stdout).readline() == b"ready\n"

    def broadcast(self, receivers: int) -> float:
        """Return the time from the first rank that began to the last that had all, ms."""
        for child in self._children:
            _pipe(child.stdin).write(f"{receivers}\n".encode())
            _pipe(child.stdin).flush()
        stamps = [_pipe(child.stdout).readline().split() for child in self._children]
        begins, ends = zip(*((int(a), int(b)) for a, b in stamps[: receivers + 1]), strict=True)
        return (max(ends) - min(begins)) / NS_PER_MS


class Porters:
    """A labour of weights for each node; its porter runs in the node's namespace."""

    def __init__(self, enters: dict[str, Sequence[str]], logs: Path) -> None:
        self._nodes = {
            name: Weights(lambda _note: None, program=(*enter, *PROGRAM), logs=logs)
            for name, enter in enters.items()
        }
        self._listen: dict[str, str] = {}
        self._version = 0

    async def open(self, addresses: dict[str, str]) -> None:
        for name, address in addresses.items():
            opened = await _ask(self._nodes[name], OpenPorter(address=address))
            assert isinstance(opened, PorterOpen)
            self._listen[name] = opened.listen

    async def sync(
        self, path: Path, sources: Sequence[str], edges: Sequence[Edge]
    ) -> tuple[float, float]:
        """Return the time until every answer was here, and that of the transfer alone, ms."""
        self._version += 1
        transfer = uuid.uuid4().hex
        asked: dict[str, Message] = {
            to: ExpectWeights(
                transfer=transfer, version=self._version, children=self._below(to, edges)
            )
            for _, to in edges
        }
        for source in sources:
            asked[source] = SendWeights(
                transfer=transfer,
                version=self._version,
                path=str(path),
                children=self._below(source, edges),
                bucket_bytes=BUCKET_BYTES,
                stall_ns=10 * NS_PER_S,
            )
        begin_ns = time.monotonic_ns()
        asks = (_ask(self._nodes[name], message) for name, message in asked.items())
        answers = await asyncio.gather(*asks)
        total_ns = time.monotonic_ns() - begin_ns
        sent = [one.spans for one in answers if isinstance(one, WeightsSent)]
        arrived = [one.spans for one in answers if isinstance(one, WeightsArrived)]
        assert len(sent) == len(sources)
        assert len(sent) + len(arrived) == len(asked)
        wire_ns = max(s.end_ns for there in arrived for s in there) - min(
            spans[0].begin_ns for spans in sent
        )
        return total_ns / NS_PER_MS, wire_ns / NS_PER_MS

    def _below(self, node: str, edges: Sequence[Edge]) -> tuple[str, ...]:
        return tuple(self._listen[child] for child in children_of(node, edges))

    async def close(self) -> None:
        for node in self._nodes.values():
            await node.close()


async def _ask(node: Weights, message: Message) -> Message:
    answer = await node.commands()[type(message)](message, time.monotonic_ns() + LIMIT_NS)
    assert not isinstance(answer, Failure), answer
    return answer


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _started(stack: ExitStack, argv: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a process that ends when its standard input closes; `stack` sees to that."""
    child = stack.enter_context(
        subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    )
    stack.callback(_pipe(child.stdin).close)
    return child


async def _measure(bare: Bare, porters: Porters, file: Path) -> dict[str, dict[str, Any]]:
    """Return a row for each number of receivers and shape; arms take turns."""
    rows = {}
    for count, shapes in SHAPES.items():
        bare.broadcast(count)  # connects
        times: dict[Shape, list[tuple[float, float, float]]] = {shape: [] for shape in shapes}
        for turn in range(ROUNDS):
            for shape in shapes[:: 1 if turn % 2 else -1]:
                sources = sources_of(TRAINERS[count], RECEIVERS[count], shape)
                edges = edges_of(sources, RECEIVERS[count], shape)
                bare_ms = bare.broadcast(count)
                times[shape].append((bare_ms, *await porters.sync(file, sources, edges)))
        rows |= {f"{count}.{shape}": _row(found) for shape, found in times.items()}
    return rows


def _row(times: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
    bare_ms, total_ms, wire_ms = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "of_bare_rate": round(statistics.median(bare / total for bare, total, _ in times), 3),
        "bare_ms": round(bare_ms, 1),
        "total_ms": round(total_ms, 1),
        "wire_ms": round(wire_ms, 1),
        "rpc_ms": round(statistics.median(total - wire for _, total, wire in times), 1),
        "gb_per_s": round(SIZE_BYTES / total_ms / 1e6, 4),
        "rounds": len(times),
    }


@contextmanager
def _network(oversubscription: float) -> Iterator[tuple[Topology, Network]]:
    """The quickstart's four nodes with another electrical path."""
    bench = load_bench(BENCH)
    topology = topology_of(bench)
    network = build(topology, replace(bench.links, oversubscription=oversubscription))
    try:
        yield topology, network
    finally:
        tear_down(network.record)


async def _measured(
    stack: ExitStack, topology: Topology, network: Network, folder: Path
) -> dict[str, Any]:
    """Return the rows of one network, as it is."""
    enters = {
        name: ("nsenter", f"--net={namespace_path(network.netns[name])}", "--")
        for name in topology.nodes
    }
    file = folder / "weights"
    file.write_bytes(bytes(range(256)) * (SIZE_BYTES // 256))
    argv = [sys.executable, "-m", "agents.store", "--host", network.coordinator_address]
    store = _pipe(_started(stack, argv).stdout).readline().decode().strip()
    porters = Porters(enters, folder)
    try:
        await porters.open({name: node.address for name, node in topology.nodes.items()})
        return await _measure(Bare(stack, tuple(enters.values()), store), porters, file)
    finally:
        await porters.close()


def _run_on(oversubscription: float, *, lit: bool = False) -> dict[str, Any]:
    with _network(oversubscription) as (topology, network), ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY)))
        if lit:
            light_the_ring(stack, topology, network)
        return asyncio.run(_measured(stack, topology, network, folder))


def run() -> dict[str, Any]:
    paths = {"4:1": _run_on(4.0), "1:1": _run_on(1.0), "ring": _run_on(4.0, lit=True)}
    best = {
        f"{path}.{count}": max(
            row["of_bare_rate"] for name, row in rows.items() if name.startswith(f"{count}.")
        )
        for path, rows in paths.items()
        for count in SHAPES
    }
    gains = {
        name: {
            "ring_over_4:1": round(paths["4:1"][name]["total_ms"] / row["total_ms"], 3),
            "ring_of_1:1": round(paths["1:1"][name]["total_ms"] / row["total_ms"], 3),
        }
        for name, row in paths["ring"].items()
    }
    return {**paths, "gains": gains, "best": best, "held": min(best.values()) >= LEAST}


def table(figures: dict[str, Any]) -> str:
    columns = ("of_bare_rate", "bare_ms", "total_ms", "wire_ms", "rpc_ms", "gb_per_s", "rounds")
    lines = [f"{'64 MiB to':20}" + "".join(f"{name:>14}" for name in columns)]
    for path in ("4:1", "1:1", "ring"):
        for name, row in figures[path].items():
            cells = "".join(f"{row[column]:>14}" for column in columns)
            lines.append(f"{path + ' ' + name:20}{cells}")
    for name, gain in figures["gains"].items():
        over, of = gain["ring_over_4:1"], gain["ring_of_1:1"]
        lines.append(f"{name}: circuits {over:.2f}x the 4:1 path, {of:.2f} of the 1:1 path")
    told = "held" if figures["held"] else "MISSED"
    lines.append(f"mark: the best path >= {LEAST:g} of the bare broadcast's rate: {told}")
    return "\n".join(lines)
