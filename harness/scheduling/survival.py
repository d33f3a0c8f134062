"""The law of response lengths that past batches tell: its shape, its level, its ties. Pure.

A length is ``level + stretch * shape(score)`` in log tokens. The shape is that of all past batches
laid upon each other by their levels, by product limit (Kaplan & Meier 1958): what stopped at the
cap is right-censored there, so batches that the cap cut at different shares still make one law.
Scores are normal scores (quantiles of the standard normal). Beyond what was seen, the log length
goes on linearly in the score, as in `harness.model.percentiles`; so mass at the cap stays at it.
Siblings (samples of one prompt) are tied by the correlation of their scores: a Gaussian copula.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.scheduling.drift import Level, level_ahead
from harness.scheduling.view import Finished, Floats

SCORE_MAX = 6.0
"""Scores end here: what outlives it is like nothing seen, and is taken to run to the cap."""
BINS_PER_LOG = 64
"""Log lengths are counted in bins of 1/64, 1.6 %."""
RANKS = np.arange(1.0, 20.0) / 20
"""Of a batch, over which its level is the mean log length."""
RANKS_LEAST = 3
BATCHES_MAX = 32
"""Older ones are forgotten."""
STRETCH_SD = 0.05
"""By how much a batch's spread of log lengths differs from that of the past, relatively."""
CORRELATION_MAX = 0.98
SMOOTH = np.arange(-5.0, 6.0) / 2
"""Scores between which lengths are taken to be log-linear where siblings are compared."""

_TABLE = np.linspace(-12.0, 12.0, 2401)
_LOG_TAILS = np.log([0.5 * math.erfc(score / math.sqrt(2)) for score in _TABLE])


def log_tail(scores: Floats) -> Floats:
    """Return the logarithm of the standard normal's chance to exceed each score."""
    found: Floats = np.interp(scores, _TABLE, _LOG_TAILS)
    return found


def score_of(log_tails: Floats) -> Floats:
    """Return the scores that are exceeded with these chances (logarithms)."""
    found: Floats = np.interp(-log_tails, -_LOG_TAILS, _TABLE)
    return found


@dataclass(frozen=True)
class Law:
    """What is believed of a batch before any of it has ended.

    `levels` of past batches (log tokens, oldest first) have the `variances` of their sampling.
    `offsets` (log tokens, rising) and `scores` are the knots of the shape. `stretch` multiplies
    offsets; its logarithm has the standard deviation `stretch_sd`. `ties`: as many siblings count
    for one independent draw. `draws`: how many independent ones the law was learnt from. `odd`: the
    share of lengths that may be anything, so that a single odd one does not outweigh all others.
    """

    levels: tuple[float, ...]
    variances: tuple[float, ...]
    stretch: float
    stretch_sd: float
    offsets: Floats
    scores: Floats
    correlation: float
    ties: float
    draws: float
    odd: float = 0.01

    def weight(self, lengths: int) -> float:
        """Return how much each of some lengths counts, next to a draw from a law that is known.

        However many there are, together they count for no more than what the law was learnt from:
        its shape is known no better.
        """
        return 1 / (self.ties + lengths / self.draws)

    def doubt(self, lengths: int) -> float:
        """Return by how much errors are larger than if the law were known, for so many lengths.

        The law is a sample as these lengths are: variances add, as in any prediction interval.
        """
        return math.sqrt(1 + lengths / self.ties / self.draws)

    def ahead(self, steps: int = 1) -> Level:
        """Return the forecast of the level, `steps` batches after the last one."""
        return level_ahead(self.levels, self.variances, steps)

    def followed_by(self, before: Level, after: Level) -> Law:
        """Return the law for the next batch, when part of one more has changed its level so.

        That part is taken for the one observation that makes `after` of `before`.
        """
        precision = max(1 / after.sd**2 - 1 / before.sd**2, 1e-9)
        level = (after.mean / after.sd**2 - before.mean / before.sd**2) / precision
        known = precision > 1e-6
        return replace(
            self,
            levels=(*self.levels, level if known else before.mean),
            variances=(*self.variances, 1 / precision),
        )

    def score(self, log_tokens: Floats, level: Floats, stretch: Floats) -> Floats:
        """Return the scores of lengths, broadcast, for a batch's own level and stretch."""
        return np.interp((log_tokens - level) / stretch, self.offsets, self.scores)


