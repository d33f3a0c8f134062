"""Where bytes come from and go to: NICs of nodes, and the rails that they take between ToRs. Pure.

An endpoint is ``n3/2``, NIC 2 of node n3, or ``n3``, the node as a whole, which shares bytes out to
all of its NICs alike. Nothing changes rails on the network: bytes leave their node by the rail that
they arrive on, over NVLink first where that is not the sender's own (NCCL's PXN). Among nodes with
as many NICs, what goes from node to node is spread over all rails, each within itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.fabric.topology import NodePlace, Topology

Ints = NDArray[np.int64]
Sizes = NDArray[np.float64]


class Ends(NamedTuple):
    """Some endpoints, a row each."""

    nodes: Ints
    """The number of its node."""
    tors: Ints
    """Of each NIC of the node, by index; the last one over again where other nodes have more."""
    counts: Ints
    """How many NICs the node has."""
    nics: Ints
    """The NICs that it uses, to equal shares."""

    def some(self, rows: Sequence[int]) -> Ends:
        """Return some of them, in this order."""
        return Ends(*(each[rows] for each in self))

    def with_channels(self) -> Ends:
        """Return them with each using all NICs of its node that any of them uses."""
        nodes = self.nodes.tolist()
        used: dict[int, set[int]] = {}
        for node, nics in zip(nodes, self.nics.tolist(), strict=True):
            used.setdefault(node, set()).update(nics)
        return self._replace(nics=_even([sorted(used[node]) for node in nodes]))

    def rails(self) -> list[Ints]:
        """Return, for each rail of the node that has most, the ToR of every endpoint on it."""
        most, here = int(self.counts.max(initial=1)), np.arange(len(self.nodes))
        return [self.tors[here, rail * self.counts // most] for rail in range(most)]

    def between(self, froms: Ints, tos: Ints, sizes: Sizes) -> tuple[Ints, Ints, Sizes]:
        """Return from which ToRs to which how much goes, for these pairs of rows and their sizes.

        Within a node nothing does, whatever its ToRs.
        """
        into, own = self.nics[tos], self.nics[froms]
        here, there = self.counts[froms, None], self.counts[tos, None]
        out = np.where(own * there // here == into, own, into * here // there)
        apart = self.nodes[froms] != self.nodes[tos]
        shares = np.where(apart, sizes, 0.0)[:, None] / into.shape[1]
        return (
            self.tors[froms[:, None], out],
            self.tors[tos[:, None], into],
            np.broadcast_to(shares, into.shape),
        )


def ends_of(topology: Topology, endpoints: Sequence[str]) -> Ends:
    """Return where these are; raises `UsageError` on one that the bench has not."""
    index = {tor: i for i, tor in enumerate(topology.tors)}
    found = {endpoint: topology.nics_at(endpoint) for endpoint in dict.fromkeys(endpoints)}
    places = dict.fromkeys(place for place, _ in found.values())
    most = max((len(place.nics) for place in places), default=1)
    rows = {place: (i, _tors(place, index, most)) for i, place in enumerate(places)}
    at = [rows[found[endpoint][0]] for endpoint in endpoints]
    return Ends(
        np.array([number for number, _ in at], np.int64),
        np.array([tors for _, tors in at], np.int64).reshape(-1, most),
        np.array([len(found[endpoint][0].nics) for endpoint in endpoints], np.int64),
        _even([list(found[endpoint][1]) for endpoint in endpoints]),
    )


def _tors(place: NodePlace, index: dict[str, int], most: int) -> list[int]:
    tors = [index[nic.tor] for nic in place.nics]
    return tors + tors[-1:] * (most - len(tors))


def _even(rows: Sequence[Sequence[int]]) -> Ints:
    """Return rows of one length, in which each item of a row is as often as any other."""
    wide = lcm(*{len(row) for row in rows})
    repeated = [[item for item in row for _ in range(wide // len(row))] for row in rows]
    return np.array(repeated, np.int64).reshape(-1, wide)
