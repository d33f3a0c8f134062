"""What earlier steps showed: idle windows, what crossed beside what was announced. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from harness.fabric.correction import corrected
from harness.fabric.demand import Comm, Demand, Floats
from harness.fabric.prediction import PAYLOAD_SHARE
from harness.fabric.windows import Window, Windows
from harness.run.fabric.traffic import Crossed, Part

LEARNS = 0.5
"""How far the newest measurement moves what is known."""
WITHIN = (0.25, 4.0)
"""How far measured traffic may be from what was announced, and still be that."""
STRAY = 0.01
"""Less than this of all that crossed is no traffic to plan for: acknowledgements, and what counters
of both ends are apart by. A circuit for it would move light for nothing."""


@dataclass
class History:
    """Kept for as long as one arm runs, or handed to the next."""

    windows: Windows = field(default_factory=Windows)
    _ratio: dict[str, Floats] = field(default_factory=dict)
    """By kind, what pairs of ToRs sent over what was announced."""
    _unannounced: dict[str, Floats] = field(default_factory=dict)

    @property
    def unannounced_bytes(self) -> Floats | float:
        """What ToRs send beside all that is announced, in a step: requests that move, and such."""
        return sum(self._unannounced.values(), start=np.float64(0.0))

    def waited(self, before: str, after: str, window_ns: float) -> None:
        """Learn how long nobody sent between two kinds of traffic."""
        self.windows = self.windows.observed((before, after), window_ns)

    def window(self, before: str, after: str) -> Window:
        """Return the window that is expected between two kinds of traffic."""
        return self.windows.expected((before, after))

    def crossed(self, announced: Demand, measured: Crossed) -> None:
        """Learn what crossed while what was announced was under way."""
        sent = corrected(
            announced, measured.sent * PAYLOAD_SHARE, measured.received * PAYLOAD_SHARE
        ).sent_bytes
        told = announced.sent_bytes > 0
        ratio = np.divide(sent, announced.sent_bytes, out=np.ones_like(sent), where=told)
        ratio = np.clip(ratio, *WITHIN)
        known = self._ratio.get(announced.name, ratio)
        self._ratio[announced.name] = known + LEARNS * (ratio - known)
        rest = np.where(told | (sent < STRAY * sent.sum()), 0.0, sent)
        before = self._unannounced.get(announced.name, rest)
        self._unannounced[announced.name] = before + LEARNS * (rest - before)

    def corrected(self, part: Part) -> Part:
        """Return what was announced as it is to be expected."""
        ratio = self._ratio.get(part.kind)
        if ratio is None:
            return part
        return part._replace(comms=tuple(_scaled(comm, ratio) for comm in part.comms))


def _scaled(comm: Comm, ratio: Floats) -> Comm:
    demand = comm.demand
    return comm._replace(demand=Demand(demand.name, demand.tors, demand.sent_bytes * ratio))
