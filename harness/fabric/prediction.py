"""How long a demand takes over given links: fluid, as if all bytes were there at once. Pure.

It is a lower bound, and reached when senders share out their NICs as the pairs need it: latency,
the steps of a collective and the ramp of TCP are left out. Where every ToR has the same electrical
path and no NIC binds, it is `harness.fabric.matchings.finish_s`. Where hosts forward, what has no
link of its own goes over as few links as lead to where it must.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from harness.clock import NS_PER_S
from harness.fabric.demand import Demand, Floats
from harness.fabric.endpoints import Ints
from harness.fabric.links import Link
from harness.fabric.topology import CUT_SHARE, Topology

PAYLOAD_SHARE = 1448 / 1514
"""Of Ethernet frames, as rates count them, what TCP carries: 1500 bytes of IP without 52 of headers
(with time stamps), and 14 of Ethernet."""
BYTES_PER_NS_OF_A_MBIT = PAYLOAD_SHARE * 1e6 / 8 / NS_PER_S


@dataclass(frozen=True, eq=False)
class Capacity:
    """What links and the electrical path carry of payload, bytes per ns; ToRs in order.

    `circuits[i, j]`: from ToR i to ToR j, 0 where there is no link. `electrical`, `nics`: of each
    ToR, out and in alike.
    """

    circuits: Floats
    electrical: Floats
    nics: Floats
    forwarding: bool = False

    def finish_ns(self, sent_bytes: Floats) -> Floats:
        """Return how long bytes [..., from, to] take, for each matrix of a stack of them.

        max( D[i,j] / circuits[i,j]         over pairs that have a link,
             rest of i's or j's other bytes / electrical path, out and in apart,
             all of i's bytes / its hosts' NICs, out and in apart )

        What is forwarded is in D of every link that it goes over, and not in the rest.
        """
        lit = self.circuits > 0
        carried = self._forwarded(sent_bytes) if self.forwarding else sent_bytes
        by_circuit = np.divide(carried, self.circuits, out=np.zeros_like(carried), where=lit).max(
            (-2, -1), initial=0.0
        )
        rest = np.where(lit, 0.0, carried)
        shared = np.maximum(_busiest(rest, self.electrical), _busiest(sent_bytes, self.nics))
        return np.asarray(np.maximum(by_circuit, shared))

    @cached_property
    def _before(self) -> Ints:
        """[i, j]: the ToR before j on a shortest way from i over links; below 0: none leads."""
        from scipy.sparse import csr_array  # noqa: PLC0415
        from scipy.sparse.csgraph import shortest_path  # noqa: PLC0415

        graph = csr_array(self.circuits > 0)
        _, before = shortest_path(graph, unweighted=True, return_predecessors=True)
        return np.asarray(before, np.int64)

    def _forwarded(self, sent_bytes: Floats) -> Floats:
        """Return what each link carries, and each pair else, when bytes go over several links."""
        carried = np.where(self._before < 0, sent_bytes, 0.0)
        *stack, froms, tos = np.nonzero(np.where(self._before < 0, 0.0, sent_bytes))
        sizes = sent_bytes[(*stack, froms, tos)]
        while len(froms):
            before = self._before[froms, tos]
            np.add.at(carried, (*stack, before, tos), sizes)
            left = before != froms
            *stack, froms, tos, sizes = (each[left] for each in (*stack, froms, before, sizes))
        return carried


def capacity(topology: Topology, links: Iterable[Link]) -> Capacity:
    """Return what these links, and what is there without them, carry."""
    index = {tor: i for i, tor in enumerate(topology.tors)}
    count = np.zeros((len(index),) * 2)
    for link in links:
        for near, far in link.ways:
            count[index[near.tor], index[far.tor]] += 1
    link_mbit_per_s = topology.rates.link_mbit_per_s
    hosts = [max(1, len(topology.nics_of(tor))) for tor in topology.tors]
    nics = np.array(hosts, np.float64) * link_mbit_per_s
    left = np.array([1.0 if topology.has_electrical(tor) else CUT_SHARE for tor in topology.tors])
    return Capacity(
        circuits=count * link_mbit_per_s * BYTES_PER_NS_OF_A_MBIT,
        electrical=nics * left / topology.rates.oversubscription * BYTES_PER_NS_OF_A_MBIT,
        nics=nics * BYTES_PER_NS_OF_A_MBIT,
        forwarding=topology.rates.forwarding,
    )


def finish_ns(topology: Topology, demand: Demand, links: Iterable[Link]) -> float:
    """Return how long `demand` takes over `links`; see `Capacity.finish_ns` for the formula.

    Pairs with a link use nothing else: routes lead over their links, parallel ones shared evenly.
    A one-way link serves the pair that it leads from and to only.
    """
    return float(capacity(topology, links).finish_ns(demand.sent_bytes))


def electrical_ns(topology: Topology, demand: Demand) -> float:
    """Return how long it takes when all of it goes over the electrical path."""
    return finish_ns(topology, demand, ())


def ideal_ns(topology: Topology, demand: Demand) -> float:
    """Return how long it takes on a non-blocking fabric of the same link rate: NICs alone bind."""
    return float(_busiest(demand.sent_bytes, capacity(topology, ()).nics))


def _busiest(sent_bytes: Floats, bytes_per_ns: Floats) -> Floats:
    """Return how long the ToR that sends or gets most, by its rate, takes."""
    out, in_ = sent_bytes.sum(-1) / bytes_per_ns, sent_bytes.sum(-2) / bytes_per_ns
    return np.asarray(np.maximum(out, in_).max(-1, initial=0.0))
