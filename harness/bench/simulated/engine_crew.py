"""One simulated instance as its agent sees it: orders act between its steps, one after another.

An order waits for those before it and for the end of the step under way. While an instance loads
weights, sends KV or is timed it makes no steps, as an engine whose loop does one thing at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from harness.bench.simulated.kv import Landing, send
from harness.bench.simulated.outputs import Outputs
from harness.bench.simulated.pace import Pace
from harness.bench.simulated.world import World
from harness.clock import NS_PER_S
from harness.errors import BadFile, InfrastructureError
from harness.model import intake
from harness.model.advance import plan_stretch
from harness.model.batching import Batching, Limits, complete_step
from harness.model.intake import Refused
from harness.model.layout import weight_bytes_per_gpu
from harness.model.placement import Instance
from harness.model.profile import Profile, costs_of, load_ns
from harness.model.requests import Carried
from harness.model.room import limits_of
from harness.model.shape import ModelShape
from harness.model.simulation import Figure
from harness.model.steptime import Faster, StepCosts
from harness.rlsim.engine import Engine
from harness.wire.generation import (
    Admission,
    Capacity,
    EngineSpec,
    MeasureSteps,
    Span,
    StepTimes,
    Submit,
    Submitted,
    UpdateWeights,
    WeightsUpdated,
    Withdraw,
    Withdrawn,
    Work,
)


class InstanceDead(InfrastructureError):
    """The instance died, or was torn down, before it did what it was asked."""


class EngineCrew:
    """An instance that is built, or being built. Raises `UsageError` where there can be none."""

    def __init__(
        self, world: World, node: str, spec: EngineSpec, instance: Instance, outputs: Outputs
    ) -> None:
        assert spec.profile is not None
        self.instance, self.dead = instance, ""
        self.turn = asyncio.Lock()
        """Held by whoever does something to it."""
        self.landing = Landing(world, node)
        self.limits = _limits(spec, spec.profile, instance)
        self.rank_bytes = _rank_bytes(spec, spec.profile.shape, instance)
        """Weights that each of its ranks holds."""
        self._load_ns = load_ns(spec.profile, instance.layout, spec.speed)
        self._shape, self._bytes_scale = spec.profile.shape, spec.bytes_scale
        speed = world.bench.nodes[node].speed / world.figures.generation.step_share.value
        self._costs = _costs(spec, spec.profile, instance, speed)
        self._world, self._node, self._outputs = world, node, outputs
        self.begin(0)

    @property
    def requests(self) -> int:
        """How many requests it holds."""
        return len(self.pace.engine.state.requests)

    @property
    def capacity(self) -> Capacity:
        """What it takes."""
        return Capacity(
            sequences_max=self.limits.sequences_max,
            step_max_tokens=self.limits.step_max_tokens,
            blocks=self.limits.blocks,
            block_tokens=self.limits.block_tokens,
            length_max_tokens=self.limits.length_max_tokens,
            vocab=self._shape.vocab,
            weights_bytes=self.instance.layout.gpus * self.rank_bytes,
        )

    def copies_s(self, host_rate: Figure) -> float:
        """Return how long its ranks, side by side, take in their weights.

        As their GPUs would, or as the host, in GB/s, copies what is really held if that is longer.
        A node's `speed` is of computing alone.
        """
        return max(self._load_ns / NS_PER_S, self.rank_bytes / 1e9 / host_rate.value)

    def begin(self, version: int) -> None:
        """Begin with no requests, at these weights."""
        state, now_ns = Batching(self.limits, version), self._world.clock.now_ns()
        self.pace = Pace(Engine(self.instance, state, self._costs, now_ns), self._outputs.add)

    def end(self, reason: str) -> None:
        """Be dead, and found no longer; whoever waits for it is told."""
        self.dead = self.dead or reason
        self.landing.close()

    def check(self) -> None:
        """Raise `InstanceDead` where it is."""
        if self.dead:
            raise InstanceDead(f"{self.instance.name}: {self.dead}")

    @asynccontextmanager
    async def between(self) -> AsyncIterator[None]:
        """Be alone, between two steps; new ones begin after it. Raises `InstanceDead`.

        Whoever is cut off in it leaves something of no use: it is dead.
        """
        clock = self._world.clock
        async with self.turn:
            self.check()
            acts_ns = self.pace.begin_order(clock.now_ns())
            try:
                while (left_ns := acts_ns - clock.now_ns()) > 0:
                    await clock.sleep_ns(left_ns)
                self.check()
                self.pace.stand()
                yield
            except asyncio.CancelledError:
                self.end("an order was not done in time")
                self._outputs.stir()
                raise
            finally:
                self.pace.end_order(clock.now_ns())
                self._outputs.look()  # something else may be due next

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Make no steps meanwhile, though time passes. Raises `InstanceDead` at the end."""
        engine = self.pace.engine
        engine.hold()
        try:
            yield
        finally:
            engine.go_on(self._world.clock.now_ns())
        self.check()

    # -- orders --------------------------------------------------------------------------------

    async def submit(self, asked: Submit) -> Submitted:
        """Queue requests; those whose KV came whole go on at once."""
        refused: dict[str, str] = {}
        async with self.between():
            with_kv = [work.carried.id for work in asked.works if self._enter(work, refused)]
        return Submitted(refused=refused, with_kv=tuple(with_kv))

    def _enter(self, work: Work, refused: dict[str, str]) -> bool:
        """Take a request, or note why not; return whether it goes on from KV that came."""
        state, request = self.pace.engine.state, work.carried
        if work.kv_transfer and self.landing.claim(work.kv_transfer, request):
            try:
                intake.import_with_kv(state, request)
            except Refused:
                pass  # no seat, or no room: it is queued, and its KV computed anew
            else:
                self.pace.opened(request, request.kv_tokens)
                return True
        try:
            intake.submit(state, request)
        except Refused as error:
            refused[request.id] = str(error)
        else:
            self.pace.opened(request)
        return False

    async def withdraw(self, asked: Withdraw) -> Withdrawn:
        """End requests; with `to`, send their KV then. `upto` is left to the node."""
        async with self.between():
            begin_ns = self._world.clock.now_ns()
            left, sent_bytes = self._leave(asked), dict[str, int]()
            if asked.to is not None:
                source = self._node, self.instance.layout
                async with self.held():
                    sent_bytes = await send(
                        self._world,
                        source,
                        left,
                        asked.to,
                        shape=self._shape,
                        bytes_scale=self._bytes_scale,
                    )
            span = self._span("kv_send" if asked.to else "withdraw", begin_ns)
            return Withdrawn(upto=0, left=tuple(left), sent_bytes=sent_bytes, spans=(span,))

    def _leave(self, asked: Withdraw) -> list[Carried]:
        state = self.pace.engine.state
        names = asked.ids or sorted(state.requests, key=lambda name: state.requests[name].place)
        leave = intake.abort if asked.verb == "abort" else intake.export
        left = [request for name in names if (request := leave(state, name))]
        for request in left:
            self.pace.ended(request, "aborted" if asked.verb == "abort" else "exported")
        return left

    async def admit(self, asked: Admission) -> None:
        """Let waiting requests in, or not."""
        async with self.between():
            (intake.admit_again if asked.open else intake.stop_admitting)(self.pace.engine.state)

    async def update_weights(self, asked: UpdateWeights) -> WeightsUpdated:
        """Load weights. Raises `BadFile` where there are none, and `Refused` on older ones."""
        figures = self._world.figures.sync
        async with self.between():
            begin_ns, state = self._world.clock.now_ns(), self.pace.engine.state
            find_weights(self._world, self._node, asked.source)
            self.pace.report(begin_ns)
            intake.set_version(state, asked.version)
            if asked.drop_kv:
                intake.drop_kv(state)
            async with self.held():
                copying_s = self.copies_s(figures.load_gb_per_s)
                await self._world.takes(figures.load_fixed_s.value + copying_s)
            span = self._span("weights", begin_ns)
            return WeightsUpdated(spans=(span,), moved_bytes=self.capacity.weights_bytes)

    async def measure(self, asked: MeasureSteps) -> StepTimes:
        """Time steps of a life cycle apart from its own. Raises `Refused`."""
        async with self.between():
            if self.requests:
                raise Refused(f"{self.instance.name} holds requests: withdraw them first")
            if not asked.batch and asked.prefill_tokens > self.limits.step_max_tokens:
                raise Refused(
                    f"{asked.prefill_tokens} tokens are not prefilled in one step, which takes "
                    f"{self.limits.step_max_tokens}"
                )
            times_ns = _timed(Batching(self.limits), self._costs, asked)
            async with self.held():
                await self._world.clock.sleep_ns(sum(times_ns))
            return StepTimes(times_ns=tuple(times_ns))

    def _span(self, stage: str, begin_ns: int) -> Span:
        return Span(stage=stage, begin_ns=begin_ns, end_ns=self._world.clock.now_ns())


