"""Simulated ranks of collectives, of all nodes together: their groups, and what they run in them.

There is one company on a bench. Nodes that are asked the same meet, and one works for all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from typing import TypeVar

from harness.bench.simulated.exchange import Exchanges, Ranks, interconnect_of
from harness.bench.simulated.loop import Loop
from harness.bench.simulated.muster import Muster
from harness.bench.simulated.world import World
from harness.errors import UsageError
from harness.model.busbw import counts
from harness.model.intake import Refused
from harness.model.scenario import Dtype, Op
from harness.model.simulation import Calibration
from harness.tasks import together
from harness.wire.messages import Groups, RankSamples, RunCollective, StartRanks, StartTraffic

T = TypeVar("T")

_PLACE = "company"


class Company:
    """See the module. `env` has NCCL's variables.

    Raises `UsageError` where nobody says which GPUs NCCL joins, or nobody measured them.
    """

    def __init__(self, world: World, asked: StartRanks) -> None:
        self.muster = Muster(asked.groups.world_size)
        self.env = asked.nccl_env
        self.loop: Loop | None = None
        self._world = world
        self._interconnect = interconnect_of(world, _gpu(world.figures), self.env)
        self._generation = -1
        self._groups: tuple[Ranks, ...] = ()
        """The one of all, then subgroups; none where they were destroyed."""

    @classmethod
    def of(cls, world: World, asked: StartRanks) -> Company:
        """Return the one of the bench; whoever asks first makes it."""
        if _PLACE not in world.shared:
            world.shared[_PLACE] = cls(world, asked)
        company: Company = world.shared[_PLACE]
        return company

    def disband(self) -> None:
        """End traffic; those who come later are another one's."""
        if self.loop is not None:
            self.loop.close()
        if self._world.shared.get(_PLACE) is self:
            del self._world.shared[_PLACE]

    async def _together(self, what: str, work: Callable[[], Awaitable[T]]) -> T:
        """Meet all nodes, do something once, and return its result to each."""
        return await self._world.meet((self, what), len(self.muster.ranks_of), work)

    # -- groups ----------------------------------------------------------------------------------

    async def make(self, groups: Groups) -> int:
        """Make groups, as soon as all nodes have come for that; return when that was done."""

        async def making() -> int:
            if self._groups:
                raise Refused(f"the groups of generation {self._generation} still stand")
            if groups.generation <= self._generation:
                raise Refused(f"generation {groups.generation} follows {self._generation}")
            await self._world.takes(self._world.figures.generation.groups_s)
            self._generation = groups.generation
            self._groups = (tuple(range(self.muster.world_size)), *groups.subgroups)
            return self._world.clock.now_ns()

        return await self._together("make", making)

    async def destroy(self) -> int:
        """Destroy all groups; return when that was done."""

        async def destroying() -> int:
            self._groups = ()
            return self._world.clock.now_ns()

        return await self._together("destroy", destroying)

    @property
    def _everyone(self) -> Ranks:
        if not self._groups:
            raise Refused("there are no groups")
        return self._groups[0]

    @cached_property
    def _exchanges(self) -> Exchanges:
        return Exchanges(self._world, self._interconnect, self.muster.places)

    # -- collectives -----------------------------------------------------------------------------

    async def run(self, asked: RunCollective) -> Sequence[RankSamples]:
        """Run a collective in all groups it is for, as soon as all nodes have come for that."""

        async def running() -> Sequence[RankSamples]:
            groups = (
                self._groups[1:] if asked.use_subgroups and self._everyone else (self._everyone,)
            )
            latest: dict[int, asyncio.Event] = {}
            runs = []
            for group in groups:
                before = dict.fromkeys(latest[rank] for rank in group if rank in latest)
                over = asyncio.Event()
                runs.append(self._timed(group, asked, tuple(before), over))
                latest |= dict.fromkeys(group, over)
            return [row for rows in await together(runs) for row in rows]

        return await self._together("run", running)

    async def _timed(
        self,
        group: Ranks,
        asked: RunCollective,
        before: Sequence[asyncio.Event],
        over: asyncio.Event,
    ) -> list[RankSamples]:
        """Time a collective in one group, once its ranks have done with the groups before it."""
        size_bytes = self._size_bytes(asked.op, asked.size_bytes, asked.dtype, group)
        for event in before:
            await event.wait()
        times_ns: list[int] = []
        if size_bytes:
            await self._once(asked.op, group, size_bytes, asked.warmup)
            times_ns = [
                await self._once(asked.op, group, size_bytes) for _ in range(asked.iterations)
            ]
            await self._once(asked.op, group, size_bytes, int(asked.verify))
        over.set()
        return [
            RankSamples(
                rank=rank,
                group=group,
                size_bytes=size_bytes,
                times_ns=tuple(times_ns),
                wrong=0 if asked.verify and size_bytes else None,
            )
            for rank in group
        ]

    async def _once(self, op: Op, group: Ranks, size_bytes: int, times: int = 1) -> int:
        """Do it, or several times of it on end; return how long that took."""
        clock = self._world.clock
        begin_ns = clock.now_ns()
        if times:
            exchange = self._exchanges.of(op, (group,), size_bytes, times=times)
            over_ns = await exchange.done(self._world, begin_ns)
            await clock.sleep_ns(over_ns - clock.now_ns())
        return clock.now_ns() - begin_ns

    def _size_bytes(self, op: Op, asked_bytes: int, dtype: Dtype, group: Ranks) -> int:
        if op == "send_recv" and len(group) == 1:
            raise Refused("send_recv needs two ranks or more")
        return counts(op, asked_bytes, len(group), dtype).size_bytes

    # -- traffic ---------------------------------------------------------------------------------

    async def start(self, asked: StartTraffic) -> Loop:
        """Begin traffic among all, as soon as all nodes have come for that."""

        async def starting() -> Loop:
            if self.loop is not None:
                raise Refused("traffic was started already: end it first")
            group = self._everyone
            size_bytes = self._size_bytes(asked.op, asked.size_bytes, asked.dtype, group)
            if not size_bytes:
                raise Refused(f"{asked.size_bytes} bytes leave nothing for each rank")
            exchange = self._exchanges.of(asked.op, (group,), size_bytes)
            self.loop = Loop(self._world, exchange, self.muster.ranks_of, asked.timeout_ns)
            return self.loop

        return await self._together("start", starting)

    def ended(self, loop: Loop) -> None:
        """End traffic that was ended on a node; it is over once it was on all."""
        loop.close()
        if not any(gate.running for gate in loop.gates.values()):
            self.loop = None


def _gpu(figures: Calibration) -> str:
    """Return which GPUs ranks have. Raises `UsageError` where that matters and is not said."""
    own = figures.collectives
    if own.backend == "nccl" and not own.gpu:
        raise UsageError(
            f"calibration {figures.name} has NCCL, which differs by GPU: say which in its table "
            '[collectives], as in gpu = "h100"'
        )
    return own.gpu
