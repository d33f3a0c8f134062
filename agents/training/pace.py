"""Computing that is not done, but takes its time."""

from __future__ import annotations

import time
from collections.abc import Callable

from agents.generation.pace import sleep_until_ns
from harness.clock import NS_PER_S

_STALL_NS = NS_PER_S


class Pace:
    """Computing in real time: each piece ends when it should, and what was late is caught up.

    Time is an argument, so that this is as exact on a virtual clock. What was over a second late is
    not caught up: a device that was stopped does not compute faster afterwards.
    """

    def __init__(
        self,
        now_ns: Callable[[], int] = time.monotonic_ns,
        sleep_until_ns: Callable[[int], None] = sleep_until_ns,
    ) -> None:
        self._now_ns, self._sleep_until_ns = now_ns, sleep_until_ns
        self.late_ns = 0
        self.computed_ns = 0

    def compute(self, duration_ns: int, work: Callable[[], None] | None = None) -> None:
        """Take `duration_ns` from now on, less what is late; `work`, if any, is done meanwhile."""
        begin_ns = self._now_ns()
        due_ns = begin_ns + duration_ns - self.late_ns
        if work:
            work()
        self._sleep_until_ns(due_ns)
        end_ns = self._now_ns()
        self.late_ns = end_ns - due_ns if end_ns - due_ns < _STALL_NS else 0
        self.computed_ns += end_ns - begin_ns