def find_weights(world: World, node: str, source: str) -> None:
    """Raise `BadFile` where a node has no such file of weights; "" are the first ones."""
    if source and ("weights", node, source) not in world.shared:
        raise BadFile(source, ["No such file or directory"])


def _limits(spec: EngineSpec, profile: Profile, instance: Instance) -> Limits:
    return limits_of(
        profile,
        instance.layout,
        sequences_max=spec.sequences_max,
        step_max_tokens=spec.step_max_tokens,
        kv_max_tokens=spec.kv_max_tokens,
        block_tokens=spec.block_tokens,
        length_max_tokens=spec.length_max_tokens,
    )


def _costs(spec: EngineSpec, profile: Profile, instance: Instance, speed: float) -> StepCosts:
    """Return how long steps really take: `speed` times faster here than the spec has them."""
    costs, speed = costs_of(profile, instance.layout), spec.speed * speed
    return costs if speed == 1 else Faster(costs, speed)


def _rank_bytes(spec: EngineSpec, shape: ModelShape, instance: Instance) -> int:
    """Return what a rank holds, of the model's size times `bytes_scale`."""
    host, rank = (
        max(1, round(size * spec.bytes_scale))
        for size in (shape.parameter_bytes, weight_bytes_per_gpu(instance.layout, shape))
    )
    return min(rank, host)


def _timed(apart: Batching, costs: StepCosts, asked: MeasureSteps) -> list[int]:
    """Return how long each of these steps takes. Raises `Refused` where they do not fit."""
    known = asked.context_tokens - 1
    for number in range(asked.batch):
        request = Carried(f"timed{number}", known, asked.steps + 2, 0, 1, known)
        intake.import_with_kv(apart, request)
    times_ns: list[int] = []
    while len(times_ns) < asked.steps:
        if not asked.batch:
            intake.submit(apart, Carried("timed", asked.prefill_tokens, 1, 0))
        stretch = plan_stretch(apart, costs, 0, 1)
        assert stretch is not None
        complete_step(apart, stretch.step, 0, stretch.times)
        times_ns.append(stretch.ends_ns)
    return times_ns
