"""Token buckets of links: what has been idle for a while lets a burst pass at once, unshaped.

A bucket fills at its link's rate. A flow that begins on links that stand idle needs to send so much
less; of several that begin together each gets an equal part. A link that is busy has no burst.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from harness.clock import NS_PER_S
from harness.rlsim.kernels import Floats

Links = Sequence[int]
LONG_AGO_NS = -(10**18)


class Buckets:
    """Of all links, each of `burst_bytes`; none where that is 0."""

    def __init__(self, burst_bytes: float, capacities_bytes_per_s: Floats) -> None:
        self.burst_bytes = burst_bytes
        self.capacity = capacities_bytes_per_s.copy()
        """Bytes per s of each link, as it is now; who is dark has no burst."""
        self.passed_bytes = np.zeros(len(self.capacity))
        """What each link has let pass so."""
        self._busy: Counter[int] = Counter()
        self._idle_ns: dict[int, int] = {}
        """Since when links are idle that were busy."""

    def left_bytes(
        self, now_ns: int, paths: Sequence[Links], sizes_bytes: Sequence[float]
    ) -> list[float]:
        """Return what flows that begin now have yet to send, once a burst of each has passed."""
        if not self.burst_bytes:
            return list(sizes_bytes)
        users = Counter(link for path in paths for link in path)
        left = []
        for path, size_bytes in zip(paths, sizes_bytes, strict=True):
            burst = min(self._full_bytes(link, now_ns) / users[link] for link in path)
            passed = min(burst, size_bytes)
            self.passed_bytes[[*path]] += passed
            left.append(size_bytes - passed)
        return left

    def _full_bytes(self, link: int, now_ns: int) -> float:
        """Return how full a link's bucket is."""
        if self._busy[link]:
            return 0.0
        idle_s = (now_ns - self._idle_ns.get(link, LONG_AGO_NS)) / NS_PER_S
        return float(min(self.burst_bytes, self.capacity[link] * idle_s))

    def begin(self, path: Links) -> None:
        """Have a flow on these links."""
        if self.burst_bytes:
            self._busy.update(path)

    def end(self, now_ns: int, path: Links) -> None:
        """Have one less; who has none is idle from now on."""
        if not self.burst_bytes:
            return
        self._busy.subtract(path)
        self._idle_ns.update((link, now_ns) for link in path if not self._busy[link])
