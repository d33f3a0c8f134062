"""How long instances of one layout take for a share of the requests: many shares at once. Pure.

For a planner that compares hundreds of mixes and cuts in milliseconds. Requests are counted in
buckets of like lengths (the longest each in their own), and a share is dealt out evenly, the
longest in turn: the instance that works longest then has ``ceil(n(x) / k)`` of the n(x) requests
that are longer than x tokens, and its time is the sum of its steps over x. Where seats or KV hold
only S of n requests, the others follow in no order of length, as renewal theory has it. With F the
share that is no longer than x, and M(x) the mean of ``min(length, x)``:

- the queue is empty after T steps, with ``(n - S) / S = T * F(T) / M(T)``;
- x steps later there still run ``S * (1 - F(T + x))`` of the first, and of those that followed
  ``(n - S) * (M(T + x) - M(x)) / T``.

`harness.scheduling.compute` follows one instance request by request; this is its fast companion.
Units: tokens, steps of a token each, seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from harness.scheduling.compute import Costs
from harness.scheduling.view import Floats, Ints

ALONE, GROWTH = 16, 1.25
"""So many of the longest are a bucket each; the next ones hold 1.25 times more in all, each."""
CUTS_GROWTH = 1.5
"""Cuts are after the first, second, ... request, then after 1.5 times as many as the last."""


@dataclass(frozen=True)
class Open:
    """Open requests as the planner looks at them: columns of one length; tokens.

    `remaining`: as they are drawn from what is expected of all. `expected`: of each, by which they
    are told apart. `computes`: contexts that must be computed in any case, for they are in no KV.
    `count`: how many requests a row stands for. `later`: contexts that later turns will compute,
    each about as long as the present one.
    """

    remaining: Floats
    expected: Floats
    context: Floats
    computes: Floats
    count: Floats
    later: Floats

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.remaining)


@dataclass(frozen=True)
class Shares:
    """Shares of open requests: for each cut the first so many by `expected`, and the rest.

    `lengths` (J,) rise. By share and bucket (R, J): `count`, and `context`, the sum of theirs. By
    share (R,): `largest`, the most KV that one will need; `first` and `moved`, tokens and their
    squares (2, R) that must be computed in any case, or if nobody stays where it is. Share i for
    ``i < len(cuts)`` is the first `cuts[i]` rows, and the rest is ``i + len(cuts)``.
    """

    cuts: Ints
    lengths: Floats
    count: Floats
    context: Floats
    largest: Floats
    first: Floats
    moved: Floats

    @cached_property
    def sums(self) -> _Sums:
        """Sums over its buckets, which all layouts share."""
        return _Sums.of(self)


def cuts_of(count: int) -> Ints:
    """Return where `count` requests are cut in two, 0 (all are the rest) to `count`."""
    found, size = [0], 1.0
    while int(size) < count:
        found.append(int(size))
        size = max(size + 1, size * CUTS_GROWTH)
    return np.array([*found, count], np.int64)


def shares(work: Open, cuts: Ints) -> Shares:
    """Count the requests of every share."""
    bucket, lengths = _buckets(work.remaining, work.count)
    order = np.argsort(-work.expected, kind="stable")
    segment = np.empty(len(work), np.int64)
    segment[order] = np.searchsorted(cuts, np.arange(len(work)), side="right")
    kept = work.context - work.computes

    def both(first: Floats) -> Floats:
        """Turn sums by segment into sums of the first so many, and of the rest."""
        upto = np.cumsum(first, axis=0)[: len(cuts)]
        return np.concatenate([upto, first.sum(axis=0) - upto])

    def counted(values: Floats, width: int, column: Ints) -> Floats:
        flat = np.bincount(segment * width + column, values, (len(cuts) + 1) * width)
        return both(np.asarray(flat, np.float64).reshape(-1, width))

    size = len(lengths)
    zeros = np.zeros(len(work), np.int64)
    any_case = (work.computes + work.later, work.computes**2 + work.later * work.context)
    if_moved = (kept, work.context**2 - work.computes**2)
    first = [counted(work.count * each, 1, zeros)[:, 0] for each in any_case]
    moved = [counted(work.count * each, 1, zeros)[:, 0] for each in if_moved]
    needs = (work.context + work.remaining)[order]
    upto = np.concatenate([[0.0], np.maximum.accumulate(needs)])
    rest = np.concatenate([np.maximum.accumulate(needs[::-1])[::-1], [0.0]])
    return Shares(
        cuts,
        lengths,
        counted(work.count, size, bucket),
        counted(work.count * work.context, size, bucket),
        np.concatenate([upto[cuts], rest[cuts]]),
        np.array(first),
        np.array(moved),
    )


def compute_s(costs: Costs, tokens: Floats) -> Floats:
    """Return the time to compute contexts, given (2, R): their tokens and the squares of them."""
    needed_s: Floats = tokens[0] * costs.prefill_token_s + tokens[1] * (costs.prefill_pair_s / 2)
    return needed_s


def work_s(costs: Costs, seats: int, given: Shares, instances: Sequence[int]) -> Floats:
    """Return how long so many instances work on each share, (K, R); not what they must compute.

    `seats` are those of one instance. Infinite where a request alone exceeds an instance's KV.
    """
    sums = given.sums
    k = np.array(instances, np.float64)[:, None]
    room = np.floor(costs.kv_capacity_tokens / np.maximum(sums.kv_mean, 1.0)).clip(1, seats)
    fullest = np.ceil(sums.above / k[:, :, None] - 1e-9)
    fits = (sums.held_mean * fullest).max(axis=2) <= costs.kv_capacity_tokens
    seated = np.minimum(k * np.where(fits, seats, room), sums.total)
    waits = sums.total > seated
    total_s = np.zeros(waits.shape)
    for mask, queued in ((~waits, False), (waits, True)):
        row_k, row = np.nonzero(mask)
        if len(row):
            how_many = k[row_k, 0]
            if queued:
                total_s[mask] = _queued_s(costs, sums, row, how_many, seated[mask])
            else:
                total_s[mask] = _together_s(costs, sums, row, how_many)
    return np.where(given.largest > costs.kv_capacity_tokens, np.inf, total_s)


@dataclass(frozen=True)
class _Sums:
    """Sums over the buckets below a length, (R, J + 1), of a share's requests.

    `knots` (J + 1,) begin with 0. `turns` (R, J + 1): of the queue, at the knots; see above.
    (R, J): how many are not below, `above`, and the KV of one of them when the bucket ends.
    """

    knots: Floats
    count: Floats
    context: Floats
    length: Floats
    square: Floats
    product: Floats
    total: Floats
    kv_mean: Floats
    above: Floats
    held_mean: Floats
    turns: Floats

    @classmethod
    def of(cls, given: Shares) -> _Sums:
        def below(values: Floats) -> Floats:
            sums = np.zeros((values.shape[0], values.shape[1] + 1))
            np.cumsum(values, axis=1, out=sums[:, 1:])
            return sums

        lengths = given.lengths
        count, context = below(given.count), below(given.context)
        length, square = below(given.count * lengths), below(given.count * lengths**2)
        product = below(given.context * lengths)
        total = count[:, -1]
        above, held = total[:, None] - count, context[:, -1:] - context
        held_mean = held[:, :-1] / np.maximum(above[:, :-1], 1e-9) + lengths
        kv_mean = (product[:, -1] + square[:, -1] / 2) / np.maximum(length[:, -1], 1e-9)
        knots = np.concatenate([[0.0], lengths])
        reached = np.maximum(length + above * knots, 1e-9)
        turns = np.maximum.accumulate(knots * count / reached, axis=1)
        return cls(
            knots,
            count,
            context,
            length,
            square,
            product,
            total,
            kv_mean,
            above[:, :-1],
            held_mean,
            turns,
        )


def _together_s(costs: Costs, sums: _Sums, row: Ints, k: Floats) -> Floats:
    """Return the time of shares that all have seats; one entry a (share, instances)."""
    width = np.diff(sums.knots)
    running = sums.above[row]
    batch = np.ceil(running / k[:, None] - 1e-9)
    step_s = costs.step_s(batch, (sums.held_mean[row] - width / 2) * batch)
    return np.asarray((np.where(running > 0, step_s, 0.0) * width).sum(axis=1))


def _queued_s(costs: Costs, sums: _Sums, row: Ints, k: Floats, seated: Floats) -> Floats:
    """Return the time of shares of which some wait; one entry a (share, instances)."""
    total = sums.total[row]
    steps = _until_empty(sums, row, (total - seated) / seated)
    at_once = seated / k
    full_tokens = np.minimum(at_once * sums.kv_mean[row], costs.kv_capacity_tokens)
    full_s = steps * costs.step_s(at_once, full_tokens)

    width = np.diff(sums.knots)
    x = (sums.knots[1:] - width / 2)[None, :]
    late = x + steps[:, None]
    first = (seated / total)[:, None]
    after = ((total - seated) / np.maximum(steps, 1e-9) / total)[:, None]
    n_late, m_late, held_late, grown_late = _above(sums, row, late)
    _, m_soon, _, grown_soon = _above(sums, row, np.broadcast_to(x, late.shape))
    running = first * n_late + after * (m_late - m_soon)
    kv_tokens = first * (held_late + late * n_late) + after * (grown_late - grown_soon)
    batch = np.maximum(running / k[:, None], 1.0)
    held = kv_tokens / np.maximum(running, 1e-9) * batch
    drain_s = np.minimum(running, 1.0) * costs.step_s(batch - 1e-9, held) * width
    return np.asarray(full_s + drain_s.sum(axis=1))


def _until_empty(sums: _Sums, row: Ints, turns: Floats) -> Floats:
    """Return after how many steps the queue is empty, from its length in turns of the seats."""
    known = sums.turns[row]
    upper = np.clip((known < turns[:, None]).sum(axis=1), 1, known.shape[1] - 1)
    at = np.arange(len(row))
    low, high = known[at, upper - 1], known[at, upper]
    part = np.clip((turns - low) / np.maximum(high - low, 1e-12), 0.0, 1.0)
    within = sums.knots[upper - 1] + part * (sums.knots[upper] - sums.knots[upper - 1])
    mean = sums.length[row, -1] / sums.total[row]
    return np.where(turns >= known[:, -1], turns * mean, within)


def _above(sums: _Sums, row: Ints, y: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return of those longer than y: how many, and their contexts; and two integrals up to y.

    In this order: n(y), the integral of n, the sum of contexts, the integral of KV held.
    """
    place = np.searchsorted(sums.knots[1:], y, side="right")
    line = row[:, None]
    n = sums.total[row][:, None] - sums.count[line, place]
    contexts = sums.context[row, -1][:, None] - sums.context[line, place]
    reached = sums.length[line, place] + y * n
    grown = sums.product[line, place] + y * contexts
    grown = grown + (sums.square[line, place] + y * y * n) / 2
    return n, reached, contexts, grown


def _buckets(remaining: Floats, count: Floats) -> tuple[Ints, Floats]:
    """Return each row's bucket, and the mean length of each, rising."""
    order = np.argsort(-remaining, kind="stable")
    edges, size = list(range(min(ALONE, len(remaining)) + 1)), float(ALONE)
    while edges[-1] < len(remaining):
        size = max(size + 1, size * GROWTH)
        edges.append(min(int(size), len(remaining)))
    last = len(edges) - 2
    bucket = np.empty(len(remaining), np.int64)
    bucket[order] = last - (np.searchsorted(edges, np.arange(len(order)), side="right") - 1)
    weight = np.bincount(bucket, count, last + 1)
    return bucket, np.bincount(bucket, count * remaining, last + 1) / np.maximum(weight, 1e-9)
