"""One measured time, and what a simulated bench makes of it by its figures. Pure.

A row's model is the very formula of the simulated bench for what was measured; its figures go by
their dotted names, as in `harness.model.simulation.figures`. Rows that are alike are pooled: their
mean stands for them, for only means of stages add up to the mean of the whole, but that of what is
left without the extremes, so that an outlier counts for nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, median

Figures = Mapping[str, float]
"""By dotted name, such as ``sync.load_fixed_s``; each in its own unit."""
Model = Callable[[Figures], float]

FLOOR_SHARE = 0.02
"""No formula is taken for truer than this."""
ALONE_SHARE = 0.1
"""How far off a time is that was measured once, as a share of it: nobody knows."""
NORMAL_OF_MAD = 1.4826
EXTREME_SHARE = 0.1
"""At either end."""
SHORT_S = 1e-4
"""What a scheduler does to any time."""


@dataclass(frozen=True)
class Row:
    """A time in s (of `generation.step_share`, a ratio); rows of one kind and key are alike."""

    kind: str
    """Such as ``sync.load``: what is told of residuals goes by it."""
    run: str
    key: Hashable
    measured_s: float
    needs: tuple[str, ...]
    """Figures that the model depends on."""
    model: Model
    floor_share: float = FLOOR_SHARE
    """How far off the model may be, as a share of the time."""


@dataclass(frozen=True)
class Pooled:
    """Rows that are alike; `off_s` is how far their mean may be off."""

    kind: str
    runs: tuple[str, ...]
    n: int
    measured_s: float
    off_s: float
    needs: tuple[str, ...]
    model: Model

    def off_pct(self, figures: Figures) -> float:
        """Return how far the model is off the measured, as a share of that."""
        return 100 * (self.model(figures) / self.measured_s - 1)


def pooled(rows: Iterable[Row]) -> list[Pooled]:
    """Return rows that are alike as one, in the order they first came; times of 0 say nothing."""
    alike: dict[Hashable, list[Row]] = defaultdict(list)
    for row in rows:
        if row.measured_s > 0:
            alike[row.kind, row.key].append(row)
    return [_pool(same) for same in alike.values()]


def _pool(same: list[Row]) -> Pooled:
    first, times_s = same[0], sorted(row.measured_s for row in same)
    n = len(times_s)
    left_out = min(math.ceil(n * EXTREME_SHARE), (n - 1) // 2)
    middle = fmean(times_s[left_out : n - left_out])
    spread_s = ALONE_SHARE * middle
    if n > 1:
        spread_s = NORMAL_OF_MAD * median(abs(time_s - middle) for time_s in times_s)
    return Pooled(
        kind=first.kind,
        runs=tuple(dict.fromkeys(row.run for row in same)),
        n=n,
        measured_s=middle,
        off_s=math.hypot(
            spread_s / math.sqrt(n), first.floor_share * middle, SHORT_S / math.sqrt(n)
        ),
        needs=first.needs,
        model=first.model,
    )
