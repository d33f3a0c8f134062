"""SCPI exchanges over a line: one message out, one reply line back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from drivers.address import SerialAddress
from drivers.base import Transport
from drivers.dialects import scpi
from drivers.errors import DeadlineExpired, Garbled, Refused
from drivers.ocs.line import Access, Line, drain

LAST_COMMAND = ":SYST:ERR?"
"""Ends a message of silent sets: its one reply says whether all of them were obeyed."""


T = TypeVar("T")


@dataclass(frozen=True)
class Answer(Generic[T]):
    """A reply, read, and the stamps (monotonic ns) of the exchange."""

    value: T
    sent_ns: int
    received_ns: int


class ScpiLine:
    """Speaks SCPI to one unit. `identity` is the unit's ``*IDN?`` answer, known from opening on."""

    def __init__(self, access: Access) -> None:
        self._line = Line(access, self._sync)
        self._reader = scpi.ReplyReader()
        self._newline = "\r\n" if isinstance(access.address, SerialAddress) else "\n"
        self._now_ns = access.now_ns
        self._name = access.name
        self._identity: str | None = None

    @property
    def waited_ns(self) -> int:
        """Time spent so far blocked on the line."""
        return self._line.waited_ns

    def identity(self) -> str:
        """Return the ``*IDN?`` answer."""
        if self._identity is None:
            self._line.ready()
        assert self._identity is not None
        return self._identity

    def query(self, message: str, parse: Callable[[str], T], *, changes: bool = False) -> Answer[T]:
        """Send a message that holds exactly one query, at its end, and return its parsed reply."""
        if self._reader.partial:
            self._line.doubt()  # a line that nobody asked for has begun
        with self._line.exchange(changes=changes) as (transport, deadline_ns):
            data = (message + self._newline).encode("ascii")
            sent_ns = self._line.send(data, deadline_ns)
            first, *more = self._receive(transport, deadline_ns, message)
            received_ns = self._now_ns()
            if more:
                raise Garbled(f"{self._name}: more than one reply to {message!r}: {more}")
            value = parse(first)
        return Answer(value, sent_ns, received_ns)

    def command(self, message: str) -> None:
        """Send silent sets and ask whether they were obeyed; raise `Refused` or `Indeterminate`."""
        answer = self.query(f"{message};{LAST_COMMAND}", scpi.parse_error, changes=True)
        self._check(answer.value, message)

    def check(self, message: str) -> None:
        """Ask why `message` was not obeyed; raise `Refused` if the unit knows."""
        self._check(self.query(LAST_COMMAND, scpi.parse_error).value, message)

    def _check(self, entry: scpi.ErrorEntry, message: str) -> None:
        if entry.code != 0:
            with self._line.exchange(changes=False) as (_, deadline_ns):
                self._line.send(f"*CLS{self._newline}".encode(), deadline_ns)
            raise Refused(str(entry.code), entry.text, message)

    def close(self) -> None:
        """Close the line."""
        self._line.close()

    def _receive(self, transport: Transport, deadline_ns: int, message: str) -> list[str]:
        """Return the lines that come, at least one; our own echo is none."""
        while True:
            try:
                lines = self._reader.feed(transport.receive(deadline_ns))
            except DeadlineExpired as expired:
                if self._reader.partial and not self._reader.partial.isascii():
                    raise Garbled(
                        f"{self._name}: received {self._reader.partial[:40]!r}: check the baud rate"
                    ) from expired
                raise
            if lines := [line for line in lines if line != message]:
                return lines

    def _sync(self, transport: Transport, deadline_ns: int, fresh: bool) -> None:
        if not fresh:
            drain(transport, self._now_ns, deadline_ns)
        self._reader.clear()
        message = f"*CLS{self._newline}*IDN?{self._newline}"
        transport.send(message.encode("ascii"), deadline_ns)
        while True:
            for line in self._receive(transport, deadline_ns, "*IDN?"):
                if self._known(line):
                    self._identity = line
                    return

    def _known(self, line: str) -> bool:
        if self._identity is not None:
            return line == self._identity
        try:
            scpi.parse_identity(line)
        except Garbled:
            return False  # a late reply to somebody before us
        return True
