"""The one place where time is read and waited for.

Everything else is handed a `Clock`. Inside the house time is integer nanoseconds of the monotonic
clock; wall time is only ever a label.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Protocol

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
NS_PER_US = 1_000


class Clock(Protocol):
    """Time as an argument."""

    def now_ns(self) -> int:
        """Return monotonic nanoseconds."""

    def wall(self) -> datetime:
        """Return the wall time, a label only."""

    async def sleep_ns(self, duration_ns: int) -> None:
        """Wait."""


class RealClock:
    """CLOCK_MONOTONIC: slewed by NTP, never stepped, one line for all processes of a machine."""

    def now_ns(self) -> int:
        """Return ``time.monotonic_ns()``."""
        return time.monotonic_ns()

    def wall(self) -> datetime:
        """Return now, in UTC."""
        return datetime.now(UTC)

    async def sleep_ns(self, duration_ns: int) -> None:
        """Sleep on the running event loop."""
        await asyncio.sleep(max(0, duration_ns) / NS_PER_S)
