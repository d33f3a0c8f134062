"""Circuits by longest finish: what ends last gets one more, until ports run out. Pure.

MixNet (arXiv 2501.03905) gives the next circuit to the pair with the longest finish D/C. Here the
electrical path has its finish too, that of its busiest node: where that is the longest, the node's
largest demand moves to a circuit. A circuit takes the first plane in which both ends have a port.
A second pass relieves what ends last by ejection chains: it takes ports from circuits that can do
without, that can move to another plane, or in whose place another one does.

Nodes are looked at in the order of their traffic, so new names give the same plan under new names,
as long as no two nodes have the same traffic.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import product

import numpy as np

from harness.fabric.matchings import Bools, Floats, Ints, Planes, Rates, by_traffic, checked

DEEPEST = 4
"""Circuits in a row that may push each other aside to relieve what ends last."""
TRIALS_MAX = 300
"""Placements tried in all: what more of them find where 256 nodes are full takes too long."""
LESS = 1 - 1e-9
"""Below this share of another time counts as less: sums of bytes are rounded."""


def greedy(
    demand: Floats,
    ports: Ints,
    rates: Rates,
    *,
    duplex: bool = True,
    allowed: Bools | None = None,
) -> Planes:
    """Return per plane the pairs to join, so that the last byte arrives early (`finish_s`).

    `demand[i, j]`: bytes from node i to j. `ports[i, p]`: uplinks of node i on plane p; on simplex
    planes so many fibres out and so many in. `allowed[i, j]`: whether a circuit may lead from i to
    j; on duplex planes either direction allows both.
    """
    demand = checked(demand)
    order = by_traffic(demand)
    may = np.ones(demand.shape, bool) if allowed is None else np.asarray(allowed, bool)
    here = np.ix_(order, order)
    state = _Circuits(
        demand[here], np.asarray(ports, np.int64)[order], rates, duplex=duplex, allowed=may[here]
    )
    state.fill()
    if state.relieve():
        state.fill()
    return state.planes(order.tolist())


class _Circuits:
    """What is lit so far, on which plane, and how long each edge and each node takes.

    An *edge* from i to j (i < j where duplex) is ``i * n + j``. Its *ends* hold its ports: nodes;
    on simplex planes a node's receiver is an end of its own, n + j. The electrical path has two
    *sides* of a node: what it sends (i) and what it gets (n + j).
    """

    def __init__(
        self, demand: Floats, ports: Ints, rates: Rates, *, duplex: bool, allowed: Bools
    ) -> None:
        self.n, self.planes_count, self.duplex = len(demand), ports.shape[1], duplex
        self.to = 0 if duplex else self.n
        """Number of the first end that circuits lead to."""
        electrical_s = demand / rates.electrical_bytes_per_s
        self.side_s: list[float] = [*electrical_s.sum(1).tolist(), *electrical_s.sum(0).tolist()]
        self.takes_s: list[float] = electrical_s.ravel().tolist()
        longer = np.maximum(demand, demand.T) if duplex else demand
        self.alone_s: list[float] = (longer / rates.circuit_bytes_per_s).ravel().tolist()
        """Of an edge with one circuit."""
        self.lit: dict[int, int] = {}
        """Edge -> its circuits."""
        self.lasts_s = np.zeros(self.n * self.n)
        """Of each edge; 0 where it is not lit."""
        self.left: list[list[int]] = (ports if duplex else np.concatenate([ports, ports])).tolist()
        self.free = [sum(1 << p for p, some in enumerate(left) if some > 0) for left in self.left]
        """Of each end, the planes in which it has a port left."""
        self.on: list[list[list[int]]] = [[[] for _ in left] for left in self.left]
        """Edges of each end on each plane, once for each circuit."""
        self.of_side = self._of_sides(demand, allowed)
        self.changes: list[tuple[int, int, int]] = []
        self.trials = 0

    def _of_sides(self, demand: Floats, allowed: Bools) -> list[list[int]]:
        """Return the edges of each side that a circuit may serve, what takes most off it first."""
        i, j = np.indices(demand.shape)
        edges = i * self.n + j
        if self.duplex:
            allowed = allowed | allowed.T
            edges = np.minimum(i, j) * self.n + np.maximum(i, j)
        used = np.where(allowed, demand, 0.0)
        found = []
        for weight, named in ((used, edges), (used.T, edges.T)):
            order = np.argsort(-weight, axis=1, kind="stable")
            several = (weight > 0).sum(1).tolist()
            listed = np.take_along_axis(named, order, axis=1).tolist()
            found += [each[:some] for each, some in zip(listed, several, strict=True)]
        return found

    # -- one circuit more or less ------------------------------------------------------------------

    def ends(self, e: int) -> tuple[int, int]:
        """Return the two ends whose ports a circuit of this edge takes."""
        return e // self.n, self.to + e % self.n

    def edge_s(self, e: int) -> float:
        """Return how long an edge takes that is lit."""
        return self.alone_s[e] / self.lit[e]

    def both_free(self, e: int) -> int:
        """Return the first plane in which both ends have a port left, or -1."""
        planes = self.free[e // self.n] & self.free[self.to + e % self.n]
        return (planes & -planes).bit_length() - 1

    def change(self, e: int, plane: int, step: int) -> None:
        """Light one more circuit of an edge on this plane (`step` 1), or put one out (-1)."""
        before = self.lit.pop(e, 0)
        after = before + step
        if after:
            self.lit[e] = after
        if not (before and after):
            self._move(e, step)
        self.lasts_s[e] = self.alone_s[e] / after if after else 0.0
        for end in self.ends(e):
            left, edges = self.left[end], self.on[end][plane]
            left[plane] -= step
            if step > 0:
                edges.append(e)
                if not left[plane]:
                    self.free[end] -= 1 << plane
            else:
                edges.remove(e)
                if left[plane] == 1:
                    self.free[end] += 1 << plane

    def _move(self, e: int, step: int) -> None:
        """Take what an edge carries off the electrical path (`step` 1), or put it back (-1)."""
        n = self.n
        i, j = divmod(e, n)
        there_s = step * self.takes_s[e]
        self.side_s[i] -= there_s
        self.side_s[n + j] -= there_s
        if self.duplex:
            back_s = step * self.takes_s[j * n + i]
            self.side_s[j] -= back_s
            self.side_s[n + i] -= back_s

    # -- longest finish ----------------------------------------------------------------------------

    def fill(self) -> None:
        """Give what ends last one circuit more, as long as it can have one."""
        latest = [(-time_s, -1, side) for side, time_s in enumerate(self.side_s)]
        latest += [(-self.edge_s(e), e, -1) for e in self.lit if self.both_free(e) >= 0]
        heapify(latest)
        dark = [iter(edges) for edges in self.of_side]
        while latest:
            told_s, e, side = heappop(latest)
            if side >= 0:
                if self.side_s[side] >= -told_s:
                    e, plane = self._largest(side, dark[side])
                    if plane < 0:
                        continue
                    self.change(e, plane, 1)
                    heappush(latest, (-self.edge_s(e), e, -1))
                heappush(latest, (-self.side_s[side], -1, side))
            elif (plane := self.both_free(e)) >= 0:
                self.change(e, plane, 1)
                heappush(latest, (-self.edge_s(e), e, -1))

    def _largest(self, side: int, dark: Iterator[int]) -> tuple[int, int]:
        """Return the next edge that ends sooner on a circuit, and its plane; or -1, -1."""
        end = side % self.n if self.duplex else side
        if self.free[end]:
            for e in dark:
                if e not in self.lit and self.alone_s[e] < self.side_s[side]:
                    plane = self.both_free(e)
                    if plane >= 0:
                        return e, plane
        return -1, -1

    # -- ejection chains ---------------------------------------------------------------------------

    def relieve(self) -> bool:
        """Take ports for what ends last from those that then still end sooner; False: not once."""
        relieved = False
        while self.n and self.trials < TRIALS_MAX:
            side, e = int(np.argmax(self.side_s)), int(np.argmax(self.lasts_s))
            below_s = LESS * max(self.side_s[side], float(self.lasts_s[e]))
            self.changes.clear()
            if self.lasts_s[e] > below_s:
                sooner = self._ease(e, below_s, DEEPEST, frozenset())
            else:
                sooner = below_s > 0 and self._unload(side, below_s, DEEPEST, frozenset())
            if not sooner:
                break
            relieved = True
        return relieved

    def _try(self, e: int, plane: int, step: int) -> None:
        self.change(e, plane, step)
        self.changes.append((e, plane, step))

    def _back_to(self, mark: int) -> None:
        """Undo what was tried since there were `mark` changes."""
        while len(self.changes) > mark:
            e, plane, step = self.changes.pop()
            self.change(e, plane, -step)

    def _dark(self, e: int, below_s: float, depth: int, held: frozenset[int]) -> bool:
        """Put an edge out if the electrical path then ends in time; False: changed nothing."""
        mark, (a, _) = len(self.changes), self.ends(e)
        for plane in range(self.planes_count):
            while e in self.on[a][plane]:
                self._try(e, plane, -1)
        if all(self._unload(side, below_s, depth, held) for side in self._sides(e)):
            return True
        self._back_to(mark)
        return False

    def _sides(self, e: int) -> tuple[int, ...]:
        i, j = divmod(e, self.n)
        return (i, self.n + j, j, self.n + i) if self.duplex else (i, self.n + j)

    def _unload(self, side: int, below_s: float, depth: int, held: frozenset[int]) -> bool:
        """Move edges of a side to circuits until it ends in time; False: changed nothing."""
        mark = len(self.changes)
        edges = iter(self.of_side[side] if depth > 0 else ())
        while self.side_s[side] >= below_s:
            e = next(edges, None) if self.trials < TRIALS_MAX else None
            if e is None:
                self._back_to(mark)
                return False
            if e not in self.lit:
                self._serve(e, below_s, depth, held)
        return True

    def _serve(self, e: int, below_s: float, depth: int, held: frozenset[int]) -> bool:
        """Give an edge as many circuits as end it in time; False: changed nothing."""
        mark = len(self.changes)
        while e not in self.lit or self.edge_s(e) >= below_s:
            if not self._place(e, below_s, depth, held | {e}):
                self._back_to(mark)
                return False
        return True

    def _place(self, e: int, below_s: float, depth: int, held: frozenset[int]) -> bool:
        """Give an edge one circuit, and all that gives way to it what it needs to end in time.

        Edges in `held` do not give way. False: changed nothing.
        """
        mark = len(self.changes)
        for plane, victims in self._ways(e, held) if self.trials < TRIALS_MAX else ():
            self.trials += 1
            for victim in victims:
                self._try(victim, plane, -1)
            self._try(e, plane, 1)
            if all(self._ease(victim, below_s, depth - 1, held) for victim in victims):
                return True
            self._back_to(mark)
        return False

    def _ease(self, e: int, below_s: float, depth: int, held: frozenset[int]) -> bool:
        """End an edge in time, by more circuits or by none; False: changed nothing."""
        if e in self.lit and self.edge_s(e) < below_s:
            return True
        return (
            self._dark(e, below_s, 0, held)
            or (e in self.lit and depth > 0 and self._serve(e, below_s, depth, held))
            or (depth > 0 and self._dark(e, below_s, depth, held))
        )

    def _ways(self, e: int, held: frozenset[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the planes that an edge could take, and who gives way there; fewest first."""
        free = self.both_free(e)
        if free >= 0:
            yield free, ()
        ways = []
        for plane in range(self.planes_count):
            at_ends = [
                (-1,) if self.left[end][plane] > 0 else self.on[end][plane] for end in self.ends(e)
            ]
            for victims in map(set, product(*at_ends)):
                victims.discard(-1)
                if victims and held.isdisjoint(victims):
                    longest_s = max(map(self.edge_s, victims))
                    ways.append((len(victims), longest_s, plane, tuple(sorted(victims))))
        yield from ((plane, victims) for _, _, plane, victims in sorted(ways))

    def planes(self, names: list[int]) -> Planes:
        """Return the pairs of each plane, under these names of the nodes."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(self.planes_count)]
        for end in range(self.n):
            for pairs, edges in zip(found, self.on[end], strict=True):
                for e in edges:
                    if e // self.n == end:
                        a, b = names[end], names[e % self.n]
                        pairs.append((b, a) if self.duplex and b < a else (a, b))
        return tuple(tuple(sorted(pairs)) for pairs in found)
