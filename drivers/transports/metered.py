"""Meters how long a caller is blocked on a line: that time is the device's, all other is ours."""

from __future__ import annotations

import time

from drivers.base import Transport


class Meter:
    """A sum of waits, in ns; it outlives the lines that it meters."""

    def __init__(self) -> None:
        self.waited_ns = 0


class Metered:
    """A transport that adds the time spent in `send` and `receive` of `inner` to `meter`."""

    def __init__(self, inner: Transport, meter: Meter) -> None:
        self.name = inner.name
        self._inner, self._meter = inner, meter

    def send(self, data: bytes, deadline_ns: int) -> None:
        """Send; a slow serial line takes its time here."""
        started_ns = time.monotonic_ns()
        try:
            self._inner.send(data, deadline_ns)
        finally:
            self._meter.waited_ns += time.monotonic_ns() - started_ns

    def receive(self, deadline_ns: int) -> bytes:
        """Receive; the unit takes its time here."""
        started_ns = time.monotonic_ns()
        try:
            return self._inner.receive(deadline_ns)
        finally:
            self._meter.waited_ns += time.monotonic_ns() - started_ns

    def close(self) -> None:
        """Close the line."""
        self._inner.close()
