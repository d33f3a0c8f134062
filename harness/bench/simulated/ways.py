"""The links of a simulated network, and which of them a flow takes by the routes in force. Pure.

Each NIC, each ToR's electrical path and each uplink is two links, out and in. A flow leaves its ToR
by the route to its target's host, else by that to the target's ToR; of several hops it takes one by
a hash of who sends to whom. The ToR at the hop's far end goes on in the same way. Without a route
it takes, where hosts forward, the shortest way over circuits that others are steered over; else the
electrical path, where one leads to the target's ToR. Who has no way at all waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple
from zlib import crc32

from drivers.tor.base import Hop, Route
from harness.bench.simulated.world import Flow
from harness.fabric.links import Uplink
from harness.fabric.topology import Nic, Topology

WAITING = 0
"""A link that never carries anything."""
HOPS_MAX = 64
"""ToRs on one way: whoever is sent round in circles waits."""

Path = tuple[int, ...]
"""Links, by their indices."""
Ends = tuple[Uplink, Uplink]
"""A hop: the uplink that sends, and the one that is to hear it."""
Hops = tuple[Ends, ...]


class Pair(NamedTuple):
    """The two links of one port."""

    out: int
    into: int


class Ways:
    """See the module. `steer` changes the routes; all else stays as it was made."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self.count = 1
        """How many links there are; the first is `WAITING`."""
        self.nics = {
            nic.name: self._pair() for place in topology.nodes.values() for nic in place.nics
        }
        self.electrical = {
            tor: self._pair() for tor in topology.tors if topology.has_electrical(tor)
        }
        self.uplinks = {(up.tor, up.device): self._pair() for up in topology.uplinks}
        self._by_address = {up.address: up for up in topology.uplinks}
        self._by_interface = {
            (up.tor, topology.tors[up.tor].interfaces.get(up.device, up.device)): up
            for up in topology.uplinks
        }
        nics = [nic for place in topology.nodes.values() for nic in place.nics]
        self._target_of = {f"{nic.address}/32": nic.name for nic in nics}
        self._target_of |= {place.prefix: tor for tor, place in topology.tors.items()}
        self._hops: dict[str, dict[str, Hops]] = {tor: {} for tor in topology.tors}
        """By ToR and target, which is another ToR or a NIC."""
        self._known: dict[tuple[str, str], Path] = {}
        """By ToR and NIC, the links between them, where all take the same."""
        self._before: dict[str, Mapping[str, str]] = {}
        """Where hosts forward, by ToR, which ToR is the last but one on the way to another."""
        self._chosen = 0
        """How often a flow took one of several hops: others may take another."""

    def _pair(self) -> Pair:
        self.count += 2
        return Pair(self.count - 2, self.count - 1)

    # -- routes -------------------------------------------------------------------------------

    def steer(self, tor: str, routes: frozenset[Route]) -> None:
        """Have these routes, and no others, in force on a ToR."""
        self._hops[tor] = {
            self._target_of[route.prefix]: tuple(self._ends(tor, hop) for hop in route.hops)
            for route in sorted(routes)
        }
        self._before.clear()
        self._known.clear()

    def aims(self, tor: str) -> dict[Uplink, Uplink]:
        """Return at whom each uplink of a ToR aims that something is sent over."""
        return {near: far for hops in self._hops[tor].values() for near, far in hops}

    def _ends(self, tor: str, hop: Hop) -> Ends:
        return self._by_interface[tor, hop.device], self._by_address[hop.via]

    # -- ways ---------------------------------------------------------------------------------

    def parts(self, flow: Flow) -> list[tuple[Nic, Nic]]:
        """Return from which NIC to which the equal parts of a flow go."""
        sends = self._topology.nodes[flow.source].nics
        gets = self._topology.nodes[flow.target].nics
        if flow.nic is not None:
            return [(sends[flow.nic * len(sends) // len(gets)], gets[flow.nic])]
        if len(sends) == len(gets):
            return list(zip(sends, gets, strict=True))
        return [(nic, gets[k * len(gets) // len(sends)]) for k, nic in enumerate(sends)]

    def path(self, source: Nic, target: Nic) -> Path:
        """Return the links from a NIC to another one."""
        key = source.tor, target.name
        between = self._known.get(key)
        if between is None:
            chosen = self._chosen
            between = self._between(source, target)
            if self._chosen == chosen:
                self._known[key] = between
        return (self.nics[source.name].out, *between, self.nics[target.name].into)

    def _between(self, source: Nic, target: Nic) -> Path:
        """Return the links from the ToR of a NIC to that of another one."""
        tor: str = source.tor
        links: Path = ()
        for _ in range(HOPS_MAX):
            if tor == target.tor:
                return links
            hops = self._hops[tor]
            steered = hops.get(target.name) or hops.get(target.tor)
            if steered is None:
                return (*links, *self._unsteered(tor, source, target))
            near, far = self._one(steered, source, target)
            links, tor = (*links, *self._over(near, far)), far.tor
        return (WAITING,)

    def _one(self, hops: Hops, source: Nic, target: Nic) -> Ends:
        """Return which of several hops a flow takes."""
        if len(hops) == 1:
            return hops[0]
        self._chosen += 1
        return hops[crc32(f"{source.name} {target.name}".encode()) % len(hops)]

    def _over(self, near: Uplink, far: Uplink) -> Path:
        return self.uplinks[near.tor, near.device].out, self.uplinks[far.tor, far.device].into

    def _unsteered(self, tor: str, source: Nic, target: Nic) -> Path:
        """Return the links from a ToR to that of the target where no route leads."""
        if self._topology.rates.forwarding and target.tor in self._forwarded(tor):
            return self._by_others(tor, source, target)
        if self._is_joined(tor, target.tor):
            return (self.electrical[tor].out, self.electrical[target.tor].into)
        return (WAITING,)

    def _by_others(self, tor: str, source: Nic, target: Nic) -> Path:
        links: Path = ()
        before, at = self._forwarded(tor), target.tor
        while at != tor:
            near, far = self._one(self._hops[before[at]][at], source, target)
            links = (*self._over(near, far), *links)
            at = before[at]
        return links

    def _is_joined(self, tor: str, other: str) -> bool:
        """Whether an electrical path leads from ToR to ToR."""
        if not (tor in self.electrical and other in self.electrical):
            return False
        if self._topology.rates.electrical == "rail":
            return self._rails.get(tor) == self._rails.get(other)
        return True

    @cached_property
    def _rails(self) -> dict[str, int]:
        """Of which rail each ToR is: that of its NICs' numbers."""
        numbered = (enumerate(place.nics) for place in self._topology.nodes.values())
        return {nic.tor: rail for nics in numbered for rail, nic in nics}

    def _forwarded(self, tor: str) -> Mapping[str, str]:
        """Return, by each ToR that circuits lead to, the last but one on the shortest way there."""
        if tor not in self._before:
            before: dict[str, str] = {}
            ahead = deque([tor])
            while ahead:
                at = ahead.popleft()
                for other, hops in self._hops[at].items():
                    if other not in before and other != tor and hops[0][1].tor == other:
                        before[other] = at
                        ahead.append(other)
            self._before[tor] = before
        return self._before[tor]
