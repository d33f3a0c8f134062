"""Every request of a run and every token that was delivered of it. Pure.

The coordinator owns the requests; engines only borrow them. Whatever happens to an engine, a
request continues from what is in here: tokens that an engine had not told are generated anew and
never counted. Outputs are applied in the order of their node's events. Stamps are on the
coordinator's clock, lengths in tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from harness.model.replay import ReplayRequest
from harness.model.requests import Carried
from harness.wire.generation import Output, Work

State = Literal["queued", "sent", "held", "finished", "refused"]
"""`queued`: waits here for an instance; `sent`: at `Entry.at`; `held`: taken from an instance, and
in the hands of whoever took it (a switch, a migration)."""


@dataclass(slots=True, eq=False)
class Entry:
    """A request: a whole trajectory, of which turn `turn` is being generated."""

    request: ReplayRequest
    arrived_ns: int
    state: State = "queued"
    at: str = ""
    """Name of the instance that has it; "" unless `sent`."""
    home: str = ""
    """The instance that had it last: its KV may still be cached there."""
    turn: int = 0
    context_tokens: int = 0
    """Prompt of the present turn: all turns before it, with their outputs and tool output."""
    produced_tokens: int = 0
    """Delivered of the present turn."""
    moves: int = 0
    """How often it continued in another engine than it had begun a turn in."""
    first_token_ns: int = 0
    last_token_ns: int = 0
    """Of the whole trajectory; 0: none yet."""
    reason: str = ""
    """Why it was refused."""

    @property
    def id(self) -> str:
        """The request's."""
        return self.request.id


@dataclass(eq=False)
class Ledger:
    """All entries by id, and the sums over them."""

    entries: dict[str, Entry] = field(default_factory=dict)
    tokens: int = 0
    """Delivered, each position once."""
    lost_tokens: int = 0
    """Positions that an engine skipped: gaps that nobody will fill. 0, or something is wrong."""
    doubled_tokens: int = 0
    """Positions delivered again. 0, or something is wrong."""
    discarded_tokens: int = 0
    """Told by an engine that no longer had the request: given up, or torn down by force."""
    finished: int = 0
    refused: int = 0
    moved: int = 0
    """Continuations in another engine."""

    def add(self, requests: Iterable[ReplayRequest], now_ns: int) -> None:
        """Take new requests. Raises `ValueError` on an id that is here already."""
        raise NotImplementedError

    def at(self, name: str) -> tuple[str, ...]:
        """Return the ids that an instance has, in the order they were sent there."""
        raise NotImplementedError

    @property
    def open(self) -> int:
        """Requests that have neither finished nor been refused."""
        return len(self.entries) - self.finished - self.refused

    def work_of(self, id_: str, *, kv_tokens: int = 0, kv_transfer: str = "") -> Work:
        """Return a request as it continues: its context, its output so far, KV sent ahead."""
        raise NotImplementedError

    def carried_of(self, id_: str) -> Carried:
        """Return where the present turn stands."""
        raise NotImplementedError

    def send(self, id_: str, name: str) -> None:
        """Note that a queued or held request goes to an instance; before the message leaves."""
        raise NotImplementedError

    def hold(self, id_: str) -> None:
        """Note that a request was taken from where it was; it waits for `send` or `requeue`."""
        raise NotImplementedError

    def apply(self, output: Output) -> Entry | None:
        """Deliver tokens; return the entry if it still was there, else None (discarded)."""
        raise NotImplementedError
