"""Max-min fairness and its course over time in whole fractions: slow, short, and without rounding.

Written from the definition alone, so that it shares no line with what it is the measure of.
Capacities in bytes per ns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction

Path = Sequence[int]


def fair(paths: Mapping[int, Path], capacity: Sequence[Fraction]) -> dict[int, Fraction]:
    """Fill all up alike; where a link is full, its flows have what they get."""
    rate: dict[int, Fraction] = {}
    times = {flow: Counter(path) for flow, path in paths.items()}
    while open_ := [flow for flow in paths if flow not in rate]:
        share = {
            link: (capacity[link] - sum(rate[flow] * times[flow][link] for flow in rate)) / many
            for link in range(len(capacity))
            if (many := sum(times[flow][link] for flow in open_))
        }
        least = min(share.values())
        for flow in open_:
            if any(share[link] == least for link in paths[flow]):
                rate[flow] = least
    return rate


class Exact:
    """Flows as they go on: what is left of each, and when those that have ended did."""

    def __init__(self, capacity: Sequence[int]) -> None:
        self.capacity = [Fraction(value) for value in capacity]
        self.now = Fraction(0)
        self.paths: dict[int, Path] = {}
        self.left: dict[int, Fraction] = {}
        self.ended: dict[int, Fraction] = {}
        self.carried = [Fraction(0)] * len(capacity)

    def add(self, flow: int, path: Path, size: int) -> None:
        self.paths[flow], self.left[flow] = path, Fraction(size)

    def advance(self, to: int | None) -> None:
        """Go on to this moment, or to the end."""
        while True:
            rate = fair(self.paths, self.capacity)
            lasts = [self.left[flow] / rate[flow] for flow in self.paths if rate[flow]]
            if to is None and not lasts:
                return
            step = min([*lasts, *([] if to is None else [to - self.now])])
            for flow in tuple(self.paths):
                self._send(flow, rate[flow] * step, self.now + step)
            self.now += step
            if self.now == to:
                return

    def _send(self, flow: int, sent: Fraction, now: Fraction) -> None:
        self.left[flow] -= sent
        for link in self.paths[flow]:
            self.carried[link] += sent
        if not self.left[flow]:
            self.ended[flow] = now
            del self.paths[flow]
