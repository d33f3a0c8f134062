"""Steerable ToRs of a bench: opened together, steered at once, each within its own limit.

A ToR across a network takes milliseconds and may hang: it has a thread of its own. One in a
namespace here takes some tens of microseconds, less than handing it to a thread would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar

from drivers.catalog import TORS, open_tor
from drivers.errors import DriverError, Indeterminate
from drivers.tor.base import Route, Tor
from harness.bench.credentials import credentials_of
from harness.bench.worker import Worker
from harness.clock import NS_PER_S
from harness.errors import InfrastructureError, SteeringFailed
from harness.model import bench
from harness.tasks import together

T = TypeVar("T")

EXCHANGES_MAX = 4
"""What one change may take: sent, no answer; logged in again, read, sent once more."""
UNKNOWN = "its routes are not known"


class SteerableTor:
    """One ToR of the bench: how it is reached, its open driver, and a thread where it is remote."""

    def __init__(self, name: str, spec: bench.Tor) -> None:
        self.name, self.spec = name, spec
        self._worker = Worker(f"tor-{name}") if TORS[spec.driver].remote else None
        self._driver: Tor | None = None
        self._late: Future[None] | None = None
        """A change that was given up, though the thread may still be at it."""
        self._last: Future[None] | None = None

    @property
    def remote(self) -> bool:
        """Whether a call takes milliseconds, in a thread."""
        return self._worker is not None

    @property
    def limit_s(self) -> float:
        """How long one change may take."""
        return EXCHANGES_MAX * self.spec.exchange_timeout_s

    @property
    def driver(self) -> Tor:
        """The open driver."""
        if self._driver is None:
            raise RuntimeError(f"{self.name} is not open")
        return self._driver

    async def open(self) -> None:
        """Open the session and read the routes once; every failure names the ToR."""
        credentials = credentials_of(self.name, self.spec)

        def open_now() -> None:  # kept by the thread: who waits for it may be gone meanwhile
            self._driver = open_tor(
                self.spec.driver,
                self.spec.url,
                name=self.name,
                credentials=credentials,
                exchange_timeout_ns=round(self.spec.exchange_timeout_s * NS_PER_S),
            )

        try:
            await self._call(open_now)
            await self.read()
        except DriverError as error:
            raise InfrastructureError(f"{self.name} ({self.spec.url}): {error}") from error

    async def read(self) -> frozenset[Route]:
        """Return the steering routes in force."""
        return await self._call(self.driver.read)

    async def apply(self, routes: frozenset[Route]) -> None:
        """Make these the whole set of steering routes; see `drivers.tor.base.Tor.apply`.

        Raises `Indeterminate` where it takes longer than `limit_s`, and from then on at once, until
        the driver has given up too.
        """
        if self._worker is None:
            self.driver.apply(routes)
            return
        if self._late is not None and not self._late.done():
            raise Indeterminate(f"ToR {self.name}: still no answer to an earlier change")
        if self._last is not None and not self._last.done():  # whoever asked was cancelled
            await asyncio.wait({asyncio.wrap_future(self._last)}, timeout=self.limit_s)
        change = self._last = self._worker.submit(lambda: self.driver.apply(routes))
        try:
            async with asyncio.timeout(self.limit_s):
                await asyncio.wrap_future(change)
        except TimeoutError as error:
            self._late = change
            raise Indeterminate(f"ToR {self.name}: no answer within {self.limit_s:g} s") from error

    async def close(self) -> None:
        """End the session and the thread; raises `TimeoutError` where a call hangs: left behind."""
        try:
            async with asyncio.timeout(self.spec.exchange_timeout_s):
                await self._call(self._close)
        finally:
            if self._worker is not None:
                self._worker.end()

    def _close(self) -> None:
        if self._driver is not None:
            self._driver.close()

    async def _call(self, work: Callable[[], T]) -> T:
        if self._worker is None:
            return work()
        return await asyncio.wrap_future(self._worker.submit(work))


async def steer(tors: Mapping[str, SteerableTor], wanted: Mapping[str, frozenset[Route]]) -> None:
    """Apply the routes of each ToR, all at once; raises `SteeringFailed` once all have ended."""
    here = [name for name in wanted if not tors[name].remote]
    away = [name for name in wanted if tors[name].remote]
    told = {name: await _failure(tors[name], wanted[name]) for name in here}
    if away:
        asked = await together(_failure(tors[name], wanted[name]) for name in away)
        told |= dict(zip(away, asked, strict=True))
    if failures := {name: text for name, text in told.items() if text}:
        raise SteeringFailed(failures)


async def _failure(tor: SteerableTor, routes: frozenset[Route]) -> str:
    """Steer one ToR; return why it failed, with its name, or nothing."""
    try:
        await tor.apply(routes)
    except DriverError as fault:
        text = str(fault) if tor.name in str(fault) else f"{tor.name}: {fault}"
        return f"{text} ({UNKNOWN})" if isinstance(fault, Indeterminate) else text
    return ""
