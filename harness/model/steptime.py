"""Step times as exact integer lines, so that a thousand steps cost no more to add up than one.

With the batch fixed, every cost here is a straight line in the tokens of KV (piecewise, for
measured tables): ``ns = (base + slope * kv) // unit`` in whole numbers. A run of decode steps
adds `batch` tokens a step, so its time is a sum of floors of an arithmetic progression, which
`floor_sum` gives exactly in O(log): jumping and stepping agree to the nanosecond. Units: `base`
and `slope` are femtoseconds times a denominator. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple, Protocol

FS_PER_NS = 1_000_000
FS_PER_US = 1_000 * FS_PER_NS


class Line(NamedTuple):
    """Step time over KV tokens, up to `kv_until` (None: for ever)."""

    base: int
    slope: int
    unit: int
    kv_until: int | None = None

    def step_ns(self, kv_tokens: int) -> int:
        """Return the time of one step that reads `kv_tokens`."""
        return (self.base + self.slope * kv_tokens) // self.unit

    def steps_ns(self, kv_tokens: int, growth: int, steps: int) -> int:
        """Return the time of `steps` steps, the first reading `kv_tokens`, each `growth` more."""
        first = self.base + self.slope * kv_tokens
        return floor_sum(steps, self.unit, self.slope * growth, first)


class StepCosts(Protocol):
    """Step times of one instance. All never fall as a load grows."""

    basis: str
    """What the times rest on: ``table``, ``fit`` or ``roofline``."""

    def line(self, batch: int, kv_tokens: int, prefill_tokens: int, prefill_pairs: int) -> Line:
        """Return the step time as a line in KV that holds at `kv_tokens` and some way up.

        `batch` sequences decode and attend to `kv_tokens` in all; `prefill_tokens` are computed
        besides, each attending to those before it: `prefill_pairs` (query, key) in all.
        """

    def beyond(self, batch: int, kv_tokens: int, prefill_tokens: int) -> frozenset[str]:
        """Return in which ways the load lies outside the range that the figures speak of."""


class Faster:
    """The step times of `costs` over `speed`, to the nanosecond: an accelerator that much faster.

    `speed` is taken as a fraction with a denominator of a million at most.
    """

    def __init__(self, costs: StepCosts, speed: float) -> None:
        self._costs, self.basis = costs, costs.basis
        self._speed = Fraction(speed).limit_denominator(10**6)

    def line(self, batch: int, kv_tokens: int, prefill_tokens: int, prefill_pairs: int) -> Line:
        """See `StepCosts`."""
        line = self._costs.line(batch, kv_tokens, prefill_tokens, prefill_pairs)
        of = self._speed.denominator
        return Line(
            line.base * of, line.slope * of, line.unit * self._speed.numerator, line.kv_until
        )

    def beyond(self, batch: int, kv_tokens: int, prefill_tokens: int) -> frozenset[str]:
        """See `StepCosts`."""
        return self._costs.beyond(batch, kv_tokens, prefill_tokens)


class StepTime(NamedTuple):
    """A step's time, and in which ways it is extrapolated; empty: it is not."""

    ns: int
    beyond: frozenset[str]


def step_time(
    costs: StepCosts, batch: int, kv_tokens: int, prefill_tokens: int = 0, prefill_pairs: int = 0
) -> StepTime:
    """Return the time of one step, and whether it had to be extrapolated."""
    line = costs.line(batch, kv_tokens, prefill_tokens, prefill_pairs)
    return StepTime(line.step_ns(kv_tokens), costs.beyond(batch, kv_tokens, prefill_tokens))


def step_ns(
    costs: StepCosts, batch: int, kv_tokens: int, prefill_tokens: int = 0, prefill_pairs: int = 0
) -> int:
    """Return the time of one step; `step_time` also tells whether it is extrapolated."""
    return costs.line(batch, kv_tokens, prefill_tokens, prefill_pairs).step_ns(kv_tokens)


def floor_sum(count: int, unit: int, slope: int, first: int) -> int:
    """Return the sum of ``(first + slope * i) // unit`` for i in 0..count-1; none is negative.

    The Euclid-like recursion of lattice points under a line; O(log(unit + slope)).
    """
    total = 0
    while True:
        total += (count - 1) * count // 2 * (slope // unit) + count * (first // unit)
        slope, first = slope % unit, first % unit
        last = slope * count + first
        if last < unit:
            return total
        count, first = divmod(last, unit)
        unit, slope = slope, unit


def outside(
    word: str, value: int, low: int, high: int, found: frozenset[str] = frozenset()
) -> frozenset[str]:
    """Add to `found` in which way `value` lies outside low..high."""
    if value > high:
        return found | {f"{word} above {high}"}
    return found | {f"{word} below {low}"} if value < low else found


