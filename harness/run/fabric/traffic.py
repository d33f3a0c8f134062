"""Traffic as it is announced, and what really crossed the ports of ToRs, by their own counters."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.fabric.demand import Comm
from harness.run.session import MESSAGE_NS, Session
from harness.wire.messages import Counters, ReadCounters

_UPLINK = re.compile(r"u\d+")
ELECTRICAL = "e0"


class Part(NamedTuple):
    """A part of a step's traffic: its kind (train, gather, sync), and its communications."""

    kind: str
    comms: tuple[Comm, ...]


class Crossed(NamedTuple):
    """Bytes of frames by ToR, in the topology's order: sent and received, and of it by circuits."""

    sent: NDArray[np.float64]
    received: NDArray[np.float64]
    by_circuits: float


@dataclass
class Meter:
    """Reads the counters of all ToRs; None where a ToR has nobody to read them."""

    session: Session
    cut: frozenset[str] = frozenset()
    """ToRs whose electrical link was down at the last reading."""
    _last: dict[str, Counters] | None = None

    async def read(self) -> Crossed | None:
        """Return what crossed since the last reading; None at the first, and where nobody tells."""
        tors = tuple(self.session.bench.topology.tors)
        if {*tors} - {*self.session.watchers}:
            return None
        now = await self.session.bench.ask_all(
            dict.fromkeys(tors, ReadCounters()), Counters, MESSAGE_NS
        )
        before, self._last = self._last, now
        self.cut = frozenset(tor for tor in tors if ELECTRICAL in now[tor].down)
        if before is None:
            return None
        sent = [_since(now[tor].sent_bytes, before[tor].sent_bytes) for tor in tors]
        received = [_since(now[tor].received_bytes, before[tor].received_bytes) for tor in tors]
        return Crossed(
            np.array([one.electrical + one.circuits for one in sent]),
            np.array([one.electrical + one.circuits for one in received]),
            sum(one.circuits for one in sent),
        )


class _Bytes(NamedTuple):
    electrical: float
    circuits: float


def _since(now: dict[str, int], before: dict[str, int]) -> _Bytes:
    grown = {name: value - before.get(name, 0) for name, value in now.items()}
    circuits = sum(value for name, value in grown.items() if _UPLINK.fullmatch(name))
    return _Bytes(float(grown.get(ELECTRICAL, 0)), float(circuits))
