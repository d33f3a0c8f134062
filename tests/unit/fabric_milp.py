"""The exact optimum of small circuit planning problems, by mixed-integer programmes (HiGHS).

`optimum_s`: one configuration. Variables, all binary but T: x[k, p], edge k has a circuit on plane
p; y[k, c], edge k has c circuits.

    minimise T
    sum over c of y[k, c]                          =  1                  for every edge k
    sum over c of c * y[k, c]                      <= sum over p of x[k, p]
    sum over c > 0 of D_k / (c * rate) * y[k, c]   <= T
    sum over unlit k at a node of D_k * y[k, 0]    <= T * electrical     egress, ingress
    sum over k at an end of x[k, p]                <= ports of the end on p

`schedule_optimum_s`: several configurations on like planes. Variables: t[p, m] >= 0, how long plane
p carries maximal matching m; z[p, m], whether it does; r[k] >= 0, what is left of pair k.

    minimise T
    r[k] + rate * sum over m that serve k, and p, of t[p, m]   >= D_k
    sum of r at a node                                         <= T * electrical
    sum over m of t[p, m] + delta * z[p, m]                    <= T
    t[p, m]                                                    <= T of the electrical path alone * z

Any matching is part of a maximal one, and carrying less does no harm, so both are exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from harness.fabric.matchings import Floats, Ints, Pairs, Rates, count, electrical_s

KINDS = ("even", "skewed", "sparse", "hot rows and columns", "levels with ties")
DELTAS = (0.0, 0.01, 0.05, 0.2, 0.5)
"""Switching time, in times that the busiest node takes over one circuit."""


@dataclass(frozen=True)
class SmallCase:
    """A demand and what may serve it."""

    kind: str
    demand: Floats
    ports: Ints
    rates: Rates
    duplex: bool
    delta_s: float

    @property
    def planes(self) -> int:
        return self.ports.shape[1]


def random_demand(rng: np.random.Generator, n: int, kind: str) -> Floats:
    match kind:
        case "even":
            demand = rng.random((n, n))
        case "skewed":
            demand = rng.lognormal(0, 1.5, (n, n))
        case "sparse":
            demand = rng.lognormal(0, 1, (n, n)) * (rng.random((n, n)) < 0.4)
        case "hot rows and columns":
            demand = np.outer(rng.pareto(1.5, n) + 0.1, rng.pareto(1.5, n) + 0.1)
        case _:
            demand = 1.0 + (rng.random((n, n)) < 0.2) * rng.integers(1, 10)
    np.fill_diagonal(demand, 0.0)
    return demand * 1e9


def random_case(seed: int, *, nodes_max: int = 6, planes_max: int = 3) -> SmallCase:
    """Three nodes or more; the electrical path has 1/4 to 2 times the rate of a circuit.

    One case in three lacks some ports.
    """
    rng = np.random.default_rng(seed)
    n, planes = int(rng.integers(3, nodes_max + 1)), int(rng.integers(1, planes_max + 1))
    kind = KINDS[seed % len(KINDS)]
    demand = random_demand(rng, n, kind)
    there = rng.random((n, planes)) < (0.8 if rng.random() < 1 / 3 else 1.0)
    busiest_s = max(demand.sum(0).max(), demand.sum(1).max()) / 1e9
    return SmallCase(
        kind,
        demand,
        there.astype(np.int64),
        Rates(1e9, 1e9 * float(rng.choice([0.25, 0.5, 1.0, 2.0]))),
        duplex=bool(rng.random() < 0.5),
        delta_s=float(rng.choice(DELTAS)) * busiest_s,
    )


@dataclass
class _Programme:
    """Rows of a mixed-integer programme; variable 0 is T, which is made small."""

    whole: list[bool] = field(default_factory=lambda: [False])
    rows: list[dict[int, float]] = field(default_factory=list)

    def variable(self, *, whole: bool) -> int:
        self.whole.append(whole)
        return len(self.whole) - 1

    def at_least_0(self, row: dict[int, float], constant: float = 0.0) -> None:
        self.rows.append({**row, -1: constant})

    def solve(self, most: float, gap: float) -> float:
        """Return a proven lower bound of the smallest T, within `gap` of it."""
        n = len(self.whole)
        entries = [(r, v, k) for r, row in enumerate(self.rows) for v, k in row.items() if v >= 0]
        at, columns, values = zip(*entries, strict=True)
        matrix = csr_array((values, (at, columns)), shape=(len(self.rows), n))
        whole = np.array(self.whole)
        found = milp(
            np.arange(n) == 0,
            constraints=LinearConstraint(matrix, [-row[-1] for row in self.rows], np.inf),
            integrality=whole.astype(int),
            bounds=Bounds(0, np.where(whole, most, np.inf)),
            options={"mip_rel_gap": gap},
        )
        assert found.success, found.message
        return float(found.mip_dual_bound if found.mip_dual_bound is not None else found.fun)


def optimum_s(case: SmallCase) -> float:
    """Return the smallest finish time of one configuration."""
    n, planes = case.ports.shape
    unit = case.demand.max(initial=0.0)
    if not unit:
        return 0.0
    demand, programme = case.demand / unit, _Programme()
    electrical = case.rates.electrical_bytes_per_s / case.rates.circuit_bytes_per_s
    sides: list[dict[int, float]] = [{} for _ in range(2 * n)]
    used: dict[tuple[int, int, int], list[int]] = {}
    for i, j in np.argwhere(demand + demand.T * case.duplex > 0).tolist():
        if case.duplex and j < i:
            continue
        x = [programme.variable(whole=True) for _ in range(planes)]
        y = [programme.variable(whole=True) for _ in range(planes + 1)]
        for sign in (1, -1):
            programme.at_least_0(dict.fromkeys(y, sign), -sign)
        counted = {each: -float(c) for c, each in enumerate(y)}
        programme.at_least_0({**dict.fromkeys(x, 1.0), **counted})
        longest = max(demand[i, j], demand[j, i] * case.duplex)
        programme.at_least_0({0: 1.0, **{y[c]: -longest / c for c in range(1, planes + 1)}})
        for a, b in ((i, j), (j, i)) if case.duplex else ((i, j),):
            sides[a][y[0]] = sides[n + b][y[0]] = -demand[a, b]
        for p in range(planes):
            for end in ((i, 0), (j, int(not case.duplex))):
                used.setdefault((*end, p), []).append(x[p])
    for side in sides:
        programme.at_least_0({0: electrical, **side})
    for (node, _, p), several in used.items():
        programme.at_least_0(dict.fromkeys(several, -1.0), float(case.ports[node, p]))
    return programme.solve(case.ports.max(initial=0), 1e-7) * unit / case.rates.circuit_bytes_per_s


def schedule_optimum_s(case: SmallCase, gap: float = 1e-3) -> float:
    """Return the smallest makespan of any sequences, where every node has a port on each plane."""
    n, planes = case.ports.shape
    unit = float(max(case.demand.sum(0).max(), case.demand.sum(1).max()))
    if not unit:
        return 0.0
    demand, rate = case.demand / unit, case.rates.circuit_bytes_per_s
    alone = electrical_s(case.demand, case.rates) * rate / unit
    served = [count([m], n, duplex=case.duplex) > 0 for m in maximal_matchings(n, case.duplex)]
    programme = _Programme()
    lasts = [[programme.variable(whole=False) for _ in served] for _ in range(planes)]
    sides: list[dict[int, float]] = [{} for _ in range(2 * n)]
    for i, j in np.argwhere(demand > 0).tolist():
        rest = programme.variable(whole=False)
        sides[i][rest] = sides[n + j][rest] = -1.0
        serves = [t for plane in lasts for t, some in zip(plane, served, strict=True) if some[i, j]]
        programme.at_least_0({rest: 1.0, **dict.fromkeys(serves, 1.0)}, -demand[i, j])
    for side in sides:
        programme.at_least_0({0: case.rates.electrical_bytes_per_s / rate, **side})
    for plane in lasts:
        on = [programme.variable(whole=True) for _ in plane]
        dark = dict.fromkeys(on, -case.delta_s * rate / unit)
        programme.at_least_0({0: 1.0, **dict.fromkeys(plane, -1.0), **dark})
        for t, z in zip(plane, on, strict=True):
            programme.at_least_0({z: alone, t: -1.0})
    for first, second in pairwise(lasts):  # like planes: one order of them
        programme.at_least_0({**dict.fromkeys(first, 1.0), **dict.fromkeys(second, -1.0)})
    return programme.solve(1, gap) * unit / rate


def maximal_matchings(n: int, duplex: bool) -> list[Pairs]:
    """Return all matchings of n nodes to which no pair can be added."""
    edges = [(i, j) for i in range(n) for j in range(n) if (i < j if duplex else i != j)]

    def ends(pair: tuple[int, int]) -> set[int]:
        return {pair[0], pair[1] if duplex else n + pair[1]}

    def grown(pairs: Pairs, taken: set[int], rest: list[tuple[int, int]]) -> list[Pairs]:
        if not rest:
            return [pairs] if all(taken & ends(pair) for pair in edges) else []
        first, *others = rest
        found = grown(pairs, taken, others)
        if not taken & ends(first):
            found += grown((*pairs, first), taken | ends(first), others)
        return found

    return grown((), set(), edges)
