"""What an emulated network consists of: namespaces, wires, addresses, routes and rates. Pure.

    node eth0 -- h1 ToR u1 -- p1 glass        glass: one namespace per switch, no addresses; light
                           glass p3 -- p1 glass   joins two of its ports. A trunk joins two glasses
                    ToR e0 -- t1 eps          eps: the electrical path
    node ctl0 -- c1 control -- starting namespace

Rates sit where a real port has its queue: at both ends of a host's link and of the electrical path,
and at the ToR's end of an uplink. The glass has none: light does not queue, and a packet that
waited there would come out after the circuit went dark. Rates are Mbit/s of Ethernet frames.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Literal

from drivers.emulators import config
from drivers.interfaces import End, TokenBucket
from drivers.tor.netlink import ELECTRICAL_METRIC, ELECTRICAL_PROTOCOL
from harness.errors import UsageError
from harness.fabric.links import Trunk, Uplink
from harness.fabric.topology import Topology, TorPlace
from harness.model.bench import Links

LightKind = Literal["none", "ebpf", "mirred"]
FibrePair = tuple[int, int]
"""Ingress and egress port."""

CONTROL = IPv4Address("198.18.0.0")
CONTROL_NETWORKS = 128
"""198.18.0.0/24 .. 198.18.127.0/24, one per bench that runs."""
EMULATED = "198.18.0.0/15"
DATA_MTU = 9000
"""With frames of 1500 bytes one core forwards half as much."""
CONTROL_MTU = 1500
ELECTRICAL_DEVICE = "e0"
BURST_BYTES = 96 * 1024
"""More than the 64 KiB that the kernel hands over at once: a smaller bucket cuts each such packet
into frames, in software, at a third of the rate. Each idle moment lets this much pass unshaped."""
HOST_QUEUE_MS = 20.0
UPLINK_QUEUE_MS = 5.0
"""Short: beacons share this queue with the traffic."""
ELECTRICAL_QUEUE_MS = 50.0
"""Deep: several senders meet here, and a time-out after losses costs 200 ms."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_RESERVED = frozenset({"eps", "control"})


@dataclass(frozen=True)
class Neighbour:
    """Who has an address on a port, so that nobody need ask."""

    address: str
    mac: str


@dataclass(frozen=True)
class Port:
    """One interface of a room: what to set on it once it is there."""

    name: str
    address: str = ""
    """With its prefix length, ``198.19.0.10/32``."""
    bucket: TokenBucket | None = None
    neighbours: tuple[Neighbour, ...] = ()


@dataclass(frozen=True)
class Path:
    """A route that is there from the start."""

    prefix: str
    via: str
    port: str
    metric: int = 0
    protocol: int = 4
    """4: static."""


@dataclass(frozen=True)
class Room:
    """One namespace with its ports and routes."""

    netns: str
    ports: tuple[Port, ...]
    paths: tuple[Path, ...] = ()
    forwards: bool = False
    bridged: bool = False
    """All ports are joined by one bridge."""


@dataclass(frozen=True)
class Wire:
    """A veth pair."""

    a: End
    b: End
    mtu: int


@dataclass(frozen=True)
class Wiring:
    """All that one emulated network consists of."""

    rooms: tuple[Room, ...]
    wires: tuple[Wire, ...]
    control_link: str
    """The interface in the starting namespace: the coordinator's end of the control network."""
    coordinator_address: str
    control_addresses: Mapping[str, str]
    lights: Mapping[str, config.Light]


def mac_of(address: str) -> str:
    """Return the MAC address of whoever has `address`: 02:00, then its four bytes."""
    return ":".join(f"{byte:02x}" for byte in b"\x02\x00" + IPv4Address(address).packed)


def wire(
    topology: Topology, links: Links, *, prefix: str, network: int, light: LightKind
) -> Wiring:
    """Lay out the emulated network of `topology` under names that begin with `prefix`.

    `network` picks the control network, 198.18.<network>.0/24. Raises `UsageError` on a name that
    cannot be a namespace's, and where the control network has no address left for an agent.
    """
    agents = (*topology.nodes, *topology.tors)
    _refuse_bad_names((*agents, *topology.switches))
    if len(agents) > 253:
        raise UsageError(f"{len(agents)} nodes and ToRs: an emulated bench holds at most 253")
    plan = _Plan(topology, links, prefix)
    base = CONTROL + 256 * network
    addresses = {name: str(base + 2 + i) for i, name in enumerate(agents)}
    rooms = (
        *(plan.node_room(name, addresses[name]) for name in topology.nodes),
        *(plan.tor_room(place, addresses[place.name]) for place in topology.tors.values()),
        *(plan.glass_room(name) for name in topology.switches),
        plan.eps_room(),
        Room(plan.room("control"), _control_ports(len(agents)), bridged=True),
    )
    return Wiring(
        rooms=rooms,
        wires=(*plan.data_wires(), *plan.control_wires(agents)),
        control_link=f"{prefix}-c",
        coordinator_address=str(base + 1),
        control_addresses=addresses,
        lights={name: plan.light(name, light) for name in topology.switches},
    )


