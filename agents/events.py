"""A node's numbered events: what was told on it, kept until the coordinator has them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Generic, TypeVar

from harness.clock import NS_PER_S
from harness.errors import InfrastructureError

Event = TypeVar("Event")

BUNDLE_MAX = 50_000
"""Events of one answer: far below the largest message, even as outputs with their token ids."""


class Forgotten(InfrastructureError):
    """Events that were had before are asked for again."""


class Events(Generic[Event]):
    """Events in order, numbered from 1; whoever watches is woken by them, and by other news."""

    def __init__(self) -> None:
        self.last = 0
        """Number of the latest event; 0 before the first."""
        self._kept: deque[Event] = deque()
        self._stirred = False
        self._watcher: asyncio.Future[None] | None = None

    def add(self, events: Iterable[Event]) -> None:
        """Append events, and wake whoever watches."""
        before = len(self._kept)
        self._kept.extend(events)
        self.last += len(self._kept) - before
        if len(self._kept) > before:
            self._wake()

    def stir(self) -> None:
        """Wake whoever watches though nothing is appended: somebody died, or was built."""
        self._stirred = True
        self._wake()

    def _wake(self) -> None:
        if self._watcher and not self._watcher.done():
            self._watcher.set_result(None)

    async def after(self, number: int, wait_ns: int) -> tuple[int, tuple[Event, ...]]:
        """Return the last event's number and the events after `number`, by `wait_ns` at the latest.

        Those up to `number` are forgotten. A later watch ends this one. Raises `Forgotten`.
        """
        self._forget(number)
        self._wake()  # an older watch has nobody waiting any more
        if not self._kept and not self._stirred:
            watcher = self._watcher = asyncio.get_running_loop().create_future()
            await asyncio.wait([watcher], timeout=wait_ns / NS_PER_S)
        self._stirred = False
        events = tuple(islice(self._kept, BUNDLE_MAX))
        return self.last - len(self._kept) + len(events), events

    def _forget(self, number: int) -> None:
        first = self.last - len(self._kept)
        if not first <= number <= self.last:
            raise Forgotten(
                f"events after {number} are asked for; here are those after {first}, to {self.last}"
            )
        for _ in range(number - first):
            self._kept.popleft()
