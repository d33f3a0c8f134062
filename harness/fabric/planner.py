"""From a demand to links: which ToRs are joined, over which uplinks and trunks. Pure.

`lay` puts given pairs of ToRs on a topology; `plan_demand` says which pairs, by the demand or by a
regular pattern. What is lit and still wanted stays as it is; what is broken is not used; pairs that
get no circuit are told, and stay on the electrical path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain as chained
from typing import Literal

import numpy as np
import rustworkx

from harness.errors import UsageError
from harness.fabric import matchings
from harness.fabric.laying import Board, is_one_way
from harness.fabric.links import Edge, Link, Plan
from harness.fabric.matchings import Floats, Pair, Planes, checked
from harness.fabric.prediction import capacity
from harness.fabric.serving import Serving
from harness.fabric.topology import Topology

Method = Literal[
    "greedy",
    "edmonds",
    "hungarian",
    "mesh",
    "isolated",
    "bipartite",
    "tree",
    "chain",
    "ring",
    "static",
]
WORTH = 0.95
"""Below this share of its time, a plan from scratch replaces one that starts from what is lit."""


def lay(
    topology: Topology,
    wanted: Sequence[Edge],
    *,
    lit: frozenset[Link] = frozenset(),
    broken: frozenset[str] = frozenset(),
) -> Plan:
    """Put pairs of ToRs on uplinks and trunks, the most important first; repeats are parallel.

    Lit links between ToRs that are wanted stay. ToRs that share a switch are joined on one, others
    over a core. A pair leads both ways, or from the first to the second where all switches are
    simplex. Raises `UsageError` where a ToR, or what is broken, is unknown.
    """
    for tor in {tor for pair in wanted for tor in pair} - topology.tors.keys():
        raise UsageError(f"a circuit is wanted at {tor!r}, which is no ToR of this bench")
    return _lay(topology, wanted, lit, broken, stay=True)


def _lay(
    topology: Topology,
    wanted: Sequence[Edge],
    lit: frozenset[Link],
    broken: frozenset[str],
    *,
    stay: bool,
) -> Plan:
    """Lay pairs of ToRs; lit links among them stay, or move only where others need their planes."""
    board = Board(topology, tuple(topology.tors), broken)
    edges = [board.edge(*pair) for pair in wanted]
    board.keep(lit, Counter(edges), stay=stay)
    kept = Counter({edge: len(lines) for edge, lines in board.lines.items()})
    unserved = []
    for pair, edge in zip(wanted, edges, strict=True):
        if kept[edge]:
            kept[edge] -= 1
        elif edge[0] == edge[1] or not board.place(edge):
            unserved.append(pair)
    return Plan(board.links(), tuple(unserved))


def plan_demand(
    topology: Topology,
    sent_bytes: Floats,
    *,
    lit: frozenset[Link] = frozenset(),
    broken: frozenset[str] = frozenset(),
    method: Method = "greedy",
) -> Plan:
    """Plan circuits for bytes from ToR to ToR, in the order of `topology.tors`.

    `greedy` gives circuits to what ends last; it starts from what is lit, unless a plan from
    scratch is faster by a twentieth. `edmonds` (duplex) and `hungarian` (simplex) take the matching
    that carries most, again and again. The others are patterns, both ways, between the ToRs that
    send or get anything (`static`: between all), over and over until the uplinks are used.

    `unserved` are the pairs that the demand, or the pattern, asks for and that get no circuit, the
    largest demand first. Raises `UsageError` where the matrix does not fit the topology, a pattern
    the demand, or where a name in `broken` is unknown.
    """
    demand = checked(sent_bytes)
    if len(demand) != len(topology.tors):
        raise UsageError(
            f"the demand is of {len(demand)} ToRs, this bench has {len(topology.tors)}"
        )
    if method == "greedy":
        links = _greedy(topology, demand, lit, broken)
        return Plan(links, _unserved(topology, demand, links))
    if method in ("edmonds", "hungarian"):
        wanted = _matched(topology, demand, broken, method)
        links = lay(topology, wanted, lit=lit, broken=broken).links
        return Plan(links, _unserved(topology, demand, links))
    names = tuple(topology.tors)
    pairs = [(names[i], names[j]) for i, j in _pattern(topology, demand, method)]
    asked = both_ways(topology, pairs)
    links = lay(topology, asked, lit=lit, broken=broken).links
    return Plan(links, tuple(unjoined(asked, links)))


def both_ways(topology: Topology, pairs: Iterable[Edge]) -> list[Edge]:
    """Return what joins each pair both ways: where circuits are one-way, one back beside each."""
    if not is_one_way(topology):
        return list(pairs)
    return [way for a, b in pairs for way in ((a, b), (b, a))]


def _unserved(topology: Topology, demand: Floats, links: Iterable[Link]) -> tuple[Edge, ...]:
    """Return the pairs that a demand asks for and no link joins, the largest first.

    Each once where duplex.
    """
    names = tuple(topology.tors)
    if not is_one_way(topology):
        demand = np.triu(np.maximum(demand, demand.T))
    rest = np.where(capacity(topology, links).circuits > 0, 0.0, demand)
    order = np.argsort(-rest, axis=None, kind="stable")[: np.count_nonzero(rest)]
    rows, columns = np.unravel_index(order, rest.shape)
    pairs = zip(rows.tolist(), columns.tolist(), strict=True)
    return tuple((names[i], names[j]) for i, j in pairs)


def unjoined(asked: Iterable[Edge], links: Iterable[Link]) -> Iterator[Edge]:
    """Yield the pairs, once each, from whose first no link leads to the second."""
    joined = {(near.tor, far.tor) for link in links for near, far in link.ways}
    yield from (pair for pair in dict.fromkeys(asked) if pair not in joined)


# -- by demand -------------------------------------------------------------------------------------


def _greedy(
    topology: Topology, demand: Floats, lit: frozenset[Link], broken: frozenset[str]
) -> frozenset[Link]:
    kept = _served(topology, demand, lit, broken)
    if not lit or kept.last_s() <= kept.floor_s:
        return kept.links()
    fresh = _served(topology, demand, frozenset(), broken)
    if fresh.last_s() >= WORTH * kept.last_s():
        return kept.links()
    wanted = [fresh.names(edge) for edge in fresh.by_finish()]
    moving = [_lay(topology, wanted, lit, broken, stay=stay).links for stay in (True, False)]
    plans = [*moving, fresh.links()]
    times = [capacity(topology, links).finish_ns(demand) for links in plans]
    return next(plan for plan, time in zip(plans, times, strict=True) if WORTH * time <= min(times))


def _served(
    topology: Topology, demand: Floats, lit: frozenset[Link], broken: frozenset[str]
) -> Serving:
    board = Serving(topology, demand, broken)
    board.keep(lit, board.carries(lit), stay=False)
    board.fill()
    if board.relieve():
        board.fill()
    return board


def _matched(
    topology: Topology, demand: Floats, broken: frozenset[str], method: Method
) -> list[Edge]:
    """Return the pairs of matchings that carry most, one after the other, while any can be laid.

    A pair that has C circuits counts with D / (C + 1).
    """
    one_way, names = is_one_way(topology), tuple(topology.tors)
    if one_way != (method == "hungarian"):
        raise UsageError(
            f"method {method!r}: this fabric is {'simplex' if one_way else 'duplex'}; hungarian is "
            "for fabrics of which every switch is simplex, edmonds for others"
        )
    best = matchings.best_simplex if one_way else matchings.best_duplex
    board = Board(topology, names, broken)
    allowed = np.ones(demand.shape, bool)
    circuits = np.zeros(demand.shape)
    wanted: list[Edge] = []
    while pairs := best(demand / (1 + circuits), allowed):
        for i, j in pairs:
            ways = ([i], [j]) if one_way else ([i, j], [j, i])
            if board.place((i, j)):
                circuits[ways] += 1
                wanted.append((names[i], names[j]))
            else:
                allowed[ways] = False
    return wanted


# -- by pattern ------------------------------------------------------------------------------------


def _pattern(topology: Topology, demand: Floats, method: Method) -> list[Pair]:
    """Return the pairs of a pattern, as often as a ToR has uplinks."""
    busy = (
        np.arange(len(demand))
        if method == "static"
        else np.flatnonzero(demand.any(0) | demand.any(1))
    )
    nodes = _root_first(demand, busy.tolist()) if method in ("tree", "chain") else busy.tolist()
    most = max(Counter(up.tor for up in topology.uplinks).values(), default=0)
    groups = _pods(topology, nodes)
    match method:
        case "mesh":
            planes = matchings.named(matchings.mesh(len(nodes), most), nodes)
        case "isolated":
            planes = matchings.isolated(groups, most)
        case "bipartite":
            planes = matchings.bipartite(*_halves(demand, nodes), most)
        case "static":
            planes = (*matchings.isolated(groups, 1), *_between(groups, most - 1))
        case _:
            shape = {"tree": matchings.tree, "chain": matchings.chain, "ring": matchings.ring}[
                method
            ]
            planes = matchings.named(shape(len(nodes)), nodes) * most
    return list(chained.from_iterable(planes))


def _pods(topology: Topology, nodes: Sequence[int]) -> list[list[int]]:
    """Return these ToRs by pod."""
    names = tuple(topology.tors)
    return [[k for k in nodes if topology.tors[names[k]].pod == pod] for pod in topology.pods]


def _root_first(demand: Floats, nodes: Sequence[int]) -> list[int]:
    """Return ToRs as they are, but for the one that sends most beyond what it gets: it is first."""
    excess = demand.sum(1) - demand.sum(0)
    return sorted(nodes, key=lambda k: k != max(nodes, key=lambda each: excess[each]))


def _halves(demand: Floats, nodes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the two sides of a demand within which nobody sends anything to each other."""
    graph: rustworkx.PyGraph[int, None] = rustworkx.PyGraph()
    graph.add_nodes_from(range(len(demand)))
    graph.add_edges_from_no_data([(int(i), int(j)) for i, j in np.argwhere(demand > 0)])
    side: Mapping[int, int] | None = rustworkx.two_color(graph)
    if side is None:
        raise UsageError(
            "method 'bipartite': the demand has no two sides; some ToRs that send to each other "
            "also send to the same third one. Use mesh or greedy"
        )
    return [k for k in nodes if not side[k]], [k for k in nodes if side[k]]


def _between(groups: Sequence[Sequence[int]], planes: int) -> Planes:
    """Return so many rounds of everyone of a pod with everyone of another pod."""
    rounds = matchings.round_robin(len(groups))
    found: list[tuple[Pair, ...]] = []
    for k in range(planes if rounds else 0):
        pods = rounds[k % len(rounds)]
        turn = k // len(rounds)
        sides = [matchings.bipartite(groups[a], groups[b], turn + 1)[turn] for a, b in pods]
        found.append(tuple(chained.from_iterable(sides)))
    return tuple(found)
