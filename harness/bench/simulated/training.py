"""The simulated labour of training: a node's ranks, as `agents.training` has them, in virtual time.

What all nodes do together is `harness.bench.simulated.crew`; here a node is asked and answers.
Files of weights and kept states are entries of the world: ``("weights", node, path)`` is (version,
bytes, checksum).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from harness.bench.simulated.crew import Crew
from harness.bench.simulated.deadline import in_time
from harness.bench.simulated.world import Verb, World
from harness.errors import InfrastructureError, UsageError
from harness.model.training.axes import misfit
from harness.model.training.trainer import facts
from harness.wire.generation import Span
from harness.wire.messages import Done, Failure, Message
from harness.wire.training import (
    CloseTraining,
    KeepTrainer,
    OpenTraining,
    PlanStep,
    PublishWeights,
    StepPlan,
    Trained,
    TrainingHappened,
    TrainingOpen,
    TrainStep,
    WatchTraining,
    WeightsPublished,
)

_KEPT = 2
"""Versions whose files stay."""


class Busy(InfrastructureError):
    """Training is open on this node already."""


class NotOpen(InfrastructureError):
    """Training is not open on this node."""


class Training:
    """See the module, and `harness.bench.simulated.world.Labour`."""

    def __init__(self, world: World, node: str) -> None:
        self._world, self._node = world, node
        self._open: OpenTraining | None = None
        self._crew: Crew | None = None
        """Once all ranks have met."""
        self._version = 0
        self._steps: dict[int, asyncio.Task[Trained]] = {}
        """By version, of the latest step: it is answered again, not taken again."""
        self._written: list[int] = []

    def verbs(self) -> Mapping[type[Message], Verb]:
        """Return who answers what."""
        return {
            OpenTraining: self._on_open,
            PlanStep: self._on_plan,
            TrainStep: self._in_time(self._on_step),
            PublishWeights: self._in_time(self._on_publish),
            KeepTrainer: self._in_time(self._on_keep),
            WatchTraining: self._on_watch,
            CloseTraining: self._on_close,
        }

    def _in_time(self, verb: Verb) -> Verb:
        """Return a verb that is done by its deadline; else all ranks of the node are ended."""

        async def answer(asked: Message) -> Message:
            limit = in_time(self._world.clock)
            try:
                async with limit:
                    return await verb(asked)
            except TimeoutError:
                if not limit.expired():
                    raise
                return self._expired(asked)

        return answer

    def _expired(self, asked: Message) -> Failure:
        """End all ranks, which wait for others or for what they are sent; return what is told."""
        ranks = self._open.ranks if self._open else ()
        self.close()
        order = asked.__struct_config__.tag
        text = f"{order} was not done in time: {self._node} waits for ranks elsewhere"
        return Failure(error="OrderExpired", text=text, ranks=ranks)

    def close(self) -> None:
        """End all ranks, and what they published."""
        for step in self._steps.values():
            step.cancel()
        for version in self._written:
            self._world.shared.pop(self._file(version), None)
        if self._crew is not None:
            self._crew.disband()
        self._open = self._crew = None
        self._version, self._steps, self._written = 0, {}, []

    # -- life ------------------------------------------------------------------------------------

    async def _on_open(self, asked: OpenTraining) -> Message:
        if problem := misfit(asked.ranks, asked.world_size, asked.spec.degrees):
            raise UsageError(problem)
        if asked.spec.mode != "paced":
            raise UsageError('nothing is learned on a simulated bench: ask for mode = "paced"')
        if self._open is not None:
            raise Busy("training is open on this node: close it first")
        crew = Crew.of(self._world, asked)
        self._open = asked
        try:
            async with in_time(self._world.clock, asked.timeout_ns):
                await self._world.takes(self._world.figures.generation.processes_s)
                await crew.muster.join(self._node, asked.ranks)
        except TimeoutError:
            crew.disband()
            return self._expired(asked)
        except BaseException:
            crew.disband()
            self.close()
            raise
        self._crew = crew
        backend = self._world.figures.collectives.backend
        return TrainingOpen(
            pids=dict.fromkeys(asked.ranks, 0),
            facts={"backend": backend, "device": "simulated", **facts(crew.spec, crew.profile)},
            parameters=crew.profile.shape.parameters,
            weights_bytes=crew.weights_bytes,
        )

    async def _on_close(self, _asked: CloseTraining) -> Message:
        self.close()
        return self._done()

    # -- steps -----------------------------------------------------------------------------------

    async def _on_plan(self, asked: PlanStep) -> Message:
        moves = self._opened.plan(asked.tokens).schedule.moves
        return StepPlan(phases=tuple(move.phase for move in moves))

    async def _on_step(self, asked: TrainStep) -> Message:
        crew, known = self._opened, self._steps.get(asked.version)
        if known is None or (known.done() and not known.cancelled() and known.exception()):
            self._require(asked.version, "cannot be stepped from")
            known = asyncio.create_task(self._step(crew, asked))
            self._steps = {asked.version: known}
        await asyncio.wait([known])
        if known.cancelled():
            text = "the ranks of this node were stopped in a step"
            return Failure(error="RankDied", text=text)
        return known.result()

    async def _step(self, crew: Crew, asked: TrainStep) -> Trained:
        tokens = crew.lengths(asked.samples)
        took = await crew.step(asked.version, tokens)
        self._version = asked.version + 1
        return crew.trained(self._node, asked.version, tokens, took)

    async def _on_watch(self, asked: WatchTraining) -> Message:
        told = self._opened.told[self._node]
        upto, phases = await told.after(asked.after, asked.wait_ns)
        return TrainingHappened(upto=upto, phases=phases, dead={})

    # -- weights and state ------------------------------------------------------------------------

    async def _on_publish(self, asked: PublishWeights) -> Message:
        crew, ranks = self._opened, self._ranks
        here = [rank for rank in ranks if rank in asked.writers]
        if len(here) > 1 or not set(asked.writers) <= set(range(crew.spec.degrees.ranks)):
            raise UsageError(
                f"ranks {asked.writers} are not one a node of {crew.spec.degrees.ranks}"
            )
        self._require(asked.version, "cannot be published")
        begin_ns, given_ns = await crew.gather(asked.writers)
        spans = [Span(stage="gather", begin_ns=begin_ns, end_ns=given_ns)]
        if len(ranks) == len(here):
            spans, given_ns = [], begin_ns
        if here:
            figures = self._world.figures
            written_bytes = crew.weights_bytes * (len(asked.writers) if figures.one_machine else 1)
            await self._world.takes(written_bytes / 1e9 / figures.sync.gather_gb_per_s.value)
            spans.append(Span(stage="write", begin_ns=given_ns, end_ns=self._now_ns()))
            self._write(asked.version, crew)
        return WeightsPublished(
            version=asked.version,
            path=_path(asked.version) if here else "",
            bytes=crew.weights_bytes if here else 0,
            checksum=crew.checksum(asked.version) if here else 0,
            spans=tuple(spans),
        )

    def _write(self, version: int, crew: Crew) -> None:
        """Have the file of a version here; of those before, the last stays."""
        content = version, crew.weights_bytes, crew.checksum(version)
        self._world.shared[self._file(version)] = content
        others = sorted(set(self._written) - {version})
        for old in others[: len(others) - _KEPT + 1]:
            del self._world.shared[self._file(old)]
        self._written = [*others[max(0, len(others) - _KEPT + 1) :], version]

    def _file(self, version: int) -> tuple[str, str, str]:
        return "weights", self._node, _path(version)

    async def _on_keep(self, asked: KeepTrainer) -> Message:
        """Keep the state in the world, or go on from it; it takes as long as writing weights."""
        crew, shared = self._opened, self._world.shared
        held_bytes = crew.held_bytes[self._node]
        rate = self._world.figures.sync.gather_gb_per_s.value
        place = "trainer", self._node, asked.path
        if asked.load:
            if place not in shared:
                raise UsageError(f"no training state was kept at {asked.path} on this node")
            degrees, version, kept_bytes = shared[place]
            if (degrees, kept_bytes) != (crew.spec.degrees, held_bytes):
                raise UsageError(
                    f"{asked.path} holds {kept_bytes} bytes of {degrees}, this node {held_bytes} "
                    f"of {crew.spec.degrees}: other degrees, another model or another bytes_scale"
                )
            await self._world.takes(held_bytes / 1e9 / rate)
            self._version, self._steps = version, {}
        else:
            await self._world.takes(held_bytes / 1e9 / rate)
            shared[place] = crew.spec.degrees, self._version, held_bytes
            shared.pop(("trainer", self._node, asked.instead_of), None)
        return self._done()

    # -- what is here ----------------------------------------------------------------------------

    @property
    def _opened(self) -> Crew:
        if self._crew is None:
            raise NotOpen("training is not open on this node")
        return self._crew

    @property
    def _ranks(self) -> tuple[int, ...]:
        return self._opened.muster.ranks_of[self._node]

    def _require(self, version: int, how: str) -> None:
        if version != self._version:
            raise UsageError(f"weights of version {version} {how}: here is {self._version}")

    def _now_ns(self) -> int:
        return self._world.clock.now_ns()

    def _done(self) -> Done:
        return Done(t_ns=self._now_ns())


def _path(version: int) -> str:
    return f"trained/{version}.safetensors"