def electrical_room(topology: Topology, links: Links, prefix: str) -> Room:
    """Return the electrical path of the network under `prefix`: one port per ToR, in their order.

    A ToR's own end, `ELECTRICAL_DEVICE`, has the same rate.
    """
    return _Plan(topology, links, prefix).eps_room()


def uplink_drain_ms(links: Links) -> float:
    """Return how long a full queue of an uplink needs to get out: to settle, before going dark."""
    bucket = _bucket(links.link_mbit_per_s, UPLINK_QUEUE_MS)
    return bucket.limit_bytes / bucket.rate_bytes_per_s * 1e3


def room_name(prefix: str, name: str) -> str:
    """Return the name of the namespace of `name`."""
    return f"{prefix}-{name}"


class _Plan:
    """One bench's names and rates, from which rooms and wires are made."""

    def __init__(self, topology: Topology, links: Links, prefix: str) -> None:
        self.topology = topology
        self._prefix = prefix
        self._host = _bucket(links.link_mbit_per_s, HOST_QUEUE_MS)
        self._uplink = _bucket(links.link_mbit_per_s, UPLINK_QUEUE_MS)
        each = links.link_mbit_per_s / links.oversubscription
        self._electrical = {
            tor: _bucket(max(1, len(topology.nodes_of(tor))) * each, ELECTRICAL_QUEUE_MS)
            for tor in topology.tors
        }
        self._reached = {name: _reached(topology, name) for name in topology.switches}

    def room(self, name: str) -> str:
        return room_name(self._prefix, name)

    def node_room(self, name: str, control_address: str) -> Room:
        place = self.topology.nodes[name]
        gateway = self.topology.tors[place.tor].gateway
        data = Port(
            place.interface, f"{place.address}/32", self._host,
            (Neighbour(gateway, mac_of(gateway)),),
        )  # fmt: skip
        ports = (data, Port("ctl0", f"{control_address}/24"))
        return Room(self.room(name), ports, (Path(EMULATED, gateway, place.interface),))

    def tor_room(self, tor: TorPlace, control_address: str) -> Room:
        gateway = tor.electrical_gateway
        electrical = Port(
            ELECTRICAL_DEVICE, f"{tor.electrical_address}/31", self._electrical[tor.name],
            (Neighbour(gateway, mac_of(gateway)),),
        )  # fmt: skip
        hosts = self.topology.nodes_of(tor.name)
        ports = (
            electrical,
            *(
                Port(f"h{i}", f"{tor.gateway}/32", self._host,
                     (Neighbour(node.address, mac_of(node.address)),))
                for i, node in enumerate(hosts, 1)
            ),
            *(self._uplink_port(up) for up in self.topology.uplinks if up.tor == tor.name),
            Port("ctl0", f"{control_address}/24"),
        )  # fmt: skip
        paths = (
            *(Path(f"{node.address}/32", node.address, f"h{i}") for i, node in enumerate(hosts, 1)),
            *(
                Path(
                    other.prefix, gateway, ELECTRICAL_DEVICE, ELECTRICAL_METRIC, ELECTRICAL_PROTOCOL
                )
                for other in self.topology.tors.values()
                if other.name != tor.name
            ),
        )
        return Room(self.room(tor.name), ports, paths, forwards=True)

    def glass_room(self, switch: str) -> Room:
        return Room(self.room(switch), tuple(Port(_glass(pair)) for pair in self._pairs_of(switch)))

    def eps_room(self) -> Room:
        tors = list(enumerate(self.topology.tors.values(), 1))
        ports = tuple(
            Port(f"t{i}", f"{tor.electrical_gateway}/31", self._electrical[tor.name],
                 (Neighbour(tor.electrical_address, mac_of(tor.electrical_address)),))
            for i, tor in tors
        )  # fmt: skip
        paths = tuple(Path(tor.prefix, tor.electrical_address, f"t{i}") for i, tor in tors)
        return Room(self.room("eps"), ports, paths, forwards=True)

    def data_wires(self) -> Iterator[Wire]:
        for number, tor in enumerate(self.topology.tors.values(), 1):
            for i, node in enumerate(self.topology.nodes_of(tor.name), 1):
                yield Wire(
                    End(node.interface, self.room(node.name), mac_of(node.address)),
                    End(f"h{i}", self.room(tor.name), mac_of(tor.gateway)),
                    DATA_MTU,
                )
            yield Wire(
                End(ELECTRICAL_DEVICE, self.room(tor.name), mac_of(tor.electrical_address)),
                End(f"t{number}", self.room("eps"), mac_of(tor.electrical_gateway)),
                DATA_MTU,
            )
        for up in self.topology.uplinks:
            yield Wire(
                End(up.device, self.room(up.tor), mac_of(up.address)),
                End(_glass((up.ingress, up.egress)), self.room(up.switch)),
                DATA_MTU,
            )
        for trunk in self.topology.trunks:
            ends = (trunk.aggregation, trunk.core)
            a, b = (End(_glass(_pair_of(trunk, name)), self.room(name)) for name in ends)
            yield Wire(a, b, DATA_MTU)

    def control_wires(self, agents: tuple[str, ...]) -> Iterator[Wire]:
        control = self.room("control")
        yield Wire(End(f"{self._prefix}-c", ""), End("c0", control), CONTROL_MTU)
        for i, name in enumerate(agents, 1):
            yield Wire(End("ctl0", self.room(name)), End(f"c{i}", control), CONTROL_MTU)

    def light(self, switch: str, kind: LightKind) -> config.Light:
        pairs = self._pairs_of(switch)
        return config.Light(
            kind=kind,
            netns=self.room(switch),
            tx={pair[0]: _glass(pair) for pair in pairs},
            rx={pair[1]: _glass(pair) for pair in pairs},
        )

    def _pairs_of(self, switch: str) -> list[FibrePair]:
        """Return the fibre pairs of a switch that something is plugged into."""
        uplinks = self.topology.by_switch[switch]
        trunks = self.topology.trunks_of[switch]
        return [(up.ingress, up.egress) for up in uplinks] + [_pair_of(t, switch) for t in trunks]

    def _uplink_port(self, up: Uplink) -> Port:
        """Return an uplink that knows every other that a circuit may join it to."""
        others = tuple(
            Neighbour(other.address, mac_of(other.address))
            for switch in self._reached[up.switch]
            for other in self.topology.by_switch[switch]
            if other != up
        )
        return Port(up.device, f"{up.address}/32", self._uplink, others)


