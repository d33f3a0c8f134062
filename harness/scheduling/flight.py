"""One batch in flight: what of it has ended, what is open, and what both say of its lengths. Pure.

All is counted at some edges, lengths from 0 to the bound between which everything is linear. What
history says of the batch's level and stretch is corrected on a grid by Bayes' rule: by the lengths
that have ended, and by those still open, which are right-censored at what they have produced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from harness.scheduling.drift import Level
from harness.scheduling.survival import SCORE_MAX, Law, log_tail, score_of
from harness.scheduling.view import Finished, Floats, Ints

LEVELS, STRETCHES, ROUNDS = 21, 7, 3
"""Points of the grid on which a batch's level and stretch are weighed; how often it is laid."""
REACH_SDS = 3.0
"""How far it reaches."""
STRATA = 5
"""Of equal chance, into which levels and stretches are put by the mean length they give."""
COLUMNS = 24
"""At how many edges what was produced is told apart where sums and maxima are taken."""
TINY = 1e-12


def edges_of(law: Law, level: Level, bound: int, produced: Ints) -> Floats:
    """Return the lengths between which all is linear, rising from 0 to the bound.

    Dense where the law has its mass; everywhere a step of some 10 % at most; and what was produced
    by the request with the least, by that with the most, and by some between.
    """
    scores = np.linspace(-3.5, 4.0, 61)
    likely = np.exp(level.mean + law.stretch * np.interp(scores, law.scores, law.offsets))
    everywhere = np.geomspace(1, bound, max(2, int(np.log(bound) / 0.1)))
    reached = np.sort(produced)[np.linspace(0, len(produced) - 1, COLUMNS // 2).astype(np.int64)]
    inside = np.unique(np.rint(np.concatenate((likely, everywhere, reached))))
    return np.concatenate(([0.0], inside[(inside >= 1) & (inside < bound)], [float(bound)]))


@dataclass(frozen=True)
class Flight:
    """One batch in flight. `below`: the edge at or below `produced`; `part` of the way to the next.

    `at`: the group of each open request, numbered from 0. `open`: requests by group and `used`
    edge, each shared out between its two edges; `coarse`: the same for the few edges that `columns`
    names. `ended`: lengths; `siblings`: those with an open one, and the groups they are `of`.
    """

    edges: Floats
    produced: Floats
    below: Ints
    part: Floats
    at: Ints
    open: Floats
    used: Ints
    columns: Ints
    coarse: Floats
    ended: Floats
    siblings: Floats
    of: Ints


def count(edges: Floats, produced: Ints, group: Ints, ended: Finished) -> Flight:
    """Count a batch in flight; a group that has no open request counts for the level only."""
    tokens = np.clip(produced, 0, edges[-1] - 1).astype(np.float64)
    below = np.searchsorted(edges, tokens, side="right") - 1
    part = (tokens - edges[below]) / np.diff(edges)[below]
    used = np.unique(np.concatenate((below, below + 1)))
    groups, at = np.unique(group, return_inverse=True)
    size = len(groups) * len(used)
    places = at * len(used) + np.searchsorted(used, below)
    shared = np.bincount(places, 1 - part, size) + np.bincount(places + 1, part, size)
    counts: Floats = shared.astype(np.float64).reshape(len(groups), len(used))
    of = np.searchsorted(groups, ended.group)
    known = groups[np.minimum(of, len(groups) - 1)] == ended.group
    lengths = ended.length.astype(np.float64)
    return Flight(
        edges,
        tokens,
        below,
        part,
        at,
        counts,
        used,
        *_thinned(counts, used, edges),
        lengths,
        lengths[known],
        of[known],
    )


def _thinned(counts: Floats, used: Ints, edges: Floats) -> tuple[Ints, Floats]:
    """Return `COLUMNS` of the edges used at most, and the counts shared out among those."""
    columns = used[np.unique(np.linspace(0, len(used) - 1, COLUMNS).astype(np.int64))]
    shares = [np.interp(edges[used], edges[columns], unit) for unit in np.eye(len(columns))]
    return columns, counts @ np.array(shares).T


class Belief(NamedTuple):
    """The batch's law, as the scores of the edges, by strata of equal chance; and its level.

    `scores`: the middle stratum. It is what to plan with: the mean of all laws has a tail that is
    due to the least likely of them.
    """

    scores: Floats
    strata: Floats
    level: Level


def believe(law: Law, before: Level, flight: Flight) -> Belief:
    """Weigh each level and stretch by how likely it makes what ended and what is still open.

    The grid is laid anew about what was found, so that it is fine where it matters, however much
    or little was known before.
    """
    logs = np.log(np.maximum(flight.edges, 0.5))
    level, stretch = before, Level(0.0, law.stretch_sd)
    weight = law.weight(len(flight.ended) + len(flight.produced))
    for _ in range(ROUNDS):
        levels, stretches = (at.ravel() for at in np.meshgrid(_grid(level, LEVELS), _grid(stretch)))
        scores = law.score(logs, levels[:, None], law.stretch * np.exp(stretches)[:, None])
        log_tails = log_tail(scores)
        log_tails[:, 0] = 0.0
        prior = ((levels - before.mean) / before.sd) ** 2 + (stretches / law.stretch_sd) ** 2
        merit = weight * _likelihood(log_tails, flight, law.odd) - prior / 2
        weights = np.exp(merit - merit.max())
        weights /= weights.sum()
        level, stretch = _found(levels, weights), _found(stretches, weights)
    tails = np.exp(log_tails)
    order = np.argsort(tails[:, :-1] @ np.diff(flight.edges))
    upto = np.append(0.0, np.minimum(np.cumsum(weights[order]), 1.0))
    limits = np.arange(STRATA + 1)[:, None] / STRATA
    shares = np.diff(np.diff(np.minimum(upto, limits), axis=1), axis=0) * STRATA
    strata = _scores(shares @ tails[order])
    return Belief(strata[STRATA // 2], strata, level)


def _grid(about: Level, points: int = STRETCHES) -> Floats:
    return about.mean + about.sd * np.linspace(-REACH_SDS, REACH_SDS, points)


def _found(values: Floats, weights: Floats) -> Level:
    """Return mean and standard deviation, no finer than the grid."""
    mean, step = float(weights @ values), float(np.diff(np.unique(values)).max())
    return Level(mean, max(float(np.sqrt(weights @ (values - mean) ** 2)), step / 3))


def _scores(tails: Floats) -> Floats:
    return score_of(np.log(np.maximum(tails, TINY))).clip(max=SCORE_MAX)


def _likelihood(log_tails: Floats, flight: Flight, odd: float) -> Floats:
    """Return the log likelihood of a batch so far, for each row of log tails at the edges.

    Of a share of `odd` the logarithm may be anything.
    """
    edges = flight.edges
    anything = 1 - np.log(np.maximum(edges, 1)) / np.log(edges[-1] + 1)
    tails = (1 - odd) * np.exp(log_tails) + odd * anything
    capped = flight.ended >= edges[-1]
    bins = np.searchsorted(edges, flight.ended[~capped])
    ended = np.bincount(bins, minlength=len(edges))[1:]
    running = np.zeros(len(edges))
    running[flight.used] = flight.open.sum(axis=0)
    running[-1] += capped.sum()
    density = np.maximum(tails[:, :-1] - tails[:, 1:], TINY)
    merit: Floats = np.log(density) @ ended + np.log(np.maximum(tails, TINY)) @ running
    return merit
