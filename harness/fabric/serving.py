"""Circuits for a demand on real uplinks and trunks: what ends last gets the next one. Pure.

As MixNet (arXiv 2501.03905) and `harness.fabric.greedy`, which plans bare matrices of ports: a pair
with C circuits takes D / C, the rest of a ToR's bytes its electrical path, out and in apart; where
that is what ends last, its largest demand moves to circuits, if they are faster. A second pass
takes circuits from those that can do without for what ends last (ejection chains).

Times are in bytes over the rate of one circuit. ToRs are looked at in the order of their traffic,
so new names give the same plan under new names, unless two ToRs have the same traffic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import combinations
from math import floor, inf

import numpy as np

from harness.fabric.laying import Board, Edge, Line
from harness.fabric.links import Link
from harness.fabric.matchings import Floats, by_traffic
from harness.fabric.topology import Topology

DEEPEST = 3
"""Circuits in a row that may push each other aside to relieve what ends last."""
TRIALS_MAX, WORK_MAX = 2_000, 100_000
"""Placements that the second pass tries, and how often it looks at a circuit: large plans get
fewer trials."""
LESS = 1 - 1e-9
"""Below this share of another time counts as less: sums of bytes are rounded."""


class Serving(Board):
    """A board on which circuits serve a demand, and how long each edge and each ToR takes.

    A ToR has two *sides* on the electrical path: what it sends (i) and what it gets (n + j).
    """

    def __init__(
        self, topology: Topology, demand: Floats, broken: frozenset[str] = frozenset()
    ) -> None:
        order = by_traffic(demand)
        names = list(topology.tors)
        super().__init__(topology, [names[k] for k in order], broken)
        self.n = len(names)
        self.demand: list[list[float]] = (demand := demand[np.ix_(order, order)]).tolist()
        rate = topology.rates.link_mbit_per_s
        self._electrical = [topology.electrical_mbit_per_s(tor) / rate for tor in self.tors] * 2
        sums = [*demand.sum(1).tolist(), *demand.sum(0).tolist()]
        self.side_s: list[float] = [
            b / rate for b, rate in zip(sums, self._electrical, strict=True)
        ]
        self._largest = [*_largest_first(demand), *_largest_first(demand.T)]
        """Of each side, the other ToRs by what they get or send, the largest first."""
        nics = [max(1, len(topology.nics_of(tor))) for tor in self.tors] * 2
        self.floor_s: float = max((b / n for b, n in zip(sums, nics, strict=True)), default=0.0)
        """What the hosts' NICs need: no circuit makes it less."""
        self.trials = 0

    def _edges(self, side: int) -> Iterator[Edge]:
        """Yield the edges that carry anything of a side, the largest first."""
        turned, tor = divmod(side, self.n)
        for other in self._largest[side]:
            i, j = (other, tor) if turned else (tor, other)
            yield (i, j) if self.one_way or i < j else (j, i)

    # -- times -------------------------------------------------------------------------------------

    def alone_s(self, edge: Edge) -> float:
        """Return how long an edge takes over one circuit."""
        i, j = edge
        there = self.demand[i][j]
        return there if self.one_way else max(there, self.demand[j][i])

    def edge_s(self, edge: Edge) -> float:
        """Return how long an edge takes that has circuits."""
        return self.alone_s(edge) / len(self.lines[edge])

    def lit(self, edge: Edge) -> bool:
        """Whether an edge has a circuit."""
        return bool(self.lines.get(edge))

    def sides(self, edge: Edge) -> tuple[int, ...]:
        """Return the sides that an edge loads where it has no circuit."""
        i, j = edge
        there = (i, self.n + j)
        return there if self.one_way else (*there, j, self.n + i)

    def carries(self, links: Iterable[Link]) -> dict[Edge, float]:
        """Return which edges of these links carry anything, without a limit to their circuits."""
        joined = [(link.a.tor, link.b.tor) for link in links]
        known = {self.edge(*pair) for pair in joined if {*pair} <= {*self.tors}}
        return {edge: inf for edge in known if self.alone_s(edge) > 0}

    def by_finish(self) -> list[Edge]:
        """Return the edges that have circuits, once for each; those that end last first."""
        lit = sorted((-self.edge_s(edge), edge) for edge, lines in self.lines.items() if lines)
        return [edge for _, edge in lit for _ in self.lines[edge]]

    def last_s(self) -> float:
        """Return when the last byte arrives."""
        by_circuit = max(
            (self.edge_s(edge) for edge, lines in self.lines.items() if lines), default=0.0
        )
        return max(by_circuit, self.floor_s, *self.side_s)

    def counted(self, line: Line, step: int) -> None:
        """Move what an edge carries off the electrical path with its first circuit, and back."""
        super().counted(line, step)
        i, j = line.edge
        if len(self.lines[line.edge]) != (1 if step > 0 else 0):
            return
        for a, b in ((i, j),) if self.one_way else ((i, j), (j, i)):
            for side in (a, self.n + b):
                self.side_s[side] -= step * self.demand[a][b] / self._electrical[side]

    # -- longest finish ----------------------------------------------------------------------------

    def fill(self) -> None:
        """Give what ends last one circuit more, as long as it can have one."""
        latest: list[tuple[float, int, Edge]] = [
            (-time_s, side, (0, 0)) for side, time_s in enumerate(self.side_s) if time_s > 0
        ]
        latest += [(-self.edge_s(edge), -1, edge) for edge, lines in self.lines.items() if lines]
        heapify(latest)
        dark = [self._edges(side) for side in range(2 * self.n)]
        while latest:
            told_s, side, edge = heappop(latest)
            if side < 0:
                if self.place(edge):
                    heappush(latest, (-self.edge_s(edge), -1, edge))
            elif (time_s := self.side_s[side]) < -told_s:
                heappush(latest, (-time_s, side, edge))
            elif (next_ := self._light(side, dark[side], time_s)) is not None:
                heappush(latest, (-self.edge_s(next_), -1, next_))
                heappush(latest, (-self.side_s[side], side, edge))

    def _light(self, side: int, dark: Iterator[Edge], time_s: float) -> Edge | None:
        """Give the next edge of a side that then ends sooner its first circuits, or return None."""
        end, free = self._end(side), self.free
        for edge in dark if free[end] else ():
            x, y = self.ends(*edge)
            if free[x] and free[y] and not self.lit(edge) and self._place_all(edge, time_s):
                return edge
        return None

    def _end(self, side: int) -> int:
        """Return the end whose ports relieve a side."""
        return 2 * (side % self.n) + (self.one_way and side >= self.n)

    def _place_all(self, edge: Edge, below_s: float) -> bool:
        """Give an edge the circuits that end it sooner than this. False: changed nothing."""
        alone_s = self.alone_s(edge)
        if alone_s < below_s:
            return self.place(edge)
        needed, mark = floor(alone_s / below_s) + 1, len(self.log)
        if all(self.place(edge) for _ in range(needed)) and self.edge_s(edge) < below_s:
            return True
        self.undo(mark)
        return False

    # -- ejection chains ---------------------------------------------------------------------------

    def relieve(self) -> bool:
        """Take circuits for what ends last from those that still end sooner; False: not once."""
        relieved = False
        self.trials = min(TRIALS_MAX, WORK_MAX // (1 + sum(map(len, self.lines.values()))))
        while self.last_s() * LESS > self.floor_s and self._relieved(self.last_s() * LESS):
            relieved = True
        return relieved

    def _relieved(self, below_s: float) -> bool:
        """Bring one edge or one side that ends last below this time. False: changed nothing."""
        last = [
            edge for edge, lines in self.lines.items() if lines and self.edge_s(edge) >= below_s
        ]
        if last:
            return self._darken(last[0], below_s) or self._serve(
                last[0], below_s, DEEPEST, frozenset()
            )
        side = max(range(2 * self.n), key=self.side_s.__getitem__)
        return self._unload(side, below_s, DEEPEST, frozenset())

    def _darken(self, edge: Edge, below_s: float) -> bool:
        """Put an edge out if the electrical path is then faster; False: changed nothing."""
        mark = len(self.log)
        for line in tuple(self.lines[edge]):
            self.remove(line)
        if self._consoled(edge, below_s, DEEPEST, frozenset((edge,))):
            return True
        self.undo(mark)
        return False

    def _unload(self, side: int, below_s: float, depth: int, held: frozenset[Edge]) -> bool:
        """Move edges of a side to circuits until it ends in time; False: changed nothing."""
        mark = len(self.log)
        for edge in self._edges(side):
            if self.side_s[side] < below_s:
                return True
            if self.trials > 0 and not self.lit(edge):
                self._serve(edge, below_s, depth, held)
        if self.side_s[side] < below_s:
            return True
        self.undo(mark)
        return False

    def _serve(self, edge: Edge, below_s: float, depth: int, held: frozenset[Edge]) -> bool:
        """Give an edge as many circuits as end it in time; False: changed nothing."""
        mark = len(self.log)
        while not self.lit(edge) or self.edge_s(edge) >= below_s:
            if not self._make_room(edge, below_s, depth, held | {edge}):
                self.undo(mark)
                return False
        return True

    def _make_room(self, edge: Edge, below_s: float, depth: int, held: frozenset[Edge]) -> bool:
        """Give an edge one circuit, and all that give way what they need to end in time.

        Edges in `held` do not give way. False: changed nothing.
        """
        if self.place(edge):
            return True
        mark = len(self.log)
        for lines in self._in_the_way(edge, held):
            self.trials -= 1
            if self.trials < 0:
                return False
            for line in lines:
                self.remove(line)
            if self.place(edge):
                lost = dict.fromkeys(line.edge for line in lines)
                if all(self._consoled(each, below_s, depth - 1, held) for each in lost):
                    return True
            self.undo(mark)
        return False

    def _consoled(self, edge: Edge, below_s: float, depth: int, held: frozenset[Edge]) -> bool:
        """Whether an edge that lost a circuit ends in time, maybe at the cost of others."""
        if self.lit(edge) and self.edge_s(edge) >= below_s:
            return depth > 0 and self._serve(edge, below_s, depth, held)
        return self.lit(edge) or all(
            self.side_s[side] < below_s or (depth > 0 and self._unload(side, below_s, depth, held))
            for side in self.sides(edge)
        )

    def _in_the_way(self, edge: Edge, held: frozenset[Edge]) -> Iterator[tuple[Line, ...]]:
        """Yield lines to take away for an edge: one, then two; those that end soonest first.

        They take a port of one of its ToRs, or of a core that it may go over.
        """
        ends = [*self.ends(*edge), *self.core_ends(edge)]
        near = {id(hop.line): hop.line for end in ends for hop in self.hops_at(end)}
        lines = [line for line in near.values() if line.edge not in held]
        lines.sort(key=lambda line: (self.edge_s(line.edge), line.edge, line.hops[0].plane))
        yield from ((line,) for line in lines)
        yield from combinations(lines, 2)


def _largest_first(demand: Floats) -> list[list[int]]:
    """Return for each row the columns that carry anything, the largest first."""
    order = np.argsort(-demand, axis=1, kind="stable").tolist()
    several = (demand > 0).sum(1).tolist()
    return [row[:some] for row, some in zip(order, several, strict=True)]
