"""A simulated node's numbered outputs: kept until the coordinator has them, and who waits for some.

As `agents.events`, but for who wakes whoever watches: what is urgent, not each output. The watch
itself goes on in virtual time: it waits until something is due, lets it happen, and looks again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import islice

from harness.clock import NS_PER_S, Clock
from harness.errors import InfrastructureError
from harness.wire.generation import Output

BUNDLE_MAX = 50_000
"""Outputs of one answer."""


class Forgotten(InfrastructureError):
    """Outputs that were had before are asked for again."""


class Outputs:
    """Outputs in order, numbered from 1. `elapse` lets all happen by now; returns what is next."""

    def __init__(self, clock: Clock, elapse: Callable[[int], int]) -> None:
        self.last = 0
        """Number of the latest output; 0 before the first."""
        self._clock, self._elapse = clock, elapse
        self._kept: deque[Output] = deque()
        self._urgent = 0
        """Number of the latest that is to be told at once."""
        self._stirred = False
        self._watch = 0
        self._waiting: asyncio.Future[None] | None = None

    def add(self, output: Output, urgent: bool) -> None:
        """Append an output."""
        self._kept.append(output)
        self.last += 1
        if urgent:
            self._urgent = self.last

    def stir(self) -> None:
        """Answer whoever watches: there is other news."""
        self._stirred = True
        self.look()

    def look(self) -> None:
        """Have whoever watches look again: something else may be due next."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def news(self, number: int, wait_ns: int) -> bool:
        """Wait until there is something urgent after `number`, other news, or `wait_ns` is over.

        Returns whether there was other news, or a later watch, which ends this one: both want to
        know where all stands. Those up to `number` are forgotten. Raises `Forgotten`.
        """
        self._forget(number)
        self._watch = watch = self._watch + 1
        self.look()  # an older watch has nobody waiting any more
        until_ns = self._clock.now_ns() + wait_ns
        while True:
            now_ns = self._clock.now_ns()
            due_ns = self._elapse(now_ns)
            known = self._urgent > number or self._stirred
            if known or now_ns >= until_ns or watch != self._watch:
                break
            await self._wait(min(due_ns, until_ns) - now_ns)
        stirred, self._stirred = self._stirred, False
        return stirred or watch != self._watch

    def kept(self) -> tuple[int, tuple[Output, ...]]:
        """Return the outputs that are here, as many as fit, and the last one's number."""
        outputs = tuple(islice(self._kept, BUNDLE_MAX))
        self._urgent = self.last  # whoever asks for any of these again is answered at once
        return self.last - len(self._kept) + len(outputs), outputs

    async def _wait(self, duration_ns: int) -> None:
        loop = asyncio.get_running_loop()
        waiting = self._waiting = loop.create_future()
        timer = loop.call_later(duration_ns / NS_PER_S, self.look)
        try:
            await waiting
        finally:
            timer.cancel()

    def _forget(self, number: int) -> None:
        first = self.last - len(self._kept)
        if not first <= number <= self.last:
            raise Forgotten(
                f"events after {number} are asked for; here are those after {first}, to {self.last}"
            )
        for _ in range(number - first):
            self._kept.popleft()
