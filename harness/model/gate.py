"""The bookkeeping of one rank's traffic: who may enter the next iteration, and when it is steady.

Traffic is one collective in a loop on every rank, so ranks are never more than one iteration
apart. To stand still without a deadlock, all are held (`hold` tells how far each has come), and
then all go on through the furthest iteration that anyone has entered (`stop_at`).

Pure: times are arguments, in nanoseconds. The caller serialises access with a lock of its own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

KEPT_ITERATIONS = 4096
STEADY_RUN = 3
"""Consecutive iterations near the reference that make the traffic steady."""


@dataclass
class Watch:
    """Waits for steady traffic. An iteration belongs to it when it *ends* after `released_ns`.

    An iteration is near the reference when it is not slower than it by more than `within_pct`: a
    path that became faster is steady too. `steady_ns` is the end of the first of three near ones.
    """

    released_ns: int
    reference_ns: int
    within_pct: float
    longest_ns: int = 0
    first_good_ns: int = 0
    steady_ns: int = 0
    near: int = 0
    _candidate_ns: int = 0

    def observe(self, begin_ns: int, end_ns: int) -> bool:
        """Take in an iteration; true once the traffic was found steady."""
        took_ns = end_ns - begin_ns
        self.longest_ns = max(self.longest_ns, took_ns)
        self.first_good_ns = self.first_good_ns or end_ns
        if took_ns > self.reference_ns * (1 + self.within_pct / 100):
            self.near = 0
            return False
        self.near += 1
        if self.near == 1:
            self._candidate_ns = end_ns
        if self.near >= STEADY_RUN and not self.steady_ns:
            self.steady_ns = self._candidate_ns
        return self.steady_ns != 0


class Gate:
    """Leave to enter iterations of one traffic; `entered` and `finished` count from its start."""

    def __init__(self) -> None:
        self.running = True
        self.entered = 0
        self.finished = 0
        self.last_good_ns = 0
        self.spans: deque[tuple[int, int]] = deque(maxlen=KEPT_ITERATIONS)
        self.inside_since_ns = 0
        self._limit: int | None = None
        self._longest_held_ns = 0

    def may_enter(self) -> bool:
        """Whether the next iteration may begin."""
        return self.running and (self._limit is None or self.entered < self._limit)

    @property
    def standing(self) -> bool:
        """Whether no iteration is in flight and none may begin."""
        return self.entered == self.finished and not self.may_enter()

    def enter(self, now_ns: int) -> None:
        """Begin an iteration; the caller has asked `may_enter` under the same lock."""
        self.entered += 1
        self.inside_since_ns = now_ns

    def leave(self, now_ns: int) -> None:
        """End the iteration in flight."""
        if self._limit is not None:
            self._longest_held_ns = max(self._longest_held_ns, now_ns - self.inside_since_ns)
        self.spans.append((self.inside_since_ns, now_ns))
        self.last_good_ns = now_ns
        self.inside_since_ns = 0
        self.finished += 1

    def hold(self) -> int:
        """Let nothing further begin; return `entered`. Holding twice changes nothing."""
        if self._limit is None:
            self._limit = self.entered
            self._longest_held_ns = 0
        return self.entered

    def stop_at(self, iteration: int) -> bool:
        """Stand still after `iteration`; false when the rank is beyond it."""
        if self.entered > iteration:
            return False
        self.hold()
        self._limit = iteration
        return True

    def resume(self, now_ns: int, reference_ns: int, within_pct: float) -> Watch:
        """Lift the limit and watch from now on."""
        longest_ns = self._longest_held_ns if self._limit is not None else 0
        self._limit = None
        return Watch(now_ns, reference_ns, within_pct, longest_ns=longest_ns)

    def end(self) -> None:
        """End the traffic: nothing further begins."""
        self.running = False
        self.inside_since_ns = 0
