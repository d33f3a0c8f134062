"""What a session offers in which commands run, each with an exit status; imports no library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Finished:
    """How a command ended: its exit status, and what it wrote."""

    status: int
    out: str
    err: str


class Commands(Protocol):
    """A session on a device that is a computer. Deadlines are absolute, monotonic ns."""

    name: str
    """The device URL without secrets, for messages."""

    def run(self, command: str, stdin: str, deadline_ns: int) -> Finished:
        """Run `command` to its end; raise `DeadlineExpired` or `LinkLost`.

        After either the session is of no use: whether the device has obeyed is not known.
        """

    def close(self) -> None:
        """End the session; safe to call twice."""
