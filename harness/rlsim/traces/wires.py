"""The network of a bench at rest, as links of flows: NICs, electrical paths, and lit circuits.

Each is two links, out and in. A flow goes from ToR to ToR over a circuit that joins them, else over
the electrical path where one leads there, else, where hosts forward, over as few circuits as lead
there. Nothing moves while a trace is replayed. Rates are those of payload, by the calibration.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import cache
from zlib import crc32

import numpy as np

from harness.fabric.links import Link, Uplink
from harness.fabric.topology import Nic, NodePlace, Topology
from harness.model.simulation import Network
from harness.rlsim.kernels import Floats

BYTES_PER_S_OF_A_MBIT = 1e6 / 8
NOWHERE = 0
"""A link that never carries anything: whoever has no way waits there."""

Path = tuple[int, ...]
Ends = tuple[Uplink, Uplink]


class Wires:
    """See the module; `lit` are links that circuits make."""

    def __init__(self, topology: Topology, figures: Network, lit: Iterable[Link] = ()) -> None:
        self.topology = topology
        self._rates = [0.0]
        link = topology.rates.link_mbit_per_s * figures.link_share.value
        electrical = figures.electrical_share.value
        nics = [nic for place in topology.nodes.values() for nic in place.nics]
        self._nics = {nic.name: self._pair(link) for nic in nics}
        self._electrical = {
            tor: self._pair(topology.electrical_mbit_per_s(tor) * electrical)
            for tor in topology.tors
            if topology.has_electrical(tor)
        }
        self._rail = {nic.tor: k for at in topology.nodes.values() for k, nic in enumerate(at.nics)}
        self._hops: dict[str, dict[str, list[Ends]]] = {tor: {} for tor in topology.tors}
        self._uplinks: dict[tuple[str, str], tuple[int, int]] = {}
        for near, far in (way for one in sorted(lit) for way in one.ways):
            self._hops[near.tor].setdefault(far.tor, []).append((near, far))
            for up in (near, far):
                if (up.tor, up.device) not in self._uplinks:
                    self._uplinks[up.tor, up.device] = self._pair(link)
        self.path = cache(self._path)
        """Return the links from a NIC to another one; `NOWHERE` is one where no way leads."""

    def _pair(self, mbit_per_s: float) -> tuple[int, int]:
        self._rates += [mbit_per_s * BYTES_PER_S_OF_A_MBIT] * 2
        return len(self._rates) - 2, len(self._rates) - 1

    def capacities_bytes_per_s(self) -> Floats:
        """Return what each link carries."""
        return np.array(self._rates)

    def _path(self, source: Nic, target: Nic) -> Path:
        out, into = self._nics[source.name][0], self._nics[target.name][1]
        if source.tor == target.tor:
            return (out, into)
        return (out, *self._between(source, target), into)

    def _between(self, source: Nic, target: Nic) -> Path:
        near, far = source.tor, target.tor
        if far in self._hops[near]:
            return self._over(near, far, source, target)
        if self._is_joined(near, far):
            return (self._electrical[near][0], self._electrical[far][1])
        steps = self._forwarded(near, far) if self.topology.rates.forwarding else []
        links = [link for a, b in steps for link in self._over(a, b, source, target)]
        return tuple(links) or (NOWHERE,)

    def _over(self, near: str, far: str, source: Nic, target: Nic) -> Path:
        """Return the circuit between two ToRs: of several, one by a hash of who sends to whom."""
        ways = self._hops[near][far]
        a, b = ways[crc32(f"{source.name} {target.name}".encode()) % len(ways)]
        return self._uplinks[a.tor, a.device][0], self._uplinks[b.tor, b.device][1]

    def _is_joined(self, near: str, far: str) -> bool:
        if not (near in self._electrical and far in self._electrical):
            return False
        by_rail = self.topology.rates.electrical == "rail"
        return not by_rail or self._rail.get(near) == self._rail.get(far)

    def _forwarded(self, near: str, far: str) -> list[tuple[str, str]]:
        """Return the steps of a shortest way over circuits; none where none leads there."""
        before = {near: near}
        ahead = deque([near])
        while ahead and far not in before:
            at = ahead.popleft()
            for other in self._hops[at]:
                if other not in before:
                    before[other] = at
                    ahead.append(other)
        steps = []
        while far in before and far != near:
            steps.append((before[far], far))
            far = before[far]
        return steps[::-1]


def over_rail(source: NodePlace, target: NodePlace, gpu: int) -> tuple[Nic, Nic]:
    """Return the NICs by which bytes get to a GPU of `target`: of both nodes, those of its rail."""
    into = target.nic_of(gpu)
    return source.nics[into * len(source.nics) // len(target.nics)], target.nics[into]


def over_all(source: NodePlace, target: NodePlace) -> list[tuple[Nic, Nic]]:
    """Return the NICs by which equal parts of what a node sends to another one go."""
    sends, gets = source.nics, target.nics
    return [(nic, gets[k * len(gets) // len(sends)]) for k, nic in enumerate(sends)]
