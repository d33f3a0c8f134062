"""Matchings of nodes: regular patterns, the best for a demand, and how long a demand takes. Pure.

A *matching* is what one plane carries at a time. On duplex planes a circuit joins an unordered pair
{i, j} and serves both directions, a port holds one circuit; on simplex planes it goes from i to j,
and a node has one fibre out and one in. A *demand* is a square matrix of bytes from row to column;
its diagonal counts for nothing. Nodes are indices: who they are, and by which uplinks they are
joined, is settled elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.errors import UsageError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Pair = tuple[int, int]
"""Two nodes: ``i < j`` where duplex, from i to j where simplex."""
Pairs = tuple[Pair, ...]
Planes = tuple[Pairs, ...]
"""Per plane, what it joins."""

EXACT = 2**52
"""Edmonds' algorithm wants whole numbers; more steps than these a float does not tell apart."""


@dataclass(frozen=True)
class Rates:
    """What one circuit carries in a direction, and the electrical path out of and into a node."""

    circuit_bytes_per_s: float
    electrical_bytes_per_s: float

    def __post_init__(self) -> None:
        if not (self.circuit_bytes_per_s > 0 and self.electrical_bytes_per_s > 0):
            raise UsageError(f"rates of circuits and of electrical paths are above 0, not {self}")


# -- what a demand costs ---------------------------------------------------------------------------


def checked(demand: Floats) -> Floats:
    """Return the demand with an empty diagonal; raises `UsageError` where it is none."""
    found = np.array(demand, np.float64)
    if found.ndim != 2 or found.shape[0] != found.shape[1]:
        raise UsageError(f"a demand is a square matrix of bytes, not of shape {found.shape}")
    if not (np.isfinite(found).all() and (found >= 0).all()):
        raise UsageError("a demand has finite bytes from 0 on")
    np.fill_diagonal(found, 0.0)
    return found


def by_traffic(demand: Floats) -> Ints:
    """Return the nodes by falling traffic: an order that does not depend on their names."""
    out, in_ = demand.sum(1), demand.sum(0)
    order: Ints = np.lexsort((-in_, -out, -(out + in_)))
    return order


def count(planes: Iterable[Pairs], n: int, *, duplex: bool) -> Ints:
    """Return how many circuits lead from each node (row) to each other one."""
    circuits = np.zeros((n, n), np.int64)
    for i, j in (pair for pairs in planes for pair in pairs):
        circuits[i, j] += 1
        if duplex:
            circuits[j, i] += 1
    return circuits


def finish_s(demand: Floats, circuits: Ints, rates: Rates) -> float:
    """Return when the last byte arrives, if nothing changes meanwhile; fluid, without headers.

    Pairs with C circuits take D / (C * rate), all at once (MixNet's D/C). The rest shares the
    electrical path: a node takes what it sends, or gets, by the rate of that path (the packet part
    of a hybrid switch; its core blocks nobody).
    """
    demand = checked(demand)
    lit = circuits > 0
    by_circuit_s = demand[lit] / (circuits[lit] * rates.circuit_bytes_per_s)
    rest_s = electrical_s(np.where(lit, 0.0, demand), rates)
    return max(float(by_circuit_s.max(initial=0.0)), rest_s)


def electrical_s(demand: Floats, rates: Rates) -> float:
    """Return when the node that sends or gets most is done, all by the electrical path."""
    busiest = max(demand.sum(0).max(initial=0.0), demand.sum(1).max(initial=0.0))
    return float(busiest) / rates.electrical_bytes_per_s


# -- the best one for a demand ---------------------------------------------------------------------


def best_simplex(demand: Floats, allowed: Bools | None = None) -> Pairs:
    """Return the matching that carries most: Hungarian, out and in apart. Carries nothing: dark."""
    from scipy.optimize import linear_sum_assignment  # noqa: PLC0415

    weight = _weights(demand, allowed)
    rows, columns = linear_sum_assignment(weight, maximize=True)
    used = weight[rows, columns] > 0
    return tuple(zip(rows[used].tolist(), columns[used].tolist(), strict=True))


def best_duplex(demand: Floats, allowed: Bools | None = None) -> Pairs:
    """Return the matching of pairs that carries most, both directions added up: Edmonds.

    A pair is allowed if either direction is.
    """
    import rustworkx  # noqa: PLC0415

    weight = _weights(demand, allowed)
    weight = np.triu(weight + weight.T, 1)
    if not weight.any():
        return ()
    whole = np.rint(weight * (EXACT / weight.max())).astype(np.int64)
    rows, columns = np.nonzero(whole)
    graph: rustworkx.PyGraph[None, int] = rustworkx.PyGraph(multigraph=False)
    graph.add_nodes_from([None] * len(whole))
    listed = zip(rows.tolist(), columns.tolist(), whole[rows, columns].tolist(), strict=True)
    graph.add_edges_from(list(listed))
    found = rustworkx.max_weight_matching(graph, weight_fn=int)
    return tuple(sorted((min(pair), max(pair)) for pair in found))


