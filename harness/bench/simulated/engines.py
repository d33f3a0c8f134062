"""The simulated engines of a node: who is up, who sleeps, which GPUs have a process that waits.

As `agents.generation.engines`, with stages that last as long as figures say: of all instances of
the node at once, for their ranks work beside each other, each for itself: the one that copies most
ends last. An engine that sleeps keeps nothing on its GPUs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from itertools import count

from harness.bench.simulated.engine_crew import EngineCrew, InstanceDead, find_weights
from harness.bench.simulated.outputs import Outputs
from harness.bench.simulated.world import World
from harness.errors import UsageError
from harness.model.advance import FOREVER_NS
from harness.model.intake import Refused
from harness.model.placement import Instance
from harness.model.profile import Profile, gpu_of
from harness.model.room import Room, unpooled
from harness.model.simulation import Figure
from harness.wire.generation import EngineSpec, OpenGeneration, Span, Strategy

FIRST_PORT = 10_240
LAST_PORT = 65_535


class Engines:
    """All of a node's, from `OpenGeneration` to `CloseGeneration`.

    Raises `UsageError` where such engines cannot be simulated.
    """

    def __init__(self, world: World, node: str, asked: OpenGeneration) -> None:
        self.profile = _profile(asked.spec)
        self.spec, self.gpus, self.address = asked.spec, asked.gpus, asked.address
        self.up: dict[str, EngineCrew] = {}
        """By name; the dead among them until they are torn down or built upon."""
        self.asleep: dict[Instance, EngineCrew] = {}
        self.outputs = Outputs(world.clock, self._elapse)
        self._world, self._node = world, node
        self._figures = world.figures.generation
        self._idle: set[int] = set()
        """GPUs with a process that waits for an engine."""
        self._ports = count()

    @property
    def room(self) -> Room:
        """What the ledger knows: the profile's GPUs, in bytes of its model, not the scaled."""
        return Room(
            shape=self.profile.shape,
            gpu=gpu_of(self.profile),
            gpus=self.gpus,
            asleep_bytes={},
            kv_max_tokens=self.spec.kv_max_tokens,
            basis="modelled",
        )

    def _elapse(self, now_ns: int) -> int:
        """Let all happen by now in all instances; return when something happens next."""
        next_ns = FOREVER_NS
        for crew in self.up.values():
            if not crew.dead:
                next_ns = min(next_ns, crew.pace.elapse(now_ns))
        return next_ns

    # -- instances come ------------------------------------------------------------------------

    async def open(self, prebuild: Sequence[Sequence[Instance]]) -> None:
        """Start a process on each GPU, and the pool. Raises `UsageError`."""
        await self._man(range(self.gpus))
        for instances in prebuild:
            await self._world.takes(self._figures.processes_s)  # of their own
            crews = self._crews(instances)
            await self._set_up(crews, 0, ("groups", "weights", "kv_cache"))
            for crew in crews:
                self.asleep[crew.instance] = crew

    async def build(
        self, instances: Sequence[Instance], strategy: Strategy, version: int, source: str = ""
    ) -> tuple[Span, ...]:
        """Build or wake instances on GPUs that are free. Where it fails, none of them is left.

        Raises `Refused`, `UsageError` and `InstanceDead`.
        """
        self._clear(instances)
        find_weights(self._world, self._node, source)
        spans: tuple[Span, ...] = ()
        if strategy == "pool":
            if reasons := self.unpooled(instances):
                raise Refused(reasons[0])
            crews = [self.asleep.pop(instance) for instance in instances]
            stages: tuple[str, ...] = ("weights", "kv_cache")
        else:
            crews = self._crews(instances)
            spans = await self._man([gpu for item in instances for gpu in item.gpus])
            self._idle.difference_update(gpu for item in instances for gpu in item.gpus)
            stages = ("groups", "weights", "kv_cache")
        self.up.update((crew.instance.name, crew) for crew in crews)
        try:
            spans += await self._set_up(crews, version, stages)
        except InstanceDead:
            self._undo(crews, strategy)
            raise
        except asyncio.CancelledError:
            for crew in crews:
                crew.end("it was not built in time")
            self._undo(crews, strategy)
            raise
        finally:
            self.outputs.stir()
        return spans

    def _undo(self, crews: Iterable[EngineCrew], strategy: Strategy) -> None:
        """Leave none of the instances of a build that failed."""
        for crew in crews:
            if crew.dead:
                self._bury(crew)
            else:
                self._part(crew, strategy)

    def _clear(self, instances: Sequence[Instance]) -> None:
        """Bury the dead on these instances' GPUs; raise `Refused` where something lives."""
        wanted = {gpu for instance in instances for gpu in instance.gpus}
        names = {instance.name for instance in instances}
        there = [c for n, c in self.up.items() if n in names or wanted & set(c.instance.gpus)]
        if alive := [crew.instance.name for crew in there if not crew.dead]:
            raise Refused(f"there is {', '.join(alive)} on these GPUs: tear it down first")
        for crew in there:
            self._bury(crew)

    def _crews(self, instances: Sequence[Instance]) -> list[EngineCrew]:
        """Return instances that take KV at ports of their own. Raises `UsageError`."""
        crews = [
            EngineCrew(self._world, self._node, self.spec, instance, self.outputs)
            for instance in instances
        ]
        for crew in crews:
            crew.landing.open([self._peer() for _ in crew.instance.gpus])
        return crews

    def _peer(self) -> str:
        port = FIRST_PORT + next(self._ports) % (LAST_PORT - FIRST_PORT)
        return f"{self.address}:{port}"

    async def _man(self, gpus: Iterable[int]) -> tuple[Span, ...]:
        """Start what processes are missing on these GPUs; return how long that took."""
        if not (missing := set(gpus) - self._idle):
            return ()
        spans = list[Span]()
        with self._stage("processes", spans):
            await self._world.takes(self._figures.processes_s)
        self._idle |= missing
        return tuple(spans)

    async def _set_up(
        self, crews: Sequence[EngineCrew], version: int, stages: Sequence[str]
    ) -> tuple[Span, ...]:
        """Go through the stages of all instances. Raises `InstanceDead` where one dies."""
        spans = list[Span]()
        async with _turns(crews):
            for stage in stages:
                with self._stage(stage, spans):
                    await self._world.takes(self._lasts_s(stage, crews))
                for crew in crews:
                    crew.check()
            for crew in crews:
                crew.begin(version)
        return tuple(spans)

    def _lasts_s(self, stage: str, crews: Iterable[EngineCrew]) -> float:
        figures = self._figures
        if stage == "weights":
            rate = figures.weights_gb_per_s
            copying_s = max((crew.copies_s(rate) for crew in crews), default=0.0)
            return figures.weights_fixed_s.value + copying_s
        figure: Figure = figures.groups_s if stage == "groups" else figures.kv_cache_s
        return figure.value

    # -- instances go --------------------------------------------------------------------------

    async def tear_down(
        self, crews: Sequence[EngineCrew], strategy: Strategy, *, force: bool
    ) -> tuple[Span, ...]:
        """End instances as `strategy` says; the dead, or with `force` all, by force."""
        spans = list[Span]()
        for crew in crews:
            if force:
                crew.end("it was torn down")
        async with _turns(crew for crew in crews if not crew.dead):
            with self._stage("teardown", spans):
                await self._world.takes(self._figures.teardown_s)
            for crew in crews:
                if crew.dead or strategy == "restart":
                    self._bury(crew)
                else:
                    self._part(crew, strategy)
        self.outputs.stir()
        return tuple(spans)

    def _part(self, crew: EngineCrew, strategy: Strategy) -> None:
        """End an instance that lives, but for its processes where `strategy` keeps them."""
        if strategy == "pool":
            del self.up[crew.instance.name]
            if older := self.asleep.pop(crew.instance, None):
                self._bury(older)
            self.asleep[crew.instance] = crew
            return
        self._bury(crew)
        if strategy == "rebuild":  # one of a pool's ends where the GPU has its resident already
            self._idle.update(crew.instance.gpus)

    def _bury(self, crew: EngineCrew) -> None:
        """End an instance and its processes."""
        if self.up.get(crew.instance.name) is crew:
            del self.up[crew.instance.name]
        crew.end("it was torn down")

    def unpooled(self, instances: Sequence[Instance]) -> list[str]:
        """Return why these cannot be woken, one by one; none: they sleep here, or are up."""
        return unpooled(instances, self.asleep, self.up)

    async def end(self) -> None:
        """End all engines."""
        for crew in (*self.up.values(), *self.asleep.values()):
            crew.end("generation was closed")
        self.outputs.stir()
        await self._world.takes(self._figures.teardown_s)

    @contextmanager
    def _stage(self, stage: str, spans: list[Span]) -> Iterator[None]:
        """Stamp what is done within."""
        begin_ns = self._world.clock.now_ns()
        yield
        spans.append(Span(stage=stage, begin_ns=begin_ns, end_ns=self._world.clock.now_ns()))


@asynccontextmanager
async def _turns(crews: Iterable[EngineCrew]) -> AsyncIterator[None]:
    """Have the turn at all of these: orders wait meanwhile."""
    async with AsyncExitStack() as turns:
        for crew in crews:
            await turns.enter_async_context(crew.turn)
        yield


def _profile(spec: EngineSpec) -> Profile:
    if spec.engine != "paced" or spec.profile is None:
        asked = f'engine = "{spec.engine}"' + ("" if spec.profile else " without a profile")
        raise UsageError(
            "a simulated bench generates by a latency profile: [generation] needs "
            f'engine = "paced" and a profile, not {asked}'
        )
    return spec.profile
