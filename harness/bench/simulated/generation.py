"""The labour of generation on a simulated node: engines, the requests in them, what they tell.

It answers what `agents.generation.labour` answers with the paced engine, but jumps from event to
event: nothing happens here until somebody asks for it, and whoever watches asks whenever something
is due. An answer to a watch has what was urgent. All output of what goes on, and the stats of all
instances, come when a watch was quiet, or the last such answer is as long ago as one may be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from harness.bench.simulated.deadline import in_time
from harness.bench.simulated.engine_crew import EngineCrew, InstanceDead
from harness.bench.simulated.engines import Engines
from harness.bench.simulated.world import Verb, World
from harness.clock import Clock
from harness.errors import HarnessError, InfrastructureError
from harness.model.intake import Refused
from harness.model.room import place_problems
from harness.wire.generation import (
    Admission,
    Build,
    Built,
    CloseGeneration,
    GenerationOpen,
    Happened,
    MeasureSteps,
    Memory,
    OpenGeneration,
    Prepare,
    Prepared,
    Span,
    Submit,
    TearDown,
    Torn,
    UpdateWeights,
    Watch,
    WeightsUpdated,
    Withdraw,
    Withdrawn,
    joined,
)
from harness.wire.messages import Done, Failure, Message

A = TypeVar("A")


class Busy(InfrastructureError):
    """Another change of engines is under way."""


class NotOpen(InfrastructureError):
    """Generation is not open on this node."""


class NoInstance(InfrastructureError):
    """No instance of that name is up on this node."""


class Generation:
    """`harness.bench.simulated.world.Labour`; see the module."""

    def __init__(self, world: World, node: str) -> None:
        self._world, self._node = world, node
        self._open: Engines | None = None
        self._under_way = ""
        self._reported_ns = 0

    def verbs(self) -> Mapping[type[Message], Verb]:
        """Return who answers what."""
        verbs: dict[type[Message], Verb] = {
            OpenGeneration: self._on_open,
            Prepare: self._on_prepare,
            Build: self._on_build,
            TearDown: self._on_tear_down,
            UpdateWeights: self._on_update_weights,
            CloseGeneration: self._on_close,
            Submit: self._on_submit,
            MeasureSteps: self._on_measure,
            Admission: self._on_admission,
            Withdraw: self._on_withdraw,
            Watch: self._on_watch,
        }
        return {kind: _answering(verb, self._world.clock) for kind, verb in verbs.items()}

    def close(self) -> None:
        """Forget all; nothing goes on by itself."""
        self._open = None

    def die(self, name: str, reason: str) -> None:
        """Let an instance die: what it had not told is gone, and its node tells why."""
        self._crew(name).end(reason)
        self._engines.outputs.stir()
        self._world.tell(self._node, reason, "error")

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

    async def _on_open(self, asked: OpenGeneration) -> Message:
        if self._open is not None:
            raise Busy("generation is open on this node: close it first")
        with self._alone(asked):
            engines = self._open = Engines(self._world, self._node, asked)
            try:
                await engines.open(asked.prebuild)
            except BaseException:
                self._open = None
                raise
            profile = engines.profile
            facts = {
                "engine": "paced",
                "version": f"profile of {profile.model} on {profile.gpu.name}",
                "device": f"a simulated {profile.gpu.name} (no token is computed)",
            }
            return GenerationOpen(pids={}, facts=facts, shape=profile.shape)

    async def _on_prepare(self, asked: Prepare) -> Message:
        with self._alone(asked):
            room = self._engines.room
            reasons = room.problems(asked.instances)
            if asked.strategy == "pool":
                reasons += self._engines.unpooled(asked.instances)
            if reasons:
                return Failure(error="Infeasible", text="\n".join(reasons))
            rows = room.rows(asked.instances)
            return Prepared(memory=tuple(Memory(**row._asdict()) for row in rows))

    async def _on_build(self, asked: Build) -> Message:
        with self._alone(asked):
            engines = self._engines
            if reasons := place_problems(asked.instances, engines.gpus):
                raise Refused("\n".join(reasons))
            if asked.strategy == "pool" and (reasons := engines.room.problems(asked.instances)):
                raise Refused("\n".join(reasons))
            spans = await engines.build(
                asked.instances, asked.strategy, asked.version, asked.source
            )
            crews = {instance.name: engines.up[instance.name] for instance in asked.instances}
            return Built(
                spans=spans,
                capacities={name: crew.capacity for name, crew in crews.items()},
                kv_peers={name: crew.landing.peers for name, crew in crews.items()},
            )

    async def _on_tear_down(self, asked: TearDown) -> Message:
        if asked.force:
            up = self._engines.up
            crews = [up[name] for name in asked.instances if name in up]
            return Torn(spans=await self._engines.tear_down(crews, "restart", force=True))
        with self._alone(asked):
            crews = [self._crew(name) for name in asked.instances]
            for crew in crews:
                if not crew.dead and (left := crew.requests):
                    raise Refused(f"{crew.instance.name} holds {left} requests: withdraw them")
            spans = await self._engines.tear_down(crews, asked.strategy, force=False)
            return Torn(spans=spans)

    async def _on_update_weights(self, asked: UpdateWeights) -> Message:
        with self._alone(asked):
            crews = [self._crew(name) for name in asked.instances]
            ends = await asyncio.gather(
                *(crew.update_weights(asked) for crew in crews), return_exceptions=True
            )
            failed: dict[EngineCrew, HarnessError] = {}
            for crew, end in zip(crews, ends, strict=True):
                if isinstance(end, HarnessError):
                    failed[crew] = end
                elif isinstance(end, BaseException):
                    raise end
            if failed:
                return self._update_failed(failed, everywhere=len(failed) == len(ends))
            answers = [end for end in ends if isinstance(end, WeightsUpdated)]
            return WeightsUpdated(
                spans=_spans(answers), moved_bytes=sum(answer.moved_bytes for answer in answers)
            )

    def _update_failed(
        self, failed: Mapping[EngineCrew, HarnessError], *, everywhere: bool
    ) -> Failure:
        """Say which instances have no valid weights; they are dead. Or that nothing has changed."""
        if everywhere and not any(isinstance(error, InstanceDead) for error in failed.values()):
            error = next(iter(failed.values()))
            return Failure(error=type(error).__name__, text=str(error))
        for crew, error in failed.items():
            crew.end(f"its weights were not updated: {error}")
        self._engines.outputs.stir()
        text = "; ".join(f"{crew.instance.name}: {crew.dead}" for crew in failed)
        return Failure(error="InstanceDead", text=text)

    async def _on_close(self, _asked: CloseGeneration) -> Message:
        if engines := self._open:
            await engines.end()
            if self._open is engines:
                self._open = None
        return Done(t_ns=self._world.clock.now_ns())

    # -- requests ------------------------------------------------------------------------------

    async def _on_submit(self, asked: Submit) -> Message:
        return await self._crew(asked.instance).submit(asked)

    async def _on_measure(self, asked: MeasureSteps) -> Message:
        return await self._crew(asked.instance).measure(asked)

    async def _on_admission(self, asked: Admission) -> Message:
        crews = [self._crew(name) for name in asked.instances]
        await _each([crew.admit(asked) for crew in crews])
        return Done(t_ns=self._world.clock.now_ns())

    async def _on_withdraw(self, asked: Withdraw) -> Message:
        crews = [self._crew(name) for name in asked.instances]
        answers: list[Withdrawn] = await _each([crew.withdraw(asked) for crew in crews])
        return Withdrawn(
            upto=self._engines.outputs.last,
            left=tuple(request for answer in answers for request in answer.left),
            sent_bytes={name: n for answer in answers for name, n in answer.sent_bytes.items()},
            spans=_spans(answers),
        )

    async def _on_watch(self, asked: Watch) -> Message:
        engines, clock = self._engines, self._world.clock
        wanted = await engines.outputs.news(asked.after, asked.wait_ns)
        now_ns = clock.now_ns()
        living = {name: crew for name, crew in engines.up.items() if not crew.dead}
        if report := wanted or now_ns >= self._reported_ns + asked.wait_ns:
            self._reported_ns = now_ns
            for crew in living.values():
                crew.pace.report(now_ns)
        upto, outputs = engines.outputs.kept()
        told = living if report else dict.fromkeys(output.instance for output in outputs)
        return Happened(
            upto=upto,
            outputs=outputs,
            stats={name: living[name].pace.stats(now_ns) for name in told if name in living},
            dead={name: crew.dead for name, crew in engines.up.items() if crew.dead},
        )

    # -- what is here --------------------------------------------------------------------------

    @property
    def _engines(self) -> Engines:
        if self._open is None:
            raise NotOpen("generation is not open on this node")
        return self._open

    def _crew(self, name: str) -> EngineCrew:
        if name not in self._engines.up:
            there = ", ".join(self._engines.up) or "none"
            raise NoInstance(f"no instance {name} is up on this node; there is {there}")
        return self._engines.up[name]


def _answering(verb: Verb, clock: Clock) -> Verb:
    """Return a verb that answers what failed, or was late; a bug of ours is raised."""

    async def answer(asked: Message) -> Message:
        limit = in_time(clock)
        try:
            async with limit:
                return await verb(asked)
        except TimeoutError:
            if not limit.expired():
                raise
            order = asked.__struct_config__.tag
            return Failure(error="OrderExpired", text=f"{order} was not done in time")
        except HarnessError as error:
            return Failure(error=type(error).__name__, text=str(error))

    return answer


async def _each(orders: Sequence[Coroutine[Any, Any, A]]) -> list[A]:
    """Do all to their end; return the answers, or raise the first failure."""
    answers = []
    for end in await asyncio.gather(*orders, return_exceptions=True):
        if isinstance(end, BaseException):
            raise end
        answers.append(end)
    return answers


def _spans(answers: Iterable[Withdrawn | WeightsUpdated]) -> tuple[Span, ...]:
    return joined(span for answer in answers for span in answer.spans)
