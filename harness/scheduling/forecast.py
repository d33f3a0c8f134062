"""Forecast of remaining work: how many tokens the open requests still have to produce. Pure.

It is the distribution of that work, not an oracle for each request. For every batch in flight:

1. Past batches give a law of lengths, and by their drift the level to expect (`survival.learn`).
2. What has ended and what is still running of this batch corrects level and stretch by Bayes' rule
   on a grid; the running ones are right-censored where they are. So a batch that is longer than
   history is noticed in its course, and without history this batch alone tells.
3. Siblings: a score shared by a prompt's samples is inferred from the ended and the running ones.
4. Given both, a request's length is the law's, given that it is longer than produced so far.

Totals and maxima keep what is shared: the uncertain level, as strata of equal chance, and the score
that siblings share. Lengths are tokens; none is beyond the bound, and what reaches it ends there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np

from harness.scheduling.flight import (
    STRATA,
    TINY,
    Belief,
    Flight,
    believe,
    count,
    edges_of,
)
from harness.scheduling.survival import learn, log_tail, score_of
from harness.scheduling.view import Finished, Floats, Ints, View

SCORE_80 = 1.2816
"""Of the standard normal, 80 % lie between this and its negative."""
DOUBT_MAX = 2.0
"""How much wider intervals become, at most, because the law itself is uncertain."""
LUCK = (1, 3, 2, 0, 4)
"""By stratum of the level, that of the longest: the one says nothing of the other."""
GOLDEN = (5**0.5 - 1) / 2
"""Any stretch of its multiples, modulo 1, fills (0, 1) evenly."""


class Interval(NamedTuple):
    """Between `low` and `high` with a chance of 80 %; as likely above `mid` as below. Tokens."""

    low: float
    mid: float
    high: float


@dataclass(frozen=True)
class Forecast:
    """What the open requests still have to produce, in tokens; columns in `view.requests`' order.

    `expected`: the mean of each request, 1 or more. `spread`: one length for each, such that the
    *set* is distributed as forecast: of requests that look alike some are short and one is long,
    though which is not known. `total` of all and `longest` of any.
    """

    expected: Floats
    spread: Floats
    total: Interval
    longest: Interval
    past_batches: int
    parts: tuple[_Remaining, ...] = field(default=(), repr=False)

    def sets(self) -> tuple[Floats, ...]:
        """Return several sets of lengths, each as likely as another; the middle one is typical.

        They differ in the level, in whether one runs away, and in who is long. What is known for
        certain is one set.
        """
        if not self.parts:
            return (self.spread,)
        found = np.empty((STRATA, len(self.spread)))
        for part in self.parts:
            for stratum in range(STRATA):
                found[stratum, part.rows] = part.drawn(stratum)
        return tuple(found)

    def quantiles(self, levels: Sequence[float]) -> Floats:
        """Return the lengths that remaining ones stay below with these chances.

        Shape (requests, levels), tokens.
        """
        found = np.repeat(self.expected[:, None], len(levels), axis=1)
        for part in self.parts:
            found[part.rows] = np.stack(
                [part.lengths(np.full(len(part.rows), level)) for level in levels], axis=1
            )
        return found

    @classmethod
    def certain(cls, truth: Ints) -> Self:
        """Return the forecast of who knows the truth."""
        tokens = truth.astype(np.float64)
        total, longest = float(tokens.sum()), float(tokens.max(initial=0.0))
        return cls(tokens, tokens, Interval(*[total] * 3), Interval(*[longest] * 3), 0)


def forecast(view: View) -> Forecast:
    """Return the forecast for all open requests of a view."""
    requests = view.requests
    numbers = np.unique(requests.batch).tolist()
    past, under_way = _by_batch(view.history, numbers)
    seen = [*(batch.length for batch in view.history), requests.produced]
    bound = max(view.cap_tokens, *(int(lengths.max(initial=0)) for lengths in seen))
    law = learn(past, bound)
    parts, doubt = [], 1.0
    for number in numbers:
        rows = np.flatnonzero(requests.batch == number)
        before = law.ahead()
        flight = count(
            edges_of(law, before, bound, requests.produced[rows]),
            requests.produced[rows],
            requests.group[rows] if law.correlation else np.zeros(len(rows), np.int64),
            under_way.get(number) or _joined(number, []),
        )
        belief = believe(law, before, flight)
        parts.append(_Remaining(rows, flight, belief, law.correlation))
        doubt = max(doubt, law.doubt(len(flight.ended) + len(rows)))
        law = law.followed_by(before, belief.level)
    return _joint(len(requests), tuple(parts), min(doubt, DOUBT_MAX), len(past))


# -- what is known -------------------------------------------------------------------------------


def _by_batch(
    history: Sequence[Finished], open_batches: Sequence[int]
) -> tuple[list[Finished], dict[int, Finished]]:
    """Return past batches, oldest first, and what has ended of each that is still open."""
    by_number: dict[int, list[Finished]] = {}
    for batch in history:
        if len(batch.length):
            by_number.setdefault(batch.batch, []).append(batch)
    joined = {number: _joined(number, by_number[number]) for number in sorted(by_number)}
    past = [batch for number, batch in joined.items() if number not in open_batches]
    return past, joined


def _joined(number: int, batches: Sequence[Finished]) -> Finished:
    """Return several parts of a batch as one."""
    if len(batches) == 1:
        return batches[0]
    none = [np.zeros(0, np.int64)]
    group = np.concatenate(none + [batch.group for batch in batches])
    return Finished(number, group, np.concatenate(none + [batch.length for batch in batches]))


# -- what remains --------------------------------------------------------------------------------


class _Shared(NamedTuple):
    """Nodes of the score that siblings share, and what is likely at each.

    `log_weights` (groups, nodes); `log_tails` of the lengths at the edges (edges, nodes).
    """

    log_weights: Floats
    log_tails: Floats


class _Sums(NamedTuple):
    """By stratum and possible maximum: the log of the chance that no request has more left.

    And if none has: mean and variance of the sum of all (tokens, tokens squared).
    """

    log_chance: Floats
    mean: Floats
    variance: Floats


class _Remaining:
    """The distribution of what remains of one batch in flight."""

    def __init__(self, rows: Ints, flight: Flight, belief: Belief, correlation: float) -> None:
        self.rows, self.flight, self.belief, self.correlation = rows, flight, belief, correlation
        log_weights, log_tails = self._shared(belief.scores)
        below, part = flight.below, flight.part[:, None]
        passed = (1 - part) * log_tails[below] + part * log_tails[below + 1]
        self._tails, self._given = np.exp(log_tails), np.exp(log_weights[flight.at] - passed)
        areas = (self._tails[1:] + self._tails[:-1]) / 2 * np.diff(flight.edges)[:, None]
        beyond = np.append(np.cumsum(areas[::-1], axis=0)[::-1], 0 * areas[:1], axis=0)
        rest = flight.edges[below + 1] - flight.produced
        beyond_it = np.einsum("rn,rn->r", self._given, beyond[below + 1])
        self.expected = np.maximum(1.0, rest * (1 + self._longer(below + 1)) / 2 + beyond_it)

    def _longer(self, edge: Ints) -> Floats:
        """Return the chance of each request to be longer than an edge; 1 where it is already."""
        chance: Floats = np.einsum("rn,rn->r", self._given, self._tails[edge])
        return np.minimum(chance, 1.0)

    def lengths(self, levels: Floats) -> Floats:
        """Return the remaining length of each request at its level, tokens (by bisection)."""
        edges, tail = self.flight.edges, 1 - levels
        lower, upper = self.flight.below, np.full(len(self.rows), len(edges) - 1)
        for _ in range(len(edges).bit_length()):
            middle = (lower + upper) // 2
            longer = self._longer(middle) > tail
            upper = np.where(longer, upper, np.maximum(middle, lower + 1))
            lower = np.where(longer, middle, lower)
        start = np.maximum(edges[lower], self.flight.produced)
        high, low = self._longer(lower), self._longer(upper)
        way = np.clip((high - tail) / np.maximum(high - low, TINY), 0.0, 1.0)
        left: Floats = np.maximum(1.0, start + way * (edges[upper] - start) - self.flight.produced)
        return left

    def drawn(self, stratum: int) -> Floats:
        """Return one length for each request under the law of this stratum.

        From one stratum to the next all levels go on by an equal part of (0, 1), so every request
        is short in some and long in others. The longest has its own: of n, it stays below the
        quantile p ** (1 / n) with a chance of p.
        """
        belief = self.belief._replace(scores=self.belief.strata[stratum])
        law = _Remaining(self.rows, self.flight, belief, self.correlation)
        levels = (self._levels() + stratum / STRATA) % 1.0
        chance = (LUCK[stratum] + 0.5) / STRATA
        levels[np.argmax(levels)] = chance ** (1 / len(levels))
        return law.lengths(levels)

    def spread(self) -> Floats:
        """Return one remaining length for each request, distributed as all of them."""
        return self.lengths(self._levels())

    def _levels(self) -> Floats:
        """Return a level for each request.

        The levels are (k + 1/2) / n; requests in the order of their means, so that those of equal
        evidence lie together, get them in the order of the golden-ratio sequence, any stretch of
        which fills (0, 1) evenly.
        """
        size = len(self.rows)
        sequence = np.argsort(np.arange(size) * GOLDEN % 1.0)
        levels = np.empty(size)
        levels[np.argsort(self.expected, kind="stable")[sequence]] = (np.arange(size) + 0.5) / size
        return levels

    def sums(self, tokens: Floats) -> _Sums:
        """Return what is known of the sum, and of the maximum, at each of these maxima."""
        strata = [self._sums(scores, tokens) for scores in self.belief.strata]
        return _Sums(*(np.array(column) for column in zip(*strata, strict=True)))

    def _sums(self, scores: Floats, tokens: Floats) -> _Sums:
        log_weights, log_tails = self._shared(scores)
        moments = _truncated(np.exp(log_tails), self.flight.edges, self.flight.columns, tokens)
        chances, means, variances = moments
        weights, coarse = np.exp(log_weights), self.flight.coarse
        pooled = (coarse.T @ weights)[:, :, None]
        mean, variance = np.sum(pooled * means, (0, 1)), np.sum(pooled * variances, (0, 1))
        of_group = coarse @ means[:, :, -1]
        shared = np.sum(weights * of_group**2) - np.sum(np.sum(weights * of_group, axis=1) ** 2)
        log_chance = _none_longer(weights, coarse, chances)
        of_most = mean / max(float(mean[-1]), TINY)
        return _Sums(log_chance, mean, variance + shared * of_most**2)

    def _shared(self, scores: Floats) -> _Shared:
        """Infer the score that each group shares, under a law with these scores at the edges."""
        flight, rho = self.flight, self.correlation
        if not rho:
            return _Shared(np.zeros((1, 1)), log_tail(scores)[:, None])
        pull, own = np.sqrt(rho), np.sqrt(1 - rho)
        gap = min(0.5, 0.75 * own / pull)
        nodes = gap * np.arange(-np.ceil(3.2 / gap), np.ceil(3.2 / gap) + 1)
        log_tails = log_tail((scores[:, None] - pull * nodes) / own)
        capped = flight.siblings >= flight.edges[-1]
        found = np.clip(np.interp(flight.siblings, flight.edges, scores), -3.5, 3.5)[~capped]
        groups = len(flight.open)
        number = np.bincount(flight.of[~capped], minlength=groups)[:, None]
        summed = np.bincount(flight.of[~capped], found, groups)[:, None]
        at_cap = np.bincount(flight.of[capped], minlength=groups)[:, None]
        merit = flight.open @ log_tails[flight.used] + at_cap * log_tails[-1] - 0.5 * nodes**2
        merit -= (number * (pull * nodes) ** 2 - 2 * pull * nodes * summed) / (2 * own**2)
        merit -= merit.max(axis=1, keepdims=True)
        return _Shared(merit - np.log(np.exp(merit).sum(axis=1, keepdims=True)), log_tails)


def _none_longer(weights: Floats, coarse: Floats, chances: Floats) -> Floats:
    """Return the log of the chance that no request of any group has more left than some tokens.

    Single precision is enough for a chance, and several times as fast.
    """
    within = np.zeros((len(coarse), chances.shape[2]), np.float32)
    weights, coarse = weights.astype(np.float32), coarse.astype(np.float32)
    logs = np.log(chances).astype(np.float32)
    for node in range(weights.shape[1]):  # one by one: what fits a cache is done sooner
        all_of_group = coarse @ logs[:, node]
        np.exp(all_of_group, out=all_of_group)
        all_of_group *= weights[:, node, None]
        within += all_of_group
    total: Floats = np.sum(np.log(np.maximum(within, TINY)), axis=0, dtype=np.float64)
    return total


def _truncated(
    tails: Floats, edges: Floats, columns: Ints, tokens: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return the chance that no more than some tokens remain, and then their mean and variance.

    `tails` by edge and node; results by column (the edge that was reached), node and tokens.
    """
    start = edges[columns, None]
    ends = np.minimum(start + tokens, edges[-1])
    lower = np.minimum(np.searchsorted(edges, ends, side="right") - 1, len(edges) - 2)
    into = (ends - edges[lower])[:, None]
    part = into / np.diff(edges)[lower][:, None]
    first, second = np.moveaxis(tails[lower], 2, 1), np.moveaxis(tails[lower + 1], 2, 1)
    there, given = (1 - part) * first + part * second, tails[columns][:, :, None]
    steps = np.diff(edges)[:, None]
    areas = np.cumsum((tails[1:] + tails[:-1]) / 2 * steps, axis=0)
    lines = tails * edges[:, None]
    moments = np.cumsum((lines[1:] + lines[:-1]) / 2 * steps, axis=0)
    areas, moments = (np.concatenate((0 * tails[:1], sums)) for sums in (areas, moments))
    ends = ends[:, None]
    area = np.moveaxis(areas[lower], 2, 1) + into * (first + there) / 2
    moment = np.moveaxis(moments[lower], 2, 1) + into * (first * (ends - into) + there * ends) / 2
    area, moment = area - areas[columns][:, :, None], moment - moments[columns][:, :, None]
    beyond = np.where(ends < edges[-1], there / given, 0.0)
    chance = np.maximum(1 - beyond, TINY)
    mean = np.maximum(area / given - tokens * beyond, 0.0) / chance
    square = 2 * (moment - start[:, :, None] * area) / given - tokens**2 * beyond
    return chance, mean, np.maximum(square / chance - mean**2, 0.0)


