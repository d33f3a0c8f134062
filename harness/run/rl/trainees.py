"""The ranks that train, as one thing to command: opened, stepped, watched, opened anew.

What fails because a rank died is done again: training is opened anew from what it kept after the
step before, as often as `REOPEN_MAX` says. A step is made only once its state is kept. The same
samples and the same state give the same step, so nothing is learned twice.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import AgentLost, InfrastructureError, StepFailed
from harness.model.training.phase import Phase
from harness.run.generation.changes import Background, Changes
from harness.run.generation.watching import ANSWERS_PER_S
from harness.run.rl.asked import TrainingAsked
from harness.run.rl.traffic import StepTraffic
from harness.run.session import MESSAGE_NS, Session
from harness.tasks import to_the_end
from harness.wire.asks import CommandFailed
from harness.wire.messages import Done, Message
from harness.wire.training import (
    CloseTraining,
    KeepTrainer,
    OpenTraining,
    PhaseHappened,
    PlanStep,
    PublishWeights,
    Sample,
    StepPlan,
    Trained,
    TrainingHappened,
    TrainingOpen,
    TrainStep,
    WatchTraining,
    WeightsPublished,
)

R = TypeVar("R", bound=Message)
T = TypeVar("T")

OPEN_NS = 180 * NS_PER_S
"""To start all ranks: each imports torch, which takes long where cores are few."""
CLOSE_NS = 30 * NS_PER_S
WATCH_NS = 500 * NS_PER_MS
REOPEN_MAX = 2
GONE = ("RankDied", "OrderExpired")
"""Failures after which no rank is left: one died, or hung and all were ended."""
STORE_PORT = 29500


class Stepped(NamedTuple):
    """A step that was made; stamps without keeping its state."""

    trained: Trained
    begin_ns: int
    end_ns: int


class Trainees:
    """See the module. Versions in calls are those of the loop."""

    def __init__(self, session: Session, asked: TrainingAsked, *, timeout_ns: int) -> None:
        self._session, self._asked, self._timeout_ns = session, asked, timeout_ns
        self._attempt = 0
        self._reopened = 0
        self._kept: Path | None = None
        self._changes = Changes()
        self._watching = Background(self._changes)
        self._written: list[Path] = []
        """Folders of this run's own: at most two."""
        self._upto: dict[str, int] = {}
        self._announced: tuple[Phase, ...] = ()
        self.traffic: StepTraffic | None = None
        """Who is told what a step sends."""
        self.weights_bytes = 0
        """Of the file of weights, as it is sent."""
        self.number = 0
        """Of the step of the scenario, for rows."""
        self.version = 0
        """Of the weights the ranks have: it goes on from loop to loop."""
        self.base = 0
        """What the ranks call version 0 of the loop that is under way."""
        self.busy_ns = 0
        """How long steps took, in all."""
        self.facts: dict[str, str] = {}

    @property
    def nodes(self) -> tuple[str, ...]:
        """All that train; rank 0 is on the first."""
        return tuple(self._asked.ranks_of)

    @property
    def ranks_of(self) -> Mapping[str, tuple[int, ...]]:
        """Global ranks of each node that trains."""
        return self._asked.ranks_of

    @property
    def real(self) -> bool:
        """Whether they learn: engines need their first weights too."""
        return self._asked.spec.mode == "real"

    @property
    def root(self) -> str:
        """The node of rank 0."""
        return self.nodes[0]

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, session: Session, asked: TrainingAsked, *, timeout_ns: int
    ) -> AsyncIterator[Trainees]:
        """Start the ranks, watch them while the body runs, and close all of it."""
        trainees = cls(session, asked, timeout_ns=timeout_ns)
        try:
            await trainees._open()
            for node in trainees.nodes:
                trainees._watching.start(trainees._watch(node))
            yield trainees
        finally:
            await to_the_end(trainees._close())

    async def step(
        self, version: int, samples: Sequence[Sample], keep: Path | None = None
    ) -> Stepped:
        """Make weights of `version` + 1 from those of `version`, and keep all state in a folder.

        Raises `CommandFailed` when a rank died and opening anew does not help, and `AgentLost`.
        """
        now_ns = self._session.bench.clock.now_ns
        begin_ns = now_ns()

        async def made() -> Stepped:
            stepped = Stepped(await self._step(self.base + version, samples), begin_ns, now_ns())
            if keep is not None:
                await self._keep(keep)
            return stepped

        stepped = await self._surviving(made)
        self._kept, self.version = keep, self.base + version + 1
        self.busy_ns += stepped.end_ns - begin_ns
        return stepped

    async def publish(self, nodes: Sequence[str]) -> dict[str, WeightsPublished]:
        """Have the weights written on each of `nodes`; returns what all nodes answer.

        Raises as `step` does.
        """
        writers = tuple(self._asked.ranks_of[node][0] for node in nodes)
        body = PublishWeights(version=self.version, writers=writers)
        return await self._surviving(lambda: self._all(body, WeightsPublished))

    async def _keep(self, folder: Path) -> None:
        """Have all state written into `folder`; of those it wrote before, the last one stays.

        A checkpoint names that one until the next is written.
        """
        others = [other for other in self._written if other != folder]
        gone = str(others.pop(0)) if len(others) > 1 else ""
        await self._all(KeepTrainer(path=str(folder), instead_of=gone), Done)
        self._kept, self._written = folder, [*others, folder]

    async def load(self, folder: Path, trained_version: int, version: int) -> None:
        """Go on from a folder with the ranks' `trained_version`, which the loop calls `version`."""
        await self._all(KeepTrainer(path=str(folder), load=True), Done)
        self._kept, self.version = folder, trained_version
        self.base = trained_version - version

    # -- inside -----------------------------------------------------------------------------

    async def _step(self, version: int, samples: Sequence[Sample]) -> Trained:
        lengths = tuple(sample.prompt_tokens + sample.response_tokens for sample in samples)
        plan = await self._session.bench.ask(
            self.root, PlanStep(tokens=lengths), StepPlan, self._timeout_ns
        )
        self._announced = plan.phases
        body = TrainStep(version=version, samples=tuple(samples))
        if self.traffic is None:
            return (await self._all(body, Trained))[self.root]
        async with self.traffic.training(plan.phases):
            return (await self._all(body, Trained))[self.root]

    async def _all(self, body: Message, reply: type[R]) -> dict[str, R]:
        bodies = dict.fromkeys(self.nodes, body)
        return await self._session.bench.ask_all(bodies, reply, self._timeout_ns)

    async def _open(self) -> None:
        nodes, spec = self._session.bench.topology.nodes, self._asked.spec
        address = nodes[self.root].address
        bodies = {
            node: OpenTraining(
                spec=spec,
                ranks=ranks,
                world_size=spec.degrees.ranks,
                store=f"{address}:{STORE_PORT + self._attempt}",
                address=nodes[node].address,
                interface=nodes[node].interface,
                attempt=self._attempt,
                timeout_ns=self._timeout_ns,
            )
            for node, ranks in self._asked.ranks_of.items()
        }
        self._attempt += 1
        self._upto.clear()
        answers = await self._session.bench.ask_all(bodies, TrainingOpen, OPEN_NS)
        self.facts, self.weights_bytes = answers[self.root].facts, answers[self.root].weights_bytes
        told = ", ".join(f"{key}: {value}" for key, value in self.facts.items())
        text = f"{spec.degrees.ranks} ranks train {answers[self.root].parameters:,} parameters"
        row = {"level": "info", "who": "training", "text": f"{text}; {told}"}
        self._session.record.event("note", row)

    async def _surviving(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do something as often as a rank dies in it, each time from what was kept."""
        self._changes.check()
        while True:
            try:
                return await work()
            except CommandFailed as error:
                await self._again(error)

    async def _again(self, error: CommandFailed) -> None:
        """Open training anew and go back to what was kept; raises `error` when it must not."""
        died = any(failure.error in GONE for failure in error.failures.values())
        if not died or self._reopened >= REOPEN_MAX or (self._kept is None and self.version):
            raise error
        self._reopened += 1
        row = {"level": "warning", "who": "training", "text": f"opened anew: {error}"}
        self._session.record.event("note", row)
        await self._session.bench.ask_all(
            dict.fromkeys(self.nodes, CloseTraining()), Done, CLOSE_NS
        )
        await self._open()
        if self._kept is not None:
            await self.load(self._kept, self.version, self.version - self.base)

    async def _watch(self, node: str) -> None:
        """Write a row of each phase that a node tells, until it is lost or all is closed."""
        wait_ns = max(WATCH_NS, len(self.nodes) * NS_PER_S // ANSWERS_PER_S)
        while True:
            body = WatchTraining(after=self._upto.get(node, 0), wait_ns=wait_ns)
            try:
                happened = await self._session.bench.ask(
                    node, body, TrainingHappened, wait_ns + MESSAGE_NS
                )
            except AgentLost:
                return  # whoever asks for a step is told why
            except CommandFailed:  # it is being opened anew
                await self._session.bench.clock.sleep_ns(WATCH_NS)
                continue
            self._upto[node] = happened.upto
            for phase in happened.phases:
                if phase.end_ns:
                    if self.traffic is not None:
                        self.traffic.phase_ended(node, phase.index)
                    self._session.record.event("phase", self._phase_row(node, phase))

    def _phase_row(self, node: str, phase: PhaseHappened) -> dict[str, object]:
        known = phase.index < len(self._announced)
        return {
            "step": self.number,
            "node": node,
            "version": phase.version,
            "index": phase.index,
            "name": phase.name,
            "op": phase.op,
            "axis": phase.axis,
            "bytes": phase.bytes,
            "expected_gap_ms": self._announced[phase.index].gap_ns / NS_PER_MS if known else None,
            "begin_ns": self._session.at(node, phase.begin_ns),
            "end_ns": self._session.at(node, phase.end_ns),
        }

    async def _close(self) -> None:
        await self._watching.close()
        bodies = dict.fromkeys(self.nodes, CloseTraining())
        try:
            await self._session.bench.ask_all(bodies, Done, CLOSE_NS)
        except (StepFailed, InfrastructureError) as error:
            row = {"level": "warning", "who": "training", "text": f"not closed: {error}"}
            self._session.record.event("note", row)
