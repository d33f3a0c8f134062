"""The fast loop: requests leave the instance that is expected to end last. Pure.

When an instance ends follows from sums over its requests, as its step time is nearly a line in
batch and KV: with L steps to come, S tokens to produce and Q tokens of context to read meanwhile,
``L * t(S / L) + Q * t_kv``. L is its longest request, or S over the sequences that it can run at
once where seats or KV make others wait (queue length, KV headroom). One that lately yielded less
than it should (service rate) is taken to go on so.

A request moves if of the two instances the later one then ends sooner, by more than the move's cost
and a margin of the time left; and only to where a seat is free, and KV for what it is expected to
become. Each move lowers the later end of a pair, so in a pool that stands still moves come to an
end; and a forecast that wavers sends nobody back: a request does not return to an instance that it
left, as long as `View.moved` tells of it. Times in s, lengths in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from harness.model.layout import Layout
from harness.scheduling.compute import Compute, Costs
from harness.scheduling.forecast import Forecast
from harness.scheduling.view import Floats, Instance, Ints, Move, Settings, View

MoveS = Callable[[str, str, int], float]
"""``(source, target, context)`` -> what a move costs: by KV or computed anew, the cheaper way."""

MARGIN = 0.02
"""Of the time left at the later of two instances: what a move must save beyond its cost."""
LOOKED_AT = 8
"""Requests for which a target is sought: the longest of an instance, and those that weigh least."""
TINY = 1e-9
"""Instead of 0, by which nothing can be divided."""
SLOW, SLOWEST = 0.8, 4.0
"""An instance counts as slow below this share of its expected speed; at most so many times."""


def balance(
    view: View, forecast: Forecast, compute: Compute, settings: Settings, move_s: MoveS
) -> tuple[Move, ...]:
    """Return which requests to move now, the most urgent first; none where it would not pay."""
    allowed = moves_allowed(view, settings)
    if not allowed or len(view.instances) < 2 or not len(view.requests):
        return ()
    pool = _Pool(view, forecast, compute)
    moves: list[Move] = []
    while len(moves) < allowed and (found := pool.best(move_s, settings.move_rest_s)):
        moves.append(found)
    return tuple(moves)


def moves_allowed(view: View, settings: Settings) -> int:
    """Return how many moves the rate allows now; none while the layout changes."""
    rate = settings.moves_per_s_max
    if view.changing or rate <= 0:
        return 0
    window_s = max(1.0, 1 / rate)
    lately = sum(view.now_s - moved.at_s < window_s for moved in view.moved)
    return max(0, math.floor(rate * window_s + 1e-9) - lately)


class _StepTimes:
    """Step times of all instances; a fraction of a sequence costs a fraction."""

    def __init__(self, instances: tuple[Instance, ...], compute: Compute) -> None:
        self._at: dict[Layout, list[int]] = {}
        for number, instance in enumerate(instances):
            self._at.setdefault(instance.layout, []).append(number)
        self._costs = {layout: compute.costs(layout) for layout in self._at}

    def step_s(self, batch: Floats, kv_tokens: Floats) -> Floats:
        """Return the time of a decode step; the last axis is that of all instances."""
        if len(self._at) == 1:
            return _step_s(next(iter(self._costs.values())), batch, kv_tokens)
        found = np.empty_like(batch)
        for layout, at in self._at.items():
            found[..., at] = _step_s(self._costs[layout], batch[..., at], kv_tokens[..., at])
        return found


def _step_s(costs: Costs, batch: Floats, kv_tokens: Floats) -> Floats:
    sizes = np.arange(len(costs.fixed_s))
    kv_token_s = costs.kv_token_s[np.minimum(batch, len(sizes) - 1).astype(np.int64)]
    return np.interp(batch, sizes, costs.fixed_s) + kv_token_s * kv_tokens


class _Pool:
    """What a view adds up to; columns of requests, and sums by instance."""

    def __init__(self, view: View, forecast: Forecast, compute: Compute) -> None:
        requests, instances = view.requests, view.instances
        self.view, self.context, self.at = view, requests.context, requests.at.copy()
        self.tokens = np.maximum(forecast.expected, 1.0)
        strays = max(1.0, forecast.longest.mid / float(self.tokens.max()))
        self.reach = np.maximum(
            np.minimum(self.tokens * strays, view.cap_tokens - requests.produced), self.tokens
        )
        """What a request produces yet if it is the one that strays up: some of many does."""
        self.reads = self.tokens * (requests.context + self.tokens / 2)
        self.taken = np.zeros(len(requests), dtype=bool)

        self.tokens_at, self.reads_at = self._sum(self.tokens), self._sum(self.reads)
        self.longest_at = np.zeros(len(instances))
        placed = self.at >= 0
        np.maximum.at(self.longest_at, self.at[placed], self.reach[placed])
        seats, taken, kv, kv_used = np.array(
            [
                (i.sequences_max, i.running + i.waiting, i.kv_capacity_tokens, i.kv_used_tokens)
                for i in instances
            ],
            dtype=float,
        ).T
        self.seats, self.kv = seats, kv
        self.seats_free = seats - taken
        self.kv_free = kv - kv_used - self._sum(np.where(requests.running, 0, self.context))
        self.accepting = np.array([i.accepting for i in instances])
        self.length_max = np.array([i.length_max_tokens for i in instances])
        self.times = _StepTimes(instances, compute)
        self.slow = _slowness(instances, self.times)
        self.ends = self._ends(self.longest_at, self.tokens_at, self.reads_at)

    def best(self, move_s: MoveS, rest_s: float) -> Move | None:
        """Find the move that saves most at the instance that ends last, and make it true here."""
        source = int(np.argmax(self.ends))
        rows = self._movable(source, rest_s)
        if not len(rows):
            return None
        after_source = self._without(source, rows)
        after_target = self._with(rows)
        after_target[~self._feasible(source, rows)] = np.inf
        targets = np.argmin(after_target, axis=1)
        later = np.maximum(after_source, after_target[np.arange(len(rows)), targets])
        name = self.view.instances[source].name
        best: tuple[float, int, int] = (MARGIN * self.ends[source], -1, -1)
        for row, target, ends_s in zip(rows.tolist(), targets.tolist(), later, strict=True):
            saves_s = float(self.ends[source] - ends_s)
            if saves_s > best[0]:
                other = self.view.instances[target].name
                saves_s -= move_s(name, other, int(self.context[row]))
                best = max(best, (saves_s, row, target))
        saves_s, row, target = best
        if row < 0:
            return None
        self._move(row, source, target)
        return Move(self.view.requests.ids[row], name, self.view.instances[target].name, saves_s)

    # -- inside -----------------------------------------------------------------------------

    def _sum(self, column: Floats | Ints) -> Floats:
        """Add up a column by instance; what is queued elsewhere is left out."""
        sums = np.bincount(self.at + 1, column, minlength=len(self.view.instances) + 1)
        return sums[1:]

    def _ends(self, longest: Floats, tokens: Floats, reads: Floats) -> Floats:
        """Return in how many seconds all instances (the last axis) end with so much to do."""
        tokens = np.maximum(tokens, TINY)
        at_once = np.minimum(self.seats, self.kv * tokens / np.maximum(reads, TINY))
        steps = np.maximum(longest, tokens / np.maximum(at_once, 1))
        step_s = self.times.step_s(np.maximum(tokens / steps, 1), reads / steps)
        return np.asarray(self.slow * steps * step_s)

    def _movable(self, source: int, rest_s: float) -> Ints:
        """Return the rows at an instance to be looked at: the longest, and the cheapest to move.

        Cheap is who waits without a seat, and who weighs most for the context that must move.
        """
        rows = np.flatnonzero((self.at == source) & ~self.taken)
        now_s, ids = self.view.now_s, self.view.requests.ids
        if resting := {m.id for m in self.view.moved if now_s - m.at_s < rest_s}:
            rows = rows[[ids[row] not in resting for row in rows.tolist()]]
        if len(rows) <= LOOKED_AT:
            return rows
        weight = self.tokens[rows] / (1 + self.context[rows] * self.view.requests.running[rows])
        first = np.argpartition(-self.reach[rows], LOOKED_AT // 2)[: LOOKED_AT // 2]
        light = np.argpartition(-weight, LOOKED_AT // 2)[: LOOKED_AT // 2]
        return rows[np.unique(np.concatenate((first, light)))]

    def _without(self, source: int, rows: Ints) -> Floats:
        """Return when the source ends without each of `rows`: (rows,)."""
        reach = np.sort(self.reach[self.at == source])
        second = reach[-2] if len(reach) > 1 else 0.0
        sums = np.stack((self.longest_at, self.tokens_at, self.reads_at))
        after = np.repeat(sums[:, None], len(rows), axis=1)
        after[0, :, source] = np.where(self.reach[rows] == reach[-1], second, reach[-1])
        after[1, :, source] -= self.tokens[rows]
        after[2, :, source] -= self.reads[rows]
        return self._ends(*after)[:, source]

    def _with(self, rows: Ints) -> Floats:
        """Return when every instance ends with each of `rows` besides: (rows, instances)."""
        return self._ends(
            np.maximum(self.longest_at, self.reach[rows, None]),
            self.tokens_at + self.tokens[rows, None],
            self.reads_at + self.reads[rows, None],
        )

    def _feasible(self, source: int, rows: Ints) -> NDArray[np.bool_]:
        """Return which instances could have each of `rows` at once: (rows, instances)."""
        grown = self.context[rows] + self.tokens[rows]
        longest = self.context[rows] + self.view.cap_tokens - self.view.requests.produced[rows]
        able = self.accepting & (self.seats_free >= 1)
        able = able & (grown[:, None] <= self.kv_free) & (longest[:, None] <= self.length_max)
        able[:, source] = False
        ids = [self.view.requests.ids[row] for row in rows.tolist()]
        names = {instance.name: at for at, instance in enumerate(self.view.instances)}
        for moved in self.view.moved:
            if moved.id in ids and moved.source in names:
                able[ids.index(moved.id), names[moved.source]] = False
        return able

    def _move(self, row: int, source: int, target: int) -> None:
        """Make a move true in the sums."""
        self.at[row], self.taken[row] = target, True
        for sums, column in ((self.tokens_at, self.tokens), (self.reads_at, self.reads)):
            sums[source] -= column[row]
            sums[target] += column[row]
        self.longest_at[source] = self.reach[self.at == source].max(initial=0.0)
        self.longest_at[target] = max(self.longest_at[target], self.reach[row])
        self.seats_free[source] += 1
        self.seats_free[target] -= 1
        self.kv_free[source] += self.context[row]
        self.kv_free[target] -= self.context[row]
        self.ends = self._ends(self.longest_at, self.tokens_at, self.reads_at)


def _slowness(instances: tuple[Instance, ...], times: _StepTimes) -> Floats:
    """Return by how much each instance is slower than it should be, by what it yields: 1 or more.

    Within the noise of a measurement (`SLOW`), or while nothing is known, it is as fast as said.
    """
    running, kv_used, yields = np.array(
        [(i.running, i.kv_used_tokens, i.tokens_per_s) for i in instances], dtype=float
    ).T
    batch = np.maximum(running, 1.0)
    step_s = times.step_s(batch, kv_used)
    known = (yields > 0) & (running > 0)
    slower = np.divide(batch / step_s, yields, out=np.ones(len(instances)), where=known)
    return np.clip(np.where(slower > 1 / SLOW, slower, 1.0), 1.0, SLOWEST)
