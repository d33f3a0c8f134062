"""A step's traffic as it was announced, the course set for it, and how far it has come."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from harness.fabric.circuits import Plan
from harness.fabric.course import Course
from harness.fabric.demand import Comm
from harness.run.fabric.traffic import Part


class Ahead(NamedTuple):
    """Traffic that was announced, and the course set for it; `at`: which of it comes next.

    `due_ns`: when that is expected to begin, or has begun; None: not known.
    """

    parts: tuple[Part, ...]
    course: Course
    at: int = 0
    due_ns: int | None = None

    @property
    def comms(self) -> tuple[Comm, ...]:
        """All communications, in order."""
        return tuple(comm for part in self.parts for comm in part.comms)

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
