"""Clock offsets between nodes: four stamps, lowest delays kept, a bound that grows with age.

A probe gives t1 (coordinator sends), t2 (agent receives), t3 (agent sends), t4 (coordinator
receives), each on its own monotonic clock. The offset estimate ``((t2-t1)+(t3-t4))/2`` is wrong by
at most half the delay ``(t4-t1)-(t3-t2)``, *whatever the asymmetry of the path*; so each sample is
a hard interval around the true offset. The fit is least squares over the samples of least delay;
its bound is derived from the intervals, not from the scatter, and therefore holds as long as the
clocks drift evenly within the window and by less than `MAX_DRIFT_PPB`.

Pure: no I/O, no clock. Nanoseconds throughout. Errors: `ClockError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import NamedTuple

import msgspec

from harness.errors import InfrastructureError

STAMP_COST_NS = 200
"""Reading the clock: 80 ns at the median, 170 ns at the 99th percentile."""

MAX_DRIFT_PPB = 500_000
"""Crystals stay within 100 ppm; the kernel slews by up to 500 ppm more slowly than it steps."""

BUCKET_NS = 5_000_000_000
"""Samples are thinned per stretch of this length, so that the fit spans its whole window."""

WINDOW_NS = 120_000_000_000
"""Older samples are forgotten: over minutes a crystal's drift is no longer even."""

KEEP_SHARE = 0.05
KEEP_AT_LEAST = 3


class ClockError(InfrastructureError):
    """Clocks that cannot be mapped: too few samples, or stamps that contradict the mapping."""


class ClockFit(msgspec.Struct, frozen=True, kw_only=True):
    """How one node's monotonic clock maps onto the coordinator's.

    ``t_coordinator = t_node - offset_ns - drift_ppb * 1e-9 * (t_node - at_ns)``, right within
    `bound_ns` at `at_ns`, and `drift_bound_ppb` worse with every nanosecond away from it. `at_ns`
    is on the node's clock. `method` is "four-stamp", or "same clock" where the node shares the
    coordinator's clock (same kernel, same time namespace) and the probes agree.
    """

    node: str
    offset_ns: int
    drift_ppb: float
    at_ns: int
    delay_ns: int
    bound_ns: int
    samples: int
    drift_bound_ppb: float = 0.0
    method: str = "four-stamp"

    def to_coordinator(self, t_ns: int) -> int:
        """Map a stamp of the node onto the coordinator's clock."""
        return t_ns - self.offset_ns - round(self.drift_ppb * 1e-9 * (t_ns - self.at_ns))

    def to_node(self, t_ns: int) -> int:
        """Map a stamp of the coordinator onto the node's clock: the inverse of `to_coordinator`."""
        drift = self.drift_ppb * 1e-9
        since_ns = t_ns + self.offset_ns - self.at_ns  # on the node's clock, but for the drift
        return self.at_ns + round(since_ns / (1 - drift))

    def bound_at(self, t_ns: int) -> int:
        """Return the half-width around ``to_coordinator(t_ns)`` that holds the true time."""
        return self.bound_ns + round(self.drift_bound_ppb * 1e-9 * abs(t_ns - self.at_ns))


class Sample(NamedTuple):
    """The four stamps of a probe: t1 and t4 on the coordinator's clock, t2 and t3 on the node's."""

    t1: int
    t2: int
    t3: int
    t4: int

    @property
    def at(self) -> int:
        """When the node held the probe, on its clock."""
        return (self.t2 + self.t3) // 2

    @property
    def offset(self) -> float:
        """Node's clock minus coordinator's, estimated."""
        return ((self.t2 - self.t1) + (self.t3 - self.t4)) / 2

    @property
    def delay(self) -> int:
        """Time on the way, both ways together."""
        return (self.t4 - self.t1) - (self.t3 - self.t2)

    @property
    def half_width(self) -> float:
        """How far `offset` may be from the truth: half the delay, and the drift while held."""
        held = self.t3 - self.t2
        return max(self.delay, 0) / 2 + MAX_DRIFT_PPB * 1e-9 * held + STAMP_COST_NS


class Interval(NamedTuple):
    """A duration between stamps of two nodes: `ns` ± `bound_ns`; `clipped` if it came out < 0."""

    ns: int
    bound_ns: int
    clipped: bool = False


