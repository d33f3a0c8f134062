"""Figures by least squares over pooled rows: robust, not negative, with 95 % intervals. Pure.

Residuals count in units of how far each row may be off; beyond some of these they count less and
less (soft L1), so that a row that met a busy moment pulls little. Rates and shares of the network
are solved for as time per byte, in which every formula is linear. Where rows can't tell figures
apart, one of these is held: of `HELD_FIRST` the first, else the one that matters least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.rlsim.fits.row import Figures, Pooled
from harness.seeds import seeded

Floats = NDArray[np.float64]

HELD_FIRST = (
    "network.latency_us",
    "network.burst_kb",
    "control.hand_ms",
    "training.phase_us",
    "sync.bucket_us",
    "sync.carry_fixed_s",
    "generation.kv_fixed_s",
    "sync.load_fixed_s",
    "sync.gather_fixed_s",
    "generation.weights_fixed_s",
    "collectives.copy_ns_per_kb",
    "collectives.step_us",
)
PER_BYTE = ("_gb_per_s", "network.link_share", "network.electrical_share")
"""What is solved for as its inverse."""
TOLD_APART = 1e-2
"""Smallest singular value of a Jacobian of unit columns; below, two columns are one."""
FELT = 1e-3
"""A figure that no row feels more than so much, of what it may be off by, is not told at all."""
DIGITS = 4
UNFELT = {
    True: "no row feels it: it is this or more",
    False: "no row feels it: it is next to nothing",
}
"""By whether it is a rate: why it is held."""
PULL = 1.5
RATE_MAX = 1e4
LEAST = 1e-3
"""Share of the measured time below which it does not matter how far off a model is."""
STARTS = 16
"""Solutions are looked for from so many places: a maximum hides figures from one side."""
FAR = 30.0
"""Times a guess, up and down: where the others are."""
TOLD_ALONE = (
    ("network.latency_us",),
    ("control.", "generation."),
    ("training.phase_us", "training.compute_share"),
    ("",),
)
"""Beginnings of figures' names, in turn: rows that need no others tell them, and all rows that
come after take them as known. Clocks tell latency, changes tell messages and steering, ranks what
they take between two communications."""
EVALUATIONS_MAX = 400


@dataclass(frozen=True)
class Fit:
    """What came of it: values, half of their 95 % intervals, and why others were held."""

    values: dict[str, float]
    plus_minus: dict[str, float]
    held: dict[str, str] = field(default_factory=dict)
    """Why each was held, at its value in `values`."""
    rows_of: dict[str, int] = field(default_factory=dict)
    """How many measurements speak of each."""


def is_per_byte(name: str) -> bool:
    """Whether a figure divides what crosses."""
    return name.endswith(PER_BYTE)


def fit(rows: Sequence[Pooled], base: Figures, starts: int = STARTS) -> Fit:
    """Fit all figures that rows need; `base` gives first guesses, and what no row tells.

    A time that can't be told from others is held at 0: these have all of it then.

    What rows tell alone comes first, and is known then: see `TOLD_ALONE`.
    """
    found, left = Fit({}, {}), list(rows)
    for prefixes in TOLD_ALONE:
        now = [row for row in left if all(_is_told(name, prefixes, found) for name in row.needs)]
        left = [row for row in left if row not in now]
        for part in _apart(now, found.values):
            one = _fit(part, base, found.values, starts)
            found.values.update(one.values)
            found.plus_minus.update(one.plus_minus)
            found.held.update(one.held)
    for row in rows:
        for name in row.needs:
            found.rows_of[name] = found.rows_of.get(name, 0) + row.n
    return found


def _is_told(name: str, prefixes: tuple[str, ...], found: Fit) -> bool:
    return name in found.values or name.startswith(prefixes)


def _apart(rows: Sequence[Pooled], known: Figures) -> list[list[Pooled]]:
    """Return rows in parts that have no figure in common, but those known; others are left out."""
    part_of: dict[str, int] = {}
    parts: dict[int, list[Pooled]] = {}
    for number, row in enumerate(rows):
        names = [name for name in row.needs if name not in known]
        if not names:
            continue
        joined = sorted({part_of[name] for name in names if name in part_of})
        parts[number] = [*(one for part in joined for one in parts.pop(part)), row]
        part_of |= {name: number for name, part in part_of.items() if part in joined}
        part_of |= dict.fromkeys(names, number)
    return list(parts.values())


def _fit(rows: Sequence[Pooled], base: Figures, known: Figures, starts: int) -> Fit:
    names = list(dict.fromkeys(n for row in rows for n in row.needs if n not in known))
    held: dict[str, str] = {}
    values: dict[str, float] = {}
    while free := [name for name in names if name not in held]:
        fixed = {**known, **{name: values[name] for name in held}}
        problem = _Problem(rows, tuple(free), fixed)
        solved = problem.solve(base, starts)
        values |= problem.figures(solved)
        out, why = problem.unclear(solved)
        if not out:
            off = problem.half_widths(solved)
            return Fit(values, dict(zip(free, off, strict=True)), held)
        if out in base and not problem.feels(solved, out, base[out]):
            values[out] = base[out]
        elif why == UNFELT[True]:
            values[out] = problem.least_rate(solved, out)
        elif not is_per_byte(out) and not out.endswith("_share"):
            values[out] = 0.0
        elif out in base:
            values[out] = base[out]
        held[out] = f"{why}; held at {values[out]:.{DIGITS}g}"
    return Fit(values, {}, held)


@dataclass(frozen=True)
class _Problem:
    """Rows, figures that are free, and the values of all others."""

    rows: Sequence[Pooled]
    free: tuple[str, ...]
    fixed: Figures

    def figures(self, theta: Floats) -> dict[str, float]:
        """Return the free figures that a solution stands for."""
        return {
            name: float(1 / max(x, 1e-9)) if is_per_byte(name) else float(x)
            for name, x in zip(self.free, theta, strict=True)
        }

    def residuals(self, theta: Floats) -> Floats:
        """Return how far each row is off, in units of what it may be: by logarithms.

        So that half and twice the time are as far off.
        """
        figures = {**self.fixed, **self.figures(theta)}
        shares = [max(row.model(figures) / row.measured_s, LEAST) for row in self.rows]
        return np.log(shares) / self._off

    @cached_property
    def _off(self) -> Floats:
        return np.array([row.off_s / row.measured_s for row in self.rows])

    def solve(self, base: Figures, starts: int) -> Floats:
        """Return the best solution of so many starts, the first at the base's values."""
        from scipy.optimize import least_squares  # noqa: PLC0415 - it takes a while to import

        first = self._first(base)
        tries: list[Any] = []
        rng = seeded(0, "first guesses of a fit")
        for _ in range(starts if len(self.free) > 1 else 2):
            tries.append(
                least_squares(
                    self.residuals,
                    first,
                    bounds=(0.0, np.inf),
                    loss="soft_l1",
                    f_scale=PULL,
                    x_scale=np.maximum(first, 1e-9),
                    max_nfev=EVALUATIONS_MAX,
                )
            )
            first = self._first(base) * [FAR ** rng.uniform(-1, 1) for _ in self.free]
        return np.asarray(min(tries, key=lambda one: one.cost).x)

    def _first(self, base: Figures) -> Floats:
        return np.array([_guess(name, base) for name in self.free])

    def _jacobian(self, theta: Floats) -> Floats:
        """Return by row and figure what a change by all of the figure does."""
        columns = []
        for i, x in enumerate(theta):
            step = max(1e-4 * abs(x), 1e-12)
            up, down = theta.copy(), theta.copy()
            up[i], down[i] = x + step, max(0.0, x - step)
            slope = (self.residuals(up) - self.residuals(down)) / (up[i] - down[i])
            columns.append(slope)
        return np.array(columns).T

    def unclear(self, theta: Floats) -> tuple[str, str]:
        """Return a figure that must be held, and why; "": each can be told from all others."""
        slopes = self._jacobian(theta)
        sizes = np.linalg.norm(slopes, axis=0)
        scale = np.maximum(np.abs(theta), [_guess(name, {}) * 1e-3 for name in self.free])
        felt = sizes * scale
        least = int(np.argmin(felt))
        if felt[least] < FELT:
            name = self.free[least]
            return name, UNFELT[is_per_byte(name)]
        few = len(self.rows) < len(self.free)  # then the last direction is one that no row feels
        _, singular, right = np.linalg.svd(slopes / sizes, full_matrices=few)
        if not few and singular[-1] >= TOLD_APART:
            return "", ""
        alike = [self.free[i] for i in np.flatnonzero(np.abs(right[-1]) > 0.2)]
        ranked = [name for name in HELD_FIRST if name in alike]
        weights = dict(zip(self.free, felt, strict=True))
        out = ranked[0] if ranked else min(alike, key=lambda name: weights[name])
        others = ", ".join(name for name in alike if name != out)
        return out, f"not told apart from {others}"

    def feels(self, theta: Floats, name: str, value: float) -> bool:
        """Return whether any row would notice that a figure had this value."""
        tried = theta.copy()
        tried[self.free.index(name)] = 1 / value if is_per_byte(name) else value
        return bool(np.abs(self.residuals(tried) - self.residuals(theta)).max() > FELT)

    def least_rate(self, theta: Floats, name: str) -> float:
        """Return the smallest rate, a power of 2 or so, that no row would notice either."""
        rate = 1 / _guess(name, {})
        while self.feels(theta, name, rate) and rate < RATE_MAX:
            rate *= 2
        return rate

    def half_widths(self, theta: Floats) -> list[float]:
        """Return half of each figure's 95 % interval, by what residuals are left; in its unit."""
        from scipy.special import stdtrit  # noqa: PLC0415 - as above

        slopes, left = self._jacobian(theta), self.residuals(theta)
        freedom = max(1, sum(row.n for row in self.rows) - len(self.free))
        weight = 1 / np.sqrt(1 + (left / PULL) ** 2)
        scatter = max(1.0, float((weight * left**2).sum() / max(1, len(left) - len(self.free))))
        cov = np.linalg.pinv((slopes.T * weight) @ slopes) * scatter
        half = stdtrit(freedom, 0.975) * np.sqrt(np.maximum(np.diag(cov), 0.0))
        return [
            float(h / max(x, 1e-9) ** 2) if is_per_byte(name) else float(h)
            for name, x, h in zip(self.free, theta, half, strict=True)
        ]


def _guess(name: str, base: Figures) -> float:
    """Return where to begin: the base's value, or something of the right order."""
    if base.get(name):
        return 1 / base[name] if is_per_byte(name) else base[name]
    if name.endswith("_gb_per_s"):
        return 1.0
    if name.endswith("_share"):
        return 1.0
    return {"_us": 100.0, "_ms": 10.0, "_kb": 100.0}.get(name[-3:], 0.05)
