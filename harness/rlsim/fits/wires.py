"""What flows take on the network of a run: which circuits were lit when, and how busy links are.

The simulated network shares links max-min fairly. Flows that begin together all end when the
busiest link is done, as long as nothing changes meanwhile; that bound is what is fitted here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from harness.clock import NS_PER_MS
from harness.fabric.topology import Topology
from harness.rlsim.fits.measured import Measured
from harness.rlsim.fits.row import Figures

Circuits = Mapping[tuple[str, str], int]
"""How many lead from a ToR to another."""
Sent = tuple[str, str, float]
"""From a node, to a node, bytes."""
Crossed = tuple[Hashable, float, bool]
"""A link: who it is, its Mbit/s, whether it is electrical."""

LINK, ELECTRICAL = "network.link_share", "network.electrical_share"
BURST, LATENCY = "network.burst_kb", "network.latency_us"
BYTES_PER_S_OF_A_MBIT = 1e6 / 8
DARK: Circuits = {}


class Loads(NamedTuple):
    """How long the busiest link of each sort is, s, if all of its nominal rate were payload's.

    ``_kb_s``: how long it is for 1000 bytes.
    """

    link_s: float = 0.0
    electrical_s: float = 0.0
    link_kb_s: float = 0.0
    electrical_kb_s: float = 0.0

    @property
    def needs(self) -> tuple[str, ...]:
        """Figures that it depends on."""
        found = (LINK,) * (self.link_s > 0) + (ELECTRICAL,) * (self.electrical_s > 0)
        return (*found, BURST, LATENCY) if found else ()

    def takes_s(self, figures: Figures, idle_s: float = 0.0, times: int = 1) -> float:
        """Return how long it really takes, so many times on end; links were idle for a while."""
        taken_s = 0.0
        for share, busy_s, kb_s in (
            (LINK, self.link_s, self.link_kb_s),
            (ELECTRICAL, self.electrical_s, self.electrical_kb_s),
        ):
            if busy_s:
                burst_s = min(figures[BURST] * kb_s / figures[share], idle_s)
                taken_s = max(taken_s, times * busy_s / figures[share] - burst_s)
        return taken_s + (figures[LATENCY] / 1e6 if self.needs else 0.0)


@dataclass(frozen=True)
class Wires:
    """The network as it was at some time; nodes have one NIC each."""

    topology: Topology
    circuits: Circuits = field(default_factory=dict)
    oversubscription: float | None = None
    """Of the electrical path, where it was not as stated."""

    def loads(self, sent: Iterable[Sent]) -> Loads | None:
        """Return the busiest links' loads; None where no way leads from a sender to its target."""
        busy: dict[Hashable, float] = defaultdict(float)
        rates: dict[Hashable, tuple[float, bool]] = {}
        for source, target, size_bytes in sent:
            if source == target or size_bytes <= 0:
                continue
            way = self._way(source, target)
            if way is None:
                return None
            for link, mbit_per_s, is_electrical in way:
                bytes_per_s = mbit_per_s * BYTES_PER_S_OF_A_MBIT
                busy[link] += size_bytes / bytes_per_s
                rates[link] = bytes_per_s, is_electrical
        (link_s, link_kb_s), (electrical_s, electrical_kb_s) = (
            max(
                ((busy[link], 1e3 / rate) for link, (rate, sort) in rates.items() if sort == which),
                default=(0.0, 0.0),
            )
            for which in (False, True)
        )
        return Loads(link_s, electrical_s, link_kb_s, electrical_kb_s)

    def shared(self, hops: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Loads] | None:
        """Return by hop what one byte takes while all of them send, max-min fairly.

        Who is bound by what is found at nominal rates; what that is of payload comes later.
        """
        ways = {hop: self._way(*hop) for hop in hops}
        left: dict[Hashable, float] = {}
        waiting: dict[tuple[str, str], list[Crossed]] = {}
        for hop, way in ways.items():
            if way is None:
                return None
            waiting[hop] = way
            left |= {link: rate * BYTES_PER_S_OF_A_MBIT for link, rate, _ in way}
        found = {}
        while waiting:
            users = Counter(link for way in waiting.values() for link, _, _ in way)
            tight = min(users, key=lambda link: left[link] / users[link])
            each = left[tight] / users[tight]
            bound = [hop for hop, way in waiting.items() if tight in (link for link, _, _ in way)]
            for hop in bound:
                way = waiting.pop(hop)
                is_electrical = any(link == tight and electrical for link, _, electrical in way)
                kb_s = 1e3 / each
                found[hop] = (
                    Loads(electrical_s=1 / each, electrical_kb_s=kb_s)
                    if is_electrical
                    else Loads(link_s=1 / each, link_kb_s=kb_s)
                )
                for link, _, _ in way:
                    left[link] -= each
        return {hop: found[hop] for hop in hops}

    def _way(self, source: str, target: str) -> list[Crossed] | None:
        """Return the links of a flow; None: there are none that lead there."""
        nodes, rate = self.topology.nodes, self.topology.rates.link_mbit_per_s
        here, there = nodes[source].tor, nodes[target].tor
        ends: list[Crossed] = [(("out", source), rate, False), (("in", target), rate, False)]
        if here == there:
            return ends
        if count := self.circuits.get((here, there), 0):
            hosts = [nic.node for nic in self.topology.nics_of(there)]
            lane = hosts.index(target) % count
            return [*ends, ((here, there, lane), rate, False)]
        if not (self.topology.has_electrical(here) and self.topology.has_electrical(there)):
            return None
        out, into = self._electrical(here), self._electrical(there)
        return [*ends, (("up", here), out, True), (("down", there), into, True)]

    def _electrical(self, tor: str) -> float:
        rate = self.topology.electrical_mbit_per_s(tor)
        if self.oversubscription is None:
            return rate
        return rate * self.topology.rates.oversubscription / self.oversubscription


