"""Clock offsets between nodes: four stamps, lowest-delay filter, and a bound that grows with age."""

from __future__ import annotations

import msgspec


class ClockFit(msgspec.Struct, frozen=True, kw_only=True):
    """How one node's monotonic clock maps onto the coordinator's.

    ``t_coordinator = t_node - offset_ns - drift_ppb * 1e-9 * (t_node - at_ns)``, right within
    `bound_ns` at `at_ns` (half the smallest delay plus stamp cost), growing with age.
    """

    node: str
    offset_ns: int
    drift_ppb: float
    at_ns: int
    delay_ns: int
    bound_ns: int
    samples: int
    method: str = "four-stamp"
