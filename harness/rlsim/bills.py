"""Bills of materials: what a network is made of, line by line, what it costs and draws.

Only ports in use are counted: no spare ports of half-filled switches. By the textbook, G being the
NICs' ports: a link from a host is a NIC, two transceivers, a port of a packet switch (EPS) and a
fibre; a link between packet switches two transceivers, two ports and a fibre. Light goes straight
through an optical switch (OCS) or a patch panel: no transceiver there. So for each NIC

    fat-tree, three tiers    1 NIC + 6 transceivers + 5 EPS ports + 3 fibres
    rail-optimised           the same
    rail-only, two tiers     1 NIC + 4 transceivers + 3 EPS ports + 2 fibres
    TopoOpt                  1 NIC + 1 transceiver + 1 patch-panel port + 1 fibre
    MixNet                   a fat-tree for its EPS NICs; 1 NIC + 1 transceiver + 1 OCS port
                             + 1 fibre for each of the others
    RFabric                  hosts and ToRs as above; per ToR uplink 1 transceiver + 1 EPS port
                             + 1 fibre + 1 OCS port; per trunk 1 fibre and an OCS port at both
                             ends; and above the ToRs the packet switches of a fat-tree

Oversubscribed r:1 means at the ToRs: of the links above them there are G / r at each tier, rounded
up. US $, W, Gbit/s. A user's mistake is a `UsageError`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import ceil, isinf
from typing import Literal

from harness.errors import UsageError
from harness.model.bench import Bench, Fabric
from harness.model.ports import is_trunk, parse_ports
from harness.rlsim.prices import TITLES, Item, Power, Prices

TIERS: dict[Fabric, int] = {
    "fat-tree": 3, "rail-optimised": 3, "rail-only": 2, "mixnet": 3, "rfabric": 3,
}  # fmt: skip
"""Of packet switches, ToRs included, as published; other kinds have none that are billed."""
OF_ONE_KIND: dict[str, Fabric] = {
    "circuit_nics_per_server": "mixnet", "uplinks": "rfabric", "trunks": "rfabric",
}  # fmt: skip
LEVELS = ("ToRs to aggregation EPS", "aggregation EPS to core EPS")


@dataclass(frozen=True, kw_only=True)
class Network:
    """A design and its size. Each NIC has one port."""

    kind: Fabric
    gpus: int
    gpus_per_server: int = 8
    nics_per_server: int = 8
    rate_gbit_per_s: float = 400.0
    oversubscription: float = 1.0
    """Of the packet switches above the ToRs. Infinite, of rfabric alone: there are none."""
    tiers: int = 0
    """Of packet switches, ToRs included: 2 or 3; 0: as published."""
    circuit_nics_per_server: int = 0
    """Of mixnet: how many of a server's NICs are on an OCS."""
    uplinks: int = 0
    """Of rfabric: all ToR uplinks to aggregation OCS."""
    trunks: int = 0
    """Of rfabric: all links between aggregation OCS and core OCS."""
    ocs_ports_per_end: Literal[1, 2] = 1
    """What an end of a duplex link takes of an OCS: 1, or 2 where each way has its own port."""

    @property
    def nics(self) -> int:
        """All NICs of all servers."""
        return self.gpus // self.gpus_per_server * self.nics_per_server


@dataclass(frozen=True)
class Part:
    """So many of an item, for one purpose."""

    item: Item
    what: str
    count: int


@dataclass(frozen=True)
class Line(Part):
    """A part with its price and its power, each."""

    each_usd: float
    each_w: float

    @property
    def usd(self) -> float:
        """Of all of them."""
        return self.count * self.each_usd

    @property
    def w(self) -> float:
        """Of all of them."""
        return self.count * self.each_w


@dataclass(frozen=True)
class Bill:
    """A whole bill. That of an ideal switch has no lines: nobody sells one."""

    title: str
    gpus: int
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()
    """Where the figures come from, and what a reader must know."""

    @property
    def is_priced(self) -> bool:
        """Whether there is anything to pay for."""
        return bool(self.lines)

    @property
    def usd(self) -> float:
        """Of the network; no server, no GPU."""
        return sum(line.usd for line in self.lines)

    @property
    def w(self) -> float:
        """Of the network; no server, no GPU."""
        return sum(line.w for line in self.lines)

    def of(self, *items: Item) -> Bill:
        """Return the part of the bill that is for these items."""
        kept = tuple(line for line in self.lines if line.item in items)
        return Bill(self.title, self.gpus, kept, self.notes)

    def count(self, item: Item) -> int:
        """Return how many of an item there are."""
        return sum(line.count for line in self.lines if line.item == item)


