"""A demand on parallel planes: which configurations each one carries in turn. Pure.

Spectra (arXiv 2603.07373) decomposes a demand into few weighted matchings, deals them to switches
longest first, and splits to balance. So here, from several decompositions: of few configurations,
as if a change cost less, as much and more than it does; and the one that would be best if a change
cost nothing (column generation: the dual of each pair's bytes prices the next matching). The best
few of what comes out get their durations from a linear programme, which also says what is left to
the electrical path; where there are many pairs, they last as long as they did.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import nsmallest
from typing import NamedTuple

import numpy as np

from harness.errors import UsageError
from harness.fabric.decomposition import (
    NOTHING,
    Configuration,
    Sequences,
    few,
    makespan_s,
)
from harness.fabric.greedy import greedy
from harness.fabric.matchings import (
    Bools,
    Floats,
    Pairs,
    Rates,
    best_duplex,
    best_simplex,
    by_traffic,
    checked,
    count,
    finish_s,
)

PATIENCE = (0.25, 1.0, 4.0)
"""Times `delta_s`: what a change is thought to cost; the dearer, the fewer and longer they are."""
WEIGHED = 24
"""Candidates whose durations are settled exactly: those that are best as they are."""
PAIRS_MAX, SEARCHED_MAX = 1_000, 200
"""Pairs with demand, at most, for which durations are settled exactly; and neighbours looked at."""
WORTH = 1 - 1e-6
"""Below this share of the makespan, another schedule is worth a further look."""
COLUMNS_PER_NODE = 8
"""Matchings that are tried per node, at most, for the decomposition without dark times."""


@dataclass(frozen=True)
class Schedule:
    """What each plane carries in turn, and when the last byte arrives."""

    planes: Sequences
    makespan_s: float


def schedule(
    demand: Floats,
    planes: int,
    rates: Rates,
    delta_s: float,
    *,
    duplex: bool = True,
    allowed: Bools | None = None,
) -> Schedule:
    """Return what each of so many like planes carries in turn; each node has one port on each.

    Nothing at all where the electrical path alone is soonest. `allowed[i, j]`: whether a circuit
    may lead from i to j; on duplex planes either direction allows both.
    """
    if planes < 0 or delta_s < 0:
        raise UsageError(f"planes and switching time are not below 0, as in {planes}, {delta_s} s")
    demand = checked(demand)
    order = by_traffic(demand)
    here = np.ix_(order, order)
    may = np.ones(demand.shape, bool) if allowed is None else np.asarray(allowed, bool)
    if duplex:
        may = may | may.T
    found = _Task(demand[here], planes, rates, delta_s, duplex, may[here]).best()
    names = order.tolist()
    return replace(
        found,
        planes=tuple(tuple(_named(each, names, duplex) for each in one) for one in found.planes),
    )


def _named(each: Configuration, names: Sequence[int], duplex: bool) -> Configuration:
    pairs = ((names[a], names[b]) for a, b in each.pairs)
    listed = ((min(p), max(p)) if duplex else p for p in pairs)
    return Configuration(tuple(sorted(listed)), each.weight_bytes)


@dataclass(frozen=True)
class _Task:
    """What is to be scheduled."""

    demand: Floats
    planes: int
    rates: Rates
    delta_s: float
    duplex: bool
    allowed: Bools

    def best(self) -> Schedule:
        """Return the best that was found; ties go to the first, which is to light nothing."""
        nothing = self._told(((),) * self.planes)
        if not self.planes or not self.demand.any():
            return nothing
        found = [self._told(planes) for planes in self._candidates()]
        first = nsmallest(WEIGHED, found, key=lambda each: each.makespan_s)
        best = min([nothing, *map(self._weighed, first)], key=lambda each: each.makespan_s)
        while np.count_nonzero(self.demand) <= SEARCHED_MAX:
            tried = (self._weighed(self._told(planes)) for planes in self._beside(best.planes))
            better = min(tried, key=lambda each: each.makespan_s, default=best)
            if better.makespan_s >= best.makespan_s * WORTH:
                break
            best = better
        return best

    def _told(self, planes: Sequences) -> Schedule:
        end_s = makespan_s(self.demand, planes, self.rates, self.delta_s, duplex=self.duplex)
        return Schedule(planes, end_s)

    def _weighed(self, found: Schedule) -> Schedule:
        """Return the same configurations, as long as is best; those that carry nothing go."""
        if not (self._is_small and any(found.planes)):
            return found
        lasts = lasting(self, [[each.pairs for each in one] for one in found.planes])
        if lasts is None:
            return found
        weights, least = iter(lasts.weights), NOTHING * self.demand.max()
        weighed = [[c._replace(weight_bytes=next(weights)) for c in one] for one in found.planes]
        told = self._told(tuple(tuple(c for c in one if c.weight_bytes > least) for one in weighed))
        return min(found, told, key=lambda each: each.makespan_s)

    @cached_property
    def _is_small(self) -> bool:
        return bool(np.count_nonzero(self.demand) <= PAIRS_MAX)

    def _beside(self, planes: Sequences) -> Iterator[Sequences]:
        """Yield what differs by one configuration: gone, replaced, added, or moved.

        What is new is the matching whose bytes are worth most, by the prices of this schedule.
        """
        lasts = lasting(self, [[each.pairs for each in one] for one in planes])
        if lasts is None:
            return
        new = (self._filled(Configuration(self._matched(lasts.prices), 0.0)),)
        for p, one in enumerate(planes):
            yield (*planes[:p], (*one, *new), *planes[p + 1 :])
            for k, gone in enumerate(one):
                left = one[:k] + one[k + 1 :]
                without = [*planes[:p], left, *planes[p + 1 :]]
                yield tuple(without)
                yield (*planes[:p], (*left, *new), *planes[p + 1 :])
                for q in range(self.planes):
                    if q != p:
                        yield tuple((*o, gone) if r == q else o for r, o in enumerate(without))

    def _filled(self, found: Configuration) -> Configuration:
        """Add the pairs that nodes which rest could serve: they may spare another configuration."""
        rest = self.demand.copy()
        for i, j in found.pairs:
            rest[i, :] = rest[:, j] = 0.0
            if self.duplex:
                rest[j, :] = rest[:, i] = 0.0
        return found._replace(pairs=found.pairs + self._matched(rest))

    def _matched(self, weight: Floats) -> Pairs:
        best = best_duplex if self.duplex else best_simplex
        return best(weight, self.allowed)

    # -- candidates --------------------------------------------------------------------------------

    def _candidates(self) -> Iterator[Sequences]:
        """Yield what the planes might carry, from the first so many of each decomposition."""
        yield self._as_now()
        for listed in self._decompositions():
            filled = [self._filled(each) for each in listed] if self._is_small else listed
            for most in range(1, len(listed) + 1):
                longest = sorted(filled[:most], key=lambda each: -each.weight_bytes)
                yield self._dealt(longest)
                yield self._split(longest)

    def _as_now(self) -> Sequences:
        """Return the circuits of one configuration a plane; each carries what the longest does."""
        n = len(self.demand)
        ports = np.ones((n, self.planes), np.int64)
        lit = greedy(self.demand, ports, self.rates, duplex=self.duplex, allowed=self.allowed)
        circuits = count(lit, n, duplex=self.duplex)
        end_s = finish_s(self.demand, circuits, self.rates)
        weight_bytes = end_s * self.rates.circuit_bytes_per_s
        return tuple((Configuration(pairs, weight_bytes),) if pairs else () for pairs in lit)

    def _decompositions(self) -> Iterator[Sequence[Configuration]]:
        most = 2 * len(self.demand) * self.planes
        for patience in PATIENCE if self._is_small else (1.0,):
            yield few(
                self.demand,
                most,
                self.rates,
                patience * self.delta_s,
                duplex=self.duplex,
                allowed=self.allowed,
                planes=self.planes,
            )
        if self._is_small:
            yield self._undarkened()

    def _undarkened(self) -> list[Configuration]:
        """Return the best decomposition if changes cost nothing, longest first."""
        fast = Rates(
            self.rates.circuit_bytes_per_s * self.planes, self.rates.electrical_bytes_per_s
        )
        task = replace(self, planes=1, rates=fast, delta_s=0.0)
        columns: list[Pairs] = []
        found = Lasting([], self.demand)
        for _ in range(COLUMNS_PER_NODE * len(self.demand)):
            column = self._matched(found.prices)
            known = not column or column in columns
            priced = None if known else lasting(task, [[*columns, column]])
            if priced is None:
                break
            columns.append(column)
            found = priced
        least = NOTHING * self.demand.max(initial=0.0)
        weighed = map(Configuration, columns, found.weights)
        kept = (each for each in weighed if each.weight_bytes > least)
        return sorted(kept, key=lambda each: -each.weight_bytes)

    def _dealt(self, longest: Sequence[Configuration]) -> Sequences:
        """Deal configurations, longest first, each to the plane that is done first."""
        planes: list[list[Configuration]] = [[] for _ in range(self.planes)]
        busy_s = [0.0] * self.planes
        for each in longest:
            first = min(range(self.planes), key=busy_s.__getitem__)
            planes[first].append(each)
            busy_s[first] += self.delta_s + each.weight_bytes / self.rates.circuit_bytes_per_s
        return tuple(map(tuple, planes))

    def _split(self, longest: Sequence[Configuration]) -> Sequences:
        """Deal them plane by plane, all equally long; what does not fit goes on in the next one.

        McNaughton's rule, with a dark time more for each plane but the last.
        """
        rate, delta_s, last = self.rates.circuit_bytes_per_s, self.delta_s, self.planes - 1
        bytes_ = sum(each.weight_bytes for each in longest)
        each_s = (bytes_ / rate + delta_s * (len(longest) + last)) / self.planes
        planes: list[list[Configuration]] = [[]]
        left_s = each_s
        for each in longest:
            rest = each.weight_bytes
            while rest > 0:
                room = (left_s - delta_s) * rate
                if room <= NOTHING * bytes_ and len(planes) <= last:
                    planes.append([])
                    left_s = each_s
                    continue
                part = min(rest, room) if len(planes) <= last else rest
                planes[-1].append(Configuration(each.pairs, part))
                rest -= part
                left_s -= delta_s + part / rate
        return tuple(map(tuple, planes)) + ((),) * (self.planes - len(planes))


class Lasting(NamedTuple):
    """How long configurations should last, and what a byte on circuits would be worth."""

    weights: list[float]
    """Bytes of each configuration, plane by plane."""
    prices: Floats
    """By how much the makespan falls with each byte of a pair that circuits carry (no unit)."""


def lasting(task: _Task, planes: Sequence[Sequence[Pairs]]) -> Lasting | None:
    """Return how long the matchings of each plane should last, by a linear programme.

    Smallest T with: the configurations of a plane and their dark times take at most T; what they do
    not carry of a pair is left to the electrical path; no node has more of that than it sends, or
    gets, in T. None where the solver gives up: numbers many orders of magnitude apart.
    """
    from scipy.optimize import linprog  # noqa: PLC0415
    from scipy.sparse import csr_array  # noqa: PLC0415

    n, unit = len(task.demand), max(task.demand.sum(0).max(), task.demand.sum(1).max())
    matrix, limits = _programme(task, planes, unit)
    cost = np.zeros(matrix.shape[1])
    cost[0] = 1.0
    solved = linprog(cost, csr_array(matrix), limits, method="highs")
    if not solved.success:
        return None
    wanted = np.flatnonzero(task.demand)
    prices = np.zeros(n * n)
    prices[wanted] = np.maximum(-solved.ineqlin.marginals[: len(wanted)], 0.0)
    several = sum(map(len, planes))
    return Lasting((solved.x[1 : 1 + several] * unit).tolist(), prices.reshape(n, n))


def _programme(
    task: _Task, planes: Sequence[Sequence[Pairs]], unit: float
) -> tuple[Floats, Floats]:
    """Return rows and their upper limits. Bytes in `unit`, times in what a circuit takes for it.

    Columns: T, the configurations, what is left of each pair with demand. Rows: these pairs, what
    nodes send, what they get, the planes.
    """
    n, rate = len(task.demand), task.rates.circuit_bytes_per_s
    listed = [count([pairs], n, duplex=task.duplex).ravel() for one in planes for pairs in one]
    wanted = np.flatnonzero(task.demand)
    pairs, first = np.arange(len(wanted)), 1 + len(listed)
    nodes, ends = len(wanted), len(wanted) + 2 * n
    matrix = np.zeros((ends + len(planes), first + len(wanted)))
    limits = np.zeros(len(matrix))
    limits[:nodes] = -task.demand.ravel()[wanted] / unit
    matrix[:nodes, 1:first] = -np.array(listed).reshape(-1, n * n)[:, wanted].T
    matrix[pairs, first + pairs] = -1.0
    matrix[nodes:ends, 0] = -task.rates.electrical_bytes_per_s / rate
    matrix[nodes + wanted // n, first + pairs] = 1.0
    matrix[nodes + n + wanted % n, first + pairs] = 1.0
    at = 1
    for row, one in enumerate(planes, ends):
        matrix[row, 0] = -1.0
        matrix[row, at : at + len(one)] = 1.0
        limits[row] = -len(one) * task.delta_s * rate / unit
        at += len(one)
    return matrix, limits
