"""Flows that were put on the network together, and how they fare until something is changed.

Times within are floats of ns since the island began, so that a long run stays exact. Flows of one
class (`harness.rlsim.classes`) are reckoned as one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.model.advance import FOREVER_NS
from harness.rlsim.batch import Batch
from harness.rlsim.classes import classes, untied
from harness.rlsim.kernels import (
    SAME,
    SAME_NS,
    Bools,
    Course,
    Floats,
    Indices,
    Web,
    advance,
    parts,
    settle,
)
from harness.rlsim.paths import Ints, Paths


def started(
    paths: Paths, sizes_bytes: Floats, capacity: Floats, *, lump: bool = True
) -> tuple[Web, Course, Ints]:
    """Return how flows fare that begin now, and the class of each. Capacities in bytes per ns.

    Links are those of `paths`, from 0 on. `lump`: reckon flows that fare alike as one.
    """
    found = classes(paths, sizes_bytes, capacity) if lump else None
    if found:
        web, class_of, flows, links = found
        sizes_bytes, capacity = sizes_bytes[flows], capacity[links]
    else:
        web, class_of = untied(paths, len(capacity)), np.arange(len(paths))
    course = Course.of(sizes_bytes, capacity)
    settle(web, course, np.arange(len(capacity), dtype=np.int32), 0.0, 0.0)
    return web, course, class_of


def numbered(paths: Paths, links: int) -> tuple[Paths, Ints]:
    """Return paths over only those links that they name, numbered anew, and which these are."""
    named = np.zeros(links, np.bool_)
    named[paths.links] = True
    used = np.flatnonzero(named)
    place = np.empty(links, np.int64)
    place[used] = np.arange(len(used))
    return Paths(paths.starts, place[paths.links]), used


class Island:
    """See the module. Capacities in bytes per ns, of all links."""

    def __init__(self, began_ns: int, batch: Batch, capacity: Floats) -> None:
        """Begin with flows in the order of their ids."""
        self._began_ns, self._batch = began_ns, batch
        self._local, self.links = numbered(batch.paths, len(capacity))
        self._web, self._course, self._class_of = started(
            self._local, batch.left_bytes, capacity[self.links]
        )
        self._counted_bytes = batch.left_bytes
        """What was left of each flow when links were last told what they carried."""
        self._here = np.ones(len(batch.ids), np.bool_)
        """Flows that have neither ended nor left."""
        self._left = np.zeros(len(batch.ids), np.bool_)
        self.next_ns = FOREVER_NS
        """When the last byte of a flow is sent next."""
        self._end(-np.inf)

    def __bool__(self) -> bool:
        """Tell whether a flow is left."""
        return bool(self._here.any())

    def advance(self, now_ns: int) -> tuple[Ints, Ints]:
        """Go on; return the flows that were sent by now, and when their last bytes arrive."""
        ends = np.zeros(self._course.alive.size, np.bool_)
        ends[self._end(float(now_ns - self._began_ns))] = True
        flows = np.flatnonzero(ends[self._class_of] & self._here)
        self._here[flows] = False
        sent_ns = self._began_ns + _whole(self._course.end_ns[self._class_of[flows]])
        return self._batch.ids[flows], sent_ns + self._batch.latency_ns[flows]

    def left_bytes(self, now_ns: int) -> Floats:
        """Return what is left of each flow, also of one that left, as if it had stayed."""
        course = self._course
        sent = course.rate * (float(now_ns - self._began_ns) - course.since_ns)
        left = np.where(course.alive, np.maximum(course.left_bytes - sent, 0.0), 0.0)
        return left[self._class_of]

    def look(self, now_ns: int, flows: Ints) -> tuple[Floats, Paths]:
        """Return what is left of each of these flows of the batch, and their paths."""
        places = np.searchsorted(self._batch.ids, flows)
        one, course = self._class_of[places], self._course
        sent = course.rate[one] * (float(now_ns - self._began_ns) - course.since_ns[one])
        left = np.where(self._here[places], np.maximum(course.left_bytes[one] - sent, 0.0), 0.0)
        return left, self._batch.paths.take(places)

    def crossing(self, link: int) -> list[int]:
        """Return the flows on a link, by their ids."""
        paths = self._batch.paths
        over = np.repeat(np.arange(len(paths)), paths.lengths)[paths.links == link]
        found: list[int] = self._batch.ids[np.unique(over[self._here[over]])].tolist()
        return found

    def count(self, now_ns: int, carried_bytes: Floats) -> None:
        """Add to each link what it carried since they were last told."""
        left = self.left_bytes(now_ns)
        sent = np.where(self._left, 0.0, self._counted_bytes - left)
        sent_over = np.repeat(sent, self._local.lengths)
        carried_bytes[self.links] += np.bincount(self._local.links, sent_over, len(self.links))
        self._counted_bytes = left

    def leave(self, now_ns: int, touched: Bools, carried_bytes: Floats) -> Batch:
        """Let go all flows that hang together with the links `touched`; links are told first."""
        self.count(now_ns, carried_bytes)
        starts, links = self._local.starts, self._local.links
        part = parts(starts, links, self._here, len(self.links))
        reached = np.zeros(len(self.links), np.bool_)
        reached[part[touched[self.links]]] = True
        going = np.flatnonzero(reached[part[links[starts[:-1]]]] & self._here)
        self._here[going], self._left[going] = False, True
        stay = np.bincount(self._class_of[self._here], minlength=self._course.alive.size) > 0
        np.logical_and(self._course.alive, stay, out=self._course.alive)
        self._end(-np.inf)
        return self._batch._replace(left_bytes=self._counted_bytes).take(going)

    def _end(self, until_ns: float) -> Indices:
        """Let classes end; look when the next one does."""
        ended, end_ns = advance(self._web, self._course, until_ns)
        later = end_ns < FOREVER_NS
        self.next_ns = self._began_ns + int(_whole(end_ns)) if later else FOREVER_NS
        return ended


def _whole(moments_ns: Any) -> Any:
    """Return the first whole ns that is no earlier, or the same moment (`slack_ns`)."""
    slack = np.maximum(SAME_NS, moments_ns * SAME)
    return np.ceil(moments_ns - slack).astype(np.int64)
