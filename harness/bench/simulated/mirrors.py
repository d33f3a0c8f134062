"""The light inside one unit in virtual time: what leaves where, and the moments when that changes.

As the emulated units' mover has it: a port that is to move is dark at once, and lit again when its
mirrors have moved and its far end's NIC has held the port down for long enough.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Sequence

from drivers.emulators.model import Change
from harness.clock import NS_PER_S, Clock

Heed = Callable[[Sequence[int]], None]
"""Told which ingress ports' light has just changed."""


class Mirrors:
    """`lit`: per ingress port, the egress port by which its light leaves now."""

    def __init__(self, hold_ns: int) -> None:
        self.lit: dict[int, int] = {}
        self.heed: Heed = lambda _ingress: None
        self._hold_ns = hold_ns
        self._moves: list[tuple[int, int, int, int | None]] = []
        """What is to come: (when, order of planning, ingress, egress or dark)."""
        self._orders = 0
        self._coming: dict[int, dict[int, int]] = {}
        """Per ingress port, when the lightings are due that still count, by their order."""
        self._timer: asyncio.TimerHandle | None = None
        self._timed_ns = 0

    def carry_out(self, change: Change, at_ns: int) -> None:
        """Plan what a change at `at_ns` brings; changes come in the order of time."""
        for ingress in change.dark:
            self._forget(ingress, at_ns)
            self._plan(at_ns, ingress, None)
        for lighting in change.light:
            self._plan(lighting.at_ns + self._hold_ns, lighting.ingress, lighting.egress)

    def stop(self, at_ns: int) -> None:
        """Mirrors stand from now on: what is lit stays lit, what was to come does not."""
        for ingress in list(self._coming):
            self._forget(ingress, at_ns)

    def turn(self, clock: Clock) -> None:
        """Do what is due by now, and come back when more is."""
        now_ns = clock.now_ns()
        touched: dict[int, None] = {}
        while self._moves and self._moves[0][0] <= now_ns:
            _, order, ingress, egress = heapq.heappop(self._moves)
            if egress is None:
                changed = self.lit.pop(ingress, None) is not None
            elif changed := self._coming.get(ingress, {}).pop(order, None) is not None:
                self.lit[ingress] = egress
            if changed:
                touched[ingress] = None
        if touched:
            self.heed(tuple(touched))
        if self._moves and (self._timer is None or self._moves[0][0] < self._timed_ns):
            self._set_timer(clock, now_ns)

    def close(self) -> None:
        """Move no more."""
        self._moves.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self, clock: Clock, now_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timed_ns = self._moves[0][0]
        left_s = (self._timed_ns - now_ns) / NS_PER_S
        self._timer = asyncio.get_running_loop().call_later(left_s, self._wake, clock)

    def _wake(self, clock: Clock) -> None:
        self._timer = None
        self.turn(clock)

    def _plan(self, at_ns: int, ingress: int, egress: int | None) -> None:
        self._orders += 1
        heapq.heappush(self._moves, (at_ns, self._orders, ingress, egress))
        if egress is not None:
            self._coming.setdefault(ingress, {})[self._orders] = at_ns

    def _forget(self, ingress: int, at_ns: int) -> None:
        """Give up what was to be lit after this moment."""
        due = self._coming.get(ingress, {})
        self._coming[ingress] = {order: due_ns for order, due_ns in due.items() if due_ns <= at_ns}
