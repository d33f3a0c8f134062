"""What a ToR whose electrical link is down leaves without any way. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from harness.fabric.demand import Demand
from harness.fabric.links import Edge, Link
from harness.fabric.topology import Topology


def stranded(topology: Topology, demand: Demand, links: Iterable[Link]) -> tuple[Edge, ...]:
    """Return which pairs (from, to) of the demand get nowhere over these links, largest first.

    They have no link, and one of them, or both, no electrical path.
    """
    if not topology.cut:
        return ()
    joined = {(near.tor, far.tor) for link in links for near, far in link.ways}
    order = np.argsort(-demand.sent_bytes, axis=None, kind="stable")
    rows, columns = np.unravel_index(order, demand.sent_bytes.shape)
    pairs = (
        (demand.tors[i], demand.tors[j])
        for i, j in zip(rows.tolist(), columns.tolist(), strict=True)
        if demand.sent_bytes[i, j] > 0
    )
    return tuple(pair for pair in pairs if {*pair} & topology.cut and pair not in joined)