def _weights(demand: Floats, allowed: Bools | None) -> Floats:
    weight = checked(demand)
    return weight if allowed is None else np.where(allowed, weight, 0.0)


# -- regular patterns ------------------------------------------------------------------------------


def round_robin(n: int) -> Planes:
    """Return all pairs of n nodes as matchings: n - 1 for an even n, n of them for an odd one.

    The circle method: one seat stays, the others turn. With an odd n one node rests each round.
    """
    seats = n + n % 2
    rounds = []
    for turn in range(seats - 1 if n > 1 else 0):
        circle = [0, *((each - turn) % (seats - 1) + 1 for each in range(seats - 1))]
        pairs = [(circle[k], circle[-1 - k]) for k in range(seats // 2)]
        rounds.append(tuple(sorted((min(p), max(p)) for p in pairs if max(p) < n)))
    return tuple(rounds)


def mesh(n: int, planes: int) -> Planes:
    """Return so many rounds of all pairs, over again where there are more planes than rounds."""
    rounds = round_robin(n)
    return tuple(rounds[k % len(rounds)] if rounds else () for k in range(planes))


def chain(n: int) -> Planes:
    """Return the path 0-1-...: its odd and its even steps."""
    steps = [(k, k + 1) for k in range(n - 1)]
    return _some([steps[0::2], steps[1::2]])


def ring(n: int) -> Planes:
    """Return the ring 0-1-...-0: two matchings if n is even, three if odd; two nodes have one edge.

    An odd ring is not 2-edge-colourable.
    """
    return chain(n) if n < 3 else _closed(n)


def _closed(n: int) -> Planes:
    last = (0, n - 1)
    steps = chain(n)
    if n % 2 == 0:
        return steps[0], (last, *steps[1])
    return (*steps, (last,))


def torus(dims: Sequence[int]) -> Planes:
    """Return a ring along each dimension, one after the other; nodes are numbered row by row."""
    numbers = np.arange(int(np.prod(dims, dtype=np.int64))).reshape(tuple(dims))
    planes = []
    for axis, size in enumerate(dims):
        lines = np.moveaxis(numbers, axis, -1).reshape(-1, size)
        planes += [
            tuple((int(line[a]), int(line[b])) for line in lines for a, b in colour)
            for colour in ring(size)
        ]
    return tuple(planes)


def tree(n: int) -> Planes:
    """Return the binary tree in heap order: node k hangs on (k - 1) // 2; three matchings at most.

    A node's way up has one colour, its two ways down have the two others.
    """
    up = [2] * n
    colours: list[list[Pair]] = [[], [], []]
    for k in range(1, n):
        above = (k - 1) // 2
        up[k] = [colour for colour in range(3) if colour != up[above]][(k - 1) % 2]
        colours[up[k]].append((above, k))
    return _some(colours)


def bipartite(left: Sequence[int], right: Sequence[int], planes: int) -> Planes:
    """Return so many rounds of everyone of `left` with everyone of `right`, by rotation.

    Where the sides differ in size, some of the larger rest each round. Pairs lead left to right.
    """
    size = max(len(left), len(right))
    if not (left and right):
        return ((),) * planes
    return tuple(
        tuple(
            (left[a], right[(a + turn) % size])
            for a in range(len(left))
            if (a + turn) % size < len(right)
        )
        for turn in (k % size for k in range(planes))
    )


def isolated(groups: Sequence[Sequence[int]], planes: int) -> Planes:
    """Return a mesh within each group of nodes, and nothing between groups."""
    meshes = [named(mesh(len(group), planes), group) for group in groups]
    return tuple(
        tuple(sorted((min(p), max(p)) for rounds in meshes for p in rounds[k]))
        for k in range(planes)
    )


def named(planes: Planes, names: Sequence[int]) -> Planes:
    """Return these planes with node k called ``names[k]``."""
    return tuple(tuple((names[a], names[b]) for a, b in pairs) for pairs in planes)


def _some(colours: Iterable[Iterable[Pair]]) -> Planes:
    return tuple(pairs for pairs in map(tuple, colours) if pairs)
