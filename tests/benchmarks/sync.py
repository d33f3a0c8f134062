"""Weight sync over the network: porters in chains and trees against a bare broadcast of the bytes.

On the shipped quickstart's bench (four nodes), network and light only, first over the electrical
path, where all nodes are alike, then over a ring of circuits. 64 MiB go from one node to two and to
three others. Arms are interleaved in one run over the same links: ``torch.distributed.broadcast``
of gloo, which verifies nothing, a chain of porters, and a tree of them. Our time is that until
every answer is here; what of it was no transfer (orders, answers, opening files) is told apart as
RPC. Agents are in this process: what the wire to a coordinator adds is `coordinator`'s to say.

Mark: the better of chain and tree reaches >= 0.8 of the bare broadcast's rate. Needs root.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from agents.weights import MEMORY, PROGRAM, Weights
from drivers.netlink import namespace_path
from harness.clock import NS_PER_MS, NS_PER_S
from harness.wire.messages import Failure, Message
from harness.wire.weights import (
    ExpectWeights,
    OpenPorter,
    PorterOpen,
    SendWeights,
    WeightsArrived,
    WeightsSent,
)
from tests.benchmarks.circuits import light_the_ring, network_of_four

SIZE_BYTES = 64 << 20
BUCKET_BYTES = 1 << 20
ROUNDS = 3
RECEIVERS = (2, 3)
SHAPES = {
    (2, "chain"): ((1,), (2,), ()),
    (2, "tree"): ((1, 2), (), ()),
    (3, "chain"): ((1,), (2,), (3,), ()),
    (3, "tree"): ((1, 3), (2,), (), ()),
}
"""(receivers, shape) -> whom each node passes it on to."""
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

    def __init__(self, enters: Sequence[Sequence[str]], logs: Path) -> None:
        self._nodes = [
            Weights(lambda _note: None, program=(*enter, *PROGRAM), logs=logs) for enter in enters
        ]
        self._listen: list[str] = []
        self._version = 0

    async def open(self, addresses: Sequence[str]) -> None:
        for node, address in zip(self._nodes, addresses, strict=True):
            opened = await _ask(node, OpenPorter(address=address))
            assert isinstance(opened, PorterOpen)
            self._listen.append(opened.listen)

    async def sync(self, path: Path, shape: Sequence[Sequence[int]]) -> tuple[float, float]:
        """Return the time until every answer was here, and that of the transfer alone, ms."""
        self._version += 1
        transfer = uuid.uuid4().hex
        below = [tuple(self._listen[child] for child in children) for children in shape]
        asked: list[Message] = [
            SendWeights(
                transfer=transfer,
                version=self._version,
                path=str(path),
                children=below[0],
                bucket_bytes=BUCKET_BYTES,
                stall_ns=10 * NS_PER_S,
            )
        ]
        asked += [
            ExpectWeights(transfer=transfer, version=self._version, children=children)
            for children in below[1:]
        ]
        begin_ns = time.monotonic_ns()
        sent, *arrived = await asyncio.gather(*map(_ask, self._nodes, asked))
        total_ns = time.monotonic_ns() - begin_ns
        assert isinstance(sent, WeightsSent)
        ends = [
            span.end_ns for one in arrived if isinstance(one, WeightsArrived) for span in one.spans
        ]
        return total_ns / NS_PER_MS, (max(ends) - sent.spans[0].begin_ns) / NS_PER_MS

    async def close(self) -> None:
        for node in self._nodes:
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
    for receivers in RECEIVERS:
        shapes = {name: below for (count, name), below in SHAPES.items() if count == receivers}
        bare.broadcast(receivers)  # connects
        times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in shapes}
        for turn in range(ROUNDS):
            for name in list(shapes)[:: 1 if turn % 2 else -1]:
                bare_ms = bare.broadcast(receivers)
                times[name].append((bare_ms, *await porters.sync(file, shapes[name])))
        rows |= {f"{receivers}.{name}": _row(found) for name, found in times.items()}
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


async def _on_both_paths(
    enters: Sequence[Sequence[str]], addresses: Sequence[str], store: str, light: Any, folder: Path
) -> dict[str, Any]:
    file = folder / "weights"
    file.write_bytes(bytes(range(256)) * (SIZE_BYTES // 256))
    porters = Porters(enters, folder)
    found = {}
    try:
        await porters.open(addresses)
        with ExitStack() as stack:
            bare = Bare(stack, enters, store)
            found["electrical"] = await _measure(bare, porters, file)
            light(stack)
            found["ring"] = await _measure(bare, porters, file)
    finally:
        await porters.close()
    return found


def run() -> dict[str, Any]:
    with network_of_four() as (topology, network), ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY)))
        enters = [
            ("nsenter", f"--net={namespace_path(network.netns[name])}", "--")
            for name in topology.nodes
        ]
        addresses = [node.address for node in topology.nodes.values()]
        argv = [sys.executable, "-m", "agents.store", "--host", network.coordinator_address]
        store = _pipe(_started(stack, argv).stdout).readline().decode().strip()
        paths = asyncio.run(
            _on_both_paths(
                enters,
                addresses,
                store,
                lambda stack: light_the_ring(stack, topology, network),
                folder,
            )
        )
    best = {
        f"{path}.{receivers}": max(
            row["of_bare_rate"] for name, row in rows.items() if name.startswith(f"{receivers}.")
        )
        for path, rows in paths.items()
        for receivers in RECEIVERS
    }
    return {**paths, "best": best, "held": min(best.values()) >= LEAST}


def table(figures: dict[str, Any]) -> str:
    columns = ("of_bare_rate", "bare_ms", "total_ms", "wire_ms", "rpc_ms", "gb_per_s", "rounds")
    lines = [f"{'64 MiB to':20}" + "".join(f"{name:>14}" for name in columns)]
    for path in ("electrical", "ring"):
        for name, row in figures[path].items():
            cells = "".join(f"{row[column]:>14}" for column in columns)
            lines.append(f"{path + ' ' + name:20}{cells}")
    told = "held" if figures["held"] else "MISSED"
    lines.append(f"mark: the better shape >= {LEAST:g} of the bare broadcast's rate: {told}")
    return "\n".join(lines)
