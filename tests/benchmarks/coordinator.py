"""What the coordinator costs: a barrier and a command to 64 agents, and one round trip to four.

The 64 are stubs (the real sockets, CURVE and codec, 16 to a process, no event loop); the four are
real agent processes. The marks: 64 agents p99 <= 20 ms; four real agents p50 < 0.5 ms.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import zmq

from harness.clock import NS_PER_MS, NS_PER_S
from harness.wire import codec, keys
from harness.wire.link import Link
from harness.wire.messages import (
    VERSION,
    Done,
    Held,
    Hello,
    Hold,
    Message,
    Quiesced,
    Shutdown,
    StopAt,
    StopRanks,
    Welcome,
)
from harness.wire.sockets import client_socket

AGENTS, PER_PROCESS = 64, 16
WARMUP, ROUNDS = 50, 1_000
ROOT = Path(__file__).parents[2]
LIMIT_NS = 30 * NS_PER_S


def run() -> dict[str, object]:
    """Return the figures in milliseconds, each with its mark."""
    stubs = asyncio.run(_with_agents(AGENTS, _start_stubs, _drain_step))
    real = asyncio.run(_with_agents(4, _start_agents, _one_command))
    one = asyncio.run(_with_agents(1, _start_agents, _one_command))
    return {
        "barrier_and_command_64": {**_spread(stubs), "mark": "p99 <= 20"},
        "ask_all_4_agents": {**_spread(real), "mark": "p50 < 0.5"},
        "ask_1_agent": _spread(one),
        "unit": "ms",
        "load": os.getloadavg()[0],
    }


def table(figures: dict[str, object]) -> str:
    lines = [f"{'':26}{'n':>6}{'p50':>9}{'p99':>9}{'max':>9}  ms (load {figures['load']})"]
    for name, row in figures.items():
        if isinstance(row, dict):
            values = "".join(f"{row[key]:9.3f}" for key in ("p50", "p99", "max"))
            lines.append(f"{name:26}{row['n']:6}{values}  {row.get('mark', '')}")
    return "\n".join(lines)


def _spread(times_ns: list[int]) -> dict[str, object]:
    ordered = sorted(times_ns)
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    ranks = {key: min(len(ordered) - 1, int(share * len(ordered))) for key, share in at.items()}
    return {"n": len(ordered)} | {k: ordered[rank] / NS_PER_MS for k, rank in ranks.items()}


Step = Callable[[Link, list[str]], Awaitable[object]]
Start = Callable[[list[str], str, Path], list[subprocess.Popen[bytes]]]


async def _with_agents(count: int, start: Start, step: Step) -> list[int]:
    names = [f"n{index}" for index in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        keys.make_folder(where, names)
        pair, allowed = keys.load(where, keys.COORDINATOR), keys.allow_list(where, names)
        async with Link(bind="127.0.0.1:0", pair=pair, agents=allowed, run="bench") as link:
            processes = start(names, link.address, where)
            try:
                await link.ready(names, LIMIT_NS)
                times = await _time(link, names, step)
                await link.shutdown(LIMIT_NS)
                for process in processes:
                    process.wait(10)
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
    return times


async def _time(link: Link, names: list[str], step: Step) -> list[int]:
    times = []
    for index in range(WARMUP + ROUNDS):
        began = time.monotonic_ns()
        await step(link, names)
        if index >= WARMUP:
            times.append(time.monotonic_ns() - began)
    return times


async def _drain_step(link: Link, names: list[str]) -> None:
    """The drain's first two steps: everyone tells its iteration; the latest is told to all."""
    held = await link.ask_all(dict.fromkeys(names, Hold()), Held, LIMIT_NS)
    latest = max(max(answer.entered.values()) for answer in held.values())
    stop = StopAt(iteration=latest)
    await link.ask_all(dict.fromkeys(names, stop), Quiesced, LIMIT_NS)


async def _one_command(link: Link, names: list[str]) -> None:
    await link.ask_all(dict.fromkeys(names, StopRanks()), Done, LIMIT_NS)


def _start_agents(names: list[str], address: str, folder: Path) -> list[subprocess.Popen[bytes]]:
    fixed = ["--coordinator", address, "--keys", str(folder)]
    return [
        subprocess.Popen([sys.executable, "-m", "agents", "--name", name, *fixed], cwd=ROOT)
        for name in names
    ]


def _start_stubs(names: list[str], address: str, folder: Path) -> list[subprocess.Popen[bytes]]:
    program = [sys.executable, "-m", "tests.benchmarks.coordinator", address, str(folder)]
    groups = [names[first : first + PER_PROCESS] for first in range(0, len(names), PER_PROCESS)]
    return [subprocess.Popen([*program, *group], cwd=ROOT) for group in groups]


class _Stub:
    """One agent reduced to its two sockets."""

    def __init__(self, context: zmq.Context, name: str, address: str, folder: Path) -> None:
        self.name, self.host = name, address.rsplit(":", 1)[0]
        self.open = lambda: client_socket(
            context,
            keys.load(folder, name),
            keys.load_public(folder / "coordinator.pub"),
            name.encode(),
        )
        self.work = self.open()
        self.work.connect(f"tcp://{address}")
        hello = Hello(version=VERSION, host="stub", pid=0, gpus=0, interfaces=(), facts={})
        self.say(hello, None)
        self.pulse: zmq.Socket[bytes] | None = None
        self.over = False

    def say(self, body: Message, re: int | None) -> None:
        now = time.monotonic_ns()
        self.work.send(
            codec.encode(body, run="", node=self.name, epoch=1, seq=0, re=re, t_mono_ns=now)
        )

    def on_work(self, poller: zmq.Poller) -> None:
        envelope = codec.decode(self.work.recv())
        body = codec.decode_body(envelope)
        if isinstance(body, Hold):
            self.say(Held(entered={0: envelope.seq}), envelope.seq)
        elif isinstance(body, StopAt):
            self.say(Quiesced(last_good_ns={0: time.monotonic_ns()}), envelope.seq)
        elif isinstance(body, Welcome) and self.pulse is None:
            self.pulse = self.open()
            self.pulse.connect(f"tcp://{self.host}:{body.pulse_port}")
            self.pulse.send(codec.BEAT)
            poller.register(self.pulse, zmq.POLLIN)
        elif isinstance(body, Shutdown):
            self.say(Done(t_ns=time.monotonic_ns()), envelope.seq)
            self.over = True

    def on_pulse(self) -> None:
        assert self.pulse
        t1 = codec.parse_probe(self.pulse.recv())
        t2 = time.monotonic_ns()
        self.pulse.send(codec.echo(t1, t2, time.monotonic_ns()))


def _stubs(address: str, folder: Path, names: list[str]) -> None:
    context: zmq.Context = zmq.Context()
    stubs = [_Stub(context, name, address, folder) for name in names]
    poller = zmq.Poller()
    for stub in stubs:
        poller.register(stub.work, zmq.POLLIN)
    while not all(stub.over for stub in stubs):
        ready = dict(poller.poll(LIMIT_NS // NS_PER_MS))
        if not ready:
            raise TimeoutError("the coordinator fell silent")
        for stub in stubs:
            if stub.work in ready:
                stub.on_work(poller)
            if stub.pulse in ready:
                stub.on_pulse()
    for stub in stubs:
        stub.work.linger = 1_000
    context.destroy()


if __name__ == "__main__":
    _stubs(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