def vague(bound_tokens: int) -> Law:
    """Return the law where there is no history: log-normal, about as published ones are.

    Of published workloads the median is from 1/100 to 1/1.6 of the bound, sigma from 0.35 to 0.92
    (DAPO, DeepCoder, Search-R1, a video VLM, Intern-S1): in logarithms some 1/16 give or take a
    factor of 4.5, and 0.67 give or take one of 1.4. That it is log-normal is a guess: this batch
    counts for some dozens of draws at most, and more lengths may be odd: short answers, runaways.
    """
    line, level = np.array([-SCORE_MAX, SCORE_MAX]), math.log(bound_tokens / 16)
    return Law((level,), (1.5**2,), 0.67, 0.35, line, line, 0.0, 3.0, 60.0, odd=0.04)


def learn(past: Sequence[Finished], bound_tokens: int) -> Law:
    """Return the law that past batches tell (oldest first, none of them empty)."""
    if not past:
        return vague(bound_tokens)
    counted = [_Counted(batch, bound_tokens) for batch in past[-BATCHES_MAX:]]
    below = min(batch.below for batch in counted)
    ranks = RANKS[: max(RANKS_LEAST, int(np.sum(below >= RANKS)))]
    points = np.array([batch.logs_at(ranks) for batch in counted])
    levels = points.mean(axis=1)
    offsets, scores = _shape(counted, levels)
    correlation = _correlation(counted, levels, np.interp(SMOOTH, scores, offsets))
    sizes = np.array([len(batch.logs) for batch in counted])
    ties = np.array([1 + (batch.siblings - 1) * correlation for batch in counted])
    draws = float(np.sum(sizes / ties))
    variances = points.var(axis=1) * ties / sizes + 1e-6
    if len(counted) > 1:
        offsets, scores = _shape(counted, _shrunk(levels, variances))
    return Law(
        tuple(levels.tolist()),
        tuple(variances.tolist()),
        1.0,
        math.sqrt(STRETCH_SD**2 + 0.5 / draws),
        offsets,
        scores,
        correlation,
        float(ties[-1]),
        draws,
    )


def _shrunk(levels: Floats, variances: Floats) -> Floats:
    """Return levels without the part of their differences that sampling explains (James-Stein).

    Laid upon each other by levels as measured, batches of few prompts would make too narrow a law.
    """
    found = float(levels.var(ddof=1))
    real = max(0.0, 1 - float(variances.mean()) / found) if found else 0.0
    shrunk: Floats = levels.mean() + real * (levels - levels.mean())
    return shrunk


class _Counted:
    """One past batch: log lengths, their ranks, and who are siblings."""

    def __init__(self, batch: Finished, bound_tokens: int) -> None:
        self.logs = np.log(np.maximum(batch.length, 1))
        self.capped = batch.length >= bound_tokens
        self.below = 1 - float(self.capped.mean())
        counts = np.bincount(np.rint(self.logs * BINS_PER_LOG).astype(np.int64))
        self._middles = (np.cumsum(counts) - counts / 2) / len(self.logs)
        _, self._group, self._sizes = np.unique(
            batch.group, return_inverse=True, return_counts=True
        )
        self.groups = len(self._sizes)
        typical = len(self.logs) - float(self._sizes @ self._sizes) / len(self.logs)
        self.siblings = max(1.0, typical / max(1, self.groups - 1))

    def logs_at(self, ranks: Floats) -> Floats:
        """Return the log lengths at these ranks."""
        return np.interp(ranks, self._middles, np.arange(len(self._middles)) / BINS_PER_LOG)

    def squares(self, scores: Floats) -> tuple[float, float]:
        """Return the sums of squares of its scores between groups and within them."""
        means = np.bincount(self._group, scores) / self._sizes
        within = float(np.sum((scores - means[self._group]) ** 2))
        return float(self._sizes @ (means - scores.mean()) ** 2), within


