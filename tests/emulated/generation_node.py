"""A node's labour of generation without a wire, and what a coordinator would say to it."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from agents.generation.labour import Generation
from agents.process import group_members
from harness.clock import NS_PER_S
from harness.errors import HarnessError
from harness.model.layout import parse_layout
from harness.model.load import load_profile
from harness.model.placement import Instance, place
from harness.model.requests import Carried
from harness.processes import start_ticks
from harness.wire.generation import (
    Build,
    Built,
    EngineSpec,
    GenerationOpen,
    Happened,
    OpenGeneration,
    Output,
    Strategy,
    Submit,
    Submitted,
    TearDown,
    Torn,
    Watch,
    Work,
)
from harness.wire.messages import Failure, Message, Note

SCRIPTED = (sys.executable, str(Path(__file__).with_name("scripted_engine.py")))
LIMIT_NS = 60 * NS_PER_S
PROFILE = load_profile(
    Path(__file__).parents[2] / "scenarios" / "profiles" / "qwen2.5-14b-h800.toml"
)
M = TypeVar("M", bound=Message)


def scripted(**options: Any) -> EngineSpec:
    """A scripted engine; `lockstep` and `odd` are its options."""
    return EngineSpec(engine="paced", profile=PROFILE, options=options)


def layout(text: str, gpus: int) -> tuple[Instance, ...]:
    """The instances of a layout on a node ``n`` of `gpus` GPUs."""
    return place(parse_layout(text), {"n": gpus})["n"]


def works(*ids: str, tokens: int = 20, produced: int = 0) -> tuple[Work, ...]:
    return tuple(
        Work(
            carried=Carried(
                id=name,
                prompt_tokens=10,
                response_tokens=tokens,
                arrived_ns=0,
                produced_tokens=produced,
            )
        )
        for name in ids
    )


class Node:
    """One node, with everything that it told so far."""

    def __init__(self, program: Sequence[str], logs: Path) -> None:
        self.notes: list[Note] = []
        self.labour = Generation(self.notes.append, program=program, logs=logs)
        self.pids: dict[int, int] = {}
        self.outputs: list[Output] = []
        self.dead: dict[str, str] = {}
        self.last: Happened | None = None
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

    async def fails(self, message: Message, limit_ns: int = LIMIT_NS) -> Failure:
        return await self.ask(message, Failure, limit_ns)

    async def open(
        self, spec: EngineSpec, gpus: int = 2, prebuild: Sequence[Sequence[Instance]] = ()
    ) -> GenerationOpen:
        asked = OpenGeneration(
            spec=spec,
            gpus=gpus,
            address="127.0.0.1",
            prebuild=tuple(tuple(instances) for instances in prebuild),
        )
        opened = await self.ask(asked, GenerationOpen)
        self.pids = opened.pids
        return opened

    async def build(
        self, instances: Sequence[Instance], strategy: Strategy = "rebuild", version: int = 0
    ) -> Built:
        asked = Build(instances=tuple(instances), strategy=strategy, version=version)
        return await self.ask(asked, Built)

    async def tear_down(
        self, instances: Sequence[Instance], strategy: Strategy = "rebuild", *, force: bool = False
    ) -> Torn:
        names = tuple(instance.name for instance in instances)
        return await self.ask(TearDown(instances=names, strategy=strategy, force=force), Torn)

    async def submit(self, instance: Instance, *ids: str, tokens: int = 20) -> Submitted:
        asked = Submit(instance=instance.name, works=works(*ids, tokens=tokens))
        return await self.ask(asked, Submitted)

    async def watch(self, wait_ns: int = NS_PER_S) -> Happened:
        happened = await self.ask(Watch(after=self.upto, wait_ns=wait_ns), Happened)
        assert happened.upto - self.upto == len(happened.outputs)
        self.upto = happened.upto
        self.outputs += happened.outputs
        self.dead, self.last = happened.dead, happened
        return happened

    async def finished(self, *ids: str) -> None:
        """Watch until these requests have ended."""
        while not set(ids) <= {o.id for o in self.outputs if o.ended == "finished"}:
            await self.watch()
            assert not self.dead, self.dead

    async def death_of(self, instance: Instance) -> str:
        while instance.name not in self.dead:
            await self.watch()
        return self.dead[instance.name]

    def positions(self, name: str) -> list[int]:
        """Every position of a response that was told, in the order of telling."""
        return [
            position
            for output in self.outputs
            if output.id == name
            for position in range(output.start, output.start + output.count)
        ]

    def living(self) -> set[int]:
        return {pid for seat in self.seats() if start_ticks(pid := seat.child.pid) is not None}

    def seats(self) -> list[Any]:
        opened = self.labour._open
        return list(opened._seats) if opened else []


@asynccontextmanager
async def node(tmp_path: Path, program: Sequence[str] = SCRIPTED) -> AsyncIterator[Node]:
    """A node; whatever the test leaves on it is gone afterwards."""
    found = Node(program, tmp_path)
    try:
        yield found
    finally:
        pids = found.living() | set(found.pids.values())
        await found.labour.close()
        for pid in pids:
            assert group_members(pid) == []
            assert start_ticks(pid) is None


async def until(predicate: Callable[[], bool]) -> None:
    """Wait for what nobody tells."""
    while not predicate():  # noqa: ASYNC110 - it is looked up in the labour, from outside
        await asyncio.sleep(0.005)


def run(test: Coroutine[None, None, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(110):
            await test

    asyncio.run(bounded())
