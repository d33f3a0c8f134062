"""One instance's ranks as their agent sees them: every order goes to all, and all must do it.

Orders are sent to all ranks within one turn of the event loop, so they come in one sequence
everywhere. A lockstep engine's steps are orders too: as long as there is more to do, one grant is
under way and one waits behind it. A rank that dies, breaks or does not answer in time takes its
instance with it: what the others hold is of no use without it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from agents.asking import OrderFailed, ask_all
from agents.generation.answers import capacity_of, kv_peers_of, merged
from agents.generation.orders import Leave, Seated, Sit, Sleep, Slept, Stepped, Steps, Wake, Woken
from agents.generation.ports import Range
from agents.seat import Seat
from harness.clock import NS_PER_MS, NS_PER_S
from harness.model.placement import Instance
from harness.wire.generation import Capacity, Span, Stats, joined
from harness.wire.messages import Failure, Message

GRANT_NS = 20 * NS_PER_MS
"""A grant of steps should last about this long: orders wait behind two of them at most."""
GRANT_STEPS_MAX = 64
GRANTS = 2
_GRANT_LIMIT_NS = 120 * NS_PER_S
"""The longest grant: a first step may compile."""


def next_grant(taken: Stepped) -> int:
    """Return how many steps the next grant has, after `taken`: twice as many at most.

    From idle it begins with one: what a step takes with requests in it is not known then.
    """
    if not taken.more or not taken.steps:
        return 1
    fitting = GRANT_NS * taken.steps // max(1, taken.elapsed_ns)
    return max(1, min(fitting, 2 * taken.steps, GRANT_STEPS_MAX))


class Crew:
    """The ranks of one instance, in rank order. `changed` is called when it dies."""

    def __init__(
        self,
        instance: Instance,
        seats: Sequence[Seat],
        ports: Range,
        *,
        lockstep: bool,
        changed: Callable[[], None],
    ) -> None:
        self.instance, self.seats, self.ports = instance, tuple(seats), ports
        self.dead = ""
        """Why it is dead; "" while it lives."""
        self.leaving = False
        """Whether its processes are told to end: that they do is no news then."""
        self.capacity: Capacity | None = None
        self.kv_peers: tuple[str, ...] = ()
        self.stats: Stats | None = None
        self.kept_bytes: dict[int, int] = {}
        """By GPU, what it keeps while it sleeps; empty before it has."""
        self.freed_bytes: dict[int, int] = {}
        """By GPU, what its sleep has freed, as the device tells it: needed to wake."""
        self._lockstep, self._changed = lockstep, changed
        self._dues_ns: list[int] = []
        self._ordered = 0
        self._grants: set[asyncio.Task[bool]] = set()
        self._steps = 1
        self._awake = False

    @property
    def requests(self) -> int:
        """How many requests it holds, as its leader told last."""
        return self.stats.running + self.stats.waiting if self.stats else 0

    # -- orders --------------------------------------------------------------------------------

    async def order(self, body: Message, due_ns: int) -> Any:
        """Order all ranks to do the same; return their answer as one. Raises `OrderFailed`."""
        return merged(await self.orders([body] * len(self.seats), due_ns))

    async def orders(self, bodies: Sequence[Message], due_ns: int) -> list[Any]:
        """Order each rank to do its own; return the answers. Raises `OrderFailed`.

        An order waits behind earlier ones, and then has as long as they.
        """
        if self.dead:
            raise self._death()
        grant = isinstance(bodies[0], Steps)
        if not grant:
            self._ordered += 1
            due_ns = max([due_ns, *self._dues_ns])
            self._dues_ns.append(due_ns)
        try:
            answers = await ask_all(dict(zip(self.seats, bodies, strict=True)), due_ns)
        except OrderFailed as error:
            if error.breaks or self.dead:
                self.fail(error.failure.text)
                raise self._death() from error
            raise
        finally:
            if not grant:
                self._dues_ns.remove(due_ns)
        if not grant:
            self._grant()  # it may have given work
        return answers

    def _death(self) -> OrderFailed:
        failure = Failure(error="InstanceDead", text=f"{self.instance.name}: {self.dead}")
        return OrderFailed(failure, breaks=True)

    def fail(self, reason: str) -> None:
        """Call the instance dead: kill its ranks, and so answer what was asked of them."""
        if self.dead:
            return
        self.dead = reason
        self._awake = False
        for seat in self.seats:
            seat.kill()
        self._changed()

    async def end(self) -> None:
        """Kill its processes, see them gone, give its ports back. Raises `Unkillable`."""
        self.dead = self.dead or "it was torn down"
        self._awake = False
        for seat in self.seats:
            seat.kill()
        self.ports.close()
        await asyncio.gather(*(seat.end() for seat in self.seats))

    # -- what becomes of its engine ------------------------------------------------------------

    async def build(
        self, address: str, version: int, due_ns: int, source: str = ""
    ) -> tuple[Span, ...]:
        """Build the engine; it takes requests then. Raises `OrderFailed`."""
        meeting, *_ = own = self.ports.ports
        bodies = [
            Sit(
                instance=self.instance,
                rank=rank,
                gpu=seat.number,
                address=address,
                meeting=f"{address}:{meeting}",
                port=own[1],
                ports=len(own) - 1,
                version=version,
                source=source,
            )
            for rank, seat in enumerate(self.seats)
        ]
        self._awake = True
        seated: list[Seated] = await self.orders(bodies, due_ns)
        self.capacity, self.kv_peers = capacity_of(seated), kv_peers_of(seated)
        return joined(span for rank in seated for span in rank.spans)

    async def leave(self, due_ns: int, *, ends: bool) -> None:
        """Tear the engine down; with `ends`, its processes end too. Raises `OrderFailed`."""
        self._awake, self.leaving = False, ends
        await self.order(Leave(ends=ends), due_ns)

    async def sleep(self, due_ns: int) -> None:
        """Put the engine to sleep. Raises `OrderFailed`; where it was refused, it is awake."""
        self._awake = False
        try:
            slept: list[Slept] = await self.orders([Sleep()] * len(self.seats), due_ns)
        except OrderFailed:
            self._awake = not self.dead
            raise
        pairs = zip(self.seats, slept, strict=True)
        self.kept_bytes = {seat.number: rank.kept_bytes for seat, rank in pairs}

    async def wake(self, version: int, due_ns: int, source: str = "") -> tuple[Span, ...]:
        """Wake the engine at these weights. Raises `OrderFailed`."""
        self._awake = True
        woken: Woken = await self.order(Wake(version=version, source=source), due_ns)
        return woken.spans

    # -- steps of a lockstep engine ------------------------------------------------------------

    def _grant(self) -> None:
        """Grant steps until as many grants are out as there may be."""
        while self._lockstep and self._awake and len(self._grants) < GRANTS:
            grant = asyncio.create_task(self._step())
            self._grants.add(grant)
            grant.add_done_callback(self._granted)

    def _granted(self, grant: asyncio.Task[bool]) -> None:
        self._grants.discard(grant)
        if not grant.cancelled() and grant.result():
            self._grant()

    async def _step(self) -> bool:
        """Have one grant taken; return whether there is more to do, or was ordered meanwhile."""
        ordered = self._ordered
        steps = self._steps
        due_ns = max([time.monotonic_ns(), *self._dues_ns]) + _GRANT_LIMIT_NS  # behind orders
        try:
            taken: list[Stepped] = await self.orders([Steps(steps=steps)] * len(self.seats), due_ns)
        except OrderFailed as error:
            self.fail(str(error))
            return False
        if len({rank.steps for rank in taken}) > 1:
            counts = ", ".join(f"{rank.steps}" for rank in taken)
            self.fail(f"its ranks are out of step: they took {counts} steps of the same {steps}")
            return False
        self._steps = next_grant(taken[0])
        return taken[0].more or ordered != self._ordered
