"""A node's ranks of training, from `OpenTraining` until they are closed or one of them is lost.

Every order goes to all of them at once. They are one group with those of other nodes: a rank that
dies, breaks or is late takes the others with it, for what they hold is of no use without it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agents.asking import OrderFailed, ask_all
from agents.events import Events
from agents.labour import Notify
from agents.process import Unkillable
from agents.seat import Seat, combine
from agents.training.folder import Folder
from agents.training.orders import FRAMES, Join, Joined, Learned, Publish, Published, Told
from harness.errors import UsageError
from harness.model.nccl import NCCL_ALLOWED
from harness.wire.generation import Span
from harness.wire.messages import Failure, Message, Note
from harness.wire.training import (
    KeepTrainer,
    OpenTraining,
    PhaseHappened,
    PlanStep,
    PublishWeights,
    StepPlan,
    Trained,
    TrainingOpen,
    TrainStep,
    WeightsPublished,
)

_BREAKING = ("RankDied", "RankFailed", "OrderExpired")


class Crew:
    """The ranks, in order; `dead` says by rank why."""

    def __init__(self, asked: OpenTraining, *, logs: Path | None, notify: Notify) -> None:
        self.asked = asked
        self.events: Events[PhaseHappened] = Events()
        self.dead: dict[int, str] = {}
        self._steps: dict[int, asyncio.Task[Trained]] = {}
        """By version, of the latest step: it is answered again, not taken again."""
        self._seats: dict[int, Seat] = {}
        self._logs, self._notify = logs, notify
        self._failure: Failure | None = None
        self._killed: list[Failure] = []
        self._ordering = asyncio.Lock()
        self._ended = False
        self._folder = Folder()

    # -- life ----------------------------------------------------------------------------------

    async def open(self, program: Sequence[str], due_ns: int) -> TrainingOpen:
        """Start the ranks and have them meet all others. Raises `OrderFailed`."""
        asked = self.asked
        for rank in asked.ranks:
            self._seats[rank] = await Seat.started(
                f"rank {rank}",
                rank,
                [*program, f"--rank={rank}"],
                env=self._environment(),
                log=self._logs / f"training{rank}.log" if self._logs else None,
                decoder=FRAMES,
                news=self._news,
            )
            if self._ended:  # who closes has not seen this one
                self._seats[rank].kill()
        bodies = [
            Join(
                spec=asked.spec,
                rank=rank,
                local=local,
                world_size=asked.world_size,
                store=asked.store,
                interface=asked.interface,
                attempt=asked.attempt,
                timeout_ns=asked.timeout_ns,
                tells=local == 0,
            )
            for local, rank in enumerate(asked.ranks)
        ]
        joined: list[Joined] = await self._order(bodies, due_ns)
        return TrainingOpen(
            pids={rank: seat.child.pid for rank, seat in self._seats.items()},
            facts=joined[0].facts,
            parameters=joined[0].parameters,
            weights_bytes=joined[0].weights_bytes,
        )

    def _environment(self) -> dict[str, str]:
        """Return the ranks' environment: ours, less NCCL variables that nobody records."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("NCCL_") or name in NCCL_ALLOWED
        }
        return {**kept, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    def _news(self, seat: Seat, told: Message) -> None:
        """Take what a rank says unasked, or its death."""
        if isinstance(told, Told):
            self.events.add(told.phases)
        elif isinstance(told, Failure) and not self._ended:
            self.dead[seat.number] = told.text
            if seat.cause.startswith("killed"):
                self._killed.append(told)
            self._notify(Note(level="error", text=told.text, ranks=told.ranks))
            if not self._ordering.locked():  # else whoever waits hears of all that follows from it
                self._fail(told)
            self.events.stir()

    def _fail(self, failure: Failure) -> Failure:
        """Call training on this node failed: kill all ranks; return what is told of it."""
        if self._failure is None:
            self._failure = combine(self._killed or [failure])
            for rank, seat in self._seats.items():
                self.dead.setdefault(rank, f"rank {rank} was ended: {self._failure.text}")
                seat.kill()
            self.events.stir()
        return self._failure

    async def end(self) -> None:
        """Kill all ranks and see them gone; delete what was published. Raises `Unkillable`."""
        self._ended = True
        for seat in self._seats.values():
            seat.kill()
        ends = await asyncio.gather(
            *(s.end() for s in self._seats.values()), return_exceptions=True
        )
        self.events.stir()
        self._folder.remove()
        failed = [end for end in ends if isinstance(end, BaseException)]
        for bug in (end for end in failed if not isinstance(end, Unkillable)):
            raise bug
        if failed:
            raise Unkillable("; ".join(map(str, failed)))

    def kill_now(self) -> None:
        """Kill all ranks without waiting; from any thread."""
        for seat in list(self._seats.values()):
            seat.child.kill()

    @property
    def failed(self) -> bool:
        """Whether it must be opened anew."""
        return self._failure is not None

    # -- orders --------------------------------------------------------------------------------

    async def _order(self, bodies: Sequence[Message], due_ns: int) -> list[Any]:
        """Order each rank to do its own; return the answers in rank order. Raises `OrderFailed`.

        What the ranks refuse together (it cannot be done) leaves them as they were; anything else
        ends them all.
        """
        async with self._ordering:
            if self._failure is not None:
                raise OrderFailed(self._failure, breaks=True)
            try:
                return await ask_all(dict(zip(self._seats.values(), bodies, strict=True)), due_ns)
            except OrderFailed as error:
                if not error.breaks and error.failure.error not in _BREAKING:
                    raise
                raise OrderFailed(self._fail(error.failure), breaks=True) from error

    async def _all(self, body: Message, due_ns: int) -> list[Any]:
        return await self._order([body] * len(self._seats), due_ns)

    async def plan(self, asked: PlanStep, due_ns: int) -> StepPlan:
        """Return the phases of a step, as one rank knows them."""
        async with self._ordering:
            if self._failure is not None:
                raise OrderFailed(self._failure, breaks=True)
            seat = next(iter(self._seats.values()))
            plans: list[StepPlan] = await ask_all({seat: asked}, due_ns)
            return plans[0]

    async def step(self, asked: TrainStep, due_ns: int) -> Trained:
        """Take a step; one of the same version is taken once, however often it is asked for."""
        known = self._steps.get(asked.version)
        if known is None or (known.done() and known.exception()):
            known = asyncio.create_task(self._step(asked, due_ns))
            known.add_done_callback(_heard)
            self._steps = {asked.version: known}
        return await asyncio.shield(known)

    async def _step(self, asked: TrainStep, due_ns: int) -> Trained:
        learned: list[Learned] = await self._all(asked, due_ns)
        return trained(asked.version, learned, leads=0 in self._seats)

    async def publish(self, asked: PublishWeights, due_ns: int) -> WeightsPublished:
        """Have the weights written, if here is a writer; of those before, the last stays."""
        here = [rank for rank in self._seats if rank in asked.writers]
        if len(here) > 1 or not set(asked.writers) <= set(range(self.asked.world_size)):
            raise UsageError(f"ranks {asked.writers} are not one a node of {self.asked.world_size}")
        path = str(self._folder.place(asked.version)) if here else ""
        bodies = [
            Publish(version=asked.version, path=path if rank in here else "", writers=asked.writers)
            for rank in self._seats
        ]
        published: list[Published] = await self._order(bodies, due_ns)
        if here:
            self._folder.forget_older(asked.version)
        writer = published[list(self._seats).index(here[0])] if here else None
        return WeightsPublished(
            version=asked.version,
            path=path,
            bytes=writer.bytes if writer else 0,
            checksum=writer.checksum if writer else 0,
            spans=publishing(published, writer),
        )

    async def keep(self, asked: KeepTrainer, due_ns: int) -> None:
        """Have the state written to, or read from, a folder."""
        await self._all(asked, due_ns)
        if asked.load:
            self._steps.clear()


def _heard(step: asyncio.Task[Trained]) -> None:
    """Take note of how a step ended, though whoever asked for it may be gone."""
    if not step.cancelled():
        step.exception()


def trained(version: int, learned: Sequence[Learned], *, leads: bool) -> Trained:
    """Return what local ranks learned as one answer.

    `tokens` of each shard of the samples that has ranks here. The spans are those of the rank that
    computed longest; they say how long, not when: computing from the step's begin on,
    communicating up to its end.
    """
    shards: Mapping[int, int] = {rank.dp: rank.tokens for rank in learned}
    longest = max(learned, key=lambda rank: rank.compute_ns)
    begin_ns, end_ns = longest.begin_ns, longest.end_ns
    return Trained(
        version=version,
        tokens=sum(shards.values()),
        micro_batches=max(rank.micro_batches for rank in learned),
        spans=(
            Span(stage="compute", begin_ns=begin_ns, end_ns=begin_ns + longest.compute_ns),
            Span(stage="communicate", begin_ns=end_ns - longest.communicate_ns, end_ns=end_ns),
        ),
        figures=learned[0].figures if leads else {},
    )


def publishing(published: Sequence[Published], writer: Published | None) -> tuple[Span, ...]:
    """Return the spans ``gather`` and ``write``.

    The writer takes until the last of the others has given all; what follows is writing. Where it
    is alone on its node, that cannot be told apart from here, and all of it is called writing.
    """
    givers = [rank for rank in published if rank is not writer]
    begin_ns = min(rank.begin_ns for rank in published)
    given_ns = max((rank.end_ns for rank in givers), default=begin_ns)
    spans = []
    if givers:
        spans.append(Span(stage="gather", begin_ns=begin_ns, end_ns=given_ns))
    if writer:
        spans.append(Span(stage="write", begin_ns=given_ns, end_ns=max(given_ns, writer.end_ns)))
    return tuple(spans)