class _Change(NamedTuple):
    begin_ns: int
    end_ns: int
    circuits: Circuits


class Networks:
    """The networks of a run, by when and under which arm; None where nobody knows."""

    def __init__(self, measured: Measured) -> None:
        self._topology = measured.topology
        self._shapes = {row["shape"]: _lit(row["lit"]) for row in measured.rows("shape")}
        self._changes: dict[str, list[_Change]] = defaultdict(list)
        for t_ns, row in measured.stamped("fabric_change"):
            begin_ns = t_ns - round(row["total_ms"] * NS_PER_MS)
            self._changes[row["policy"]].append(_Change(begin_ns, t_ns, _lit(row["lit"])))

    def of_shape(self, path: str) -> Wires | None:
        """Return the network of a label of results: ``electrical``, or a shape's name."""
        if path == "electrical":
            return Wires(self._topology)
        shape = path.partition("@")[0]
        return Wires(self._topology, self._shapes[shape]) if shape in self._shapes else None

    def during(self, arm: str, begin_ns: int, end_ns: int) -> Wires | None:
        """Return that of an arm; None where it was changed meanwhile, or before any arm was."""
        network = arm.rpartition("@")[2] if "@" in arm else ""
        if network == "ideal":
            return Wires(self._topology, DARK, 1.0)
        if not network and self._shapes:
            return None
        lit: Circuits = DARK
        for change in self._changes[arm]:
            if change.begin_ns < end_ns and change.end_ns > begin_ns:
                return None
            if change.end_ns <= begin_ns:
                lit = change.circuits
        return Wires(self._topology, lit)


def _lit(links: Iterable[str]) -> Circuits:
    """Read ``tor0-tor1@agg0``, or ``tor0>tor1@agg0`` of light that goes one way."""
    found: Counter[tuple[str, str]] = Counter()
    for link in links:
        ends = link.partition("@")[0]
        if ">" in ends:
            a, _, b = ends.partition(">")
        else:
            a, _, b = ends.partition("-")
            found[b, a] += 1
        found[a, b] += 1
    return found
