"""The network of a simulated bench: fluid flows over links that light and routes give and take.

A link is a NIC, the electrical path of a ToR, or an uplink, each way apart. Routes say which links
a flow takes (`harness.bench.simulated.ways`). An uplink carries something as long as its light
arrives where the routes over it aim at. Otherwise what is sent over it waits there: packets would
be lost, and sent again. Whatever changes changes all rates at that very moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from drivers.tor.base import Route
from harness.bench.simulated.buckets import Buckets
from harness.bench.simulated.light import Light
from harness.bench.simulated.units import Unit
from harness.bench.simulated.ways import Pair, Path, Ways
from harness.bench.simulated.world import Flow
from harness.clock import NS_PER_S, NS_PER_US, Clock
from harness.errors import UsageError
from harness.fabric.links import Uplink
from harness.fabric.topology import Nic, Topology
from harness.model.advance import FOREVER_NS
from harness.model.bench import Bench
from harness.model.simulation import Calibration
from harness.rlsim.flows import Flows

ELECTRICAL = "e0"
BYTES_PER_S_OF_A_MBIT = 1e6 / 8
AT_ONCE_NS = 1
"""All that changes at one moment is reckoned so much later, once."""


@dataclass(eq=False, slots=True)
class _Parcel:
    """Flows that were handed over together, and how many of them go on."""

    flows: Sequence[int]
    left: int
    arrived: asyncio.Future[None]


@dataclass(eq=False, slots=True)
class _UnderWay:
    """One flow that goes on."""

    parcel: _Parcel
    source: Nic
    target: Nic
    path: Path


class Fabric:
    """The `Network` of a world, and what else of it can be asked or changed."""

    def __init__(
        self, bench: Bench, topology: Topology, figures: Calibration, clock: Clock
    ) -> None:
        self._bench, self._topology, self._clock = bench, topology, clock
        self._figures = figures.network
        self._latency_ns = round(figures.network.latency_us.value * NS_PER_US)
        self._ways = Ways(topology)
        link = topology.rates.link_mbit_per_s * figures.network.link_share.value
        self._link_bytes_per_s = link * BYTES_PER_S_OF_A_MBIT
        self._flows = Flows(self._capacities())
        self._buckets = Buckets(1000 * figures.network.burst_kb.value, self._capacities())
        self._under_way: dict[int, _UnderWay] = {}
        self._aims: dict[Uplink, Uplink] = {}
        self._turned = asyncio.Event()
        """Set when ways or light change; a new one then."""
        self._timer: asyncio.TimerHandle | None = None
        self._due_ns = FOREVER_NS
        self._units: Mapping[str, Unit] = {}
        self._counted: tuple[int, NDArray[np.float64]] | None = None
        self.light = Light(topology, {})

    @property
    def units(self) -> Mapping[str, Unit]:
        """The switches whose light the network goes by. Must be set once, before it is used."""
        return self._units

    @units.setter
    def units(self, units: Mapping[str, Unit]) -> None:
        self._units = units
        self.light = Light(self._topology, {name: unit.mirrors for name, unit in units.items()})
        self.light.listeners.append(self._relit)

    # -- carrying -----------------------------------------------------------------------------

    async def carry(self, flows: Sequence[Flow]) -> None:
        """Send all of these from now on; return when the last byte of the last has arrived."""
        ways, sizes_bytes = [], []
        for flow in flows:
            if flow.source != flow.target and flow.bytes > 0:
                parts = self._ways.parts(flow)
                ways += parts
                sizes_bytes += [flow.bytes / len(parts)] * len(parts)
        if not ways:
            return
        paths, now_ns = [self._ways.path(*way) for way in ways], self._clock.now_ns()
        left_bytes = self._buckets.left_bytes(now_ns, paths, sizes_bytes)
        ids = self._flows.add(now_ns, paths, left_bytes, self._latency_ns)
        parcel = _Parcel(ids, len(ids), asyncio.get_running_loop().create_future())
        for flow_id, way, path in zip(ids, ways, paths, strict=True):
            self._under_way[flow_id] = _UnderWay(parcel, *way, path)
            self._buckets.begin(path)
        self._stir()
        try:
            await parcel.arrived
        finally:
            self._withdraw(parcel)

    async def stands_still(self, source: str, target: str, for_ns: int) -> None:
        """Return when nothing could get from one node to the other for so long."""
        way = Flow(source, target, 1.0)
        while True:
            turned = self._turned
            try:
                async with asyncio.timeout(for_ns / NS_PER_S):
                    await turned.wait()
            except TimeoutError:
                paths = (self._ways.path(*part) for part in self._ways.parts(way))
                if not any(self._buckets.capacity[[*path]].all() for path in paths):
                    return

    def _withdraw(self, parcel: _Parcel) -> None:
        """Take what is left of a parcel away; nothing is where all has arrived."""
        if not parcel.left:
            return
        now_ns = self._clock.now_ns()
        left = [flow_id for flow_id in parcel.flows if flow_id in self._under_way]
        for flow_id in left:
            self._buckets.end(now_ns, self._under_way.pop(flow_id).path)
        self._flows.remove(now_ns, left)
        self._stir()

    def _stir(self) -> None:
        """Reckon anew when all that changes now has changed."""
        self._wake_at(self._clock.now_ns() + AT_ONCE_NS)

    def _wake_at(self, due_ns: int) -> None:
        if self._timer is not None:
            if self._due_ns <= due_ns:
                return
            self._timer.cancel()
        self._due_ns = due_ns
        left_s = (due_ns - self._clock.now_ns()) / NS_PER_S
        self._timer = asyncio.get_running_loop().call_later(left_s, self._settle)

    def _settle(self) -> None:
        """Tell those whose flows have ended, and come back when the next do."""
        self._timer = None
        now_ns = self._clock.now_ns()
        for flow_id in self._flows.advance(now_ns):
            flow = self._under_way.pop(flow_id)
            self._buckets.end(now_ns, flow.path)
            parcel = flow.parcel
            parcel.left -= 1
            if not parcel.left and not parcel.arrived.done():
                parcel.arrived.set_result(None)
        if (due_ns := self._flows.next_ns()) < FOREVER_NS:
            self._wake_at(due_ns)

    # -- changing -----------------------------------------------------------------------------

    def steer(self, wanted: Mapping[str, frozenset[Route]]) -> None:
        """Have these steering routes in force on these ToRs, from now on."""
        for tor, routes in wanted.items():
            before = self._ways.aims(tor)
            self._ways.steer(tor, routes)
            aims = self._ways.aims(tor)
            for uplink in before:
                del self._aims[uplink]
            self._aims |= aims
            self._open({**before, **aims})
        now_ns, turned = self._clock.now_ns(), dict[int, Path]()
        for flow_id, flow in self._under_way.items():
            if flow.source.tor == flow.target.tor:
                continue
            path = self._ways.path(flow.source, flow.target)
            if path != flow.path:
                self._buckets.end(now_ns, flow.path)
                self._buckets.begin(path)
                turned[flow_id] = flow.path = path
        self._flows.reroute(now_ns, turned)
        self._stir()

    def electrical(self, oversubscription: float | None) -> None:
        """Let every ToR's electrical path carry its NICs' rates divided by this; None: as stated.

        Raises `UsageError` unless it is more than 0, and where there is no electrical path.
        """
        if oversubscription is not None and not oversubscription > 0:
            raise UsageError(f"oversubscription: {oversubscription:g}; expected more than 0")
        if not self._ways.electrical:
            raise UsageError(
                f"bench {self._bench.name} has no electrical path that could have another rate"
            )
        now_ns = self._clock.now_ns()
        for tor, bytes_per_s in self._electrical_bytes_per_s(oversubscription).items():
            for link in self._ways.electrical[tor]:
                self._set_capacity(now_ns, link, bytes_per_s)
        self._stir()

    def _relit(self, senders: Iterable[Uplink]) -> None:
        self._open(senders)
        self._stir()

    def _open(self, senders: Iterable[Uplink]) -> None:
        """Let uplinks carry something whose light arrives where they aim at; no others."""
        self._turned.set()
        self._turned = asyncio.Event()
        now_ns = self._clock.now_ns()
        for sender in senders:
            aim = self._aims.get(sender)
            hits = aim is not None and self.light.far(sender) is aim
            link = self._ways.uplinks[sender.tor, sender.device].out
            self._set_capacity(now_ns, link, self._link_bytes_per_s if hits else 0.0)

    def _set_capacity(self, now_ns: int, link: int, bytes_per_s: float) -> None:
        self._flows.set_capacity(now_ns, link, bytes_per_s)
        self._buckets.capacity[link] = bytes_per_s

    def close(self) -> None:
        """Carry nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
        for unit in self._units.values():
            unit.close()

    # -- telling ------------------------------------------------------------------------------

    def crossed(self, tor: str) -> tuple[dict[str, float], dict[str, float]]:
        """Return bytes of payload by device, ``e0`` and uplinks, that a ToR has sent and got."""
        carried, pairs = self._carried(), self._devices[tor]
        sent = {device: float(carried[pair.out]) for device, pair in pairs.items()}
        return sent, {device: float(carried[pair.into]) for device, pair in pairs.items()}

    @cached_property
    def _devices(self) -> dict[str, dict[str, Pair]]:
        found: dict[str, dict[str, Pair]] = {tor: {} for tor in self._topology.tors}
        for tor, pair in self._ways.electrical.items():
            found[tor][ELECTRICAL] = pair
        for (tor, device), pair in self._ways.uplinks.items():
            found[tor][device] = pair
        return found

    def _carried(self) -> NDArray[np.float64]:
        """Return what each link has carried by now; it is worked out once for all who ask."""
        now_ns = self._clock.now_ns()
        if self._counted is None or self._counted[0] < now_ns:
            carried = self._flows.carried_bytes(now_ns) + self._buckets.passed_bytes
            self._counted = now_ns, carried
        return self._counted[1]

    # -- rates --------------------------------------------------------------------------------

    def _capacities(self) -> NDArray[np.float64]:
        """Return bytes of payload per s, by link; no uplink is lit."""
        found = np.zeros(self._ways.count)
        for pair in self._ways.nics.values():
            found[[*pair]] = self._link_bytes_per_s
        for tor, bytes_per_s in self._electrical_bytes_per_s(None).items():
            found[[*self._ways.electrical[tor]]] = bytes_per_s
        for pair in self._ways.uplinks.values():
            found[pair.into] = self._link_bytes_per_s
        return found

    def _electrical_bytes_per_s(self, oversubscription: float | None) -> dict[str, float]:
        """Return what the electrical path of each ToR that has one carries of payload."""
        topology = self._topology
        if oversubscription is not None:
            rates = replace(topology.rates, oversubscription=oversubscription)
            topology = replace(topology, rates=rates)
        share = self._figures.electrical_share.value * BYTES_PER_S_OF_A_MBIT
        return {tor: topology.electrical_mbit_per_s(tor) * share for tor in self._ways.electrical}
