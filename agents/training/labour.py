"""The labour of training: this node's ranks of one process group, their steps, and what they tell.

`agents.training.crew` has the processes. A rank that dies takes all others with it; training is
then opened anew, with a later `attempt`. Nothing is here before `OpenTraining`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from agents.asking import answering
from agents.labour import Handler, Notify
from agents.ranks import LOG_DIR
from agents.training.crew import Crew
from harness.errors import InfrastructureError, UsageError
from harness.model.training.axes import misfit
from harness.wire.messages import Done, Message
from harness.wire.training import (
    CloseTraining,
    KeepTrainer,
    OpenTraining,
    PlanStep,
    PublishWeights,
    TrainingHappened,
    TrainStep,
    WatchTraining,
)

PROGRAM = (sys.executable, "-m", "agents.training.rank")


class Busy(InfrastructureError):
    """Training is open on this node already."""


class NotOpen(InfrastructureError):
    """Training is not open on this node."""


class Training:
    """The labour of training; see `agents.labour`. `program` starts one rank."""

    def __init__(
        self, notify: Notify, *, program: Sequence[str] = PROGRAM, logs: Path | None = None
    ) -> None:
        folder = os.environ.get(LOG_DIR)
        self._notify, self._program = notify, tuple(program)
        self._logs = logs or (Path(folder) if folder else None)
        self._open: Crew | None = None
        self._opening = asyncio.Lock()

    def commands(self) -> dict[type[Message], Handler]:
        """Return who answers what."""
        verbs: dict[type[Message], Handler] = {
            OpenTraining: self._on_open,
            PlanStep: self._on_plan,
            TrainStep: self._on_step,
            PublishWeights: self._on_publish,
            KeepTrainer: self._on_keep,
            WatchTraining: self._on_watch,
            CloseTraining: self._on_close,
        }
        return {kind: answering(verb) for kind, verb in verbs.items()}

    async def close(self) -> None:
        """Kill all ranks and verify that they are gone; raises `Unkillable`."""
        await self._end(self._open)

    def kill_now(self) -> None:
        """Kill all ranks without waiting."""
        if crew := self._open:
            crew.kill_now()

    # -- commands ------------------------------------------------------------------------------

    async def _on_open(self, asked: OpenTraining, due_ns: int) -> Message:
        if problem := misfit(asked.ranks, asked.world_size, asked.spec.degrees):
            raise UsageError(problem)
        async with self._opening:
            if self._open is not None and not self._open.failed:
                raise Busy("training is open on this node: close it first")
            await self._end(self._open)
            crew = self._open = Crew(asked, logs=self._logs, notify=self._notify)
            try:
                return await crew.open(self._program, due_ns)
            except BaseException:
                await self._end(crew)
                raise

    async def _on_plan(self, asked: PlanStep, due_ns: int) -> Message:
        return await self._crew.plan(asked, due_ns)

    async def _on_step(self, asked: TrainStep, due_ns: int) -> Message:
        return await self._crew.step(asked, due_ns)

    async def _on_publish(self, asked: PublishWeights, due_ns: int) -> Message:
        return await self._crew.publish(asked, due_ns)

    async def _on_keep(self, asked: KeepTrainer, due_ns: int) -> Message:
        await self._crew.keep(asked, due_ns)
        return Done(t_ns=time.monotonic_ns())

    async def _on_watch(self, asked: WatchTraining, _due_ns: int) -> Message:
        crew = self._crew
        upto, phases = await crew.events.after(asked.after, asked.wait_ns)
        return TrainingHappened(upto=upto, phases=phases, dead=dict(crew.dead))

    async def _on_close(self, _asked: CloseTraining, _due_ns: int) -> Message:
        await self._end(self._open)
        return Done(t_ns=time.monotonic_ns())

    # -- what is here --------------------------------------------------------------------------

    @property
    def _crew(self) -> Crew:
        if self._open is None:
            raise NotOpen("training is not open on this node")
        return self._open

    async def _end(self, crew: Crew | None) -> None:
        """End all ranks; they are here until that is done, so that `kill_now` finds what hangs."""
        if crew is not None:
            await crew.end()
            if self._open is crew:
                self._open = None