def bill_of(network: Network, prices: Prices, power: Power) -> Bill:
    """Return the bill of a design; raises `UsageError` where its numbers do not fit."""
    for problem in _problems(network):
        raise UsageError(f"bill of {network.kind}: {problem}")
    rate = network.rate_gbit_per_s
    title = (
        f"{network.kind}: {network.gpus} GPUs in servers of {network.gpus_per_server} with "
        f"{network.nics_per_server} NICs of {rate:g} Gbit/s"
    )
    if network.kind == "ideal":
        return Bill(title, network.gpus, (), ("an ideal switch: an upper bound, without a bill",))
    lines = _priced(_parts(network), rate, prices, power)
    return Bill(title, network.gpus, lines, tuple(_sources(lines, prices, power)))


def bill_of_bench(
    bench: Bench,
    prices: Prices,
    power: Power,
    *,
    rate_gbit_per_s: float = 0.0,
    ocs_ports_per_end: Literal[1, 2] = 1,
    tiers: int = 0,
) -> Bill:
    """Return the bill of a bench at the rate of its links, or at this one.

    One that was generated is billed as the design that it stands for (`network_of`), any other as
    it is cabled. Packet switches above ToRs are not in the file, only their oversubscription: they
    are billed as a fat-tree's, or rail-only's, each ToR's links rounded up. Ports of switches that
    are ours but have no cable have a line of their own. A node without GPUs counts as one, as its
    rank does. Raises `UsageError` where a rate has no price.
    """
    rate = rate_gbit_per_s or bench.links.link_mbit_per_s / 1000
    if bench.generated is not None:
        network = replace(
            network_of(bench), rate_gbit_per_s=rate, ocs_ports_per_end=ocs_ports_per_end
        )
        return bill_of(replace(network, tiers=tiers or network.tiers), prices, power)
    lines = _priced(_cabled(bench, ocs_ports_per_end, tiers), rate, prices, power)
    notes = [*_sources(lines, prices, power)]
    gpus = [node.gpus or node.emulated_gpus for node in bench.nodes.values()]
    if unknown := gpus.count(0):
        notes.append(f"{unknown} nodes state no GPUs, and count as one each")
    nics = sum(len(node.tors) for node in bench.nodes.values())
    all_gpus = sum(gpus) + unknown
    title = f"bench {bench.name}: {all_gpus} GPUs, {nics} NICs of {rate:g} Gbit/s"
    return Bill(title, all_gpus, lines, tuple(notes))


def network_of(bench: Bench) -> Network:
    """Return the design that a generated bench, with all its tables, stands for.

    Where a server is its own ToR, that is no switch to be paid for: what are its uplinks are NICs.
    Raises `UsageError` of a bench that was not generated.
    """
    if bench.generated is None:
        raise UsageError(f"bench {bench.name}: no table [generated] says what design it is")
    kind = bench.generated.fabric
    uplinks, trunks = _cables(bench) if kind == "rfabric" else (0, 0)
    over_tors = kind in TIERS and kind != "mixnet"
    return Network(
        kind=kind,
        gpus=bench.generated.gpus,
        gpus_per_server=bench.generated.gpus_per_server,
        nics_per_server=len(next(iter(bench.nodes.values())).tors),
        rate_gbit_per_s=bench.links.link_mbit_per_s / 1000,
        oversubscription=bench.links.oversubscription if over_tors else 1.0,
        circuit_nics_per_server=next(iter(bench.tors.values())).uplinks if kind == "mixnet" else 0,
        uplinks=uplinks,
        trunks=trunks,
    )


# -- what there is ---------------------------------------------------------------------------------


def _parts(network: Network) -> Iterator[Part]:
    nics, ports = network.nics, network.ocs_ports_per_end
    if network.kind == "topoopt":
        yield from _straight("patch_port", nics)
        return
    if network.kind == "mixnet":
        on_circuits = nics // network.nics_per_server * network.circuit_nics_per_server
        nics -= on_circuits
    yield from _hosts(nics)
    if network.kind == "mixnet":
        yield from _straight("ocs_port", on_circuits, ports)
    yield from _circuits(network.uplinks, network.trunks, ports)
    above = ceil(nics / network.oversubscription)
    yield from _above(above, network.tiers or TIERS[network.kind])


def _hosts(nics: int) -> Iterator[Part]:
    """Yield the links from NICs to ToRs."""
    yield Part("nic", "hosts", nics)
    yield Part("transceiver", "hosts to ToRs", 2 * nics)
    yield Part("eps_port", "ToRs, towards hosts", nics)
    yield Part("fibre", "hosts to ToRs", nics)


def _above(links: int, tiers: int) -> Iterator[Part]:
    """Yield the links between packet switches, as many at each tier."""
    for level in LEVELS[: tiers - 1]:
        yield Part("transceiver", level, 2 * links)
        yield Part("eps_port", level, 2 * links)
        yield Part("fibre", level, links)


def _circuits(uplinks: int, trunks: int, ports: int) -> Iterator[Part]:
    """Yield what is cabled between ToRs and two tiers of OCS."""
    yield Part("transceiver", "ToRs to aggregation OCS", uplinks)
    yield Part("eps_port", "ToRs, towards OCS", uplinks)
    yield Part("fibre", "ToRs to aggregation OCS", uplinks)
    yield Part("ocs_port", "aggregation, towards ToRs", ports * uplinks)
    yield Part("ocs_port", "aggregation, towards the core", ports * trunks)
    yield Part("ocs_port", "core", ports * trunks)
    yield Part("fibre", "aggregation OCS to core OCS", trunks)


