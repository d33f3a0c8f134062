"""Where the time of a switch went: spans of work in, a table of stages out. Pure.

Spans are ns on the coordinator's clock. Every nanosecond between the intent and steady belongs to
one stage, or to the residual: messages on their way, and waiting for nobody's work. Where several
stages are under way at once (nodes are not equally fast) the moment belongs to the earliest of
them, for it is the one that the others wait for. So the table always sums to the wall time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from harness.clock import NS_PER_MS, NS_PER_S
from harness.model.streams import SWITCH_STAGES
from harness.wire.generation import Span

_PLACE = {stage: place for place, stage in enumerate(SWITCH_STAGES)}


@dataclass(frozen=True)
class Table:
    """The stages of one switch, ms, null where there was no such work; they sum to the total."""

    stages: dict[str, float | None]
    residual_ms: float
    total_ms: float


def table(spans: Iterable[Span], begin_ns: int, end_ns: int) -> Table:
    """Deal the time from `begin_ns` to `end_ns` out to the stages.

    What lies outside is cut off: stamps from nodes are mapped, and may be early by the bound.
    """
    named = [span for span in spans if span.stage in _PLACE]
    sums = dict.fromkeys((span.stage for span in named), 0)
    cut = [(max(s.begin_ns, begin_ns), min(s.end_ns, end_ns), _PLACE[s.stage]) for s in named]
    cut = [(begin, end, place) for begin, end, place in cut if begin < end]
    edges = sorted({edge for begin, end, _ in cut for edge in (begin, end)})
    for left, right in pairwise(edges):
        under_way = [place for begin, end, place in cut if begin <= left and right <= end]
        if under_way:
            sums[SWITCH_STAGES[min(under_way)]] += right - left
    total_ns = max(0, end_ns - begin_ns)
    return Table(
        stages={name: sums[name] / NS_PER_MS if name in sums else None for name in SWITCH_STAGES},
        residual_ms=(total_ns - sum(sums.values())) / NS_PER_MS,
        total_ms=total_ns / NS_PER_MS,
    )


@dataclass(frozen=True)
class Silence:
    """Instances that gave way to others: their last token, and the others' first; 0: none."""

    last_ns: int
    first_ns: int


def blackout_ms(silences: Iterable[Silence]) -> float | None:
    """Return the longest silence; null where none had a token both before and after."""
    known = [s.first_ns - s.last_ns for s in silences if s.last_ns and s.first_ns]
    return max(0, *known) / NS_PER_MS if known else None


NOTES_KEPT = 20_000
"""Twenty a second: more than any switch, and the time around it, takes."""


class Pace:
    """A count of tokens that only grows, noted now and then; its speed over any late window."""

    def __init__(self) -> None:
        self._notes: list[tuple[int, int]] = []

    def note(self, t_ns: int, tokens: int) -> None:
        """Note the count at a time that is not before the last one's."""
        if self._notes and self._notes[-1][0] == t_ns:
            self._notes.pop()
        self._notes.append((t_ns, tokens))
        if len(self._notes) >= 2 * NOTES_KEPT:
            del self._notes[:NOTES_KEPT]

    def per_s(self, begin_ns: int, end_ns: int) -> float | None:
        """Return tokens/s between two times, as far as they lie among the notes; null outside."""
        if not self._notes:
            return None
        begin_ns = max(begin_ns, self._notes[0][0])
        end_ns = min(end_ns, self._notes[-1][0])
        if begin_ns >= end_ns:
            return None
        return (self._at(end_ns) - self._at(begin_ns)) / ((end_ns - begin_ns) / NS_PER_S)

    def _at(self, t_ns: int) -> float:
        """Interpolate the count at a time among the notes."""
        place = bisect_left(self._notes, (t_ns,))
        (t, tokens) = self._notes[place]
        if t == t_ns:
            return tokens
        before_ns, before = self._notes[place - 1]
        return before + (tokens - before) * (t_ns - before_ns) / (t - before_ns)
