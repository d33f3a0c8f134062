"""Two nodes' labours of training without a wire, and what a coordinator would say to them."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from agents.process import group_members
from agents.training.labour import Training
from harness.clock import NS_PER_S
from harness.errors import HarnessError
from harness.model.degrees import parse_degrees
from harness.model.load import load_profile
from harness.model.shape import ModelShape
from harness.model.training.trainer import TrainerSpec
from harness.processes import start_ticks
from harness.wire.messages import Failure, Message, Note
from harness.wire.training import (
    OpenTraining,
    PhaseHappened,
    Sample,
    Trained,
    TrainingHappened,
    TrainingOpen,
    TrainStep,
    WatchTraining,
)

LIMIT_NS = 60 * NS_PER_S
PROFILES = Path(__file__).parents[2] / "scenarios" / "profiles"
DENSE = ModelShape(
    layers=6, hidden=512, heads=8, kv_heads=4, head_dim=64, vocab=8000, intermediate=1024
)
EXPERTS = replace(DENSE, intermediate=0, experts=8, experts_per_token=2, expert_intermediate=256)
M = TypeVar("M", bound=Message)


def spec(degrees: str, shape: ModelShape = DENSE, *, speed: float = 1.0) -> TrainerSpec:
    """A paced trainer of a small model, all of whose bytes are sent."""
    profile = load_profile(PROFILES / "qwen2.5-14b-h800.toml")
    return TrainerSpec(
        mode="paced",
        degrees=parse_degrees(degrees),
        profile=replace(profile, shape=shape),
        seed=11,
        speed=speed,
        bytes_scale=1e-1,
        micro_batch_tokens=2048,
    )


def samples(*tokens: int) -> tuple[Sample, ...]:
    return tuple(
        Sample(f"s{n}", "g", length // 4, length - length // 4, 1.0, 0.0, 0, 0)
        for n, length in enumerate(tokens)
    )


class Node:
    """One node, with everything that it told so far."""

    def __init__(self, logs: Path, **options: Any) -> None:
        logs.mkdir()
        self.logs = logs
        self.notes: list[Note] = []
        self.labour = Training(self.notes.append, logs=logs, **options)
        self.pids: dict[int, int] = {}
        self.told: list[PhaseHappened] = []
        self.dead: dict[int, str] = {}
        self.upto = 0

    async def say(self, message: Message, limit_ns: int = LIMIT_NS) -> Message:
        """Ask, as the agent would: what is raised becomes a `Failure`."""
        handler = self.labour.commands()[type(message)]
        async with asyncio.timeout(limit_ns / NS_PER_S + 15):
            try:
                return await handler(message, time.monotonic_ns() + limit_ns)
            except HarnessError as error:
                return Failure(error=type(error).__name__, text=str(error))

    async def ask(self, message: Message, kind: type[M], limit_ns: int = LIMIT_NS) -> M:
        answer = await self.say(message, limit_ns)
        assert isinstance(answer, kind), answer
        return answer

    async def watch(self, wait_ns: int = NS_PER_S) -> TrainingHappened:
        asked = WatchTraining(after=self.upto, wait_ns=wait_ns)
        happened = await self.ask(asked, TrainingHappened)
        assert happened.upto - self.upto == len(happened.phases)
        self.upto = happened.upto
        self.told += happened.phases
        self.dead = happened.dead
        return happened

    def living(self) -> list[int]:
        return [pid for pid in self.pids.values() if start_ticks(pid) is not None]


class Pod:
    """Two nodes, and the ranks of one training shared out among them."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = tuple(nodes)
        self.port = free_port()
        self._pids: list[int] = []

    async def all(
        self, message: Callable[[int], Message] | Message, kind: type[M], limit_ns: int = LIMIT_NS
    ) -> list[M]:
        """Ask every node at once."""
        bodies = [message if isinstance(message, Message) else message(n) for n in range(2)]
        asks = (
            node.ask(body, kind, limit_ns) for node, body in zip(self.nodes, bodies, strict=True)
        )
        return list(await asyncio.gather(*asks))

    def opening(self, which: TrainerSpec, attempt: int = 0) -> Callable[[int], OpenTraining]:
        ranks = which.degrees.ranks
        shares = (tuple(range(ranks // 2)), tuple(range(ranks // 2, ranks)))
        return lambda n: OpenTraining(
            spec=which,
            ranks=shares[n],
            world_size=ranks,
            store=f"127.0.0.1:{self.port}",
            address="127.0.0.1",
            interface="lo",
            attempt=attempt,
            timeout_ns=LIMIT_NS,
        )

    async def open(self, which: TrainerSpec, attempt: int = 0) -> list[TrainingOpen]:
        opened = await self.all(self.opening(which, attempt), TrainingOpen)
        for node, answer in zip(self.nodes, opened, strict=True):
            node.pids, node.upto, node.told = answer.pids, 0, []
            self._pids += answer.pids.values()
        return opened

    async def step(self, version: int, *tokens: int) -> list[Trained]:
        return await self.all(TrainStep(version=version, samples=samples(*tokens)), Trained)

    async def gone(self) -> None:
        """Close all; whatever the test leaves is gone afterwards."""
        for node in self.nodes:
            await node.labour.close()
        for pid in self._pids:
            assert group_members(pid) == []
            assert start_ticks(pid) is None


@asynccontextmanager
async def pod(tmp_path: Path) -> AsyncIterator[Pod]:
    found = Pod([Node(tmp_path / name) for name in "ab"])
    try:
        yield found
    finally:
        await found.gone()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def run(test: Coroutine[None, None, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(110):
            await test

    asyncio.run(bounded())