def _correlation(counted: Sequence[_Counted], levels: Floats, offsets: Floats) -> float:
    """Return the correlation of siblings' scores, shrunk by its own error: 0 if it may be none.

    The intraclass correlation of a one-way analysis of variance (Fisher); its error, were there
    no correlation, is sqrt(2 / (k (k - 1) groups)) with k samples of a prompt. Scores are linear
    between the `offsets` of few (`SMOOTH`): by their own ranks, siblings of few prompts, who
    lie close together, would seem to lie apart.
    """
    groups = sum(batch.groups - 1 for batch in counted)
    spare = sum(len(batch.logs) - batch.groups for batch in counted)
    siblings = sum(batch.siblings for batch in counted) / len(counted)
    if not groups or not spare or siblings <= 1:
        return 0.0
    squares = [
        batch.squares(np.interp(batch.logs - level, offsets, SMOOTH))
        for batch, level in zip(counted, levels, strict=True)
    ]
    between, within = (float(total) for total in np.sum(squares, axis=0) / (groups, spare))
    found = (between - within) / max(between + (siblings - 1) * within, 1e-12)
    error = math.sqrt(2 / (siblings * (siblings - 1) * groups))
    if found <= error:
        return 0.0
    return min(CORRELATION_MAX, found * (1 - (error / found) ** 2))


def _shape(counted: Sequence[_Counted], levels: Floats) -> tuple[Floats, Floats]:
    """Return the knots of the law that all batches share, from their levels (product limit)."""
    capped = np.concatenate([batch.capped for batch in counted])
    above = [batch.logs - level for batch, level in zip(counted, levels, strict=True)]
    places = np.rint(np.concatenate(above) * BINS_PER_LOG).astype(np.int64)
    lowest, bins = int(places.min()), int(np.ptp(places)) + 1
    ended = np.bincount(places[~capped] - lowest, minlength=bins)
    left = np.bincount(places[capped] - lowest, minlength=bins)
    at_risk = np.maximum(1, np.cumsum((ended + left)[::-1])[::-1])
    survived = np.cumsum(np.log1p(-np.minimum(ended / at_risk, 1 - 1e-9)))
    before = np.concatenate(([0.0], survived[:-1]))
    knots = np.flatnonzero(ended)
    log_tails = (before + np.log1p(-ended / (2 * at_risk)))[knots]
    if left[-1]:  # at the cap itself: all that had not ended just before it
        knots, log_tails = np.append(knots, bins - 1), np.append(log_tails, survived[-1])
    return _extended((knots + lowest) / BINS_PER_LOG, score_of(log_tails))


def _extended(offsets: Floats, scores: Floats) -> tuple[Floats, Floats]:
    """Lengthen the law at both ends to `SCORE_MAX`, along its outermost score."""
    scores = np.clip(scores, 0.1 - SCORE_MAX, SCORE_MAX - 0.1)
    low, high = float(scores[0]), float(scores[-1])
    spans = np.linspace(low, low + 1, 5), np.linspace(high - 1, high, 5)
    below, above = (_slope(span, np.interp(span, scores, offsets)) for span in spans)
    first = offsets[0] - below * (SCORE_MAX + low)
    last = offsets[-1] + above * (SCORE_MAX - high)
    return (
        np.concatenate(([first], offsets, [last])),
        np.concatenate(([-SCORE_MAX], scores, [SCORE_MAX])),
    )


def _slope(x: Floats, y: Floats) -> float:
    """Return the slope of the least-squares line, at least a little above 0."""
    centred = x - x.mean()
    return max(0.02, float(centred @ y / (centred @ centred)))
