"""The paced trainer: a step against its formula and bare collectives, and what announcing costs.

Two ranks, a process each, on loopback. Four things take turns: the step's collectives bare (plain
torch, the same sizes and groups in the same order, on end), a plain loop that sleeps before each of
them as long as the step computes, a step that tells nobody, and one whose phases are told over a
socket, as a rank tells its agent. Medians of rank 0. The ideal is the longest chain of computing
through all ranks, by the profile, plus the bare collectives. Ranks that wake at different times
wait for each other: the plain loop has that too.

Marks: a step within 2 % of the plain loop, and within 10 % of the ideal on an idle machine;
announcing under 1 % of it.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from agents.frames import pack
from agents.training.base import Groups
from agents.training.groups import join
from agents.training.orders import Join, Told
from agents.training.paced import Paced, make
from harness.clock import NS_PER_MS, NS_PER_S
from harness.model.busbw import counts
from harness.model.degrees import parse_degrees
from harness.model.load import load_profile
from harness.model.training.axes import place_of
from harness.model.training.phase import Phase
from harness.model.training.schedule import DTYPE
from harness.model.training.trainer import TrainerSpec
from harness.wire.training import PhaseHappened, Sample

ROOT = Path(__file__).parents[2]
PROFILE = ROOT / "scenarios" / "profiles" / "qwen2.5-14b-h800.toml"
CASES = ("DP2", "TP2", "PP2")
TOKENS = (3000, 800, 5000, 1200, 2500, 4000, 600, 900) * 2
SPEED = 8.0
ROUNDS = 7
LIMIT_S = 300


def run() -> dict[str, object]:
    """Return a row for each split of two ranks."""
    return {
        "rows": [one(case) for case in CASES],
        "mark": "step / plain <= 1.02; step / ideal <= 1.1 if idle; announcing < 1 % of a step",
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def table(figures: dict[str, object]) -> str:
    rows = figures["rows"]
    assert isinstance(rows, list)
    columns = (
        "degrees", "phases", "collectives", "mb", "computing_ms", "bare_ms", "plain_ms", "step_ms",
        "per_ideal", "per_plain", "announcing_pct",
    )  # fmt: skip
    lines = ["".join(f"{column:>15}" for column in columns)]
    lines += ["".join(_cell(row[column]) for column in columns) for row in rows]
    lines.append(f"mark: {figures['mark']} (load {figures['load']}, {figures['cores']} cores)")
    return "\n".join(lines)


def _cell(value: float | str) -> str:
    return f"{value:>15}" if isinstance(value, str) else f"{value:15.4g}"


def one(degrees: str) -> dict[str, Any]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        store = f"127.0.0.1:{free.getsockname()[1]}"
    argv = [sys.executable, "-m", "tests.benchmarks.training", degrees, store]
    children = [
        subprocess.Popen([*argv, str(rank)], cwd=ROOT, stdout=subprocess.PIPE) for rank in range(2)
    ]
    try:
        outputs = [child.communicate(timeout=LIMIT_S)[0] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    row: dict[str, Any] = json.loads(outputs[0])
    return row


def measure(degrees: str, store: str, rank: int) -> dict[str, Any]:
    """Measure in this process, which is one of the two ranks."""
    spec = TrainerSpec(
        mode="paced", degrees=parse_degrees(degrees), profile=load_profile(PROFILE), speed=SPEED
    )
    groups = join(
        Join(
            spec=spec,
            rank=rank,
            local=rank,
            world_size=2,
            store=store,
            interface="lo",
            attempt=0,
            timeout_ns=60 * NS_PER_S,
            tells=True,
        )
    )
    trainer = make(spec, groups)
    phases = trainer.phases(TOKENS)
    tell = _teller()
    ways: tuple[Callable[[], None], ...] = (
        _plain(trainer, groups, computing=False),
        _plain(trainer, groups, computing=True),
        lambda: _step(trainer, _nobody),
        lambda: _step(trainer, tell),
    )
    rounds = [[_timed(way) for way in ways] for _ in range(ROUNDS)]
    medians = (statistics.median(times) for times in zip(*rounds, strict=True))
    bare_ns, plain_ns, step_ns, told_ns = medians
    computing_ns = _computing_ns(trainer)
    return {
        "degrees": degrees,
        "phases": float(len(phases)),
        "collectives": float(sum(phase.times for phase in phases)),
        "mb": sum(phase.bytes * phase.times for phase in phases) / 1e6,
        "computing_ms": computing_ns / NS_PER_MS,
        "bare_ms": bare_ns / NS_PER_MS,
        "plain_ms": plain_ns / NS_PER_MS,
        "step_ms": step_ns / NS_PER_MS,
        "per_ideal": step_ns / (computing_ns + bare_ns),
        "per_plain": step_ns / plain_ns,
        "announcing_pct": 100 * (told_ns / step_ns - 1),
    }


def _computing_ns(trainer: Paced) -> float:
    """Return the longest chain of computing: ranks that meet in a phase go on together."""
    plan = trainer._plan(TOKENS)
    degrees = trainer._spec.degrees
    at_ns = [0.0] * degrees.ranks
    for move in plan.moves:
        for ranks in move.phase.groups:
            places = [place_of(rank, degrees) for rank in ranks]
            gaps_ns = [trainer._time_ns(move.flops[p.pp, p.dp]) for p in places]
            met_ns = max(at_ns[r] + gap for r, gap in zip(ranks, gaps_ns, strict=True))
            for rank in ranks:
                at_ns[rank] = met_ns
    return max(at_ns)


def _step(trainer: Paced, tell: Callable[[PhaseHappened], None]) -> None:
    samples = [Sample(str(n), "g", 0, tokens, 0.0, 0.0, 0, 0) for n, tokens in enumerate(TOKENS)]
    trainer.step(0, samples, tell)


def _plain(trainer: Paced, groups: Groups, *, computing: bool) -> Callable[[], None]:
    """The same collectives by plain torch on tensors of the same sizes, and plain sleep."""
    place = groups.place
    calls: list[tuple[Callable[[], Any], float, int]] = []
    for move in trainer._plan(TOKENS).moves:
        gap_ns = trainer._time_ns(move.flops[place.pp, place.dp] / move.phase.times)
        calls.append((_call(move.phase, groups), gap_ns / NS_PER_S, move.phase.times))

    def every() -> None:
        for call, gap_s, times in calls:
            for _ in range(times):
                if computing:
                    time.sleep(gap_s)
                call()

    return every


def _call(phase: Phase, groups: Groups) -> Callable[[], Any]:
    here, kind, group = groups.rank, getattr(torch, DTYPE), groups.handles[phase.axis]
    ranks = next(ranks for ranks in phase.groups if here in ranks)
    row = counts(phase.op, phase.bytes, len(ranks), DTYPE)
    sent, got = torch.ones(row.sent, dtype=kind), torch.zeros(row.received, dtype=kind)
    match phase.op:
        case "all_reduce":
            return lambda: dist.all_reduce(sent, group=group)
        case "all_gather":
            return lambda: dist.all_gather_single(got, sent, group=group)
        case "reduce_scatter":
            return lambda: dist.reduce_scatter_single(got, sent, group=group)
        case "send_recv" if here == ranks[0]:
            return lambda: dist.send(sent, ranks[1], group=group)
    return lambda: dist.recv(got, ranks[0], group=group)


def _timed(work: Callable[[], None]) -> int:
    dist.barrier()
    begin_ns = time.monotonic_ns()
    work()
    return time.monotonic_ns() - begin_ns


def _nobody(_phase: PhaseHappened) -> None:
    """Hear nothing."""


def _teller() -> Callable[[PhaseHappened], None]:
    """Tell over a socket, as a rank does; another process reads at its other end."""
    ours, theirs = socket.socketpair()
    subprocess.Popen(["cat"], stdin=theirs, stdout=subprocess.DEVNULL)  # ends with the line
    theirs.close()
    return lambda phase: ours.sendall(pack(0, 0, Told(phases=(phase,))))


if __name__ == "__main__":
    found = measure(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    if sys.argv[3] == "0":
        sys.stdout.write(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # rank 1 may be gone before; there is nothing left to close
