"""The pulsed shutter: ports that close and open by themselves, a set number of times.

Pure: it tells which ports close and open at which instant, and acts on nothing. Times are
monotonic ns inside, milliseconds as the unit takes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from drivers.base import NS_PER_MS


class Pattern(NamedTuple):
    """Closed for `off_ms`, then open for `on_ms`, `cycles` times; then open for good."""

    off_ms: int = 10
    on_ms: int = 500
    cycles: int = 1


class Edge(NamedTuple):
    """What happens at one instant."""

    at_ns: int
    close: set[int]
    open: set[int]


class _Next(NamedTuple):
    at_ns: int
    closes: bool
    left: int
    """Cycles that end after this edge."""
    pattern: Pattern


class Flaps:
    """The patterns of all ports, and those that run. A port without one has the factory's."""

    def __init__(self) -> None:
        self._patterns: dict[int, Pattern] = {}
        self._next: dict[int, _Next] = {}

    def pattern(self, port: int) -> Pattern:
        """Return the pattern that the next start of this port runs."""
        return self._patterns.get(port, Pattern())

    def set_pattern(self, ports: Iterable[int], pattern: Pattern) -> None:
        """Give ports a pattern; one that runs goes on as it was started."""
        self._patterns.update(dict.fromkeys(ports, pattern))

    def start(self, ports: Iterable[int], now_ns: int) -> None:
        """Run the patterns of these ports, from their start."""
        for port in ports:
            pattern = self.pattern(port)
            self._next[port] = _Next(now_ns, True, pattern.cycles, pattern)

    def stop(self, ports: Iterable[int]) -> None:
        """Run no pattern on these ports any more."""
        for port in ports:
            self._next.pop(port, None)

    @property
    def due_ns(self) -> int | None:
        """When the next edge is; None where nothing runs."""
        return min((edge.at_ns for edge in self._next.values()), default=None)

    def edge(self) -> Edge:
        """Take the next edge, of all ports that have one at that instant."""
        at_ns = min(edge.at_ns for edge in self._next.values())
        taken = Edge(at_ns, set(), set())
        for port, (due_ns, closes, left, pattern) in list(self._next.items()):
            if due_ns != at_ns:
                continue
            (taken.close if closes else taken.open).add(port)
            if closes:
                opens_ns = at_ns + pattern.off_ms * NS_PER_MS
                self._next[port] = _Next(opens_ns, False, left - 1, pattern)
            elif left:
                closes_ns = at_ns + pattern.on_ms * NS_PER_MS
                self._next[port] = _Next(closes_ns, True, left, pattern)
            else:
                del self._next[port]
        return taken
