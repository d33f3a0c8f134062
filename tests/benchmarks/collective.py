"""What the harness adds to a collective: its all-reduce against a bare torch loop.

Both run on the same links, interleaved in one run, because a busy machine drifts by more than what
is measured: per round each arm does a burst of iterations, the order alternates, and the figure is
the median over rounds of harness / bare. Arms: a timed collective, and traffic (the loop that can
be held). The bare loop rotates over as many tensors as the harness does, since that is part of the
definition of the measurement and not of its cost.

Mark: within 3 % at 1 and 16 MiB.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from agents.collective import SPAN_BYTES
from agents.ranks import PROGRAM, Ranks
from harness.clock import NS_PER_MS, NS_PER_S
from harness.model.busbw import mean_of_ranks_ns
from harness.model.sizes import format_size
from harness.wire.messages import (
    EndTraffic,
    Failure,
    Groups,
    Held,
    Hold,
    Message,
    RunCollective,
    Samples,
    StartRanks,
    StartTraffic,
    StopAt,
    StopRanks,
    TrafficSoFar,
    TrafficTimes,
)

MARK = "ratio <= 1.03"
LIMIT_NS = 60 * NS_PER_S
SIZES = {2**20: (60, 20), 16 * 2**20: (40, 8)}
"""Bytes -> (rounds, iterations in each arm's burst)."""

BARE = """
import os, sys, time
rank, world, store, interface, span = sys.argv[1:]
os.environ["GLOO_SOCKET_IFNAME"] = interface
import torch, torch.distributed as dist
torch.set_num_threads(1)
host, port = store.rsplit(":", 1)
keys = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
dist.init_process_group("gloo", store=dist.PrefixStore("bare", keys), rank=int(rank),
                        world_size=int(world))
tensors, kept = [], 0
print("ready", flush=True)
for line in sys.stdin:
    size, iterations = map(int, line.split())
    if size != kept:
        kept, slots = size, max(1, int(span) // size)
        tensors = [torch.ones(size // 4) for _ in range(slots)]
        for tensor in tensors:
            dist.all_reduce(tensor)
    dist.barrier()
    begin = time.monotonic_ns()
    for i in range(iterations):
        dist.all_reduce(tensors[i % slots])
    print((time.monotonic_ns() - begin) // iterations, flush=True)
"""


@dataclass(frozen=True)
class Place:
    """Where a rank runs: words before its command (``ip netns exec n0``), its data interface."""

    enter: tuple[str, ...] = ()
    interface: str = "lo"


class Bare:
    """The bare loop's processes."""

    def __init__(self, stack: ExitStack, places: Sequence[Place], store: str) -> None:
        self._children = []
        for rank, place in enumerate(places):
            words = [str(rank), str(len(places)), store, place.interface, str(SPAN_BYTES)]
            argv = [*place.enter, sys.executable, "-c", BARE, *words]
            self._children.append(_started(stack, argv))
        for child in self._children:
            assert _pipe(child.stdout).readline() == b"ready\n"

    def burst(self, size: int, iterations: int) -> float:
        """Return the mean over ranks of the mean iteration, ns."""
        for child in self._children:
            _pipe(child.stdin).write(f"{size} {iterations}\n".encode())
            _pipe(child.stdin).flush()
        return statistics.fmean(int(_pipe(child.stdout).readline()) for child in self._children)


class Harness:
    """The harness's ranks: one agent's worth per place, all asked at once as a coordinator does."""

    def __init__(self, places: Sequence[Place], logs: Path) -> None:
        self._nodes = [
            Ranks(lambda _note: None, program=(*place.enter, *PROGRAM), logs=logs)
            for place in places
        ]
        self._places = places

    async def start(self, store: str) -> None:
        """Start all ranks."""
        answers = []
        for rank, (node, place) in enumerate(zip(self._nodes, self._places, strict=True)):
            groups = Groups(
                generation=1,
                world_size=len(self._places),
                store=store,
                interface=place.interface,
                timeout_ns=LIMIT_NS,
            )
            answers.append(_ask(node, StartRanks(ranks=(rank,), groups=groups)))
        await asyncio.gather(*answers)

    async def ask(self, message: Message) -> list[Message]:
        """Ask every node."""
        return await asyncio.gather(*(_ask(node, message) for node in self._nodes))

    async def collective(self, size: int, iterations: int) -> float:
        """Return the mean over ranks of the mean iteration of one timed collective, ns."""
        asked = RunCollective(
            op="all_reduce",
            size_bytes=size,
            dtype="float32",
            iterations=iterations,
            warmup=0,
            verify=False,
            timeout_ns=LIMIT_NS,
        )
        found = await self.ask(asked)
        rows = [row for samples in found if isinstance(samples, Samples) for row in samples.ranks]
        return mean_of_ranks_ns([row.times_ns for row in rows])

    async def traffic(self, size: int, iterations: int, about_ns: float) -> float:
        """Return the same of a traffic that ran for about `iterations`, ns."""
        start = StartTraffic(op="all_reduce", size_bytes=size, dtype="float32", timeout_ns=LIMIT_NS)
        await self.ask(start)
        await asyncio.sleep(iterations * about_ns / NS_PER_S)
        held = [found.entered for found in await self.ask(Hold()) if isinstance(found, Held)]
        await self.ask(StopAt(iteration=max(n for entered in held for n in entered.values())))
        found = await self.ask(TrafficSoFar(last=iterations))
        await self.ask(EndTraffic())
        told = [one for one in found if isinstance(one, TrafficTimes)]
        return mean_of_ranks_ns([times for one in told for times in one.times_ns.values()])

    async def stop(self) -> None:
        """Stop all ranks."""
        await self.ask(StopRanks())


async def _ask(node: Ranks, message: Message) -> Message:
    answer = await node.commands()[type(message)](message, time.monotonic_ns() + LIMIT_NS)
    assert not isinstance(answer, Failure), answer
    return answer


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _started(stack: ExitStack, argv: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a process that ends when its standard input closes; `stack` sees to that."""
    child = stack.enter_context(
        subprocess.Popen(
            list(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
    )
    stack.callback(_pipe(child.stdin).close)
    return child


async def _measure(
    places: Sequence[Place], store: str, logs: Path, sizes: Mapping[int, tuple[int, int]]
) -> dict[str, object]:
    rows: dict[str, object] = {}
    harness = Harness(places, logs)
    with ExitStack() as stack:
        bare = Bare(stack, places, store)
        await harness.start(store)
        try:
            for size, (rounds, iterations) in sizes.items():
                rows |= await _rounds(bare, harness, size, rounds, iterations)
        finally:
            await harness.stop()
    return rows


async def _rounds(
    bare: Bare, harness: Harness, size: int, rounds: int, iterations: int
) -> dict[str, object]:
    about_ns = bare.burst(size, iterations)
    await harness.collective(size, iterations)  # both warm
    times: dict[str, list[float]] = {"bare": [], "collective": [], "traffic": []}
    for turn in range(rounds):
        arms = list(times) if turn % 2 == 0 else list(times)[::-1]
        for arm in arms:
            if arm == "bare":
                found = bare.burst(size, iterations)
            elif arm == "collective":
                found = await harness.collective(size, iterations)
            else:
                found = await harness.traffic(size, iterations, about_ns)
            times[arm].append(found)
    bare_ns = times.pop("bare")
    return {f"{arm}.all_reduce.{format_size(size)}": figures(times[arm], bare_ns) for arm in times}


def figures(ours_ns: Sequence[float], bare_ns: Sequence[float]) -> dict[str, object]:
    """Return the ratio (median over rounds, and its quartiles) and both arms' medians."""
    ratios = [ours / bare for ours, bare in zip(ours_ns, bare_ns, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "ratio": round(middle, 4),
        "p25": round(low, 4),
        "p75": round(high, 4),
        "fastest": round(min(ours_ns) / min(bare_ns), 4),
        "bare_ms": round(statistics.median(bare_ns) / NS_PER_MS, 3),
        "harness_ms": round(statistics.median(ours_ns) / NS_PER_MS, 3),
        "rounds": len(ratios),
        "mark": MARK,
    }


def run(
    places: Sequence[Place] = (Place(), Place()),
    *,
    sizes: Mapping[int, tuple[int, int]] = SIZES,
    store_enter: Sequence[str] = (),
    store_host: str = "127.0.0.1",
) -> dict[str, object]:
    """Return one row per arm and size; `ratio` is harness / bare, median over rounds.

    `store_enter` and `store_host` say where the ranks' store runs and under which address all
    places reach it.
    """
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        argv = [*store_enter, sys.executable, "-m", "agents.store", "--host", store_host]
        served = _started(stack, argv)
        store = _pipe(served.stdout).readline().decode().strip()
        rows = asyncio.run(_measure(places, store, logs, sizes))
    return {**rows, "load": os.getloadavg()[0]}


def table(rows: dict[str, object]) -> str:
    """Return the figures for a terminal."""
    columns = ("ratio", "p25", "p75", "fastest", "bare_ms", "harness_ms", "rounds")
    lines = [f"{'':32}" + "".join(f"{name:>12}" for name in columns) + f"  (load {rows['load']})"]
    for name, row in rows.items():
        if isinstance(row, dict):
            lines.append(f"{name:32}" + "".join(f"{row[c]:>12}" for c in columns) + f"  {MARK}")
    return "\n".join(lines)
