"""From one plan to another with few circuits moved: what both have stays lit. Pure.

A wanted pair may be served on any plane. Three ways are tried, the best one is taken. Whole planes
change places (Hungarian on what they have in common with what is lit). Circuit by circuit: those
that both plans have stay, others are added on a plane where both ends have a port left; else an
alternating chain between two planes (Kempe) makes room, the one that moves fewest. Plane by plane:
each carries the matching that keeps most of what is lit there (Hungarian; Edmonds if duplex) and
leaves what the other planes can carry. The second finds what few changes need, the third is better
where no port is left free.

Which uplinks a circuit takes within its plane is settled elsewhere: one that stays keeps them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product

import numpy as np

from harness.fabric.matchings import Ints, Pair, Pairs, Planes, best_duplex, best_simplex, count

KEPT, NEW, STOLEN = 8.0, 1.0, -4.0
"""What a circuit is worth to a plane: lit there; lit nowhere; lit on a plane that comes later."""
CHAINS_MAX = 64
"""Pairs of planes that are tried for one circuit."""
Chain = list[int]
"""Circuits that change between two planes, each to the other one."""


def rewirings(now: Planes, wanted: Planes) -> int:
    """Return how many circuits must be lit anew."""
    return sum(
        sum((Counter(then) - Counter(before)).values())
        for before, then in zip(now, wanted, strict=True)
    )


def rewired(now: Planes, wanted: Planes, ports: Ints, *, duplex: bool = True) -> Planes:
    """Return the wanted circuits on planes such that few are lit anew; never more than as given.

    `now` and `wanted`: per plane its pairs, `wanted` within `ports[i, p]`, the uplinks of node i on
    plane p (simplex: so many out and so many in).
    """
    ports = np.asarray(ports)
    found = [
        wanted,
        _places_changed(now, wanted, ports, duplex=duplex),
        _Beside(now, wanted, ports, duplex=duplex).planes(),
    ]
    if (ports == 1).all():
        found.append(_plane_by_plane(now, wanted, len(ports), duplex=duplex))
    return min((each for each in found if each is not None), key=lambda each: rewirings(now, each))


def _ends(pair: Pair, n: int, *, duplex: bool) -> tuple[int, int]:
    """Return the two ends that a circuit takes a port of; a simplex receiver is n + j."""
    return (pair[0], pair[1]) if duplex else (pair[0], n + pair[1])


# -- whole planes ----------------------------------------------------------------------------------


def _places_changed(now: Planes, wanted: Planes, ports: Ints, *, duplex: bool) -> Planes:
    """Return the wanted matchings, whole, on those planes where most of their circuits are lit."""
    from scipy.optimize import linear_sum_assignment  # noqa: PLC0415

    never = -1 - sum(map(len, wanted))
    common = np.full((len(wanted), len(now)), never, dtype=np.int64)
    for k, pairs in enumerate(wanted):
        for plane, lit in enumerate(now):
            if plane == k or _fits(pairs, ports[:, plane], duplex=duplex):
                common[k, plane] = (Counter(pairs) & Counter(lit)).total()
    rows, planes = linear_sum_assignment(common, maximize=True)
    placed = dict(zip(planes.tolist(), rows.tolist(), strict=True))
    return tuple(wanted[placed[plane]] for plane in range(len(now)))


def _fits(pairs: Pairs, ports: Ints, *, duplex: bool) -> bool:
    """Whether a plane with so many uplinks of each node can carry these pairs."""
    n = len(ports)
    used = Counter(end for pair in pairs for end in _ends(pair, n, duplex=duplex))
    return all(times <= ports[end % n] for end, times in used.items())


# -- plane by plane --------------------------------------------------------------------------------


def _plane_by_plane(now: Planes, wanted: Planes, n: int, *, duplex: bool) -> Planes | None:
    """Give each plane in turn the matching that keeps most; None where that does not work out.

    A node that has as many circuits left as there are planes left must be served by each of them:
    then what is left fits into the planes that are left, if simplex (König). Ports: one each.
    """
    best = best_duplex if duplex else best_simplex
    left = count(wanted, n, duplex=duplex)
    lit = [count([pairs], n, duplex=duplex) for pairs in now]
    later = sum(lit, np.zeros((n, n), np.int64))
    must = 2 * (KEPT + NEW) * n
    found = []
    for p, here in enumerate(lit):
        later = later - here
        value = np.where(here > 0, KEPT, np.where(left > later, NEW, STOLEN))
        full = [(left.sum(axis) == len(now) - p) * must for axis in (1, 0)]
        value = np.maximum(value + np.add.outer(*full), 0.0)
        pairs = best(np.where(left > 0, value, 0.0))
        left = left - count([pairs], n, duplex=duplex)
        found.append(pairs)
    return None if left.any() else tuple(found)


# -- circuit by circuit ----------------------------------------------------------------------------


class _Beside:
    """Wanted circuits on planes, those that stay first."""

    def __init__(self, now: Planes, wanted: Planes, ports: Ints, *, duplex: bool) -> None:
        self.pairs = [pair for pairs in wanted for pair in pairs]
        self.ends = [_ends(pair, len(ports), duplex=duplex) for pair in self.pairs]
        self.left: list[list[int]] = (ports if duplex else np.concatenate([ports, ports])).tolist()
        self.on: list[list[list[int]]] = [[[] for _ in left] for left in self.left]
        """Circuits of each end on each plane."""
        self.plane_of = [-1] * len(self.pairs)
        self.home = self._homes(now)
        """Of each circuit the plane where it is lit, if it may stay; else -1."""
        self.wanted_on = [plane for plane, pairs in enumerate(wanted) for _ in pairs]

    def _homes(self, now: Planes) -> list[int]:
        lit: dict[Pair, list[int]] = {}
        for plane, pairs in enumerate(now):
            for pair in pairs:
                lit.setdefault(pair, []).append(plane)
        return [lit[pair].pop() if lit.get(pair) else -1 for pair in self.pairs]

    def planes(self) -> Planes | None:
        """Return the planes, or None where a circuit finds no room."""
        for e, plane in enumerate(self.home):
            if plane >= 0 and self._has_room(e, plane):  # ports may have gone since it was lit
                self._move(e, plane)
        missing = [e for e, plane in enumerate(self.plane_of) if plane < 0]
        if not all(self._add(e) for e in missing):
            return None
        found: list[list[Pair]] = [[] for _ in self.left[0]] if self.left else []
        for pair, plane in zip(self.pairs, self.plane_of, strict=True):
            found[plane].append(pair)
        return tuple(tuple(sorted(pairs)) for pairs in found)

    def _has_room(self, e: int, plane: int) -> bool:
        return all(self.left[end][plane] > 0 for end in self.ends[e])

    def _move(self, e: int, plane: int) -> None:
        """Take a circuit from where it is to this plane; -1: to none."""
        before = self.plane_of[e]
        for end in self.ends[e]:
            if before >= 0:
                self.left[end][before] += 1
                self.on[end][before].remove(e)
            if plane >= 0:
                self.left[end][plane] -= 1
                self.on[end][plane].append(e)
        self.plane_of[e] = plane

    def _free(self, end: int) -> list[int]:
        return [plane for plane, left in enumerate(self.left[end]) if left > 0]

    def _add(self, e: int) -> bool:
        """Put a circuit on a plane, by a chain if need be; False: no chain helps."""
        room = (
            p for p in (self.wanted_on[e], *self._free(self.ends[e][0])) if self._has_room(e, p)
        )
        plane = next(room, -1)
        if plane < 0:
            fewest: tuple[int, Chain, int, int] | None = None
            for chain, p, q in self._chains(e):
                moved = sum(self.home[c] == self.plane_of[c] for c in chain)
                if fewest is None or moved < fewest[0]:
                    fewest = moved, chain, p, q
            if fewest is None:
                return False
            _, chain, plane, q = fewest
            self._exchange(chain, plane, q)
        self._move(e, plane)
        return True

    def _chains(self, e: int) -> Iterator[tuple[Chain, int, int]]:
        """Yield the chains after which both ends of a circuit have a port on the first plane."""
        a, b = self.ends[e]
        tried = list(product(self._free(a), self._free(b)))[:CHAINS_MAX]
        for p, q in tried:
            for free, end, there, other in ((a, b, p, q), (b, a, q, p)):
                chain = self._chain(end, there, other)
                if chain and not any(free in self.ends[c] for c in chain):
                    yield chain, there, other

    def _chain(self, end: int, p: int, q: int) -> Chain | None:
        """Return the circuits that change between p and q so that `end` gets a port on p.

        None where somebody on the way has no port on the other plane.
        """
        chain: Chain = []
        at, from_, to = end, p, q
        while True:
            e = next((c for c in self.on[at][from_] if c not in chain), None)
            if e is None:
                return None
            chain.append(e)
            a, b = self.ends[e]
            at = b if at == a else a
            if self.left[at][to] > 0:
                return chain
            from_, to = to, from_

    def _exchange(self, chain: Chain, p: int, q: int) -> None:
        """Bring the circuits of a chain from p to q, and from q to p."""
        planes = [q if self.plane_of[c] == p else p for c in chain]
        for c in chain:
            self._move(c, -1)
        for c, plane in zip(chain, planes, strict=True):
            self._move(c, plane)
