"""What is cabled to what: pods, ToRs, nodes, uplinks, trunks, and the fibre pairs they land on.

Built from a bench file, immutable, free of I/O. An *uplink* is one ToR port with a transmit and a
receive fibre, a *trunk* a fibre pair between an aggregation switch and a core switch; a *link* is
two uplinks joined by circuits, one each way, on one switch or through trunks and a core switch.
Address plan of emulated benches (all inside 198.18.0.0/15, the range reserved for benchmarking):

    198.19.<tor>.0/24     hosts of a ToR: gateway .1, nodes from .10
    198.18.128.0/18       uplinks, one address each, in the order of the bench file
    198.18.192.0/18       electrical point-to-point links, /31 each
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from ipaddress import IPv4Address
from typing import Literal

from drivers.base import Matching
from drivers.tor.base import Hop, Route
from harness.clock import NS_PER_MS
from harness.errors import UsageError
from harness.fabric.links import Link, Trunk, Uplink
from harness.model.bench import Bench
from harness.model.ports import Fibres, is_trunk, parse_cable, parse_ports, parse_trunk

HOSTS = IPv4Address("198.19.0.0")
UPLINKS = IPv4Address("198.18.128.0")
ELECTRICAL = IPv4Address("198.18.192.0")
TORS_MAX = 250
CUT_SHARE = 1e-6
"""Of its rate, what plans take a cut electrical path for. Not 0: of two plans that both leave
traffic stranded, one is better."""


@dataclass(frozen=True)
class Plane:
    """One switch as plans see it."""

    name: str
    tier: Literal["aggregation", "core"] = "aggregation"
    duplex: bool = True
    """Whether a circuit and its opposite go over the same two uplinks."""
    switching_ns: int = 25 * NS_PER_MS
    """How long a circuit that moves is expected to stay dark."""
    hold_ns: int = 0
    """How long a port stays down after its light returns."""


@dataclass(frozen=True)
class Rates:
    """What the network carries, Mbit/s of Ethernet frames."""

    link_mbit_per_s: float = 1000.0
    """Of each host port and each circuit, each way."""
    oversubscription: float = 4.0
    """The electrical path of a ToR carries the sum of its host ports divided by this."""


@dataclass(frozen=True)
class TorPlace:
    """A ToR in the plan: the hosts' prefix, its gateway address, and its electrical /31."""

    name: str
    prefix: str
    gateway: str
    electrical_address: str
    electrical_gateway: str
    steered: bool
    """Whether its routes are steered by us."""
    pod: str = ""
    interfaces: Mapping[str, str] = field(default_factory=dict)
    """What the ToR itself calls its uplinks, where that differs."""


@dataclass(frozen=True)
class NodePlace:
    """A node in the plan: where it hangs, and how its data interface is called and addressed."""

    name: str
    tor: str
    pod: str
    interface: str
    address: str
    gpus: int | None = None
    """GPUs for its ranks, one each; None: all that its agent finds. Emulated nodes use none."""


@dataclass(frozen=True)
class Topology:
    """The whole plan; every lookup is by name."""

    tors: Mapping[str, TorPlace]
    nodes: Mapping[str, NodePlace]
    uplinks: tuple[Uplink, ...]
    ours: Mapping[str, frozenset[int]]
    """Per switch, the ports that the bench file gives us."""
    trunks: tuple[Trunk, ...] = ()
    planes: Mapping[str, Plane] = field(default_factory=dict)
    rates: Rates = Rates()
    cut: frozenset[str] = frozenset()
    """ToRs whose electrical link is down."""

    @cached_property
    def pods(self) -> Mapping[str, tuple[str, ...]]:
        """The ToRs of each pod, in the order of the bench file."""
        names = dict.fromkeys(tor.pod for tor in self.tors.values())
        return {pod: tuple(t.name for t in self.tors.values() if t.pod == pod) for pod in names}

    @cached_property
    def trunks_of(self) -> Mapping[str, tuple[Trunk, ...]]:
        """Per switch, aggregation and core alike, the trunks that end on it."""
        return {
            switch: tuple(t for t in self.trunks if switch in (t.aggregation, t.core))
            for switch in self.ours
        }

    @cached_property
    def by_switch(self) -> Mapping[str, tuple[Uplink, ...]]:
        """Uplinks of each switch, in ToR order."""
        return {
            switch: tuple(up for up in self.uplinks if up.switch == switch) for switch in self.ours
        }

    @cached_property
    def switches(self) -> tuple[str, ...]:
        """Switch names in the order of the bench file."""
        return tuple(self.ours)

    @property
    def is_steered(self) -> bool:
        """Whether traffic is steered off circuits before they move, on every ToR that has any."""
        return all(self.tors[up.tor].steered for up in self.uplinks)

    def uplink(self, tor: str, switch: str) -> Uplink | None:
        """Return the first uplink of `tor` on `switch`, or None."""
        return next((up for up in self.by_switch[switch] if up.tor == tor), None)

    def nodes_of(self, tor: str) -> tuple[NodePlace, ...]:
        """Nodes that hang on `tor`."""
        return tuple(place for place in self.nodes.values() if place.tor == tor)

    def matching(self, links: frozenset[Link], switch: str) -> Matching:
        """Return the map of `switch` that carries `links`; raises `BadMatching` on a double use."""
        return Matching.of(circuit for link in links for circuit in link.circuits_on(switch))

    def electrical_mbit_per_s(self, tor: str) -> float:
        """Return what the electrical path of `tor` carries, each way."""
        hosts = max(1, len(self.nodes_of(tor))) * (CUT_SHARE if tor in self.cut else 1.0)
        return hosts * self.rates.link_mbit_per_s / self.rates.oversubscription

    def routes(self, links: frozenset[Link]) -> dict[str, frozenset[Route]]:
        """Return, per steered ToR, the routes that send traffic over `links`.

        Hosts of the far ToR are reached by the link's uplink. Parallel links share the flows to
        them by hash, and because few large flows seldom fall evenly, each host is also given one
        of them, in turn. ToRs without links get an empty set: electrical.
        """
        hops: dict[str, dict[str, list[Hop]]] = {
            name: {} for name, place in self.tors.items() if place.steered
        }
        for link in sorted(links):
            for near, far in link.ways:
                if near.tor in hops:
                    device = self.tors[near.tor].interfaces.get(near.device, near.device)
                    hop = Hop(far.address, device)
                    hops[near.tor].setdefault(far.tor, []).append(hop)
        return {
            tor: frozenset(
                route for far, ways in to.items() for route in self._routes_to(far, ways)
            )
            for tor, to in hops.items()
        }

    def _routes_to(self, tor: str, hops: Sequence[Hop]) -> Iterator[Route]:
        """Yield the route to a ToR's hosts, and where there are several ways, that to each host."""
        yield Route(self.tors[tor].prefix, tuple(hops))
        if len(hops) > 1:
            for i, node in enumerate(self.nodes_of(tor)):
                yield Route(f"{node.address}/32", (hops[i % len(hops)],))


