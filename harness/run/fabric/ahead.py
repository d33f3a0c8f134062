"""A step's traffic as it was announced, the course set for it, and how far it has come."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from harness.clock import NS_PER_S
from harness.fabric.course import Course
from harness.fabric.demand import Comm
from harness.fabric.links import Plan
from harness.run.fabric.traffic import Part

UNKNOWN_NS = 10 * NS_PER_S
"""Of a window that nobody knows: longer than any change, for nobody waits for one in it."""


class Ahead(NamedTuple):
    """Traffic that was announced, and the course set for it; `at`: which of it comes next.

    `due_ns`: when that is expected to begin, or has begun; None: not known. Gaps of its
    communications hold the windows between parts.
    """

    parts: tuple[Part, ...]
    course: Course
    at: int = 0
    due_ns: int | None = None

    @property
    def comms(self) -> tuple[Comm, ...]:
        """All communications, in order."""
        return tuple(comm for part in self.parts for comm in part.comms)

    def left(self, now_ns: int) -> tuple[Comm, ...]:
        """Return what comes next and all after it; of the first gap, what is left of it."""
        first, *others = self.comms[self.at :]
        left_ns = UNKNOWN_NS if self.due_ns is None else max(0, self.due_ns - now_ns)
        return (first._replace(gap_ns=float(left_ns)), *others)

    @property
    def kind(self) -> str:
        """Of what comes next."""
        ends = accumulate(len(part.comms) for part in self.parts)
        return next(p.kind for p, end in zip(self.parts, ends, strict=True) if self.at < end)

    def place_of(self, kind: str, number: int) -> int | None:
        """Return where a communication is, by kind and number there; None: not announced."""
        first = 0
        for part in self.parts:
            if part.kind == kind:
                return first + number if number < len(part.comms) else None
            first += len(part.comms)
        return None

    @property
    def segment(self) -> int:
        """Index of the course's segment that `at` is in."""
        return max(i for i, each in enumerate(self.course.segments) if each.first <= self.at)

    @property
    def plan(self) -> Plan:
        """The circuits that are to carry what comes next."""
        return self.course.segments[self.segment].plan

    @property
    def rest(self) -> tuple[Comm, ...]:
        """What these circuits are to carry, from `at` on."""
        ends = [each.first for each in self.course.segments[self.segment + 1 :]]
        return self.comms[self.at : ends[0] if ends else None]