def _joint(requests: int, parts: tuple[_Remaining, ...], doubt: float, past: int) -> Forecast:
    """Put the batches in flight together: their levels are high, or low, together."""
    if not parts:
        nothing = np.zeros(0)
        return Forecast(nothing, nothing, Interval(0.0, 0.0, 0.0), Interval(0.0, 0.0, 0.0), past)
    expected, spread = np.zeros(requests), np.zeros(requests)
    for part in parts:
        expected[part.rows], spread[part.rows] = part.expected, part.spread()
    most = np.concatenate([part.flight.edges[-1] - part.flight.produced for part in parts])
    tokens = _maxima(spread, float(most.max()))
    sums = _Sums(*np.sum([part.sums(tokens) for part in parts], axis=0))
    wanted = SCORE_80 * doubt * np.array([-1.0, 0.0, 1.0])
    total = np.clip(_total(tokens, sums, requests, wanted), requests, most.sum())
    chance = np.mean(np.exp(sums.log_chance), axis=0)
    return Forecast(
        expected, spread, _interval(total), _interval(_longest(tokens, chance, wanted)), past, parts
    )


def _maxima(spread: Floats, most: float) -> Floats:
    """Return lengths that the longest may have, rising to the most: dense where it is likely."""
    low = max(1.0, min(float(np.median(spread)), most) / 8)
    about = float(spread[spread < most / 2].max(initial=low))
    near = about * np.geomspace(0.5, 2.0, 9)
    tokens = np.concatenate((np.geomspace(low, max(low, most), 8), near, [most - 0.5]))
    return np.append(np.unique(tokens[(tokens >= low) & (tokens < most)]), most)


