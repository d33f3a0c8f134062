"""The rank processes of a node and the engines in them: who is up, who sleeps, who is free.

One resident process a GPU waits for an engine, unless one has it. Instances of a pool have their
own processes beside them. What dies is replaced when its GPU is built on again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from agents.asking import OrderFailed, ask_all
from agents.events import Events
from agents.generation.crew import Crew
from agents.generation.orders import FRAMES, FindMemory, Leave, MemoryFound, Ready, Start, Told
from agents.generation.ports import Ports, Range
from agents.labour import Notify
from agents.seat import Seat
from harness.clock import NS_PER_S
from harness.model.intake import Refused
from harness.model.placement import Instance
from harness.model.room import unpooled
from harness.wire.generation import EngineSpec, Output, Span, Strategy, joined
from harness.wire.messages import Failure, Message, Note

_PARTING_NS = 10 * NS_PER_S
"""At the end, engines have this long to leave by themselves."""


class Engines:
    """All of a node's, from `OpenGeneration` to `CloseGeneration`."""

    def __init__(
        self,
        spec: EngineSpec,
        gpus: int,
        address: str,
        *,
        program: Sequence[str],
        logs: Path | None,
        notify: Notify,
    ) -> None:
        self.spec, self.gpus = spec, gpus
        self.up: dict[str, Crew] = {}
        """By name; the dead among them until they are torn down or built upon."""
        self.asleep: dict[Instance, Crew] = {}
        self.events: Events[Output] = Events()
        self.ready: Ready | None = None
        self._address, self._ports = address, Ports(address)
        self._program, self._logs, self._notify = tuple(program), logs, notify
        self._idle: dict[int, Seat] = {}
        self._seats: set[Seat] = set()
        self._crew_of: dict[Seat, Crew] = {}
        self._ended = False

    # -- processes -----------------------------------------------------------------------------

    async def open(self, prebuild: Sequence[Sequence[Instance]], due_ns: int) -> dict[int, int]:
        """Start a process on each GPU, and the pool; return the pids. Raises `OrderFailed`."""
        await self._man(range(self.gpus), due_ns)
        for layout in prebuild:
            await _all(self._prebuild(instance, due_ns) for instance in layout)
        return {gpu: seat.child.pid for gpu, seat in self._idle.items()}

    async def _man(self, gpus: Iterable[int], due_ns: int) -> tuple[Span, ...]:
        """Start what is missing on these GPUs; return how long that took."""
        missing = [gpu for gpu in gpus if gpu not in self._idle or self._idle[gpu].cause]
        if not missing:
            return ()
        begin_ns = time.monotonic_ns()
        for gpu in missing:
            if gpu in self._idle:
                await self._discard(self._idle.pop(gpu))
        seats = await self._started(missing, due_ns)
        self._idle |= dict(zip(missing, seats, strict=True))
        return (Span(stage="processes", begin_ns=begin_ns, end_ns=time.monotonic_ns()),)

    async def _started(self, gpus: Sequence[int], due_ns: int, log: str = "") -> list[Seat]:
        """Start a process for each GPU; they are ready. Raises `OrderFailed`, and leaves none."""
        seats: list[Seat] = []
        try:
            for gpu in gpus:
                seats += [await self._start(gpu, log)]
            readies = await ask_all(dict.fromkeys(seats, Start(spec=self.spec)), due_ns)
        except BaseException:
            for seat in seats:
                await self._discard(seat)
            raise
        self.ready = readies[0]
        return seats

    async def _start(self, gpu: int, log: str) -> Seat:
        seat = await Seat.started(
            f"rank of GPU {gpu}",
            gpu,
            [*self._program, f"--gpu={gpu}"],
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            log=self._logs / f"gpu{gpu}{log}.log" if self._logs else None,
            decoder=FRAMES,
            news=self._news,
        )
        self._seats.add(seat)
        if self._ended:  # who closes has not seen this one
            await self._discard(seat)
            raise Refused("generation was closed meanwhile")
        return seat

    async def _discard(self, seat: Seat) -> None:
        """Kill a process and see it gone. Raises `Unkillable`."""
        seat.kill()
        await seat.end()
        self._seats.discard(seat)

    def _news(self, seat: Seat, told: Message) -> None:
        """Take what a rank says unasked, or its death."""
        crew = self._crew_of.get(seat)
        if isinstance(told, Told):
            if crew and not crew.dead:
                crew.stats = told.stats
                self.events.add(told.outputs)
        elif isinstance(told, Failure) and not self._ended and not (crew and crew.leaving):
            self._notify(Note(level="error", text=told.text, ranks=told.ranks))
            if crew:
                crew.fail(told.text)

    # -- instances -----------------------------------------------------------------------------

    async def build(
        self,
        instances: Sequence[Instance],
        strategy: Strategy,
        version: int,
        due_ns: int,
        source: str = "",
    ) -> tuple[Span, ...]:
        """Build or wake instances on GPUs that are free. Raises `OrderFailed`: none is left."""
        await self._clear(instances)
        spans: tuple[Span, ...] = ()
        crews: list[Crew] = []
        if strategy == "pool":
            crews = [await self._pooled(instance, due_ns) for instance in instances]
            work = [crew.wake(version, due_ns, source) for crew in crews]
            for instance in instances:
                del self.asleep[instance]
        else:
            spans = await self._man([gpu for item in instances for gpu in item.gpus], due_ns)
            crews = self._crews(instances)
            work = [crew.build(self._address, version, due_ns, source) for crew in crews]
        for crew in crews:
            self.up[crew.instance.name] = crew
        try:
            return joined((*spans, *await _all(work)))
        except OrderFailed:
            await self._undo(crews, strategy)
            raise
        except BaseException:
            await _all(self._bury(crew) for crew in crews)
            raise
        finally:
            self.events.stir()

    async def _clear(self, instances: Sequence[Instance]) -> None:
        """Bury the dead on these instances' GPUs; raise `Refused` where something lives."""
        wanted = {gpu for instance in instances for gpu in instance.gpus}
        names = {instance.name for instance in instances}
        there = [c for n, c in self.up.items() if n in names or wanted & set(c.instance.gpus)]
        if alive := [crew.instance.name for crew in there if not crew.dead]:
            raise Refused(f"there is {', '.join(alive)} on these GPUs: tear it down first")
        for crew in there:
            await self._bury(crew)

    def _crews(self, instances: Sequence[Instance]) -> list[Crew]:
        """Give the waiting processes to instances; all of them, or on `NoPorts` none."""
        ports: list[Range] = []
        try:
            ports += (self._ports.take() for _ in instances)
        except BaseException:
            for taken in ports:
                taken.close()
            raise
        return [
            self._crew(instance, [self._idle.pop(gpu) for gpu in instance.gpus], taken)
            for instance, taken in zip(instances, ports, strict=True)
        ]

    def _crew(self, instance: Instance, seats: Sequence[Seat], ports: Range) -> Crew:
        assert self.ready is not None
        stir, lockstep = self.events.stir, self.ready.lockstep
        crew = Crew(instance, seats, ports, lockstep=lockstep, changed=stir)
        self._crew_of |= dict.fromkeys(seats, crew)
        return crew

    async def _undo(self, crews: Sequence[Crew], strategy: Strategy) -> None:
        """Leave none of the instances of a build that failed; their processes stay if they can."""
        due_ns = time.monotonic_ns() + _PARTING_NS
        for crew in crews:
            try:
                await self._part(crew, strategy, due_ns)
            except OrderFailed:  # why the build failed is told already; this one just goes
                await self._bury(crew)

    async def tear_down(
        self, crews: Sequence[Crew], strategy: Strategy, due_ns: int, *, force: bool
    ) -> tuple[Span, ...]:
        """End instances as `strategy` says; the dead, or with `force` all, by force.

        Raises `OrderFailed`; whatever refuses to end is still there then.
        """
        begin_ns = time.monotonic_ns()
        try:
            await _all(
                self._bury(crew) if force or crew.dead else self._part(crew, strategy, due_ns)
                for crew in crews
            )
        finally:
            self.events.stir()
        return (Span(stage="teardown", begin_ns=begin_ns, end_ns=time.monotonic_ns()),)

    async def _part(self, crew: Crew, strategy: Strategy, due_ns: int) -> None:
        """End an instance that lives, as `strategy` says. Raises `OrderFailed`."""
        if strategy == "pool":
            await self._lull(crew, due_ns)
        else:
            await crew.leave(due_ns, ends=strategy == "restart")
        if strategy == "restart" or crew.dead:  # dead: by force meanwhile
            await self._bury(crew)
            return
        del self.up[crew.instance.name]
        if strategy == "pool":
            return
        crew.ports.close()
        for seat in crew.seats:
            del self._crew_of[seat]
            if seat.number in self._idle:  # one of a pool's: the GPU has its resident already
                await self._discard(seat)
            else:
                self._idle[seat.number] = seat

    async def _bury(self, crew: Crew) -> None:
        """Kill an instance's processes and see them gone. Raises `Unkillable`."""
        if self.up.get(crew.instance.name) is crew:
            del self.up[crew.instance.name]
        for seat in crew.seats:
            self._crew_of.pop(seat, None)
        await crew.end()
        self._seats.difference_update(crew.seats)

    # -- the pool ------------------------------------------------------------------------------

    async def _prebuild(self, instance: Instance, due_ns: int) -> None:
        """Build an engine in processes of its own and put it to sleep. Raises `OrderFailed`."""
        log = f"-{str(instance.layout).partition('x')[2]}"
        seats = await self._started(instance.gpus, due_ns, log)
        crew = self._crew(instance, seats, self._ports.take())
        try:
            await crew.build(self._address, 0, due_ns)
            await self._lull(crew, due_ns)
        except BaseException:
            await self._bury(crew)
            raise

    async def _lull(self, crew: Crew, due_ns: int) -> None:
        """Put an engine to sleep; learn from the device what it will need to wake."""
        before = await self._free(crew, due_ns)
        await crew.sleep(due_ns)
        after = await self._free(crew, due_ns)
        crew.freed_bytes = {gpu: after[gpu] - before[gpu] for gpu in after}
        if older := self.asleep.pop(crew.instance, None):
            await self._bury(older)
        self.asleep[crew.instance] = crew

    def unpooled(self, instances: Sequence[Instance]) -> list[str]:
        """Return why these cannot be woken, one by one; none: they sleep here, or are up."""
        return unpooled(instances, self.asleep, self.up)

    def asleep_bytes(self, woken: Sequence[Instance], strategy: Strategy) -> dict[int, int]:
        """Return by GPU what sleepers would keep with these awake, and what is up now asleep."""
        sleepers = list(self.asleep.values())
        sleepers += self.up.values() if strategy == "pool" else ()
        kept: Counter[int] = Counter()
        for crew in sleepers:
            if crew.instance not in woken and not crew.dead:
                kept.update(crew.kept_bytes)
        return dict(kept)

    async def _pooled(self, instance: Instance, due_ns: int) -> Crew:
        """Return the sleeping engine that is this instance, if it can wake. Raises `Refused`."""
        if reasons := self.unpooled([instance]):
            raise Refused(reasons[0])
        crew = self.asleep[instance]
        free = await self._free(crew, due_ns)
        for gpu, need_bytes in crew.freed_bytes.items():
            if free[gpu] < need_bytes:
                raise Refused(
                    f"GPU {gpu}: to wake {instance.name} takes {need_bytes / 1e9:.1f} GB; "
                    f"{free[gpu] / 1e9:.1f} GB are free"
                )
        return crew

    async def _free(self, crew: Crew, due_ns: int) -> dict[int, int]:
        """Return the free bytes of a crew's devices by GPU; empty where memory is emulated."""
        if self.spec.engine == "paced":
            return {}
        found: list[MemoryFound] = await crew.orders([FindMemory()] * len(crew.seats), due_ns)
        pairs = zip(crew.seats, found, strict=True)
        return {seat.number: memory.free_bytes for seat, memory in pairs}

    async def device(self, due_ns: int) -> MemoryFound:
        """Return the memory of one of the node's devices, as a rank finds it."""
        living = [seat for seat in self._seats if not seat.cause]
        if not living:
            await self._man([0], due_ns)
            living = [self._idle[0]]
        seat = living[0]
        found: list[MemoryFound] = await ask_all({seat: FindMemory()}, due_ns)
        return found[0]

    # -- the end -------------------------------------------------------------------------------

    async def end(self, due_ns: int = 0) -> None:
        """End all processes and see them gone; those that can leave by `due_ns` do so themselves.

        Raises `Unkillable`.
        """
        self._ended = True
        seats = list(self._seats)
        for crew in (*self.up.values(), *self.asleep.values()):
            crew.leaving = True
        living = [seat for seat in seats if not seat.cause]
        if due_ns and living:
            with suppress(OrderFailed):  # what does not leave is killed
                await ask_all(dict.fromkeys(living, Leave(ends=True)), due_ns)
        for seat in seats:
            seat.kill()
        for crew in {*self._crew_of.values()}:
            crew.fail("generation was closed")
            crew.ports.close()
        await _all(self._discard(seat) for seat in seats)

    def kill_now(self) -> None:
        """Kill all processes without waiting; from any thread."""
        for seat in list(self._seats):
            seat.child.kill()


async def _all(works: Iterable[Coroutine[Any, Any, tuple[Span, ...] | None]]) -> tuple[Span, ...]:
    """Do all to their end, then raise the first error, if any; return the spans of all."""
    ends = await asyncio.gather(*works, return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException):
            raise end
    return tuple(span for end in ends if isinstance(end, tuple) for span in end)
