"""The labour of generation: engines on this node, the requests in them, and what they tell.

One change of engines at a time; requests may come and go meanwhile. What is refused leaves all as
it was. `agents.generation.engines` has the processes; nothing is here before `OpenGeneration`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from agents.asking import OrderFailed, answering
from agents.generation.answers import merged
from agents.generation.crew import Crew
from agents.generation.engines import Engines
from agents.generation.memory import Room, cpu_room, gpu_room, paced_room, place_problems
from agents.labour import Handler, Notify
from agents.ranks import LOG_DIR
from harness.clock import NS_PER_S
from harness.errors import InfrastructureError
from harness.model.intake import Refused
from harness.model.shape import ModelShape, shape_of_config
from harness.wire.generation import (
    Admission,
    Build,
    Built,
    CloseGeneration,
    EngineSpec,
    GenerationOpen,
    Happened,
    MeasureSteps,
    OpenGeneration,
    Prepare,
    Prepared,
    Submit,
    TearDown,
    Torn,
    UpdateWeights,
    Watch,
    Withdraw,
    Withdrawn,
)
from harness.wire.messages import Done, Failure, Message

PROGRAM = (sys.executable, "-m", "agents.generation.rank")

_PARTING_NS = 10 * NS_PER_S
"""When generation is closed, engines have this long to leave by themselves."""


class Busy(InfrastructureError):
    """Another change of engines is under way."""


class NotOpen(InfrastructureError):
    """Generation is not open on this node."""


class NoInstance(InfrastructureError):
    """No instance of that name is up on this node."""


class Generation:
    """The labour of generation; see `agents.labour`. `program` starts one rank."""

    def __init__(
        self, notify: Notify, *, program: Sequence[str] = PROGRAM, logs: Path | None = None
    ) -> None:
        folder = os.environ.get(LOG_DIR)
        self._notify, self._program = notify, tuple(program)
        self._logs = logs or (Path(folder) if folder else None)
        self._open: Engines | None = None
        self._under_way = ""

    def commands(self) -> dict[type[Message], Handler]:
        """Return who answers what."""
        verbs: dict[type[Message], Handler] = {
            OpenGeneration: self._on_open,
            Prepare: self._on_prepare,
            Build: self._on_build,
            TearDown: self._on_tear_down,
            UpdateWeights: self._on_update_weights,
            CloseGeneration: self._on_close,
            Submit: self._on_one,
            MeasureSteps: self._on_one,
            Admission: self._on_admission,
            Withdraw: self._on_withdraw,
            Watch: self._on_watch,
        }
        return {kind: answering(verb) for kind, verb in verbs.items()}

    async def close(self) -> None:
        """Kill all ranks and verify that they are gone; raises `Unkillable`."""
        await self._end()

    def kill_now(self) -> None:
        """Kill all ranks without waiting."""
        if engines := self._open:
            engines.kill_now()

    @contextmanager
    def _alone(self, asked: Message) -> Iterator[None]:
        """Let nothing else change engines meanwhile. Raises `Busy`."""
        if self._under_way:
            raise Busy(f"{self._under_way} is under way on this node")
        self._under_way = str(asked.__struct_config__.tag)
        try:
            yield
        finally:
            self._under_way = ""

    # -- engines -------------------------------------------------------------------------------

    async def _on_open(self, asked: OpenGeneration, due_ns: int) -> Message:
        if self._open is not None:
            raise Busy("generation is open on this node: close it first")
        with self._alone(asked):
            shape = _shape(asked.spec)  # a model that is not there is told before all else
            engines = self._open = Engines(
                asked.spec,
                asked.gpus,
                asked.address,
                program=self._program,
                logs=self._logs,
                notify=self._notify,
            )
            try:
                pids = await engines.open(asked.prebuild, due_ns)
            except BaseException:
                await self._end()
                raise
            assert engines.ready is not None
            return GenerationOpen(
                pids=pids,
                facts=engines.ready.facts,
                warnings=engines.ready.warnings,
                shape=shape,
            )

    async def _on_prepare(self, asked: Prepare, due_ns: int) -> Message:
        with self._alone(asked):
            room = await self._room(asked, due_ns)
            reasons = room.problems(asked.instances)
            if asked.strategy == "pool":
                reasons += self._engines.unpooled(asked.instances)
            if reasons:
                return Failure(error="Infeasible", text="\n".join(reasons))
            return Prepared(memory=room.ledger(asked.instances))

    async def _on_build(self, asked: Build, due_ns: int) -> Message:
        with self._alone(asked):
            engines = self._engines
            if reasons := place_problems(asked.instances, engines.gpus):
                raise Refused("\n".join(reasons))
            if asked.strategy == "pool":
                room = await self._room(asked, due_ns)
                if reasons := room.problems(asked.instances):
                    raise Refused("\n".join(reasons))
            spans = await engines.build(
                asked.instances, asked.strategy, asked.version, due_ns, asked.source
            )
            crews = {instance.name: engines.up[instance.name] for instance in asked.instances}
            return Built(
                spans=spans,
                capacities={name: crew.capacity for name, crew in crews.items() if crew.capacity},
                kv_peers={name: crew.kv_peers for name, crew in crews.items()},
            )

    async def _on_tear_down(self, asked: TearDown, due_ns: int) -> Message:
        if asked.force:  # not to be held up by what may hang
            up = self._engines.up
            crews = [up[name] for name in asked.instances if name in up]
            return Torn(spans=await self._engines.tear_down(crews, "restart", due_ns, force=True))
        with self._alone(asked):
            crews = [self._crew(name) for name in asked.instances]
            for crew in crews:
                if not crew.dead and (left := crew.requests):
                    raise Refused(f"{crew.instance.name} holds {left} requests: withdraw them")
            spans = await self._engines.tear_down(crews, asked.strategy, due_ns, force=False)
            return Torn(spans=spans)

    async def _on_update_weights(self, asked: UpdateWeights, due_ns: int) -> Message:
        with self._alone(asked):
            crews = [self._crew(name) for name in asked.instances]
            orders = (crew.order(asked, due_ns) for crew in crews)
            ends = await asyncio.gather(*orders, return_exceptions=True)
            failed: dict[Crew, OrderFailed] = {}
            for crew, end in zip(crews, ends, strict=True):
                if isinstance(end, OrderFailed):
                    failed[crew] = end
                elif isinstance(end, BaseException):
                    raise end
            if failed:
                return _update_failed(failed, everywhere=len(failed) == len(ends))
            answer: Message = merged(ends)
            return answer

    async def _on_close(self, _asked: CloseGeneration, due_ns: int) -> Message:
        now_ns = time.monotonic_ns()
        await self._end(min(now_ns + _PARTING_NS, (now_ns + due_ns) // 2))
        return Done(t_ns=time.monotonic_ns())

    async def _end(self, due_ns: int = 0) -> None:
        """End all; it is here until that is done, so that `kill_now` finds what hangs."""
        if engines := self._open:
            await engines.end(due_ns)
            if self._open is engines:
                self._open = None

    async def _room(self, asked: Prepare | Build, due_ns: int) -> Room:
        """Return what the ledger knows, if what is asked for were all that runs here."""
        engines = self._engines
        asleep_bytes = engines.asleep_bytes(asked.instances, asked.strategy)
        if (profile := engines.spec.profile) and engines.spec.engine == "paced":
            return paced_room(profile, engines.spec, engines.gpus, asleep_bytes)
        device = await engines.device(due_ns)
        shape = _shape(engines.spec)
        if device.total_bytes:
            return gpu_room(shape, engines.spec, engines.gpus, asleep_bytes, device.total_bytes)
        host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return cpu_room(shape, engines.spec, engines.gpus, host_bytes)

    # -- requests ------------------------------------------------------------------------------

    async def _on_one(self, asked: Submit | MeasureSteps, due_ns: int) -> Message:
        answer: Message = await self._crew(asked.instance).order(asked, due_ns)
        return answer

    async def _on_admission(self, asked: Admission, due_ns: int) -> Message:
        answer: Message = merged(await self._each(asked.instances, asked, due_ns))
        return answer

    async def _on_withdraw(self, asked: Withdraw, due_ns: int) -> Message:
        answers: list[Withdrawn] = await self._each(asked.instances, asked, due_ns)
        withdrawn: Withdrawn = merged(answers)
        return msgspec.structs.replace(
            withdrawn,
            upto=self._engines.events.last,
            left=tuple(request for answer in answers for request in answer.left),
        )

    async def _on_watch(self, asked: Watch, _due_ns: int) -> Message:
        engines = self._engines
        upto, outputs = await engines.events.after(asked.after, asked.wait_ns)
        return Happened(
            upto=upto,
            outputs=outputs,
            stats={name: crew.stats for name, crew in engines.up.items() if crew.stats},
            dead={name: crew.dead for name, crew in engines.up.items() if crew.dead},
        )

    async def _each(self, names: Sequence[str], asked: Message, due_ns: int) -> list[Any]:
        """Order several instances at once; return their answers. Raises the first failure."""
        crews = [self._crew(name) for name in names]
        ends = await asyncio.gather(
            *(crew.order(asked, due_ns) for crew in crews), return_exceptions=True
        )
        for end in ends:
            if isinstance(end, BaseException):
                raise end
        return ends

    # -- what is here --------------------------------------------------------------------------

    @property
    def _engines(self) -> Engines:
        if self._open is None:
            raise NotOpen("generation is not open on this node")
        return self._open

    def _crew(self, name: str) -> Crew:
        if name not in self._engines.up:
            there = ", ".join(self._engines.up) or "none"
            raise NoInstance(f"no instance {name} is up on this node; there is {there}")
        return self._engines.up[name]


def _update_failed(failed: Mapping[Crew, OrderFailed], *, everywhere: bool) -> Failure:
    """Say which instances have no valid weights; they are dead. Or that nothing has changed.

    What all have refused has changed nothing. Where others took it, one that refused is behind.
    """
    if everywhere and all(not error.breaks for error in failed.values()):
        return next(iter(failed.values())).failure
    for crew, error in failed.items():
        crew.fail(f"its weights were not updated: {error}")
    text = "; ".join(f"{crew.instance.name}: {crew.dead}" for crew in failed)
    return Failure(error="InstanceDead", text=text)


def _shape(spec: EngineSpec) -> ModelShape:
    """Return the shape of the model that is run. Raises `BadFile`, naming its directory."""
    from harness.model.load import load_shape  # most agents never need these

    if spec.profile and spec.engine == "paced":
        return spec.profile.shape
    if spec.model:
        return load_shape(spec.model)
    from agents.generation.tiny_model import CONFIG

    return shape_of_config(CONFIG)[0]
