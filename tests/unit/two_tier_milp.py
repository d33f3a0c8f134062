"""Random small fabrics of one tier or two, and the exact optimum of their circuits (HiGHS)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from harness.fabric.laying import is_one_way
from harness.fabric.topology import Topology, topology_of
from harness.model.bench import Bench, EmulatedUnit, Links, Node, Switch, Tor

Floats = NDArray[np.float64]
Port = tuple[str, str, str]
"""ToR or core, aggregation switch, and the direction of the light where one-way."""


def random_fabric(rng: np.random.Generator, *, two_tier: bool) -> Topology:
    """One to three uplinks a ToR, one to three hosts, anywhere; up to three trunks a plane."""
    planes, cores = int(rng.integers(1, 3 if two_tier else 4)), int(rng.integers(1, 3))
    ports: Counter[str] = Counter()

    def port(switch: str) -> str:
        ports[switch] += 1
        return f"{switch}:{ports[switch]}"

    tors, nodes, cables = {}, {}, {}
    for pod in range(1 + two_tier):
        for _ in range(int(rng.integers(1, 4) if two_tier else rng.integers(2, 6))):
            name = f"t{len(tors)}"
            tors[name] = Tor(uplinks=int(rng.integers(1, 4)), pod=f"p{pod}")
            for u in range(tors[name].uplinks):
                cables[f"{name}:u{u + 1}"] = port(f"agg{pod * planes + int(rng.integers(planes))}")
            nodes |= {f"{name}.{k}": Node(tor=name) for k in range(int(rng.integers(1, 4)))}
        for plane in range(planes if two_tier else 0):
            for _ in range(int(rng.integers(0, 4))):
                near = port(f"agg{pod * planes + plane}")
                cables[near] = port(f"core{int(rng.integers(cores))}")
    kind = "simplex" if rng.random() < 0.3 else "duplex"
    tiers = {f"agg{k}": "aggregation" for k in range(planes * (1 + two_tier))}
    tiers |= {f"core{k}": "core" for k in range(cores if two_tier else 0)}
    switches = {
        name: Switch(
            driver="polatis-scpi", url="tcp://", ports="1-64", circuits=kind,  # type: ignore[arg-type]
            tier=tier, emulate=EmulatedUnit(ports=32),  # type: ignore[arg-type]
        )
        for name, tier in tiers.items()
    }  # fmt: skip
    links = Links(oversubscription=float(rng.choice([1.5, 2, 4, 8])))
    return topology_of(
        Bench(
            name="random", world="simulated", nodes=nodes, tors=tors, switches=switches,
            cables=cables, links=links,
        )
    )  # fmt: skip


def random_demand(rng: np.random.Generator, n: int) -> Floats:
    """Skewed more or less, dense or sparse."""
    demand = rng.lognormal(20, float(rng.choice([0.3, 1, 2])), (n, n))
    demand *= rng.random((n, n)) < rng.choice([0.3, 0.6, 1])
    np.fill_diagonal(demand, 0)
    return demand


def optimum(topology: Topology, demand: Floats) -> float:
    """The least finish of any circuits, in bytes over the rate of one circuit.

    Variables: the finish, how many circuits go which way, and which number each pair has.
    """
    names, one_way = list(topology.tors), is_one_way(topology)
    rate = topology.rates
    electrical = [topology.electrical_mbit_per_s(tor) / rate.link_mbit_per_s for tor in names]
    sums = np.maximum(demand.sum(1), demand.sum(0)) / electrical / rate.oversubscription
    edges = [
        (i, j)
        for i, j in np.argwhere(demand + (0 if one_way else demand.T) > 0).tolist()
        if one_way or i < j
    ]
    if not edges:
        return float(sums.max())
    scale, most = demand.max(), max(Counter(up.tor for up in topology.uplinks).values())
    ways = [
        (e, way) for e, (i, j) in enumerate(edges) for way in _ways(topology, names[i], names[j])
    ]
    chosen = 1 + len(ways)
    rows: list[tuple[dict[int, float], float, float]] = []
    for port, number in _ports(topology).items():
        used = {1 + w: 1.0 for w, (_, way) in enumerate(ways) if port in way}
        rows.append((used, 0, number))
    sides: dict[tuple[int, int], dict[int, float]] = {}
    for e, (i, j) in enumerate(edges):
        first = chosen + e * (most + 1)
        rows.append(({first + c: 1.0 for c in range(most + 1)}, 1, 1))
        here = {1 + w: -1.0 for w, (other, _) in enumerate(ways) if other == e}
        rows.append((here | {first + c: float(c) for c in range(1, most + 1)}, -np.inf, 0))
        alone = (demand[i, j] if one_way else max(demand[i, j], demand[j, i])) / scale
        rows.append(({0: 1.0} | {first + c: -alone / c for c in range(1, most + 1)}, 0, np.inf))
        for a, b in ((i, j),) if one_way else ((i, j), (j, i)):
            for side, path in (((a, 0), electrical[a]), ((b, 1), electrical[b])):
                row = sides.setdefault(side, {0: 1.0})
                row[first] = row.get(first, 0.0) - demand[a, b] / path / scale
    rows += [(row, 0, np.inf) for row in sides.values()]
    return max(float(sums.max()), _least(rows, chosen + len(edges) * (most + 1), most) * scale)


def _least(rows: list[tuple[dict[int, float], float, float]], n: int, most: int) -> float:
    """Return the least value of variable 0; all others are whole numbers up to `most`."""
    matrix = lil_matrix((len(rows), n))
    for k, (row, _, _) in enumerate(rows):
        for variable, factor in row.items():
            matrix[k, variable] = factor
    upper = np.full(n, float(most))
    upper[0] = np.inf
    found = milp(
        np.eye(n)[0],
        constraints=LinearConstraint(matrix.tocsr(), [r[1] for r in rows], [r[2] for r in rows]),
        integrality=np.arange(n) > 0,
        bounds=Bounds(0, upper),
        options={"mip_rel_gap": 1e-6},
    )
    assert found.success, found.message
    return float(found.x[0])


def _ports(topology: Topology) -> Counter[Port]:
    """How often each port is there, each direction of its light by itself and both together."""
    ends = [(up.tor, up.switch) for up in topology.uplinks]
    ends += [(trunk.core, trunk.aggregation) for trunk in topology.trunks]
    return Counter((*end, way) for end in ends for way in ("", "out", "in"))


def _ways(topology: Topology, a: str, b: str) -> Iterator[tuple[Port, ...]]:
    """Yield the ports that a circuit from a to b can take: on one switch; if none, over a core."""
    ports = _ports(topology)
    out, in_ = ("out", "in") if is_one_way(topology) else ("", "")
    planes = {tor: {s for v, s, _ in ports if v == tor} for tor in (a, b)}
    if both := planes[a] & planes[b]:
        yield from (((a, s, out), (b, s, in_)) for s in both)
        return
    for core in {trunk.core for trunk in topology.trunks}:
        for near in planes[a]:
            for far in planes[b]:
                way = ((a, near, out), (core, near, in_), (core, far, out), (b, far, in_))
                if all(port in ports for port in way):
                    yield way
