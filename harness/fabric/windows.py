"""How long nobody sends between two kinds of work, learnt from what was seen. Values only.

A window that comes out shorter than foretold makes a change late, one that comes out longer costs
nothing: so the estimate is a low quantile. Who announces a window is believed until one was seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

RECENT = 10
"""Observations that are kept of a transition."""
LOW = 0.2
"""The quantile that is the estimate."""
TURN = 3
"""So many on end that are all shorter than all before them, or all longer by `LONGER`: times have
changed, and what was before them is forgotten. Of ten alike, that happens once in 120 times."""
LONGER = 2.0

Transition = tuple[str, str]
"""Such as ``("train", "sync")``."""


class Window(NamedTuple):
    """An idle window that is expected: `ns` long, from `seen` observations; 0: as announced."""

    ns: float
    seen: int = 0


@dataclass(frozen=True)
class Windows:
    """What was seen of each transition lately, oldest first, ns."""

    seen_ns: Mapping[Transition, tuple[float, ...]] = field(default_factory=dict)

    def observed(self, transition: Transition, window_ns: float) -> Windows:
        """Return it with one window more; one that began late is 0 long, not less."""
        kept = (*self.seen_ns.get(transition, ()), max(0.0, window_ns))[-RECENT:]
        before, latest = kept[:-TURN], kept[-TURN:]
        if before and (max(latest) < min(before) or min(latest) > LONGER * max(before)):
            kept = latest
        return Windows({**self.seen_ns, transition: kept})

    def expected(self, transition: Transition, announced_ns: float = 0.0) -> Window:
        """Return the window that is to be counted on."""
        seen_ns = self.seen_ns.get(transition, ())
        if not seen_ns:
            return Window(max(0.0, announced_ns))
        return Window(float(np.quantile(seen_ns, LOW, method="lower")), len(seen_ns))
