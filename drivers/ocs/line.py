"""A device's line that is brought back into step before it is used again after a fault.

A late reply must never be taken for the answer to a later question. So after any fault the line is
*doubtful*: before the next exchange it is resynchronised with a query whose answer is known, and
when that fails, or the line is gone, it is opened again. Nothing here repeats an exchange.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from drivers.address import NO_CREDENTIALS, Address, Credentials, SerialAddress
from drivers.base import Transport
from drivers.errors import DeadlineExpired, Garbled, Indeterminate, LinkLost
from drivers.transports.metered import Meter, Metered

QUIET_NS = 20_000_000
"""After a fault: no byte for this long means that nothing more of the old exchange comes."""


@dataclass(frozen=True)
class Access:
    """How to reach one unit: `open` takes a deadline (monotonic ns) and opens its line."""

    name: str
    address: Address
    open: Callable[[int], Transport]
    exchange_timeout_ns: int
    open_timeout_ns: int
    credentials: Credentials = NO_CREDENTIALS
    now_ns: Callable[[], int] = time.monotonic_ns


class Line:
    """The line of `access`, opened when first needed.

    `sync(transport, deadline_ns, fresh)` brings dialect and device into step; `fresh` says that the
    line was just opened. It raises `LinkLost`, `DeadlineExpired` or `Garbled` when it fails, or
    `AccessDenied`.
    """

    def __init__(self, access: Access, sync: Callable[[Transport, int, bool], None]) -> None:
        self.access = access
        self._sync = sync
        self._transport: Transport | None = None
        self._doubtful = False
        self._closed = False
        self._meter = Meter()

    @property
    def waited_ns(self) -> int:
        """Time spent so far blocked on the line, over all its openings."""
        return self._meter.waited_ns

    def doubt(self) -> None:
        """Say that question and answer may be out of step."""
        self._doubtful = True

    def ready(self) -> Transport:
        """Return the transport, in step; raise what opening or synchronising raises."""
        if self._closed:
            raise LinkLost(f"{self.access.name}: used after it was closed")
        if self._transport is not None and not self._doubtful:
            return self._transport
        if self._transport is not None:
            try:
                self._sync(self._transport, self._deadline(), False)
            except (LinkLost, DeadlineExpired, Garbled):
                self._drop()
            else:
                self._doubtful = False
                return self._transport
        return self._reopened()

    @contextmanager
    def exchange(self, *, changes: bool) -> Iterator[tuple[Transport, int]]:
        """Enter one exchange: the transport in step, and the deadline of the exchange.

        A fault inside leaves the line doubtful; where the exchange `changes` the unit, it becomes
        `Indeterminate`, since the command may have been obeyed.
        """
        transport = self.ready()
        self._doubtful = True  # until the exchange is known to have ended in step
        try:
            yield transport, self._deadline()
        except (LinkLost, DeadlineExpired, Garbled) as fault:
            if isinstance(fault, LinkLost):
                self._drop()
            if changes:
                raise Indeterminate(
                    f"{self.access.name}: the outcome of a change is not known: {fault}"
                ) from fault
            raise
        self._doubtful = False

    def send(self, data: bytes, deadline_ns: int) -> int:
        """Send within an exchange, return the stamp; half a command left behind ends the line."""
        if self._transport is None:
            raise LinkLost(f"{self.access.name}: not open")
        try:
            self._transport.send(data, deadline_ns)
        except DeadlineExpired:
            self._drop()
            raise
        return self.access.now_ns()

    def close(self) -> None:
        """Close for good."""
        self._closed = True
        self._drop()

    def _deadline(self) -> int:
        return self.access.now_ns() + self.access.exchange_timeout_ns

    def _drop(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def _reopened(self) -> Transport:
        opened = self.access.open(self.access.now_ns() + self.access.open_timeout_ns)
        transport = Metered(opened, self._meter)
        self._transport = transport
        try:
            self._sync(transport, self._deadline(), True)
        except DeadlineExpired as expired:
            self._drop()
            serial = isinstance(self.access.address, SerialAddress)
            raise DeadlineExpired(
                f"{self.access.name}: {transport.name} is open, but the unit does not answer its"
                f" first question: check {'baud rate, cable' if serial else 'the port'} and driver"
            ) from expired
        except BaseException:
            self._drop()
            raise
        self._doubtful = False
        return transport


def drain(transport: Transport, now_ns: Callable[[], int], deadline_ns: int) -> None:
    """Read away what still comes of an earlier exchange; stops at `deadline_ns` all the same."""
    while (now := now_ns()) < deadline_ns:
        try:
            transport.receive(min(now + QUIET_NS, deadline_ns))
        except DeadlineExpired:
            return
