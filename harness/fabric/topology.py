"""What is cabled to what: ToRs, nodes, uplinks and the fibre pairs they land on.

Built from a bench file, immutable, free of I/O. An *uplink* is one ToR port with a transmit and a
receive fibre; a *link* is two uplinks of one switch joined by two circuits, one each way. Address
plan of emulated benches (all inside 198.18.0.0/15, the range reserved for benchmarking):

    198.19.<tor>.0/24     hosts of a ToR: gateway .1, nodes from .10
    198.18.128.0/18       uplinks, one address each, in the order of the bench file
    198.18.192.0/18       electrical point-to-point links, /31 each
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from ipaddress import IPv4Address

from drivers.base import Circuit, Matching
from drivers.tor.base import Route
from harness.errors import UsageError
from harness.model.bench import Bench
from harness.model.ports import parse_cable, parse_ports

HOSTS = IPv4Address("198.19.0.0")
UPLINKS = IPv4Address("198.18.128.0")
ELECTRICAL = IPv4Address("198.18.192.0")
TORS_MAX = 250


@dataclass(frozen=True, order=True)
class Uplink:
    """One ToR port and the fibre pair of the switch that it lands on."""

    tor: str
    device: str
    switch: str
    ingress: int
    """Port that the uplink's transmit fibre enters."""
    egress: int
    """Port that the uplink's receive fibre leaves."""
    address: str

    def __str__(self) -> str:
        return f"{self.tor}:{self.device}"


@dataclass(frozen=True, order=True)
class Link:
    """Two uplinks of one switch, joined in both directions."""

    a: Uplink
    b: Uplink

    @property
    def switch(self) -> str:
        """The switch that carries both circuits."""
        return self.a.switch

    @property
    def circuits(self) -> tuple[Circuit, Circuit]:
        """The two cross-connects: a's light to b, b's light to a."""
        return ((self.a.ingress, self.b.egress), (self.b.ingress, self.a.egress))

    def __str__(self) -> str:
        return f"{self.a.tor}-{self.b.tor}@{self.switch}"


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

    def uplink(self, tor: str, switch: str) -> Uplink | None:
        """Return the first uplink of `tor` on `switch`, or None."""
        return next((up for up in self.by_switch[switch] if up.tor == tor), None)

    def nodes_of(self, tor: str) -> tuple[NodePlace, ...]:
        """Nodes that hang on `tor`."""
        return tuple(place for place in self.nodes.values() if place.tor == tor)

    def matching(self, links: frozenset[Link], switch: str) -> Matching:
        """Return the map of `switch` that carries `links`; raises `BadMatching` on a double use."""
        return Matching.of(
            circuit for link in links if link.switch == switch for circuit in link.circuits
        )

    def routes(self, links: frozenset[Link]) -> dict[str, frozenset[Route]]:
        """Return, per steered ToR, the routes that send traffic over `links`.

        Hosts of the far ToR are reached by the link's uplink; where two links join the same two
        ToRs the first by name carries the traffic. ToRs without links get an empty set: electrical.
        """
        routes: dict[str, dict[str, Route]] = {
            name: {} for name, place in self.tors.items() if place.steered
        }
        for link in sorted(links):
            for near, far in ((link.a, link.b), (link.b, link.a)):
                if near.tor in routes:
                    prefix = self.tors[far.tor].prefix
                    route = Route(prefix=prefix, via=far.address, device=near.device)
                    routes[near.tor].setdefault(prefix, route)
        return {tor: frozenset(by_prefix.values()) for tor, by_prefix in routes.items()}


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
            prefix=f"{HOSTS + 256 * i}/24",
            gateway=str(HOSTS + 256 * i + 1),
            electrical_gateway=str(ELECTRICAL + 2 * i),
            electrical_address=str(ELECTRICAL + 2 * i + 1),
            steered=tor.driver != "none",
        )
        for i, (name, tor) in enumerate(bench.tors.items())
    }
    return Topology(
        tors=tors,
        nodes=_place_nodes(bench),
        uplinks=tuple(sorted(_uplinks(bench))),
        ours={name: parse_ports(switch.ports) for name, switch in bench.switches.items()},
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


def _uplinks(bench: Bench) -> list[Uplink]:
    uplinks = []
    for number, (near, far) in enumerate(bench.cables.items()):
        cable = parse_cable(near, far)
        egress = cable.egress
        if egress is None:
            if bench.world == "live":
                raise UsageError(
                    f'cables."{near}" = "{far}": name both ports on a live bench, as in '
                    f'"{cable.switch}:{cable.ingress}/17"'
                )
            egress = cable.ingress + bench.switches[cable.switch].emulate.ports
        uplinks.append(
            Uplink(
                tor=cable.tor,
                device=cable.uplink,
                switch=cable.switch,
                ingress=cable.ingress,
                egress=egress,
                address=str(UPLINKS + 1 + number),
            )
        )
    return uplinks