def _pair_of(trunk: Trunk, switch: str) -> FibrePair:
    """Return the fibre pair of one of its two switches that a trunk takes."""
    if switch == trunk.aggregation:
        return trunk.from_core, trunk.to_core
    return trunk.ingress, trunk.egress


def _glass(pair: FibrePair) -> str:
    """Return the interface that stands for a fibre pair."""
    return f"p{pair[0]}"


def _reached(topology: Topology, switch: str) -> list[str]:
    """Return the switches that light of `switch` can get to through trunks, itself among them."""
    reached, fresh = [], {switch}
    while fresh:
        reached += sorted(fresh)
        ends = (t for name in fresh for t in topology.trunks_of[name])
        fresh = {end for trunk in ends for end in (trunk.aggregation, trunk.core)} - {*reached}
    return reached


def _control_ports(agents: int) -> tuple[Port, ...]:
    return tuple(Port(f"c{i}") for i in range(agents + 1))


def _bucket(mbit_per_s: float, queue_ms: float) -> TokenBucket:
    return TokenBucket.of(mbit_per_s, burst_bytes=BURST_BYTES, queue_ms=queue_ms)


def _refuse_bad_names(names: tuple[str, ...]) -> None:
    for name in names:
        if not _NAME.fullmatch(name) or name in _RESERVED:
            raise UsageError(
                f"{name!r} cannot name a network namespace: letters, digits, '_', '-' and '.', at "
                f"most 64, and not {' or '.join(sorted(_RESERVED))}"
            )
        if names.count(name) > 1:
            raise UsageError(f"{name!r} names two things: nodes, ToRs and switches share one space")
