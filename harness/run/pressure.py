"""Which share of a stretch of time some task waited for a CPU. Pure: time and totals are handed in.

On an emulated bench this says how far times are the machine's own and not the bench's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from harness.clock import NS_PER_S, NS_PER_US


def untold() -> int | None:
    """Tell nothing: nothing waits for a CPU here, or nobody knows."""
    return None


@dataclass
class Pressure:
    """One stretch after the other; `waited_us` tells the total so far, None where nobody knows."""

    waited_us: Callable[[], int | None] = untold
    begin_ns: int = 0
    before_us: int | None = None

    def begin(self, now_ns: int) -> None:
        """Begin a stretch; one that was under way is forgotten."""
        self.begin_ns, self.before_us = now_ns, self.waited_us()

    def row(self, now_ns: int, step: int, policy: str) -> dict[str, object] | None:
        """Return the stretch so far as a row of the journal; None where nothing is known of it."""
        after_us, took_ns = self.waited_us(), now_ns - self.begin_ns
        if self.before_us is None or after_us is None or took_ns <= 0:
            return None
        waited_ns = (after_us - self.before_us) * NS_PER_US
        return {
            "step": step,
            "policy": policy,
            "duration_s": took_ns / NS_PER_S,
            # The kernel's clock and ours are read one after the other.
            "cpu_waited_pct": min(100.0, 100 * waited_ns / took_ns),
        }