def thin(samples: Iterable[Sample], now_ns: int) -> list[Sample]:
    """Keep what a fit may use of samples in time order: the fastest of each stretch of a window.

    `now_ns` is on the node's clock; samples older than `WINDOW_NS` go.
    """
    buckets: dict[int, list[Sample]] = {}
    for sample in samples:
        if now_ns - sample.at <= WINDOW_NS:
            buckets.setdefault(sample.at // BUCKET_NS, []).append(sample)
    kept: list[Sample] = []
    for bucket in buckets.values():
        count = max(KEEP_AT_LEAST, round(len(bucket) * KEEP_SHARE))
        kept += sorted(bucket, key=lambda sample: sample.delay)[:count]
    return sorted(kept, key=lambda sample: sample.at)


def fit(node: str, kept: Sequence[Sample], taken: int) -> ClockFit:
    """Fit offset and drift to the kept samples, weighted by 1/width²; bound by their intervals.

    `taken` is the number of probes they were chosen from. Raises `ClockError` for none at all and
    for samples that no even drift can explain (a stepped clock).
    """
    if not kept:
        raise ClockError(f"{node}: no clock probe was answered")
    best = min(kept, key=lambda sample: sample.half_width)
    points = [
        _Point(sample.at - best.at, sample.offset - best.offset, sample.half_width)
        for sample in kept
    ]
    low, high = _drift_interval(node, points)
    if high - low < MAX_DRIFT_PPB * 1e-9:
        slope = min(max(_least_squares_slope(points), low), high)
    else:
        slope = (low + high) / 2  # the window is too short to see a drift
    doubt = max(high - slope, slope - low)
    level = _weighted_mean([(p.rise - slope * p.at, p.half_width) for p in points])
    offset = round(best.offset + level)
    bound = abs(offset - best.offset) + best.half_width
    return ClockFit(
        node=node,
        offset_ns=offset,
        drift_ppb=slope * 1e9,
        at_ns=best.at,
        delay_ns=best.delay,
        bound_ns=int(bound) + 1,
        samples=taken,
        drift_bound_ppb=doubt * 1e9,
    )


def same_clock(measured: ClockFit) -> ClockFit:
    """Return the identity for a node that shares our clock, checked against what was measured.

    Raises `ClockError` when the probes contradict it.
    """
    if abs(measured.offset_ns) > measured.bound_ns:
        raise ClockError(
            f"{measured.node} claims to share the coordinator's clock, but probes put it "
            f"{measured.offset_ns} ± {measured.bound_ns} ns away"
        )
    return msgspec.structs.replace(
        measured,
        offset_ns=0,
        drift_ppb=0.0,
        drift_bound_ppb=0.0,
        bound_ns=STAMP_COST_NS,
        method="same clock",
    )


def interval(start: ClockFit, start_ns: int, end: ClockFit, end_ns: int) -> Interval:
    """Return the time from `start_ns` to `end_ns`, stamps of the nodes of the two fits.

    A negative result inside its bound is 0 with that bound; outside, the mapping is wrong and
    `ClockError` is raised. Stamps of one node are compared directly, with no bound.
    """
    if start.node == end.node:
        gap, bound = end_ns - start_ns, 0
    else:
        gap = end.to_coordinator(end_ns) - start.to_coordinator(start_ns)
        bound = start.bound_at(start_ns) + end.bound_at(end_ns)
    if gap >= 0:
        return Interval(gap, bound)
    if -gap <= bound:
        return Interval(0, bound, clipped=True)
    raise ClockError(
        f"{end.node} is {-gap} ns ahead of {start.node}, where {bound} ns would be possible: "
        "a clock was stepped or is not synchronised"
    )


class _Point(NamedTuple):
    """A sample relative to the best one, so that floats keep their nanoseconds."""

    at: int
    rise: float
    half_width: float


def _drift_interval(node: str, points: Sequence[_Point]) -> tuple[float, float]:
    """Every slope that passes the intervals of each stretch's best sample, and clocks can have."""
    best: dict[int, _Point] = {}
    for point in points:
        bucket = point.at // BUCKET_NS
        if bucket not in best or point.half_width < best[bucket].half_width:
            best[bucket] = point
    low, high = -MAX_DRIFT_PPB * 1e-9, MAX_DRIFT_PPB * 1e-9
    for first, second in combinations(sorted(best.values()), 2):
        span = second.at - first.at
        rise = second.rise - first.rise
        room = first.half_width + second.half_width
        low = max(low, (rise - room) / span)
        high = min(high, (rise + room) / span)
    if low > high:
        raise ClockError(
            f"{node}: clock probes contradict each other by {(low - high) * 1e6:.3g} ppm of "
            "drift: a clock was stepped, or drifts faster than clocks do"
        )
    return low, high


def _least_squares_slope(points: Sequence[_Point]) -> float:
    mean_at = _weighted_mean([(p.at, p.half_width) for p in points])
    mean_rise = _weighted_mean([(p.rise, p.half_width) for p in points])
    spread = sum((p.at - mean_at) ** 2 / p.half_width**2 for p in points)
    together = sum((p.at - mean_at) * (p.rise - mean_rise) / p.half_width**2 for p in points)
    return together / spread


def _weighted_mean(values: Sequence[tuple[float, float]]) -> float:
    """Mean of (value, half width), weighted by 1/width²."""
    total = sum(width**-2 for _, width in values)
    return sum(value * width**-2 for value, width in values) / total
