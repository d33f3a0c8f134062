"""Flows over a network that changes while they go on, from event to event.

Links are indices; those that a flow takes are its path. Rates are max-min fair at every moment.
What happens to a link or a flow is reckoned anew only for flows that hang together with it. Times
are whole ns: a flow ends at the first of them at which all its bytes are there. Its latency, which
is propagation and what a message costs besides, comes *after* its last byte is sent: a link is busy
from the start on, and a flow's end is late by it; nothing is shared otherwise for it.
Deterministic. What can't be asked for raises `ValueError`; a flow that is none, `KeyError`.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np
from numpy.typing import ArrayLike

from harness.clock import NS_PER_S
from harness.model.advance import FOREVER_NS
from harness.rlsim.batch import Batch
from harness.rlsim.fluid import checked, checked_sizes
from harness.rlsim.island import Island
from harness.rlsim.kernels import Floats
from harness.rlsim.paths import Ints, Paths

NOWHERE = -1
"""Instead of an island: flows that are to be put on one, or have been sent."""


class Flows:
    """See the module. A link of capacity 0 is dark: flows on it pause, and go on when it is lit.

    What is changed at one moment is reckoned once, when time goes on or is asked for: make all
    changes first, then ask `next_ns`. Time never goes back.
    """

    def __init__(self, capacities_bytes_per_s: ArrayLike) -> None:
        _, capacity = checked((), capacities_bytes_per_s)
        self._capacity = capacity / NS_PER_S
        self._carried_bytes = np.zeros(len(capacity))
        self._now_ns = 0
        self._flows_ever = self._islands_ever = 0
        self._islands: dict[int, Island] = {}
        self._island_of_link = np.full(len(capacity), NOWHERE)
        self._island_of: dict[int, int] = {}
        """Of each flow that has not been told to have ended."""
        self._ended: list[tuple[int, list[int]]] = []
        """When last bytes arrive, and of whom: a heap."""
        self._coming: list[Batch] = []
        self._rerouted: dict[int, Sequence[int]] = {}
        self._removed: set[int] = set()
        self._touched = np.zeros(len(capacity), np.bool_)
        """Links whose flows or capacity have been changed now."""

    def add(
        self,
        now_ns: int,
        paths: Paths | Sequence[Sequence[int]],
        sizes_bytes: ArrayLike,
        latency_ns: ArrayLike = 0,
    ) -> list[int]:
        """Let flows begin; return their ids, which rise. One size and latency each, or one for all.

        A flow of nothing, or over no link, takes its latency.
        """
        paths = Paths.of(paths).checked(len(self._capacity))
        sizes = checked_sizes(sizes_bytes, len(paths))
        latency = np.array(np.broadcast_to(np.asarray(latency_ns, np.int64), len(paths)))
        if (latency < 0).any():
            raise ValueError("a latency is 0 ns or more")
        self._reach(now_ns)
        ids = np.arange(self._flows_ever, self._flows_ever + len(paths))
        self._flows_ever += len(paths)
        numbers: list[int] = ids.tolist()
        self._island_of.update(dict.fromkeys(numbers, NOWHERE))
        batch, going = Batch(ids, paths, sizes, latency), (sizes > 0) & (paths.lengths > 0)
        if not going.all():
            self._end(ids[~going], now_ns + latency[~going])
            batch = batch.take(np.flatnonzero(going))
        if len(batch.ids):
            self._coming.append(batch)
            self._touched[batch.paths.links] = True
        return numbers

    def next_ns(self) -> int:
        """Return when to ask again: no flow ends before; `FOREVER_NS` where none ever does.

        Either a flow ends then, or the last byte of one is sent; or some have ended and were not
        told yet, and it is the present moment.
        """
        self._rebuild()
        due_ns = min((one.next_ns for one in self._islands.values()), default=FOREVER_NS)
        told_ns = self._ended[0][0] if self._ended else FOREVER_NS
        return max(self._now_ns, min(due_ns, told_ns))

    def advance(self, to_ns: int) -> list[int]:
        """Let time pass; return the flows that have ended by then and were not yet told, in order.

        Of those that end at one moment the oldest is first.
        """
        self._rebuild()
        self._reach(to_ns)
        due = []
        while self._ended and self._ended[0][0] <= to_ns:
            due.append(heapq.heappop(self._ended))
        told: list[int] = []
        for _, same in groupby(due, key=itemgetter(0)):
            flows = sorted(flow for _, flows in same for flow in flows)
            told += [flow for flow in flows if self._island_of.pop(flow, None) is not None]
        return told

    def set_capacity(self, now_ns: int, link: int, capacity_bytes_per_s: float) -> None:
        """Make a link wider or narrower; 0: dark."""
        Paths.of([[link]]).checked(len(self._capacity))
        checked((), [capacity_bytes_per_s])
        self._reach(now_ns)
        capacity = capacity_bytes_per_s / NS_PER_S
        if self._capacity[link] != capacity:
            self._capacity[link] = capacity
            self._touched[link] = True

    def reroute(self, now_ns: int, wanted: Mapping[int, Sequence[int]]) -> None:
        """Let what is left of flows take other links. One that has been sent does not care."""
        paths = Paths.of([*wanted.values()]).checked(len(self._capacity))
        if not paths.lengths.all():
            raise ValueError("what is left of a flow needs links to take")
        left_bytes = self._lift(now_ns, [*wanted])
        self._touched[paths.take(np.flatnonzero(left_bytes > 0)).links] = True
        going = zip(wanted.items(), (left_bytes > 0).tolist(), strict=True)
        self._rerouted.update(each for each, goes in going if goes)

    def remove(self, now_ns: int, flows: Sequence[int]) -> list[float]:
        """Take flows away; return the bytes left of each. They are not told to have ended."""
        left_bytes: list[float] = self._lift(now_ns, flows).tolist()
        for flow, left in zip(flows, left_bytes, strict=True):
            if left > 0:
                self._removed.add(flow)
                self._rerouted.pop(flow, None)
            del self._island_of[flow]
        return left_bytes

    def lose(self, now_ns: int, link: int) -> dict[int, float]:
        """Take all flows away that are on a link; return the bytes that were left of each."""
        flows = self.crossing(now_ns, link)
        return dict(zip(flows, self.remove(now_ns, flows), strict=True))

    def crossing(self, now_ns: int, link: int) -> list[int]:
        """Return the flows on a link, oldest first."""
        Paths.of([[link]]).checked(len(self._capacity))
        self._reach(now_ns)
        self._rebuild()
        island = self._islands.get(int(self._island_of_link[link]))
        return island.crossing(link) if island else []

    def carried_bytes(self, now_ns: int) -> Floats:
        """Return the bytes that each link has carried by now, whole flows or parts."""
        self._reach(now_ns)
        for island in self._islands.values():
            island.count(now_ns, self._carried_bytes)
        return self._carried_bytes.copy()

    # -- within -----------------------------------------------------------------------------------

    def _reach(self, now_ns: int) -> None:
        """Let time pass; what was changed at the moment before is reckoned first."""
        if now_ns < self._now_ns:
            raise ValueError(f"it is {self._now_ns} ns already, not {now_ns}")
        if now_ns > self._now_ns:
            self._rebuild()
        self._now_ns = now_ns
        for number, island in tuple(self._islands.items()):
            if island.next_ns <= now_ns:
                self._end(*island.advance(now_ns))
                self._drop_empty(number)

    def _end(self, flows: Ints, end_ns: Ints) -> None:
        """Keep in mind when last bytes arrive."""
        order = np.argsort(end_ns, kind="stable")
        moments, first = np.unique(end_ns[order], return_index=True)
        each = np.split(flows[order], first[1:])
        for moment_ns, same in zip(moments.tolist(), each, strict=bool(len(flows))):
            heapq.heappush(self._ended, (moment_ns, same.tolist()))

    def _drop_empty(self, number: int) -> None:
        if not (island := self._islands[number]):
            island.count(self._now_ns, self._carried_bytes)
            del self._islands[number]

    def _lift(self, now_ns: int, flows: Sequence[int]) -> Floats:
        """Return what is left of flows, and have the links that they take looked at."""
        self._reach(now_ns)
        if any(self._island_of[flow] == NOWHERE for flow in flows):
            self._rebuild()
        numbers = np.fromiter(map(self._island_of.__getitem__, flows), np.int64, len(flows))
        ids, left_bytes = np.fromiter(flows, np.int64, len(flows)), np.zeros(len(flows))
        for number in np.unique(numbers).tolist():
            if island := self._islands.get(number):
                these = np.flatnonzero(numbers == number)
                left_bytes[these], paths = island.look(now_ns, ids[these])
                self._touched[paths.take(np.flatnonzero(left_bytes[these] > 0)).links] = True
        return left_bytes

    def _rebuild(self) -> None:
        """Put all flows on a new island that hang together with what was changed."""
        if not self._touched.any():
            return
        for number in np.unique(self._island_of_link[self._touched]).tolist():
            if island := self._islands.get(number):
                left = island.leave(self._now_ns, self._touched, self._carried_bytes)
                self._coming.append(left)
                self._drop_empty(number)
        self._touched[:] = False
        if self._coming:
            batch = Batch.joined(self._coming).without(self._removed).rerouted(self._rerouted)
            self._coming, self._removed, self._rerouted = [], set(), {}
            self._begin(batch)

    def _begin(self, batch: Batch) -> None:
        if len(batch.ids):
            self._islands_ever += 1
            island = Island(self._now_ns, batch, self._capacity)
            self._islands[self._islands_ever] = island
            self._island_of_link[island.links] = self._islands_ever
            self._island_of.update(dict.fromkeys(batch.ids.tolist(), self._islands_ever))
