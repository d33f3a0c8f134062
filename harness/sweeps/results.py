"""What a sweep found: a result for each design at each place, over its seeds, with its price. Pure.

Designs are compared seed by seed: what a seed does to both cancels out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import fmean
from typing import NamedTuple

from harness.errors import UsageError
from harness.model.metrics import matching
from harness.record.intervals import half_width, ratio_half_width
from harness.rlsim.bills import Bill
from harness.rlsim.economics import Design, Gpu, Worth, worth_of
from harness.sweeps.grid import Cell, Place
from harness.sweeps.point import Point, Row, Step, Value
from harness.sweeps.sweep import Sweep

Price = Callable[[Point], Bill]
"""Returns what a point's network costs. Raises `UsageError` where that is not known."""

NOT_MADE = "not made yet"


class Estimate(NamedTuple):
    """A mean of n seeds; `plus_minus` is half of its 95 % interval, None where it has none."""

    value: float
    plus_minus: float | None = None
    n: int = 1

    def times(self, factor: float) -> Estimate:
        """Return it in another unit."""
        spread = None if self.plus_minus is None else self.plus_minus * factor
        return Estimate(self.value * factor, spread, self.n)


@dataclass(frozen=True)
class Result:
    """A design at a place. `errors`: of its seeds that failed; `doubts`: what else is missing."""

    design: str
    place: Place
    kind: str
    by_seed: Mapping[int, float]
    """Performance."""
    performance: Estimate | None
    unit: str
    metrics: Mapping[str, Estimate]
    bill: Bill | None
    share: Worth
    """What of performance 1 there is per unit of each divisor."""
    cpu_s: float
    peak_mb: float
    errors: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    """Of its first seed."""

    def merit(self, name: str) -> Estimate | None:
        """Return one of `Worth`'s figures."""
        share: float | None = getattr(self.share, name)
        if self.performance is None or share is None:
            return None
        return self.performance.times(share)


def results_of(
    sweep: Sweep, cells: Iterable[Cell], rows: Mapping[str, Row], price: Price
) -> list[Result]:
    """Return a result for each cell, in order."""
    return [_result(sweep, cell, rows, price) for cell in cells]


def _result(sweep: Sweep, cell: Cell, rows: Mapping[str, Row], price: Price) -> Result:
    found: dict[int, dict[str, Value]] = {}
    errors: list[str] = []
    notes: list[str] = []
    there = [row for point in cell.points if (row := rows.get(point.key)) is not None]
    for point in cell.points:
        row = rows.get(point.key)
        values = shown(sweep, row)
        if isinstance(values, str):
            errors.append(f"seed {point.seed}: {values}")
        else:
            found[point.seed] = values
    for row in there:
        notes += row.measured.notes if row.measured else ()
    kind = sweep.designs[cell.design].kind
    bill, doubts = _bill(cell.points[0], price) if kind != "bound" else (None, ())
    performance = [values[sweep.performance] for values in found.values()]
    return Result(
        design=cell.design,
        place=cell.place,
        kind=kind,
        by_seed={seed: values[sweep.performance].value for seed, values in found.items()},
        performance=_mean(performance),
        unit=performance[0].unit if performance else "",
        metrics={
            name: mean
            for name in sweep.metrics
            if (mean := _mean([each[name] for each in found.values() if name in each]))
        },
        bill=bill,
        share=_share(bill, Gpu(usd=sweep.gpu_usd, w=sweep.gpu_w)),
        cpu_s=sum(row.cpu_s for row in there),
        peak_mb=max((row.peak_mb for row in there), default=0.0),
        errors=tuple(errors),
        notes=tuple(dict.fromkeys(notes)),
        doubts=doubts,
        steps=next((row.measured.steps for row in there if row.measured), ()),
    )


def shown(sweep: Sweep, row: Row | None) -> dict[str, Value] | str:
    """Return the metrics that are shown, as the sweep calls them; text: why there are none."""
    if row is None:
        return NOT_MADE
    if row.measured is None:
        return row.error
    there = row.measured.metrics
    found = {}
    for pattern in (sweep.performance, *sweep.metrics):
        names = matching(pattern, there)
        if len(names) == 1:
            found[pattern] = there[names[0]]
        elif pattern == sweep.performance:
            fits = f"{len(names)} metrics fit: {', '.join(names)}" if names else "not measured"
            return f"{pattern}: {fits}"
    return found


def _bill(point: Point, price: Price) -> tuple[Bill | None, tuple[str, ...]]:
    try:
        return price(point), ()
    except UsageError as error:
        return None, (str(error),)


def _share(bill: Bill | None, gpu: Gpu) -> Worth:
    if bill is None:
        return Worth(1.0, None, None, None, None)
    return worth_of(Design("", 1.0, bill), gpu)


def _mean(values: Sequence[Value]) -> Estimate | None:
    """Return the mean over seeds; of one seed alone, what is known of it by itself."""
    if not values:
        return None
    if len(values) == 1:
        return Estimate(values[0].value, values[0].plus_minus, 1)
    figures = [value.value for value in values]
    return Estimate(fmean(figures), half_width(figures), len(figures))


# -- designs side by side --------------------------------------------------------------------------


def ratio(one: Result, other: Result, merit: str = "performance") -> Estimate | None:
    """Return how many times the other's merit one has: the geometric mean over common seeds.

    None where either has none.
    """
    shares = getattr(one.share, merit), getattr(other.share, merit)
    if None in shares:
        return None
    ratios = [
        value / other.by_seed[seed]
        for seed, value in one.by_seed.items()
        if value > 0 and other.by_seed.get(seed, 0.0) > 0
    ]
    if not ratios:
        return None
    mean = Estimate(exp(fmean(map(log, ratios))), ratio_half_width(ratios), len(ratios))
    return mean.times(shares[0] / shares[1])


def by_place(results: Iterable[Result]) -> list[list[Result]]:
    """Return the results of each place together, places in their order."""
    places: dict[tuple[object, ...], list[Result]] = {}
    for result in results:
        places.setdefault(tuple(result.place.values()), []).append(result)
    return list(places.values())


def at(results: Iterable[Result], design: str) -> Result | None:
    """Return the result of a design among those of one place; None where it was not made there."""
    return next((result for result in results if result.design == design), None)