def _total(tokens: Floats, sums: _Sums, requests: int, wanted: Floats) -> Floats:
    """Return the sum at some scores of its distribution.

    For each maximum, the sum is that, and all others given it: together about log-normal. So one
    response that runs to the cap, or does not, gives a sum of two peaks.
    """
    chances = np.diff(np.exp(sums.log_chance), axis=1, prepend=0.0)
    lower = np.append(0.0, tokens[:-1])
    others = 1 - 1 / requests
    mean = (tokens + lower) / 2 + others * sums.mean
    variance = (tokens - lower) ** 2 / 12 + others * sums.variance
    sigma2 = np.log1p(variance / mean**2)[..., None]
    points = score_of(np.log((np.arange(20) + 0.5) / 20))
    values = (mean[..., None] * np.exp(np.sqrt(sigma2) * points - sigma2 / 2)).ravel()
    order = np.argsort(values)
    upto = np.cumsum(np.repeat(np.maximum(chances, 0.0).ravel(), len(points))[order])
    quantiles: Floats = np.interp(np.exp(log_tail(-wanted)) * upto[-1], upto, values[order])
    return quantiles


def _longest(tokens: Floats, chances: Floats, wanted: Floats) -> Floats:
    """Return the maximum at some scores of its distribution: linear in the log length between."""
    scores = np.maximum.accumulate(-score_of(np.log(np.maximum(chances, TINY))))
    quantiles: Floats = np.exp(np.interp(wanted, scores, np.log(tokens)))
    return quantiles


def _interval(quantiles: Floats) -> Interval:
    low, mid, high = np.rint(quantiles).tolist()
    return Interval(low, mid, high)
