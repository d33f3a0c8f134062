"""What beacons tell: who is at the other end of each device, silences, and losses. Pure.

A beacon carries its sender ("node:device"), the sender's stream (a random number per start) and a
sequence number. Times are arrivals in nanoseconds on this node's monotonic clock.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from harness.wire.messages import Beacons, Gap

SILENCE_INTERVALS = 3
"""A silence longer than this many intervals is a gap."""
KEPT_ARRIVALS = 65536
"""Per device; half a minute at the shortest interval."""
KEPT_EVENTS = 4096
"""Gaps, and losses, per device."""

_HEAD = struct.Struct("!4sIQ")
_MAGIC = b"OHB1"


@dataclass(frozen=True)
class Beacon:
    """One beacon as received."""

    sender: str
    stream: int
    sequence: int


class Stamper:
    """Makes the payloads of one sender: the text is laid out once, the number changes."""

    def __init__(self, sender: str, stream: int) -> None:
        self._payload = bytearray(_HEAD.size) + sender.encode()
        self._stream = stream

    def payload(self, sequence: int) -> bytearray:
        """Return the payload numbered `sequence`; valid until the next call."""
        _HEAD.pack_into(self._payload, 0, _MAGIC, self._stream, sequence)
        return self._payload


def parse(payload: bytes) -> Beacon | None:
    """Return the beacon, or None when the packet is somebody else's."""
    if len(payload) <= _HEAD.size:
        return None
    magic, stream, sequence = _HEAD.unpack_from(payload)
    if magic != _MAGIC:
        return None
    return Beacon(payload[_HEAD.size :].decode(errors="replace"), stream, sequence)


@dataclass
class _Device:
    """One device's record. `arrivals` hold (time, sender), `losses` (time noticed, how many)."""

    arrivals: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=KEPT_ARRIVALS))
    gaps: deque[Gap] = field(default_factory=lambda: deque(maxlen=KEPT_EVENTS))
    losses: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=KEPT_EVENTS))
    last: Beacon | None = None
    last_ns: int = 0
    heard_ns: dict[str, int] = field(default_factory=dict)
    received: int = 0
    lost: int = 0


class Ledger:
    """All devices' records. Beacons of the device itself, looped back to it, are not recorded."""

    def __init__(self, node: str, devices: Iterable[str], interval_ns: int) -> None:
        self._node = node
        self._silence_ns = SILENCE_INTERVALS * interval_ns
        self._devices = {name: _Device() for name in devices}

    def arrived(self, device: str, at_ns: int, beacon: Beacon) -> None:
        """Record one beacon. Arrivals of one device come in order."""
        if beacon.sender == f"{self._node}:{device}":
            return
        record, before = self._devices[device], self._devices[device].last
        if before is not None:
            if at_ns - record.last_ns > self._silence_ns:
                record.gaps.append(
                    Gap(
                        device=device,
                        last_ns=record.last_ns,
                        first_ns=at_ns,
                        before=before.sender,
                        after=beacon.sender,
                    )
                )
            missing = beacon.sequence - before.sequence - 1
            same = (before.sender, before.stream) == (beacon.sender, beacon.stream)
            if same and missing > 0:
                record.losses.append((at_ns, missing))
                record.lost += missing
            if same and missing < 0:
                beacon = before  # a double, or overtaken: the count goes on from the highest
        record.arrivals.append((at_ns, beacon.sender))
        record.heard_ns[beacon.sender] = at_ns
        record.received += 1
        record.last, record.last_ns = beacon, at_ns

    def heard(self, expect: Mapping[str, str], since_ns: int) -> bool:
        """Whether every expected far end was heard after `since_ns`."""
        return all(
            self._devices[device].heard_ns.get(sender, -1) > since_ns
            for device, sender in expect.items()
        )

    def report(self, since_ns: int) -> Beacons:
        """Return what happened after `since_ns`; `last` is told however old it is.

        `first_ns` and, with `since_ns` > 0, `received` and `lost` go back no further than the
        arrivals and events that are kept.
        """
        last, first_ns, lost, received = {}, {}, {}, {}
        gaps: list[Gap] = []
        for name, record in self._devices.items():
            fresh = _after(record.arrivals, since_ns)
            received[name] = len(fresh) if since_ns > 0 else record.received
            recent = sum(count for at_ns, count in record.losses if at_ns > since_ns)
            lost[name] = recent if since_ns > 0 else record.lost
            gaps += [gap for gap in record.gaps if gap.first_ns > since_ns]
            if record.last is None:
                continue
            last[name] = record.last.sender
            if found := [at_ns for at_ns, sender in fresh if sender == last[name]]:
                first_ns[name] = found[0]
        gaps.sort(key=lambda gap: gap.first_ns)
        return Beacons(last=last, first_ns=first_ns, gaps=tuple(gaps), lost=lost, received=received)


def _after(arrivals: deque[tuple[int, str]], since_ns: int) -> list[tuple[int, str]]:
    """Return the arrivals after `since_ns`, oldest first, looking only at those."""
    found = []
    for arrival in reversed(arrivals):
        if arrival[0] <= since_ns:
            break
        found.append(arrival)
    found.reverse()
    return found
