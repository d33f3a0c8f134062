"""Switches of a simulated bench: the contract of all switches over the emulator's switch model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from drivers import apply as contract
from drivers.base import Applied, Delta, Identity, Matching
from drivers.emulators import config
from drivers.errors import DeadlineExpired, DriverError, Indeterminate, NoLight
from harness.bench.base import Switched
from harness.bench.behaviour import behaviour_of
from harness.bench.simulated.line import Line
from harness.bench.simulated.world import World
from harness.bench.switches import AGAIN_S, PASSING
from harness.clock import NS_PER_S
from harness.seeds import seeded

T = TypeVar("T")


class Unit:
    """A `SwitchHandle`. Calls to one unit never overlap; `mirrors` tell what leaves where."""

    def __init__(self, world: World, name: str) -> None:
        self.name, self.spec = name, world.bench.switches[name]
        self._clock, self._ours = world.clock, world.topology.ours[name]
        unit = behaviour_of(name, self.spec, world.bench.links)
        rng = seeded(world.seed, f"switch {name}")
        self._line = Line(self.spec, unit, world.figures.control, rng)
        self.mirrors = self._line.mirrors
        self._one_machine = world.figures.one_machine
        self._spoken: set[str] = world.shared.setdefault("lines spoken over", set())
        self._turn = asyncio.Lock()
        self._prepared: tuple[Matching, Delta] | None = None

    @property
    def typical_switch_ns(self) -> int:
        """What the unit's family and model usually take."""
        return self._line.capabilities.typical_switch_ns

    @property
    def map(self) -> Matching:
        """The whole map as the unit has it, whether or not it tells."""
        return Matching(frozenset(self._line.model.circuits()))

    async def identify(self) -> Identity:
        """Ask who it is."""
        return self._line.identify()

    async def read(self) -> Matching:
        """Read the part of the map that is ours."""
        try:
            return await self._soon(partial(contract.read_ours, self._line, self._ours))
        except TimeoutError as error:
            raise DeadlineExpired(f"{self.name}: not read within {self._soon_s:g} s") from error

    async def apply(self, wanted: Matching) -> Applied:
        """Make `wanted` our part of the map, however often the unit must be asked until then."""
        self._prepared = None
        limit_s = self.spec.apply_timeout_s
        last: DriverError | None = None
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    try:
                        return await self._call(partial(self._apply, wanted, limit_s))
                    except PASSING as fault:
                        last = fault
                    await self._clock.sleep_ns(round(AGAIN_S * NS_PER_S))
        except TimeoutError as error:
            raise last or DeadlineExpired(f"{self.name}: no answer within {limit_s:g} s") from error

    async def prepare(self, wanted: Matching) -> None:
        """Read the map and work out the change to `wanted`, to be made by the next `switch`."""
        try:
            delta = await self._soon(partial(contract.plan, self._line, wanted, self._ours))
        except (DriverError, TimeoutError):
            self._prepared = None
        else:
            self._prepared = (wanted, delta)

    async def switch(self, wanted: Matching) -> Switched:
        """Apply, then wait for light where the unit has power monitors."""
        prepared, self._prepared = self._prepared, None
        planned = prepared[1] if prepared and prepared[0] == wanted else None
        says = planned is None or bool(planned)
        try:
            return await self._soon(partial(self._switch, wanted, planned), says=says)
        except TimeoutError as error:
            raise Indeterminate(
                f"{self.name}: not changed within {self._soon_s:g} s; its map is not known"
            ) from error

    def break_down(self, faults: config.Faults) -> None:
        """Have these faults from now on; raises `Misuse` where the unit has no such ports."""
        self._line.now_ns = max(self._line.now_ns, self._clock.now_ns())
        self._line.break_down(faults)
        self.mirrors.turn(self._clock)

    def close(self) -> None:
        """Do nothing by itself any more."""
        self.mirrors.close()

    # -- calls --------------------------------------------------------------------------------

    @property
    def _soon_s(self) -> float:
        """What a unit that lives needs: for an answer, for another if that was lost, for light."""
        spec = self.spec
        return min(spec.apply_timeout_s, 2 * spec.exchange_timeout_s + spec.light_timeout_s)

    async def _soon(self, work: Callable[[], T], *, says: bool = True) -> T:
        """Do what does not wait for a unit that is starting; raises `TimeoutError`."""
        async with asyncio.timeout(self._soon_s):
            return await self._call(work, says=says)

    async def _call(self, work: Callable[[], T], *, says: bool = True) -> T:
        """Return what a call comes to, when it does; what was begun is done whoever waits."""
        async with self._turn, self._among_others(says=says):
            self._line.now_ns = max(self._line.now_ns, self._clock.now_ns())
            try:
                return work()
            finally:
                self.mirrors.turn(self._clock)
                await self._clock.sleep_ns(self._line.now_ns - self._clock.now_ns())

    @asynccontextmanager
    async def _among_others(self, *, says: bool) -> AsyncIterator[None]:
        """Have the line know how many on its machine are spoken over meanwhile."""
        if not (says and self._one_machine):
            yield
            return
        self._spoken.add(self.name)
        try:
            await asyncio.sleep(0)  # all that begin now have begun
            self._line.at_once = len(self._spoken)
            yield
        finally:
            self._spoken.discard(self.name)

    def _apply(self, wanted: Matching, limit_s: float, planned: Delta | None = None) -> Applied:
        return contract.apply(
            self._line,
            wanted,
            self._ours,
            deadline_ns=self._after_ns(limit_s),
            planned=planned,
            now_ns=self._line.time_ns,
            sleep=self._line.sleep,
        )

    def _switch(self, wanted: Matching, planned: Delta | None) -> Switched:
        line = self._line
        waited_ns = -line.waited_ns
        applied = self._apply(wanted, self._soon_s, planned)
        waited_ns += line.waited_ns
        egress = [egress for _, egress in applied.delta.make]
        if not (egress and line.capabilities.has_power):
            return Switched(applied, None, waited_ns)
        asked_ns, dark = line.now_ns, None
        try:
            self._wait_for_light(applied, egress)
        except NoLight as error:
            dark = error
        line.sleep(line.told_ns / NS_PER_S)
        light_ns = None if dark else line.now_ns
        return Switched(applied, light_ns, waited_ns + line.now_ns - asked_ns, dark)

    def _wait_for_light(self, applied: Applied, egress: list[int]) -> None:
        line, deadline_ns = self._line, self._after_ns(self.spec.light_timeout_s)
        contract.wait_for_light(
            line,
            egress,
            self.spec.light_floor_dbm,
            deadline_ns=deadline_ns,
            lit_before={egress for _, egress in applied.before},
            stale_until_ns=applied.acknowledged_ns + line.window_ns,
            now_ns=line.time_ns,
            sleep=partial(line.nap, deadline_ns),
        )

    def _after_ns(self, duration_s: float) -> int:
        return self._line.now_ns + round(duration_s * NS_PER_S)
