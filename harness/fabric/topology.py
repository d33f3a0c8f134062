"""What is cabled to what: pods, ToRs, nodes, uplinks, trunks, and the fibre pairs they land on.

Built from a bench file, immutable, free of I/O. An *uplink* is one ToR port with a transmit and a
receive fibre, a *trunk* a fibre pair between an aggregation switch and a core switch; a *link* is
two uplinks joined by circuits, one each way, on one switch or through trunks and a core switch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal, TypeVar

from drivers.base import Circuit, Matching
from drivers.tor.base import Hop, Route
from harness.clock import NS_PER_MS
from harness.errors import UsageError
from harness.fabric.addresses import FIRST_HOST, AddressPlan, address_plan
from harness.fabric.links import Link, Trunk, Uplink
from harness.model.bench import Bench, Electrical
from harness.model.ports import Fibres, is_trunk, parse_cable, parse_ports, parse_trunk
from harness.model.tor_rules import TORS_MAX

CUT_SHARE = 1e-6
"""Of its rate, what plans take a cut electrical path for. Not 0: of two plans that both leave
traffic stranded, one is better."""
NAMED_MAX = 12

T = TypeVar("T")


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
    electrical: Electrical = "spine"
    """Which ToRs it joins: all, those of a rail, or none."""
    forwarding: bool = False
    """Whether what has no circuit of its own goes over those of others."""


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
class Nic:
    """A data port of a node, and the ToR that it is plugged into."""

    name: str
    """As an endpoint: ``n3/2``, or ``n3`` where it is the node's only one."""
    node: str
    tor: str
    address: str


@dataclass(frozen=True)
class NodePlace:
    """A node in the plan: where it hangs, and how its data interface is called and addressed.

    Of several NICs, `tor` and `address` are the first's.
    """

    name: str
    tor: str
    pod: str
    interface: str
    address: str
    gpus: int | None = None
    """GPUs for its ranks, one each; None: all that its agent finds. Emulated nodes use none."""
    rails: tuple[str, ...] = ()
    """The ToR of each NIC, where there are several."""
    addresses: tuple[str, ...] = ()
    """Of each NIC, where there are several."""
    seats: int = 1
    """GPUs that it has or stands for, which share its NICs evenly and in order."""

    @cached_property
    def nics(self) -> tuple[Nic, ...]:
        """All data ports, in the order of the GPUs beside them."""
        if not self.rails:
            return (Nic(self.name, self.name, self.tor, self.address),)
        return tuple(
            Nic(f"{self.name}/{k}", self.name, tor, address)
            for k, (tor, address) in enumerate(zip(self.rails, self.addresses, strict=True))
        )

    def nic_of(self, gpu: int) -> int:
        """Return the number of the NIC that a GPU uses; more ranks than GPUs go round again."""
        return gpu % self.seats * len(self.nics) // self.seats

    def endpoint(self, gpu: int) -> str:
        """Return the endpoint of a rank that uses this GPU."""
        return self.nics[self.nic_of(gpu)].name


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
        return _grouped(((tor.pod, tor.name) for tor in self.tors.values()), ())

    @cached_property
    def trunks_of(self) -> Mapping[str, tuple[Trunk, ...]]:
        """Per switch, aggregation and core alike, the trunks that end on it."""
        ends = ((switch, t) for t in self.trunks for switch in (t.aggregation, t.core))
        return _grouped(ends, self.ours)

    @cached_property
    def by_switch(self) -> Mapping[str, tuple[Uplink, ...]]:
        """Uplinks of each switch, in ToR order."""
        return _grouped(((up.switch, up) for up in self.uplinks), self.ours)

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

    @cached_property
    def _nics(self) -> Mapping[str, tuple[Nic, ...]]:
        nics = (nic for place in self.nodes.values() for nic in place.nics)
        return _grouped(((nic.tor, nic) for nic in nics), self.tors)

    def nics_of(self, tor: str) -> tuple[Nic, ...]:
        """NICs that are plugged into `tor`, in the order of nodes."""
        return self._nics[tor]

    def nodes_of(self, tor: str) -> tuple[NodePlace, ...]:
        """Nodes that hang on `tor`, with one NIC or more."""
        return tuple(
            self.nodes[node] for node in dict.fromkeys(nic.node for nic in self._nics[tor])
        )

    def nics_at(self, endpoint: str) -> tuple[NodePlace, range]:
        """Return the node of an endpoint, and the numbers of the NICs there that it means.

        Raises `UsageError` where there is no such node, or no such NIC.
        """
        name, named, number = endpoint.partition("/")
        place = self.nodes.get(name)
        if place is None:
            there = ", ".join(list(self.nodes)[:NAMED_MAX]) + ", ..." * (
                len(self.nodes) > NAMED_MAX
            )
            raise UsageError(f"node {name!r} is not of this bench, whose nodes are {there}")
        count = len(place.nics)
        if not named:
            return place, range(count)
        if not (number.isascii() and number.isdigit() and int(number) < count):
            raise UsageError(f"{endpoint!r}: {name} has NICs 0 to {count - 1}")
        return place, range(int(number), int(number) + 1)

    def matching(self, links: frozenset[Link], switch: str) -> Matching:
        """Return the map of `switch` that carries `links`; raises `BadMatching` on a double use."""
        return Matching.of(_circuits(links).get(switch, ()))

    def has_electrical(self, tor: str) -> bool:
        """Whether an electrical path leads from `tor`, and is not cut."""
        return self.rates.electrical != "none" and tor not in self.cut

    def electrical_mbit_per_s(self, tor: str) -> float:
        """Return what the electrical path of `tor` carries, each way; next to nothing: no path."""
        hosts = max(1, len(self.nics_of(tor))) * (1.0 if self.has_electrical(tor) else CUT_SHARE)
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
            for i, nic in enumerate(self.nics_of(tor)):
                yield Route(f"{nic.address}/32", (hops[i % len(hops)],))


