"""How long the responses of a coming batch are on the whole, from those of past batches. Pure.

A batch's level (a mean of log lengths) is measured with a sampling error that is known from the
batch itself. What the level does between batches is not known: it may stay, wander, grow steadily,
or grow at a rate that itself wanders. Each of these is a local linear trend, whose reduced form is
ARIMA (0,1,1), (0,2,1) or (0,2,2) (Harvey 1989, Forecasting, Structural Time Series Models, 2.5 and
4.1); all are run through a Kalman filter side by side and averaged by how well each foretold every
batch one step ahead. So with three batches the answer leans on the prior, with thirty on the data.
The prior is for a level that stays, whose forecast is the mean of all batches: wandering and growth
have to earn their weight.
A model's variance is scaled by the squares of its past errors (its scale has an inverse-gamma
prior, the score of the model is Student's): who was surprised promises less.
A fitted ARIMA would have to learn the sampling error too, and needs tens of steps for it; the
benchmark `forecast` shows both.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

LEVEL_SDS = (0.0, 0.02, 0.05, 0.15)
"""By how much, in log tokens, a level may wander from batch to batch."""
TRENDS = ((0.0, 0.0), (0.1, 0.0), (0.1, 0.03))
"""Growth per batch, in log tokens: its standard deviation at first, and that of its wandering."""
STAYS, GROWS_NOT = 3.0, 10.0
"""So many times likelier than any other is, beforehand, no wandering; and so is no growth."""
PRIOR_MISSES = 6
"""As many errors of the size that a model expects are taken for granted beside those seen."""

_MODELS = np.array([(level, *trend) for level, trend in product(LEVEL_SDS, TRENDS)]).T
_LEVEL_NOISE, _GROWTH_SD, _GROWTH_NOISE = _MODELS
_LOG_PRIOR = np.log(STAYS) * (_LEVEL_NOISE == 0) + np.log(GROWS_NOT) * (_GROWTH_SD == 0)


class Level(NamedTuple):
    """A forecast of a level: log tokens, and its standard deviation."""

    mean: float
    sd: float


def level_ahead(levels: Sequence[float], variances: Sequence[float], steps: int = 1) -> Level:
    """Return the level `steps` batches after the last one.

    `levels` of at least one batch, oldest first, in log tokens, with the `variances` of their
    sampling. The standard deviation is of the level itself, not of one batch's sample of it.
    """
    level = np.full_like(_LEVEL_NOISE, levels[0])
    growth = np.zeros_like(level)
    of_level, both, of_growth = level * 0 + variances[0], level * 0, _GROWTH_SD**2
    logs, misses = np.zeros_like(level), np.zeros_like(level) + PRIOR_MISSES
    for batch in range(1, len(levels) + steps):
        level = level + growth
        of_level = of_level + 2 * both + of_growth + _LEVEL_NOISE**2
        both, of_growth = both + of_growth, of_growth + _GROWTH_NOISE**2
        if batch >= len(levels):
            continue
        error, variance = levels[batch] - level, of_level + variances[batch]
        logs, misses = logs + np.log(variance), misses + error**2 / variance
        level = level + of_level / variance * error
        growth = growth + both / variance * error
        of_growth = of_growth - both**2 / variance
        of_level, both = of_level * variances[batch] / variance, both * variances[batch] / variance
    seen = PRIOR_MISSES + len(levels) - 1
    merit = _LOG_PRIOR - 0.5 * (logs + seen * np.log(misses))
    weights = np.exp(merit - merit.max())
    weights /= weights.sum()
    mean = float(levels[-1] + weights @ (level - levels[-1]))
    variance = of_level * misses / seen
    return Level(mean, float(np.sqrt(weights @ (variance + (level - mean) ** 2))))
