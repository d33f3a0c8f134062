"""Carries out light transitions on time: one thread, one heap, a precise wait.

An event loop's selector rounds its timers to a millisecond; a condition wait on the monotonic
clock is late by about a tenth of that. The thread sleeps until the next lighting is due and keeps
what each move really took, for benchmarks. A light that fails to move is logged and the mover goes
on: the unit then has a dark circuit, as hardware would.
"""

from __future__ import annotations

import ctypes
import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from drivers.emulators.model import Change, Lighting
from drivers.emulators.urgent import run_first

log = logging.getLogger(__name__)

PR_SET_TIMERSLACK = 29


class LightPath(Protocol):
    """What the mover needs of a light: see `drivers.emulators.light`."""

    def set(self, changes: Mapping[int, int | None]) -> None:
        """Send light from each ingress port to that egress port; None is dark."""


@dataclass(frozen=True)
class DarkTime:
    """How long one moved circuit was dark for packets: asked for, with its hold, and in fact."""

    lighting: Lighting
    asked_ns: int
    actual_ns: int


class _Due(NamedTuple):
    """A planned lighting; heap order is by time, then by order of planning."""

    at_ns: int
    order: int
    lighting: Lighting
    asked_ns: int
    """When the command was obeyed."""
    dark_ns: int
    """When the light was gone."""


class Mover:
    """Owns the thread. `carry_out` darkens before it returns; lightings follow on their own."""

    def __init__(self, light: LightPath, *, hold_ns: int = 0, keep: int = 20_000) -> None:
        self._light, self._hold_ns = light, hold_ns
        self._due: list[_Due] = []
        self._valid: dict[int, int] = {}
        """Ingress port -> the order number of the lighting that still counts."""
        self._orders = 0
        self._closed = False
        self._wake = threading.Condition()
        self.dark_times: deque[DarkTime] = deque(maxlen=keep)
        self._thread = threading.Thread(target=self._run, name="light mover", daemon=True)
        self._thread.start()

    def carry_out(self, change: Change, now_ns: int) -> None:
        """Darken at once what `change` darkens, light at once what is due, and plan the rest."""
        with self._wake:
            for ingress in change.dark:
                self._valid.pop(ingress, None)
            self._set(dict.fromkeys(change.dark))
            begun_ns = time.monotonic_ns()
            lit = [(x.at_ns + self._hold_ns, x) for x in change.light]
            self._set({x.ingress: x.egress for at_ns, x in lit if at_ns <= now_ns})
            first = self._due[0].at_ns if self._due else None
            for at_ns, lighting in ((at_ns, x) for at_ns, x in lit if at_ns > now_ns):
                self._orders += 1
                self._valid[lighting.ingress] = self._orders
                due = _Due(at_ns, self._orders, lighting, now_ns, begun_ns)
                heapq.heappush(self._due, due)
            if self._due and (first is None or self._due[0].at_ns < first):
                self._wake.notify()

    def close(self) -> None:
        """Stop the thread; lightings still due are not carried out. Safe to call twice."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        run_first()
        _tighten_timers()
        with self._wake:
            while not self._closed:
                if not self._due:
                    self._wake.wait()
                    continue
                left_ns = self._due[0].at_ns - time.monotonic_ns()
                if left_ns > 0:
                    self._wake.wait(left_ns / 1e9)
                else:
                    self._light_due(time.monotonic_ns())

    def _light_due(self, now_ns: int) -> None:
        """Light everything that is due by `now_ns` in one act."""
        ready: list[_Due] = []
        while self._due and self._due[0].at_ns <= now_ns:
            due = heapq.heappop(self._due)
            if self._valid.get(due.lighting.ingress) == due.order:
                del self._valid[due.lighting.ingress]
                ready.append(due)
        self._set({due.lighting.ingress: due.lighting.egress for due in ready})
        done_ns = time.monotonic_ns()
        for due in ready:
            taken = DarkTime(due.lighting, due.at_ns - due.asked_ns, done_ns - due.dark_ns)
            self.dark_times.append(taken)

    def _set(self, changes: Mapping[int, int | None]) -> None:
        if not changes:
            return
        try:
            self._light.set(changes)
        except OSError:
            log.exception("light did not move: %s", dict(changes))


def _tighten_timers() -> None:
    """Ask for exact timers in this thread: by default Linux lets them be 50 us late."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    except (OSError, AttributeError):
        log.debug("no prctl: timers keep the system's slack")