def topology_of(bench: Bench) -> Topology:
    """Lay a (validated) bench file out.

    Raises `UsageError` where a cable leaves the egress port open and the unit's size is not known:
    a live bench must name both ports, as in ``"agg0:1/17"``.
    """
    if len(bench.tors) > TORS_MAX:
        raise UsageError(f"bench {bench.name}: {len(bench.tors)} ToRs, at most {TORS_MAX}")
    tors = {
        name: TorPlace(
            name=name,
            prefix=tor.prefix or f"{HOSTS + 256 * i}/24",
            gateway=str(HOSTS + 256 * i + 1),
            electrical_gateway=str(ELECTRICAL + 2 * i),
            electrical_address=str(ELECTRICAL + 2 * i + 1),
            steered=tor.driver != "none",
            pod=tor.pod,
            interfaces={up: port.interface for up, port in tor.ports.items() if port.interface},
        )
        for i, (name, tor) in enumerate(bench.tors.items())
    }
    return Topology(
        tors=tors,
        nodes=_place_nodes(bench),
        uplinks=tuple(sorted(_uplinks(bench))),
        ours={name: parse_ports(switch.ports) for name, switch in bench.switches.items()},
        trunks=tuple(sorted(_trunks(bench))),
        planes={name: _plane(bench, name) for name in bench.switches},
        rates=Rates(bench.links.link_mbit_per_s, bench.links.oversubscription),
    )


def _plane(bench: Bench, name: str) -> Plane:
    switch = bench.switches[name]
    ms = switch.switch_ms if bench.world == "live" else switch.emulate.switch_ms
    return Plane(
        name=name,
        tier=switch.tier,
        duplex=switch.circuits == "duplex",
        switching_ns=round(ms * NS_PER_MS),
        hold_ns=round(bench.links.nic_hold_ms * NS_PER_MS),
    )


def _place_nodes(bench: Bench) -> dict[str, NodePlace]:
    index_of = {name: i for i, name in enumerate(bench.tors)}
    seen = dict.fromkeys(bench.tors, 0)
    places = {}
    for name, node in bench.nodes.items():
        address = node.address or str(HOSTS + 256 * index_of[node.tor] + 10 + seen[node.tor])
        seen[node.tor] += 1
        places[name] = NodePlace(
            name=name,
            tor=node.tor,
            pod=node.pod,
            interface=node.interface or "eth0",
            address=address,
            gpus=(node.gpus or None) if bench.world == "live" else 0,
        )
    return places


def _uplinks(bench: Bench) -> Iterator[Uplink]:
    """Yield the uplinks; addresses that the file does not state count all rows of `cables`."""
    for number, (near, far) in enumerate(bench.cables.items()):
        if is_trunk(near):
            continue
        cable = parse_cable(near, far)
        fibres = Fibres(cable.switch, cable.ingress, cable.egress)
        stated = bench.tors[cable.tor].ports.get(cable.uplink)
        yield Uplink(
            tor=cable.tor,
            device=cable.uplink,
            switch=cable.switch,
            ingress=cable.ingress,
            egress=_egress(bench, near, far, fibres),
            address=stated.address if stated else str(UPLINKS + 1 + number),
        )


def _trunks(bench: Bench) -> Iterator[Trunk]:
    """Yield the trunks; either side of a row may be the core."""
    for near, far in bench.cables.items():
        if not is_trunk(near):
            continue
        down, up = parse_trunk(near, far)
        if bench.switches[down.switch].tier == "core":
            down, up = up, down
        yield Trunk(
            aggregation=down.switch,
            from_core=down.ingress,
            to_core=_egress(bench, near, far, down),
            core=up.switch,
            ingress=up.ingress,
            egress=_egress(bench, near, far, up),
        )


def _egress(bench: Bench, near: str, far: str, fibres: Fibres) -> int:
    if fibres.egress is not None:
        return fibres.egress
    if bench.world == "live":
        raise UsageError(
            f'cables."{near}" = "{far}": name both ports on a live bench, as in '
            f'"{fibres.switch}:{fibres.ingress}/17"'
        )
    return fibres.ingress + bench.switches[fibres.switch].emulate.ports
