"""The inner loops of the fluid network, compiled by numba. Without it the same lines run as Python.

*Classes* of flows cross *links*; a class is one flow, or many that fare alike. Each flow gets its
max-min fair rate by progressive filling: all rates grow as one; where a link is full, those that
cross it stay as they are, and the others grow on. A heap gives the link that is full next. What a
link has for each never falls while others fill up, so a key of the heap is at worst too small,
which is seen when it comes to the top. Imports numba: import this late. Bytes, ns, bytes per ns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

try:
    from numba import njit
except ImportError:
    njit = None

F = TypeVar("F", bound=Callable[..., Any])

Floats = NDArray[np.float64]
Indices = NDArray[np.int32]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

SAME, SAME_NS = 1e-12, 1e-6
"""Moments nearer than this part of their distance from the start, or this, are one moment."""


def compiled(function: F) -> F:
    """Compile a function, and keep what was compiled for the next process."""
    return function if njit is None else njit(cache=True)(function)


class Web(NamedTuple):
    """Who crosses what, from both sides. Class c: `links[class_starts[c]:class_starts[c + 1]]`."""

    class_starts: Indices
    links: Indices
    counts: Floats
    """Beside `links`: how many flows of the class are on this link."""
    link_starts: Indices
    classes: Indices
    flows: Floats
    """Beside `classes`: how many flows of it are on this link."""


class Course(NamedTuple):
    """How classes fare: each flow of one has `left_bytes` at `since_ns`, and goes on at `rate`."""

    capacity: Floats
    """Per link. All else is per class."""
    left_bytes: Floats
    rate: Floats
    since_ns: Floats
    end_ns: Floats
    """When it ends at this rate, infinity for never; or when it has ended."""
    alive: Bools

    @classmethod
    def of(cls, sizes_bytes: Floats, capacity: Floats) -> Course:
        """Return classes that begin at 0, without rates yet."""
        many = len(sizes_bytes)
        return cls(
            capacity=np.array(capacity),
            left_bytes=np.array(sizes_bytes),
            rate=np.zeros(many),
            since_ns=np.zeros(many),
            end_ns=np.full(many, np.inf),
            alive=np.ones(many, np.bool_),
        )


class _Region(NamedTuple):
    """What is reckoned anew."""

    links: Indices
    classes: Indices
    open_: Bools
    """Per class of the web: is it one of them, and does its rate still grow?"""
    room: Floats
    """Per link of the web: what it has left for those that still grow."""
    flows: Floats
    """Per link of the web: how many those are."""


@compiled
def slack_ns(moment_ns: float) -> float:
    """Return within what a moment is the same as another one."""
    return max(SAME_NS, moment_ns * SAME)


@compiled
def crossed(starts: Ints, links: Ints, count: int) -> tuple[Indices, Indices]:
    """Turn paths round: return per link where those that cross it begin, and who they are."""
    link_starts, flows = np.zeros(count + 1, np.int32), np.empty(links.size, np.int32)
    for link in links:
        link_starts[link + 1] += 1
    for link in range(count):
        link_starts[link + 1] += link_starts[link]
    free = link_starts.copy()
    for flow in range(starts.size - 1):
        for entry in range(starts[flow], starts[flow + 1]):
            flows[free[links[entry]]] = flow
            free[links[entry]] += 1
    return link_starts, flows


@compiled
def parts(starts: Ints, links: Ints, here: Bools, count: int) -> Ints:
    """Return for each link the one that stands for all that flows which are `here` join with it."""
    stands = np.arange(count)
    for flow in range(here.size):
        if here[flow]:
            one = _standing(stands, links[starts[flow]])
            for entry in range(starts[flow] + 1, starts[flow + 1]):
                other = _standing(stands, links[entry])
                stands[max(one, other)] = min(one, other)
                one = min(one, other)
    for link in range(count):
        stands[link] = _standing(stands, link)
    return stands


@compiled
def _standing(stands: Ints, link: int) -> int:
    while stands[link] != link:
        stands[link] = stands[stands[link]]  # halves the way for whoever asks next
        link = stands[link]
    return link


@compiled
def advance(web: Web, course: Course, until_ns: float) -> tuple[Indices, float]:
    """Let time pass and classes end; return those that did, and when the next one does."""
    ended = np.empty(course.alive.size, np.int32)
    count = 0
    while True:
        first_ns = np.inf
        for one in range(course.alive.size):
            if course.alive[one] and course.end_ns[one] < first_ns:
                first_ns = course.end_ns[one]
        if first_ns == np.inf or first_ns - slack_ns(first_ns) > until_ns:
            return ended[:count], first_ns
        before, level = count, np.inf
        for one in range(course.alive.size):
            if course.alive[one] and course.end_ns[one] <= first_ns + slack_ns(first_ns):
                course.alive[one] = False
                course.left_bytes[one] = 0.0
                level = min(level, course.rate[one])
                ended[count] = one
                count += 1
        settle(web, course, _links_of(web, ended[before:count]), level, first_ns)


@compiled
def settle(web: Web, course: Course, links: Indices, level: float, now_ns: float) -> None:
    """Give new rates to all that share, by however many steps, with those on these links.

    Rates below `level` stand. When flows go that had `level` and more, they must: up to there, all
    links fill up as they did, for the links that the gone were on were not full yet.
    """
    region = _reach(web, course, links, level)
    rate = _fill(web, region, level)
    for one in region.classes:
        if rate[one] != course.rate[one]:
            sent_bytes = course.rate[one] * (now_ns - course.since_ns[one])
            course.left_bytes[one] = max(0.0, course.left_bytes[one] - sent_bytes)
            course.since_ns[one] = now_ns
            course.rate[one] = rate[one]
            course.end_ns[one] = np.inf
            if rate[one] > 0:
                course.end_ns[one] = now_ns + course.left_bytes[one] / rate[one]


@compiled
def _links_of(web: Web, classes: Indices) -> Indices:
    size = 0
    for one in classes:
        size += web.class_starts[one + 1] - web.class_starts[one]
    links = np.empty(size, np.int32)
    size = 0
    for one in classes:
        for at in range(web.class_starts[one], web.class_starts[one + 1]):
            links[size] = web.links[at]
            size += 1
    return links


@compiled
def _reach(web: Web, course: Course, seeds: Indices, level: float) -> _Region:
    """Return all that hangs together with the links `seeds` over classes from `level` up."""
    link_seen, class_seen = np.zeros(course.capacity.size, np.bool_), np.zeros_like(course.alive)
    links, classes = np.empty(link_seen.size, np.int32), np.empty(class_seen.size, np.int32)
    room, flows = np.empty(link_seen.size), np.zeros(link_seen.size)
    links_size, classes_size, at = 0, 0, 0
    for link in seeds:
        if not link_seen[link]:
            link_seen[link] = True
            links[links_size] = link
            links_size += 1
    while at < links_size:
        link = links[at]
        at += 1
        room[link] = course.capacity[link]
        for entry in range(web.link_starts[link], web.link_starts[link + 1]):
            one = web.classes[entry]
            if not course.alive[one]:
                continue
            if course.rate[one] < level:
                room[link] -= course.rate[one] * web.flows[entry]
                continue
            flows[link] += web.flows[entry]
            if class_seen[one]:
                continue
            class_seen[one] = True
            classes[classes_size] = one
            classes_size += 1
            for other in range(web.class_starts[one], web.class_starts[one + 1]):
                if not link_seen[web.links[other]]:
                    link_seen[web.links[other]] = True
                    links[links_size] = web.links[other]
                    links_size += 1
    return _Region(links[:links_size], classes[:classes_size], class_seen, room, flows)


@compiled
def _fill(web: Web, region: _Region, level: float) -> Floats:
    """Fill a region up from `level` on; return the rate of each class in it. Uses it up."""
    links, open_, room, flows = region.links, region.open_, region.room, region.flows
    rate = np.zeros(open_.size)
    shares, heap, size = np.empty(links.size), np.empty(links.size, np.int32), 0
    for link in links:
        if flows[link] > 0:
            shares[size], heap[size] = room[link] / flows[link], link
            size += 1
    for at in range(size // 2 - 1, -1, -1):
        _sift(shares, heap, size, at)
    while size > 0:
        link = heap[0]
        if flows[link] > 0:
            share = max(level, room[link] / flows[link])  # below only by rounding
            if share > shares[0]:
                shares[0] = share
                _sift(shares, heap, size, 0)
                continue
            level = share
            for entry in range(web.link_starts[link], web.link_starts[link + 1]):
                one = web.classes[entry]
                if open_[one]:
                    open_[one] = False
                    rate[one] = share
                    for at in range(web.class_starts[one], web.class_starts[one + 1]):
                        room[web.links[at]] -= share * web.counts[at]
                        flows[web.links[at]] -= web.counts[at]
        size -= 1
        shares[0], heap[0] = shares[size], heap[size]
        _sift(shares, heap, size, 0)
    return rate


@compiled
def _sift(keys: Floats, items: Indices, size: int, at: int) -> None:
    """Let an entry of a heap sink to its place."""
    key, item = keys[at], items[at]
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and keys[child + 1] < keys[child]:
            child += 1
        if keys[child] >= key:
            break
        keys[at], items[at] = keys[child], items[child]
        at = child
    keys[at], items[at] = key, item
