"""How sure a mean is: 95 % confidence intervals by Student's t, of values and of ratios. Pure.

Samples are values of whole repeats with seeds of their own. Two arms that had the same seeds are
compared pair by pair, so that what a seed does to both cancels out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Quantile 0.975 of Student's t with 1, 2, ... 30 degrees of freedom, as every table has it."""
NORMAL_975 = 1.95996


def t_975(freedom: int) -> float:
    """Return Student's t; beyond the table by the first term of its expansion (error < 0.003)."""
    if freedom <= len(T_975):
        return T_975[freedom - 1]
    return NORMAL_975 + (NORMAL_975**3 + NORMAL_975) / (4 * freedom)


def half_width(values: Sequence[float]) -> float | None:
    """Return half of the 95 % interval of the mean; None of a single value."""
    if len(values) < 2:
        return None
    return t_975(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def ratio_half_width(ratios: Sequence[float]) -> float | None:
    """Return the same of a geometric mean, by t on logarithms; of the two sides, the wider one."""
    logs = [math.log(ratio) for ratio in ratios]
    width = half_width(logs)
    return None if width is None else math.exp(fmean(logs)) * math.expm1(width)


def shares(parts: Sequence[float], wholes: Sequence[float]) -> list[float]:
    """Return values whose mean is mean(parts) / mean(wholes), and whose spread is that ratio's.

    They are linearised (delta method; Cochran, Sampling Techniques, 1977, section 6.4): a share of
    each pair by itself would be wild where a whole is near 0. Nothing is returned where the whole
    cannot be told from 0: a share of nothing means nothing.
    """
    whole = fmean(wholes)
    if whole <= (half_width(wholes) or 0.0):
        return []
    share = fmean(parts) / whole
    return [share + (part - share * of) / whole for part, of in zip(parts, wholes, strict=True)]