class FittedCosts:
    """A line fitted to measurements: fixed + per sequence + per KV token + per prefilled token."""

    basis = "fit"

    def __init__(
        self,
        *,
        fixed_us: float,
        sequence_us: float,
        kv_token_ns: float,
        prefill_token_us: float,
        batch_max: int,
        kv_max_tokens: int,
        prefill_max_tokens: int,
    ) -> None:
        self._fixed, self._sequence = round(fixed_us * FS_PER_US), round(sequence_us * FS_PER_US)
        self._kv, self._prefill = (
            round(kv_token_ns * FS_PER_NS),
            round(prefill_token_us * FS_PER_US),
        )
        self._max = batch_max, kv_max_tokens, prefill_max_tokens

    def line(self, batch: int, kv_tokens: int, prefill_tokens: int, prefill_pairs: int) -> Line:
        """Return the fitted line; pairs are not part of the fit."""
        del kv_tokens, prefill_pairs
        base = self._fixed + self._sequence * batch + self._prefill * prefill_tokens
        return Line(base, self._kv, FS_PER_NS)

    def beyond(self, batch: int, kv_tokens: int, prefill_tokens: int) -> frozenset[str]:
        """Compare with the range of the fit."""
        found = outside("batch", batch, 0, self._max[0])
        found = outside("KV tokens", kv_tokens, 0, self._max[1], found)
        return outside("prefill tokens", prefill_tokens, 0, self._max[2], found)


class TableCosts:
    """A measured grid, linear between its points in batch and in context.

    Below the first point the time is that of the first point; above the last it goes on with the
    last slope; both are told by `beyond`. Times never fall with the batch at equal *context*, nor
    with KV at equal batch. A step that both decodes and prefills takes the sum of both less the
    smallest time of the grid, the part that is paid once. Pairs are not part of the measurement.
    """

    basis = "table"

    def __init__(
        self,
        *,
        batches: Sequence[int],
        contexts_tokens: Sequence[int],
        step_us: Sequence[Sequence[float]],
        prefills_tokens: Sequence[int],
        prefill_us: Sequence[float],
    ) -> None:
        self._batches, self._contexts = batches, contexts_tokens
        self._rows = [[round(us * FS_PER_US) for us in row] for row in step_us]
        self._prefills, self._prefill = (
            prefills_tokens,
            [round(us * FS_PER_US) for us in prefill_us],
        )
        self._once = min(self._rows[0][0], self._prefill[0])
        self._row_of: dict[int, list[int]] = {}

    def line(self, batch: int, kv_tokens: int, prefill_tokens: int, prefill_pairs: int) -> Line:
        """Return the piece of the grid's line at this batch that holds at `kv_tokens`."""
        del prefill_pairs
        more = _at(self._prefills, self._prefill, prefill_tokens) if prefill_tokens else 0
        if not batch:
            return Line(more, 0, FS_PER_NS)
        row = self._row(batch)
        more -= self._once if prefill_tokens else 0
        knots = self._contexts
        piece = bisect_left(knots, -(-kv_tokens // batch))  # first knot that is not exceeded
        if piece == 0 or len(knots) == 1:
            until = knots[0] * batch if kv_tokens <= knots[0] * batch else None
            return Line(row[0] + more, 0, FS_PER_NS, until)
        last = piece >= len(knots)
        low = min(piece, len(knots) - 1) - 1
        width = (knots[low + 1] - knots[low]) * batch
        rise = row[low + 1] - row[low]
        base = (row[low] + more) * width - rise * knots[low] * batch
        return Line(base, rise, width * FS_PER_NS, None if last else knots[low + 1] * batch)

    def beyond(self, batch: int, kv_tokens: int, prefill_tokens: int) -> frozenset[str]:
        """Compare with the grid."""
        found: frozenset[str] = frozenset()
        if batch:
            low, high = self._contexts[0] * batch, self._contexts[-1] * batch
            found = outside("batch", batch, self._batches[0], self._batches[-1])
            if not low <= kv_tokens <= high:
                edge = self._contexts[0] if kv_tokens < low else self._contexts[-1]
                side = "below" if kv_tokens < low else "above"
                found |= {f"context {side} {edge} tokens"}
        if prefill_tokens:
            low, high = self._prefills[0], self._prefills[-1]
            found = outside("prefill tokens", prefill_tokens, low, high, found)
        return found

    def _row(self, batch: int) -> list[int]:
        """Return the times at each context of the grid, at any batch; fs."""
        if (row := self._row_of.get(batch)) is None:
            columns = zip(*self._rows, strict=True)
            # the maximum: beyond the last batch, columns may go on at slopes that cross
            row = list(accumulate((_at(self._batches, c, batch) for c in columns), max))
            self._row_of[batch] = row
        return row


def _at(knots: Sequence[int], values: Sequence[int], x: int) -> int:
    """Interpolate; level below the first knot, the last slope above the last one."""
    if x <= knots[0] or len(knots) == 1:
        return values[0]
    low = min(bisect_right(knots, x) - 1, len(knots) - 2)
    rise, width = values[low + 1] - values[low], knots[low + 1] - knots[low]
    return values[low] + rise * (x - knots[low]) // width
