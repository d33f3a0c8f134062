"""Where circuits go: shapes of a scenario turned into links of a topology. Pure.

A ring of p ToRs on duplex ports is two disjoint matchings when p is even and three when it is odd
(an odd cycle is not 2-edge-colourable); one switch carries one matching per uplink that a ToR has
on it. What no switch can carry is returned as *unserved* and stays on the electrical path.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.errors import UsageError
from harness.fabric.topology import Link, Topology, Uplink
from harness.model.scenario import Shape

Edge = tuple[str, str]
"""Two ToR names."""


@dataclass(frozen=True)
class Plan:
    """Links to bring up, and the edges of the shape that no switch can carry."""

    links: frozenset[Link]
    unserved: tuple[Edge, ...] = ()


DARK = Plan(frozenset())


def plan_shape(topology: Topology, name: str, shape: Shape) -> Plan:
    """Turn a scenario's shape into links; raises `UsageError` naming the shape and its fault."""
    match shape.template:
        case "dark":
            return DARK
        case "ring":
            return assign(topology, ring_colours(tuple(topology.tors)), shape.rotate)
        case "pairs":
            round_ = factor_round(tuple(topology.tors), shape.rotate)
            return assign(topology, [round_] * len(topology.switches), 0)
        case "listed":
            return _listed(topology, name, shape)


def ring_colours(tors: Sequence[str]) -> list[list[Edge]]:
    """Return the ring's edges as matchings: two for an even number of ToRs, three for an odd one.

    Two ToRs have one edge, fewer none.
    """
    if len(tors) < 2:
        return []
    if len(tors) == 2:
        return [[(tors[0], tors[1])]]
    edges = [(tors[i], tors[(i + 1) % len(tors)]) for i in range(len(tors))]
    if len(tors) % 2 == 0:
        return [edges[0::2], edges[1::2]]
    return [edges[0:-1:2], edges[1:-1:2], [edges[-1]]]


def factor_round(tors: Sequence[str], round_: int) -> list[Edge]:
    """Return round `round_` of the 1-factorisation of the complete graph (circle method).

    With an odd number of ToRs one of them rests each round.
    """
    seats: list[str | None] = [*tors] if len(tors) % 2 == 0 else [*tors, None]
    if len(seats) < 2:
        return []
    turns = round_ % (len(seats) - 1)
    circle = seats[1:]
    circle = circle[-turns:] + circle[:-turns] if turns else circle
    order = [seats[0], *circle]
    pairs = [(order[i], order[-1 - i]) for i in range(len(order) // 2)]
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def assign(topology: Topology, colours: Sequence[Sequence[Edge]], rotate: int) -> Plan:
    """Deal matchings to switches in turn, starting at switch `rotate`; take free uplinks only."""
    taken: set[Uplink] = set()
    links: set[Link] = set()
    unserved: list[Edge] = []
    for i, colour in enumerate(colours):
        for edge in colour:
            if not topology.switches:
                unserved.append(edge)
                continue
            first = (i + rotate) % len(topology.switches)
            order = topology.switches[first:] + topology.switches[:first]
            link = _place(topology, edge, order if len(colours) > len(order) else order[:1], taken)
            if link is None:
                unserved.append(edge)
                continue
            taken |= {link.a, link.b}
            links.add(link)
    return Plan(frozenset(links), tuple(unserved))


def _place(
    topology: Topology, edge: Edge, switches: Iterable[str], taken: set[Uplink]
) -> Link | None:
    for switch in switches:
        free = [up for up in topology.by_switch[switch] if up not in taken]
        a = next((up for up in free if up.tor == edge[0]), None)
        b = next((up for up in free if up.tor == edge[1]), None)
        if a and b:
            return Link(*sorted((a, b)))
    return None


def _listed(topology: Topology, name: str, shape: Shape) -> Plan:
    taken: set[Uplink] = set()
    links: set[Link] = set()
    for text in shape.circuits:
        ends, _, switch = text.partition("@")
        near, _, far = ends.partition("-")
        if switch not in topology.by_switch or not {near, far} <= set(topology.tors):
            raise UsageError(
                f"shapes.{name}: {text!r} is not 'TOR-TOR@SWITCH' with ToRs from "
                f"{', '.join(topology.tors)} and switches from {', '.join(topology.switches)}"
            )
        link = _place(topology, (near, far), [switch], taken)
        if link is None:
            raise UsageError(
                f"shapes.{name}: {text!r} needs a free uplink of {near} and of {far} on {switch}"
            )
        taken |= {link.a, link.b}
        links.add(link)
    return Plan(frozenset(links))
