"""What the unit says: protocols as pure dialogue, bytes in and bytes out, without any I/O."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from drivers.emulators.model import Change


@dataclass(frozen=True)
class Answer:
    """What follows from one command line: bytes to send (none where silent) and what changed."""

    reply: bytes = b""
    changes: tuple[Change, ...] = ()
    """One for each change command that was obeyed, in order."""
    is_query: bool = False


class Session(Protocol):
    """One client's dialogue with the unit; it belongs to one connection."""

    greeting: bytes
    """Sent when the line opens."""
    ends: bytes
    """The bytes that end a command, for a line that hands over one byte after the other."""

    def lines(self, data: bytes) -> list[bytes]:
        """Take what arrived and return the commands that are now complete."""

    def answer(self, line: bytes, now_ns: int, wall: datetime) -> Answer:
        """Obey one command."""

    def report(self, change: Change, wall: datetime) -> bytes:
        """Return what the unit says unasked about `change`; empty where it says nothing."""
