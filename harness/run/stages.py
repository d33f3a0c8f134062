"""What a reconfiguration is made of: named stamps in, durations out. Pure.

All stamps are nanoseconds on the coordinator's clock. Every nanosecond between *intent* and
*steady* belongs to exactly one of four accounts:

    communicator   the traffic's own time: the iteration in flight at the intent, making groups
                   anew, and everything from the release of the ranks until they are steady
    device         waiting for switches: from the first command to the last light, less what our
                   own code spent around the exchanges of the slowest switch
    link           from light to the first beacon of the expected far end on every moved port
    overhead       the rest: ours. Messages to agents, steering, drivers, threads, Python
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.clock import NS_PER_MS
from harness.model.streams import STAGES


@dataclass(frozen=True)
class Waits:
    """Spans of waiting for others, ns, that the stamps alone do not show."""

    drain_ns: int = 0
    """From the intent to the end of the last rank's last iteration."""
    device_ns: int = 0
    """The slowest switch: time blocked on its line, and waiting for its light."""
    link_ns: int = 0
    """From the last light to the stamp of the last expected beacon."""
    groups_ns: int = 0
    """Destroying and making communicators, as the ranks stamped it."""
    traffic_ns: int = 0
    """From the release of the last rank until the last one was steady."""


@dataclass(frozen=True)
class Breakdown:
    """The four accounts of one reconfiguration; they sum to `cost_ms`."""

    cost_ms: float
    device_ms: float
    link_ms: float
    communicator_ms: float
    overhead_ms: float


def breakdown(stamps: Mapping[str, int | None], waits: Waits) -> Breakdown:
    """Split intent..steady into its four accounts; raises `ValueError` without those two stamps."""
    intent, steady = stamps.get("intent"), stamps.get("steady")
    if intent is None or steady is None:
        raise ValueError("a breakdown needs the stamps of intent and steady")
    cost_ns = steady - intent
    communicator_ns = waits.drain_ns + waits.groups_ns + waits.traffic_ns
    others_ns = waits.device_ns + waits.link_ns + communicator_ns
    return Breakdown(
        cost_ms=cost_ns / NS_PER_MS,
        device_ms=waits.device_ns / NS_PER_MS,
        link_ms=waits.link_ns / NS_PER_MS,
        communicator_ms=communicator_ns / NS_PER_MS,
        overhead_ms=(cost_ns - others_ns) / NS_PER_MS,
    )


def in_order(stamps: Mapping[str, int | None], slack_ns: int) -> list[str]:
    """Return the stages whose stamp lies more than `slack_ns` before an earlier stage's.

    Stamps from other nodes are mapped, so they may be early by the clock bound; more than that
    is a calibration failure.
    """
    wrong = []
    latest = None
    for name in STAGES:
        stamp = stamps.get(name)
        if stamp is None:
            continue
        if latest is not None and stamp < latest - slack_ns:
            wrong.append(name)
        latest = stamp if latest is None else max(latest, stamp)
    return wrong
