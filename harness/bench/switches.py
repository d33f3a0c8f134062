"""Switches behind worker threads: drivers block, the event loop must not.

One thread per device and nothing queued behind it but what its caller awaits, so commands to one
unit never overlap and two units switch at the same time.

A unit that loses power answers nobody, and is back later, empty. What goes on without it (`read`,
`prepare`, `switch`) fails soon; `apply`, by which it is put back, waits for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from drivers import apply as contract
from drivers.base import Applied, Delta, Identity, Matching, Ocs, PowerMonitor
from drivers.catalog import open_ocs
from drivers.errors import (
    DeadlineExpired,
    DriverError,
    Garbled,
    Indeterminate,
    LinkLost,
    NoLight,
    Unreachable,
)
from harness.bench.base import Switched
from harness.bench.credentials import credentials_of
from harness.bench.worker import Worker
from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import InfrastructureError
from harness.model.bench import Switch

P = ParamSpec("P")
T = TypeVar("T")

CLOSE_S = 10.0
"""For the end of a session, beyond what a change under way may take."""
AGAIN_S = 0.25
"""Between two attempts to reach a unit that may be starting."""
PASSING = (Unreachable, LinkLost, DeadlineExpired, Garbled, Indeterminate)
"""What a unit that is starting, or a line that is bad, does; what it refuses, it refuses again."""

POWER_WINDOW_NS = 10 * NS_PER_MS
"""Of a power meter set to averaging 1; each step doubles it (the unit's published data model)."""


class ThreadedSwitch:
    """A `SwitchHandle`: an open driver, our ports of it, and its one thread."""

    def __init__(
        self, name: str, spec: Switch, ours: frozenset[int], transcript: Path | None
    ) -> None:
        self.name, self.spec = name, spec
        self._ours, self._transcript = ours, transcript
        self._thread = Worker(f"switch-{name}")
        self._ocs: Ocs | None = None
        self._prepared: tuple[Matching, Delta] | None = None

    @property
    def _power_window_ns(self) -> int:
        return POWER_WINDOW_NS << (self.spec.power_averaging - 1)

    @property
    def typical_switch_ns(self) -> int:
        """What the unit's family and model usually take."""
        return self.ocs.capabilities.typical_switch_ns

    @property
    def ocs(self) -> Ocs:
        """The open driver."""
        if self._ocs is None:
            raise RuntimeError(f"{self.name} is not open")
        return self._ocs

    async def open(self) -> None:
        """Open the line and ask the unit who it is; every failure names the switch."""
        timeout_ns = round(self.spec.exchange_timeout_s * NS_PER_S)
        credentials = credentials_of(self.name, self.spec)

        def open_now() -> None:  # kept by the thread: who waits for it may be gone meanwhile
            self._ocs = open_ocs(
                self.spec.driver,
                self.spec.url,
                name=self.name,
                credentials=credentials,
                exchange_timeout_ns=timeout_ns,
                transcript=self._transcript,
            )

        try:
            await self._call(open_now)
            await self.identify()
        except DriverError as error:
            raise InfrastructureError(f"{self.name} ({self.spec.url}): {error}") from error

    async def identify(self) -> Identity:
        """Ask who it is."""
        return await self._call(self.ocs.identify)

    @property
    def _soon_s(self) -> float:
        """What a unit that lives needs: for an answer, for another if that was lost, for light."""
        spec = self.spec
        return min(spec.apply_timeout_s, 2 * spec.exchange_timeout_s + spec.light_timeout_s)

    async def read(self) -> Matching:
        """Read the part of the map that is ours."""
        try:
            return await self._soon(contract.read_ours, self.ocs, self._ours)
        except TimeoutError as error:
            raise DeadlineExpired(f"{self.name}: not read within {self._soon_s:g} s") from error

    async def apply(self, wanted: Matching) -> Applied:
        """Make `wanted` our part of the map, however often the unit must be asked until then.

        See `drivers.apply.apply`. Whom nobody reaches is tried again until `apply_timeout_s`.
        """
        self._prepared = None  # whoever asks for no more than the map wants it read now
        limit_s = self.spec.apply_timeout_s
        last: DriverError | None = None
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    try:
                        return await self._call(self._apply, wanted, limit_s)
                    except PASSING as fault:
                        last = fault
                    await asyncio.sleep(AGAIN_S)
        except TimeoutError as error:
            raise last or DeadlineExpired(f"{self.name}: no answer within {limit_s:g} s") from error

    async def prepare(self, wanted: Matching) -> None:
        """Read the map and work out the change to `wanted`, to be made by the next `switch`."""
        try:
            delta = await self._soon(contract.plan, self.ocs, wanted, self._ours)
        except (DriverError, TimeoutError):
            self._prepared = None
        else:
            self._prepared = (wanted, delta)

    async def switch(self, wanted: Matching) -> Switched:
        """Apply, then wait for light where the unit has power monitors.

        Raises `Indeterminate` where that does not end soon: what was begun, the thread resolves by
        itself before it does anything else; what was not, is not made any more.
        """
        prepared, self._prepared = self._prepared, None
        planned = prepared[1] if prepared and prepared[0] == wanted else None
        try:
            return await self._soon(self._switch, wanted, planned)
        except TimeoutError as error:
            raise Indeterminate(
                f"{self.name}: not changed within {self._soon_s:g} s; its map is not known"
            ) from error

    def _apply(self, wanted: Matching, limit_s: float, planned: Delta | None = None) -> Applied:
        return contract.apply(
            self.ocs, wanted, self._ours, deadline_ns=_after_s(limit_s), planned=planned
        )

    def _switch(self, wanted: Matching, planned: Delta | None) -> Switched:
        # One visit to the thread for both: each hand-over costs as much as all our own work here.
        waited_ns = -self.ocs.waited_ns
        applied = self._apply(wanted, self._soon_s, planned)
        waited_ns += self.ocs.waited_ns
        egress = [egress for _, egress in applied.delta.make]
        if not (egress and self.ocs.capabilities.has_power and isinstance(self.ocs, PowerMonitor)):
            return Switched(applied, None, waited_ns)
        asked_ns = time.monotonic_ns()
        dark, light_ns = None, None
        try:
            light_ns = contract.wait_for_light(
                self.ocs,
                egress,
                self.spec.light_floor_dbm,
                deadline_ns=_after_s(self.spec.light_timeout_s),
                lit_before={egress for _, egress in applied.before},
                stale_until_ns=applied.acknowledged_ns + self._power_window_ns,
            )
        except NoLight as error:
            dark = error
        return Switched(applied, light_ns, waited_ns + time.monotonic_ns() - asked_ns, dark)

    async def close(self) -> None:
        """End the session and the thread; raises `TimeoutError` where a call hangs: left behind."""
        try:
            async with asyncio.timeout(self.spec.apply_timeout_s + CLOSE_S):
                await self._call(self._close)
        finally:
            self._thread.end()

    def _close(self) -> None:
        if self._ocs is not None:
            self._ocs.close()

    async def _soon(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do what does not wait for a unit that is starting; raises `TimeoutError`."""
        async with asyncio.timeout(self._soon_s):
            return await self._call(work, *args, **kwargs)

    async def _call(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.wrap_future(self._thread.submit(partial(work, *args, **kwargs)))


def _after_s(duration_s: float) -> int:
    return time.monotonic_ns() + round(duration_s * NS_PER_S)
