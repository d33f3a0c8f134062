"""A demand as a sequence of matchings, where one configuration is not enough. Pure.

Each plane takes its configurations in turn, and is dark for `delta_s` before each, the first too.
What no configuration carries goes by the electrical path meanwhile. Which matchings, how many and
for how long thus depends on `delta_s`: at 10 us one for each step, at 10 ms a few that last.

Exact or with a bound: `birkhoff` (Birkhoff and von Neumann), `double` (Towles and Dally). Few where
changes are dear: `few` takes what carries most bytes per second first, dark time included, as
Eclipse does for hybrid switches. Onto parallel planes: `harness.fabric.schedule`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from harness.fabric.matchings import (
    Bools,
    Floats,
    Ints,
    Pair,
    Pairs,
    Rates,
    best_duplex,
    best_simplex,
    checked,
    count,
    electrical_s,
    round_robin,
)

NOTHING = 1e-12
"""Of the largest demand: less is what rounding left over."""


class Configuration(NamedTuple):
    """One matching, and the bytes that each of its circuits may carry in a direction."""

    pairs: Pairs
    weight_bytes: float


Sequences = tuple[tuple[Configuration, ...], ...]
"""Per plane, its configurations in turn."""


# -- what it gives ---------------------------------------------------------------------------------


def covered(configurations: Iterable[Configuration], n: int, *, duplex: bool) -> Floats:
    """Return the bytes that may pass from each node (row) to each other one."""
    total = np.zeros((n, n))
    for pairs, weight_bytes in configurations:
        total += weight_bytes * count([pairs], n, duplex=duplex)
    return total


def makespan_s(
    demand: Floats, planes: Sequences, rates: Rates, delta_s: float, *, duplex: bool
) -> float:
    """Return when the last plane and the busiest node of the electrical path are done."""
    demand = checked(demand)
    listed = [each for several in planes for each in several]
    rest = np.maximum(demand - covered(listed, len(demand), duplex=duplex), 0.0)
    rest[rest < NOTHING * demand.max(initial=0.0)] = 0.0
    latest_s = max((busy_s(several, rates, delta_s) for several in planes), default=0.0)
    return float(max(latest_s, electrical_s(rest, rates)))


def busy_s(several: Iterable[Configuration], rates: Rates, delta_s: float) -> float:
    """Return how long a plane takes for these, dark times included."""
    return sum(delta_s + each.weight_bytes / rates.circuit_bytes_per_s for each in several)


# -- exact, or with a bound ------------------------------------------------------------------------


def stuffed(demand: Floats) -> Floats:
    """Return the demand filled up so that all rows and columns have the sum of the busiest one.

    Diagonal first, which is no circuit.
    """
    full = checked(demand)
    most = max(full.sum(0).max(initial=0.0), full.sum(1).max(initial=0.0))
    rows, columns = most - full.sum(1), most - full.sum(0)
    n = len(full)
    places = [(i, i) for i in range(n)] + [(i, j) for i in range(n) for j in range(n)]
    for i, j in places:
        more = min(rows[i], columns[j])
        full[i, j] += more
        rows[i] -= more
        columns[j] -= more
    return full


def birkhoff(demand: Floats) -> tuple[Configuration, ...]:
    """Return simplex configurations that add up to the stuffed demand, its diagonal left out.

    At most n^2 - 2n + 2 of them. Each time the permutation that lasts longest (bottleneck).
    """
    rest = stuffed(demand)
    least = NOTHING * rest.max(initial=0.0)
    found = []
    while rest.max(initial=0.0) > least:
        to = _bottleneck(rest, least)
        if to is None:
            break
        rows = np.arange(len(rest))
        weight = rest[rows, to].min()
        rest[rows, to] -= weight
        rest[rest <= least] = 0.0
        found.append(Configuration(_off_diagonal(to), float(weight)))
    return tuple(found)


def _bottleneck(rest: Floats, least: float) -> Ints | None:
    """Return the column of each row, in the permutation whose smallest entry is largest."""
    levels = np.unique(rest[rest > least])
    low, high, best = 0, len(levels) - 1, None
    while low <= high:
        middle = (low + high) // 2
        to = _perfect(rest >= levels[middle])
        if to is None:
            high = middle - 1
        else:
            low, best = middle + 1, to
    return best


def _perfect(useful: Bools) -> Ints | None:
    """Return a permutation of useful entries, the column of each row; None: there is none."""
    from scipy.sparse import csr_array  # noqa: PLC0415
    from scipy.sparse.csgraph import maximum_bipartite_matching  # noqa: PLC0415

    to: Ints = maximum_bipartite_matching(csr_array(useful), perm_type="column").astype(np.int64)
    return None if (to < 0).any() else to


def _off_diagonal(to: Ints) -> Pairs:
    return tuple((i, j) for i, j in enumerate(to.tolist()) if i != j)


def double(demand: Floats, *, duplex: bool = False) -> tuple[Configuration, ...]:
    """Return configurations of one weight that cover the demand: fewer than 2n if simplex.

    With T the busiest node's bytes, all have T/n: whole multiples of it are edges of a multigraph
    of degree n, which n matchings colour (König); what is left fits once more everywhere. Duplex:
    the first of these matchings are up to 2n - 1 (each edge takes the first colour that is free).
    """
    demand = checked(demand)
    if duplex:
        demand = np.maximum(demand, demand.T)
    n = len(demand)
    weight = float(max(demand.sum(0).max(initial=0.0), demand.sum(1).max(initial=0.0))) / max(n, 1)
    if not weight:
        return ()
    whole = np.floor(demand / weight + NOTHING).astype(np.int64)
    rest = demand - weight * whole > NOTHING * demand
    rounds = round_robin(n) if duplex else _rotations(n)
    colours = [*(_first_fit(whole) if duplex else _koenig(whole))]
    colours += [tuple(pair for pair in pairs if rest[pair]) for pairs in rounds]
    return tuple(Configuration(pairs, weight) for pairs in colours if pairs)


def _rotations(n: int) -> list[Pairs]:
    return [tuple((i, (i + turn) % n) for i in range(n)) for turn in range(1, n)]


def _koenig(whole: Ints) -> Iterator[Pairs]:
    """Yield as many matchings as the busiest line has edges, which together are the multigraph."""
    rest = np.rint(stuffed(whole.astype(np.float64))).astype(np.int64)
    real = whole.copy()
    rows = np.arange(len(rest))
    for _ in range(int(rest.sum(1).max(initial=0))):
        to = _perfect(rest > 0)
        assert to is not None, "a regular bipartite graph has a perfect matching"
        rest[rows, to] -= 1
        yield tuple((i, j) for i, j in enumerate(to.tolist()) if real[i, j] > 0)
        real[rows, to] -= 1


def _first_fit(whole: Ints) -> list[Pairs]:
    """Return matchings that together are the multigraph, each edge in the first that has room."""
    colours: list[list[Pair]] = []
    taken = [0] * len(whole)
    for i, j in np.argwhere(np.triu(whole, 1) > 0).tolist():
        for _ in range(int(whole[i, j])):
            free = ~(taken[i] | taken[j])
            colour = (free & -free).bit_length() - 1
            if colour == len(colours):
                colours.append([])
            colours[colour].append((i, j))
            taken[i] |= 1 << colour
            taken[j] |= 1 << colour
    return [tuple(pairs) for pairs in colours]


# -- few ones --------------------------------------------------------------------------------------


def few(
    demand: Floats,
    most: int,
    rates: Rates,
    delta_s: float,
    *,
    duplex: bool = True,
    allowed: Bools | None = None,
    planes: int = 1,
) -> tuple[Configuration, ...]:
    """Return at most so many configurations, each the most bytes per second of those that are left.

    They end where the electrical path is done with the rest by the time that `planes` of them are.
    """
    rest, found = checked(demand), list[Configuration]()
    least = NOTHING * rest.max(initial=0.0)
    while len(found) < most and (
        busy_s(found, rates, delta_s) < planes * electrical_s(rest, rates)
    ):
        best = _richest(rest, rates, delta_s, duplex=duplex, allowed=allowed)
        if best is None:
            break
        rest = np.maximum(rest - covered([best], len(rest), duplex=duplex), 0.0)
        rest[rest <= least] = 0.0
        found.append(best)
    return tuple(found)


def _richest(
    rest: Floats, rates: Rates, delta_s: float, *, duplex: bool, allowed: Bools | None
) -> Configuration | None:
    """Return the configuration that carries most bytes per second, dark time included."""
    best = best_duplex if duplex else best_simplex
    pairs = best(rest, allowed)
    if not pairs:
        return None
    carried = rest[count([pairs], len(rest), duplex=duplex) > 0]
    weights = np.unique(carried[carried > 0])
    bytes_at = np.minimum(carried[:, None], weights).sum(0)
    each_s = delta_s + weights / rates.circuit_bytes_per_s
    weight = float(weights[np.argmax(bytes_at / each_s)])
    return Configuration(best(np.minimum(rest, weight), allowed), weight)
