"""A node's numbered phases, which may be known before their time: told once it has come."""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import takewhile

from harness.clock import NS_PER_S, Clock
from harness.errors import InfrastructureError
from harness.wire.training import PhaseHappened


class Foretold:
    """Phases in order, numbered from 1, until whoever watches has them.

    A phase that ends wakes him; one that begins comes along with what ends next.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._first = 0
        """How many are forgotten."""
        self._kept: deque[PhaseHappened] = deque()
        self._news = asyncio.Event()

    def add(self, phase: PhaseHappened) -> None:
        """Append one, whose time is not before that of the last."""
        self._kept.append(phase)
        if phase.end_ns:
            self._news.set()

    async def after(self, number: int, wait_ns: int) -> tuple[int, tuple[PhaseHappened, ...]]:
        """Return the last one's number, and what has come to pass after `number`.

        Waits for a phase to end, by `wait_ns` at the latest. Those up to `number` are forgotten.
        Raises `InfrastructureError` where those asked for are forgotten already.
        """
        if not self._first <= number <= self._first + len(self._kept):
            raise InfrastructureError(
                f"phases after {number} are asked for; here are those after {self._first}"
            )
        for _ in range(number - self._first):
            self._kept.popleft()
        self._first = number
        until_ns = self._clock.now_ns() + wait_ns
        while (left_ns := self._next_ns(until_ns) - self._clock.now_ns()) > 0:
            self._news.clear()
            try:
                async with asyncio.timeout(left_ns / NS_PER_S):
                    await self._news.wait()
            except TimeoutError:
                continue
        now_ns = self._clock.now_ns()
        told = tuple(takewhile(lambda phase: _at_ns(phase) <= now_ns, self._kept))
        return number + len(told), told

    def _next_ns(self, until_ns: int) -> int:
        """Return when the next one ends, as far as that is known."""
        return min(until_ns, next((p.end_ns for p in self._kept if p.end_ns), until_ns))


def _at_ns(phase: PhaseHappened) -> int:
    return phase.end_ns or phase.begin_ns