def _cabled(bench: Bench, ports: int, tiers: int) -> Iterator[Part]:
    """Yield what the tables of a bench file have."""
    hosts = Counter(tor for node in bench.nodes.values() for tor in node.tors)
    uplinks, trunks = _cables(bench)
    yield from _hosts(hosts.total())
    yield from _circuits(uplinks, trunks, ports)
    pairs = sum(ceil(len(parse_ports(switch.ports)) / 2) for switch in bench.switches.values())
    yield Part("ocs_port", "ours, without a cable", ports * max(0, pairs - uplinks - 2 * trunks))
    if bench.links.electrical != "none" and len(bench.tors) > 1:
        above = sum(ceil(nics / bench.links.oversubscription) for nics in hosts.values())
        usual = TIERS["rail-only" if bench.links.electrical == "rail" else "fat-tree"]
        yield from _above(above, tiers or usual)


def _cables(bench: Bench) -> tuple[int, int]:
    """Return how many uplinks and how many trunks are cabled."""
    trunks = sum(map(is_trunk, bench.cables))
    return len(bench.cables) - trunks, trunks


def _straight(item: Item, nics: int, ports: int = 1) -> Iterator[Part]:
    """Yield NICs whose light goes straight into a switch of light, or a patch panel."""
    yield Part("nic", "hosts, on circuits", nics)
    yield Part("transceiver", "hosts, on circuits", nics)
    yield Part(item, "towards hosts", ports * nics)
    yield Part("fibre", "hosts to circuits", nics)


def _priced(
    parts: Iterable[Part], rate_gbit_per_s: float, prices: Prices, power: Power
) -> tuple[Line, ...]:
    """Put a price on what there is, items together, in the order of `TITLES`."""
    order = list(TITLES)
    return tuple(
        Line(
            part.item,
            part.what,
            part.count,
            each_usd=prices.usd(part.item, rate_gbit_per_s),
            each_w=power.w(part.item, rate_gbit_per_s),
        )
        for part in sorted(parts, key=lambda part: order.index(part.item))
        if part.count
    )


def _sources(lines: Iterable[Line], prices: Prices, power: Power) -> Iterator[str]:
    """Yield where the figures come from, and which are not stated by those who make the thing."""
    yield f"prices: {prices.name}"
    items = dict.fromkeys(line.item for line in lines)
    by_sure = {
        sure: ", ".join(TITLES[item] for item in items if power.sure(item) == sure)
        for sure in ("inferred", "assumed")
    }
    doubts = "; ".join(f"{names}: {sure}" for sure, names in by_sure.items() if names)
    yield f"power: {power.name}" + (f" ({doubts})" if doubts else "")


# -- what must hold --------------------------------------------------------------------------------


def _problems(network: Network) -> Iterator[str]:
    """Yield what is wrong, the plainest first."""
    for key in ("gpus", "gpus_per_server", "nics_per_server"):
        if getattr(network, key) < 1:
            yield f"{key} = {getattr(network, key)}: expected 1 or more"
    if network.gpus % network.gpus_per_server:
        yield f"gpus = {network.gpus} do not fill servers of {network.gpus_per_server}"
    for key, kind in OF_ONE_KIND.items():
        number = getattr(network, key)
        if number < 0 or (number and network.kind != kind):
            yield f"{key} = {number}: expected 0" + (" or more" if network.kind == kind else "")
    most = network.nics_per_server
    if network.kind == "mixnet" and not 1 <= network.circuit_nics_per_server <= most:
        yield (
            f"circuit_nics_per_server = {network.circuit_nics_per_server}: expected 1 to {most}, "
            "all of a server's NICs"
        )
    if network.trunks and not network.uplinks:
        yield f"trunks = {network.trunks}: nothing reaches them without uplinks"
    if network.ocs_ports_per_end not in (1, 2):
        yield f"ocs_ports_per_end = {network.ocs_ports_per_end}: expected 1 or 2"
    yield from _above_problems(network)


def _above_problems(network: Network) -> Iterator[str]:
    """Yield what is wrong with the packet switches above the ToRs."""
    over = network.oversubscription
    if not over >= 1 or (isinf(over) and network.kind != "rfabric"):
        yield f"oversubscription = {over:g}: expected 1 (none) or more"
    if network.kind not in TIERS:
        for key, default in (("tiers", 0), ("oversubscription", 1)):
            if getattr(network, key) != default:
                yield f"{key} = {getattr(network, key):g}: there are no packet switches to bill"
    elif network.tiers not in (0, 2, 3):
        yield f"tiers = {network.tiers}: expected 2 or 3, or 0, which is {TIERS[network.kind]}"
