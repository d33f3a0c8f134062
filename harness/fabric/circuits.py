"""Where circuits go: shapes of a scenario turned into links of a topology. Pure.

A ring of p ToRs on duplex ports is two disjoint matchings when p is even and three when it is odd
(an odd cycle is not 2-edge-colourable); one switch carries one matching per uplink that a ToR has
on it. What no switch can carry is returned as *unserved* and stays on the electrical path.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.errors import UsageError
from harness.fabric.links import DARK, Edge, Link, Plan, Trunk, Uplink
from harness.fabric.matchings import ring, round_robin
from harness.fabric.planner import both_ways, lay, unjoined
from harness.fabric.topology import Topology
from harness.model.ports import parse_circuit
from harness.model.scenario import Shape


def plan_shape(topology: Topology, name: str, shape: Shape) -> Plan:
    """Turn a scenario's shape into links; raises `UsageError` naming the shape and its fault."""
    match shape.template:
        case "dark":
            return DARK
        case "ring":
            return _dealt(topology, ring_colours(tuple(topology.tors)), shape.rotate)
        case "pairs":
            round_ = factor_round(tuple(topology.tors), shape.rotate)
            return _dealt(topology, [round_] * len(topology.switches), 0)
        case "listed":
            return _listed(topology, name, shape)


def _dealt(topology: Topology, colours: Sequence[Sequence[Edge]], rotate: int) -> Plan:
    """Deal matchings to the switches, or, under two tiers, lay their edges through both."""
    if not topology.trunks:
        return assign(topology, colours, rotate)
    plan = lay(topology, both_ways(topology, (edge for colour in colours for edge in colour)))
    return Plan(plan.links, tuple(unjoined(plan.unserved, plan.links)))


def ring_colours(tors: Sequence[str]) -> list[list[Edge]]:
    """Return the ring's edges as matchings: two for an even number of ToRs, three for an odd one.

    Two ToRs have one edge, fewer none.
    """
    return [[(tors[a], tors[b]) for a, b in pairs] for pairs in ring(len(tors))]


def factor_round(tors: Sequence[str], round_: int) -> list[Edge]:
    """Return round `round_` of the 1-factorisation of the complete graph.

    With an odd number of ToRs one of them rests each round.
    """
    rounds = round_robin(len(tors))
    return [(tors[a], tors[b]) for a, b in rounds[round_ % len(rounds)]] if rounds else []


def assign(topology: Topology, colours: Sequence[Sequence[Edge]], rotate: int) -> Plan:
    """Deal matchings to switches in turn, starting at switch `rotate`; take free uplinks only.

    Where there are more matchings than switches, an edge may go to any switch that can carry it.
    """
    names = topology.switches
    plan = _Planner(topology)
    unserved: list[Edge] = []
    for i, colour in enumerate(colours):
        first = (i + rotate) % len(names) if names else 0
        order = names[first:] + names[:first]
        allowed = order if len(colours) > len(names) else order[:1]
        unserved += [e for e in colour if not any(plan.join(e, switch) for switch in allowed)]
    return Plan(frozenset(plan.links), tuple(unserved))


class _Planner:
    """Links so far, and the uplinks that are still free."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._taken: set[Uplink | Trunk] = set()
        self.links: set[Link] = set()

    def join(
        self, edge: Edge, switch: str, uplinks: tuple[str | None, str | None] = (None, None)
    ) -> bool:
        """Join two ToRs on `switch`, by these uplinks where named; False where none is free.

        On a core switch each end takes a trunk of the aggregation switch that its uplink is on.
        """
        a = self._free(edge[0], uplinks[0], switch)
        b = self._free(edge[1], uplinks[1], switch, a[1:] if a else ())
        if a is None or b is None:
            return False
        a, b = sorted((a, b))
        self._taken |= {*a, *b}
        self.links.add(Link(a[0], b[0], (*a[1:], *b[1:])))
        return True

    def _free(
        self, tor: str, device: str | None, switch: str, taken: Sequence[Uplink | Trunk] = ()
    ) -> tuple[Uplink, *tuple[Trunk, ...]] | None:
        """Return a free uplink of `tor` and, on a core switch, the trunk that leads there."""
        for up in self._topology.uplinks:
            if up.tor != tor or up in self._taken or device not in (None, up.device):
                continue
            if up.switch == switch:
                return (up,)
            for trunk in self._topology.trunks_of[switch]:
                if trunk.aggregation == up.switch and trunk not in {*self._taken, *taken}:
                    return up, trunk
        return None


def _listed(topology: Topology, name: str, shape: Shape) -> Plan:
    plan = _Planner(topology)
    for text in shape.circuits:
        circuit = parse_circuit(text)
        if circuit.switch not in topology.by_switch or not {*circuit.tors} <= {*topology.tors}:
            raise UsageError(
                f"shapes.{name}: {text!r} names a ToR or a switch that this bench has not"
            )
        if not plan.join(circuit.tors, circuit.switch, circuit.uplinks):
            raise UsageError(f"shapes.{name}: {text!r} needs an uplink that is taken or not there")
    return Plan(frozenset(plan.links))