def _grouped(pairs: Iterable[tuple[str, T]], keys: Iterable[str]) -> dict[str, tuple[T, ...]]:
    """Return, by key, what belongs to it, in order; for these keys at least."""
    found: dict[str, list[T]] = {key: [] for key in keys}
    for key, item in pairs:
        found.setdefault(key, []).append(item)
    return {key: tuple(items) for key, items in found.items()}


@lru_cache(maxsize=16)
def _circuits(links: frozenset[Link]) -> Mapping[str, Sequence[Circuit]]:
    """Return the cross-connects of links by switch: a change asks for those of each in turn."""
    found: dict[str, list[Circuit]] = {}
    for link in links:
        for switch, circuit in link.circuits:
            found.setdefault(switch, []).append(circuit)
    return found


def topology_of(bench: Bench) -> Topology:
    """Lay a (validated) bench file out.

    Raises `UsageError` where a cable leaves the egress port open and the unit's size is not known:
    a live bench must name both ports, as in ``"agg0:1/17"``.
    """
    if bench.world != "simulated" and len(bench.tors) > TORS_MAX:
        raise UsageError(f"bench {bench.name}: {len(bench.tors)} ToRs, at most {TORS_MAX}")
    plan = address_plan(bench)
    tors = {
        name: TorPlace(
            name=name,
            prefix=tor.prefix or plan.prefix(i),
            gateway=plan.host(i, 1),
            electrical_gateway=plan.electrical(2 * i),
            electrical_address=plan.electrical(2 * i + 1),
            steered=tor.driver != "none",
            pod=tor.pod,
            interfaces={up: port.interface for up, port in tor.ports.items() if port.interface},
        )
        for i, (name, tor) in enumerate(bench.tors.items())
    }
    links = bench.links
    return Topology(
        tors=tors,
        nodes=_place_nodes(bench, plan),
        uplinks=tuple(sorted(_uplinks(bench, plan))),
        ours={name: parse_ports(switch.ports) for name, switch in bench.switches.items()},
        trunks=tuple(sorted(_trunks(bench))),
        planes={name: _plane(bench, name) for name in bench.switches},
        rates=Rates(
            links.link_mbit_per_s, links.oversubscription, links.electrical, links.forwarding
        ),
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


def _place_nodes(bench: Bench, plan: AddressPlan) -> dict[str, NodePlace]:
    index_of = {name: i for i, name in enumerate(bench.tors)}
    seen = dict.fromkeys(bench.tors, FIRST_HOST)
    places = {}
    for name, node in bench.nodes.items():
        addresses = []
        for tor in node.tors:
            addresses.append(node.address or plan.host(index_of[tor], seen[tor]))
            seen[tor] += 1
        several = len(addresses) > 1
        places[name] = NodePlace(
            name=name,
            tor=node.tors[0],
            pod=node.pod,
            interface=node.interface or "eth0",
            address=addresses[0],
            gpus=(node.gpus or None) if bench.world == "live" else 0,
            rails=node.tors if several else (),
            addresses=tuple(addresses) if several else (),
            seats=node.gpus or node.emulated_gpus or 1,
        )
    return places


def _uplinks(bench: Bench, plan: AddressPlan) -> Iterator[Uplink]:
    """Yield the uplinks; addresses that the file does not state count all rows of `cables`."""
    for number, (near, far) in enumerate(bench.cables.items(), 1):
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
            address=stated.address if stated else plan.uplink(number),
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
