"""The fast loop: requests leave the instance that is expected to end last. Pure.

When an instance ends follows from sums over its requests, as its step time is nearly a line in
batch and KV: with L steps to come, S tokens to produce and Q tokens of context to read meanwhile,
``L * t(S / L, Q / L)``, and the contexts that are yet to be computed: of who waits, and of later
turns. L is its longest request, or S over the sequences that it can run at once where seats or KV
make others wait (queue length, KV headroom). One that lately yielded less than it
should (service rate) is taken to go on so.

Some requests of that instance go to one other, at the rate that is allowed, if of the two the later
one then ends sooner: by more than their moves cost and a margin of the time left. There must be
seats for them, and KV for what they are expected to become. It is the first few of a shift that are
told, the rest again at the next look: of three that are equally long, moving one gains nothing yet.

In a pool that stands still, moves come to an end, and a forecast that wavers sends nobody back: a
request does not return to an instance that it left, as long as `View.moved` tells of it. Times in
s, lengths in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.model.layout import Layout
from harness.scheduling.compute import Compute, Costs
from harness.scheduling.forecast import Forecast
from harness.scheduling.turns import later_tokens
from harness.scheduling.view import Floats, Instance, Ints, Move, Settings, View

MoveS = Callable[[str, str, int], float]
"""``(source, target, context)`` -> what a move costs: by KV or computed anew, the cheaper way."""

MARGIN = 0.02
"""Of the time left at the instance that ends last: what a shift must save beyond its cost."""
SHIFTED_MAX = 16
"""Requests of a shift, at most."""
TINY = 1e-9
"""Instead of 0, by which nothing can be divided."""
SLOW, SLOWEST = 0.7, 4.0
"""An instance counts as slow below this share of its expected speed; at most so many times."""

SETTLED_S = 1.0
"""Over which a yield is measured: who has decoded for so long had its prompt computed before."""


def balance(
    view: View, forecast: Forecast, compute: Compute, settings: Settings, move_s: MoveS
) -> tuple[Move, ...]:
    """Return which requests to move now, the most urgent first; none where it would not pay."""
    allowed = moves_allowed(view, settings)
    if not allowed or len(view.instances) < 2 or not len(view.requests):
        return ()
    pool = _Pool(view, forecast, compute)
    source = int(np.argmax(pool.ends))
    best = pool.shift(source, pool.order(source, settings), move_s)
    if best.saves_s <= MARGIN * pool.ends[source]:
        return ()
    ids, names = view.requests.ids, [instance.name for instance in view.instances]
    told = best.rows[:allowed].tolist()
    return tuple(Move(ids[row], names[source], names[best.target], best.saves_s) for row in told)


def moves_allowed(view: View, settings: Settings) -> int:
    """Return how many moves the rate allows now; none while the layout changes."""
    rate = settings.moves_per_s_max
    if view.changing or rate <= 0:
        return 0
    window_s = max(1.0, 1 / rate)
    lately = sum(view.now_s - moved.at_s < window_s for moved in view.moved)
    return max(0, math.floor(rate * window_s + 1e-9) - lately)


class _Shift(NamedTuple):
    """Requests (rows) that would go to one instance, and what that saves."""

    saves_s: float
    rows: Ints
    target: int


class _StepTimes:
    """Step times of all instances; a fraction of a sequence costs a fraction."""

    def __init__(self, instances: tuple[Instance, ...], compute: Compute) -> None:
        self._at: dict[Layout, list[int]] = {}
        for number, instance in enumerate(instances):
            self._at.setdefault(instance.layout, []).append(number)
        self._costs = {layout: compute.costs(layout) for layout in self._at}
        self._layouts = [instance.layout for instance in instances]
        costs = [self._costs[layout] for layout in self._layouts]
        first_s = [(each.prefill_token_s, each.prefill_pair_s / 2) for each in costs]
        self.prefill_s = np.array(first_s).T
        """Of a token, and of a pair of them: (2, instances)."""

    def step_s(self, batch: Floats, kv_tokens: Floats, at: int | None = None) -> Floats:
        """Return the time of a decode step: at one instance, or all, which are the last axis."""
        if at is not None or len(self._at) == 1:
            return _step_s(self._costs[self._layouts[at or 0]], batch, kv_tokens)
        found = np.empty_like(batch)
        for layout, those in self._at.items():
            found[..., those] = _step_s(
                self._costs[layout], batch[..., those], kv_tokens[..., those]
            )
        return found


def _step_s(costs: Costs, batch: Floats, kv_tokens: Floats) -> Floats:
    sizes = np.arange(len(costs.fixed_s))
    kv_token_s = costs.kv_token_s[np.minimum(batch, len(sizes) - 1).astype(np.int64)]
    return np.interp(batch, sizes, costs.fixed_s) + kv_token_s * kv_tokens


class _Pool:
    """What a view adds up to; columns of requests, and sums by instance."""

    def __init__(self, view: View, forecast: Forecast, compute: Compute) -> None:
        requests, instances = view.requests, view.instances
        self.view, self.context, self.at = view, requests.context, requests.at
        self.tokens = np.maximum(forecast.expected, 1.0)
        strays = max(1.0, forecast.longest.mid / float(self.tokens.max()))
        self.reach = np.maximum(
            np.minimum(self.tokens * strays, view.cap_tokens - requests.produced), self.tokens
        )
        """What a request produces yet if it is the one that strays up: some of many does."""
        wait = ~requests.running
        later = later_tokens(view, self.tokens)
        computes = bool(wait.any() or later.any())
        self.work = np.zeros((4, len(self.at)))
        self.work[0] = self.tokens
        np.multiply(self.tokens, self.context + self.tokens / 2, out=self.work[1])
        if computes:
            now = np.where(wait, self.context, 0.0)
            self.work[2:] = now + later, now**2 + later * self.context
        """By request: tokens to produce, tokens read meanwhile, contexts to compute, and pairs."""

        bins = self.at + 1  # what is queued elsewhere falls into the first
        size = len(instances) + 1
        self.work_at = np.zeros((4, len(instances)))
        for column in range(4 if computes else 2):
            self.work_at[column] = _added(bins, self.work[column], size)
        longest_at = np.zeros(size)
        np.maximum.at(longest_at, bins, self.reach)
        self.longest_at = longest_at[1:]
        kv_wanted = _added(bins[wait], self.context[wait], size)
        seats, taken, kv, kv_used = np.array(
            [
                (i.sequences_max, i.running + i.waiting, i.kv_capacity_tokens, i.kv_used_tokens)
                for i in instances
            ],
            dtype=float,
        ).T
        self.seats, self.kv = seats, kv
        self.seats_free = seats - taken
        self.kv_free = kv - kv_used - kv_wanted
        self.accepting = np.array([i.accepting for i in instances])
        self.length_max = np.array([i.length_max_tokens for i in instances])
        self.times = _StepTimes(instances, compute)
        self.slow = _slowness(instances, self._least(bins, size, later), self.times)
        self.ends = self._ends(self.longest_at, self.work_at)

    def order(self, source: int, settings: Settings) -> Ints:
        """Return the rows at an instance that may move, in the order in which they should.

        The longest first: they decide when it ends. But where some wait without a seat, they are
        too many, and those go first who need least for what they bring: these, and short contexts.
        """
        rows = np.flatnonzero(self.at == source)
        now_s, ids = self.view.now_s, self.view.requests.ids
        if resting := {m.id for m in self.view.moved if now_s - m.at_s < settings.move_rest_s}:
            rows = rows[[ids[row] not in resting for row in rows.tolist()]]
        runs = self.view.requests.running[rows]
        if runs.all():
            return _first(rows, self.reach[rows])
        return _first(rows, self.tokens[rows] / (1 + self.context[rows] * runs))

    def shift(self, source: int, rows: Ints, move_s: MoveS) -> _Shift:
        """Return how many of `rows`, in their order, should go where, and what that saves."""
        if not len(rows):
            return _Shift(0.0, rows, source)
        ends_s = np.maximum(self._without(source, rows)[:, None], self._with(rows))
        ends_s[~self._feasible(source, rows)] = np.inf
        saves_s = self.ends[source] - ends_s
        target = int(np.argmax(saves_s.max(axis=0)))
        if saves_s[:, target].max() <= 0:
            return _Shift(0.0, rows, source)
        name, other = (self.view.instances[at].name for at in (source, target))
        costs_s = np.cumsum([move_s(name, other, tokens) for tokens in self.context[rows].tolist()])
        net_s = saves_s[:, target] - costs_s
        count = int(np.argmax(net_s))
        return _Shift(float(net_s[count]), rows[: count + 1], target)

    # -- inside -----------------------------------------------------------------------------

    def _least(self, bins: Ints, size: int, later: Floats) -> Ints:
        """Return the least that any request of each instance has produced since its last prompt.

        Of trajectories of several turns that is not known, and counts as nothing.
        """
        requests = self.view.requests
        produced, recomputed = requests.produced, requests.recomputed
        if later.any() or (recomputed is not None and recomputed.any()):
            again = later > 0 if recomputed is None else (later > 0) | (recomputed > 0)
            produced = np.where(again, 0, produced)
        least = np.full(size, np.iinfo(np.int64).max)
        np.minimum.at(least, bins, produced)
        return least[1:]

    def _ends(self, longest: Floats, work: Floats, at: int | None = None) -> Floats:
        """Return in how many seconds an instance ends with so much to do, or all (last axis)."""
        these = slice(None) if at is None else at
        tokens, reads, computes, pairs = work
        tokens = np.maximum(tokens, TINY)
        at_once = np.minimum(self.seats[these], self.kv[these] * tokens / np.maximum(reads, TINY))
        steps = np.maximum(longest, tokens / np.maximum(at_once, 1))
        decodes_s = steps * self.times.step_s(np.maximum(tokens / steps, 1), reads / steps, at)
        token_s, pair_s = self.times.prefill_s[:, these]
        return np.asarray(self.slow[these] * (decodes_s + computes * token_s + pairs * pair_s))

    def _without(self, source: int, rows: Ints) -> Floats:
        """Return when the source ends without the first, the first two, ... of `rows`: (rows,)."""
        stays = self.at == source
        stays[rows] = False
        after = np.append(self.reach[rows[1:]], self.reach[stays].max(initial=0.0))
        longest = np.maximum.accumulate(after[::-1])[::-1]
        left = self.work_at[:, [source]] - np.cumsum(self.work[:, rows], axis=1)
        return self._ends(longest, np.maximum(left, 0.0), source)

    def _with(self, rows: Ints) -> Floats:
        """Return when every instance ends with the first of `rows`, ... too: (rows, instances)."""
        longest = np.maximum.accumulate(self.reach[rows])[:, None]
        more = np.cumsum(self.work[:, rows], axis=1)[:, :, None]
        return self._ends(np.maximum(self.longest_at, longest), self.work_at[:, None] + more)

    def _feasible(self, source: int, rows: Ints) -> NDArray[np.bool_]:
        """Return which instances could have the first of `rows`, ... at once: (rows, instances)."""
        grown = np.cumsum(self.context[rows] + self.tokens[rows])
        left = self.view.cap_tokens - self.view.requests.produced[rows]
        longest = np.maximum.accumulate(self.context[rows] + left)
        seats = np.arange(1, len(rows) + 1)
        room = (seats[:, None] <= self.seats_free) & (grown[:, None] <= self.kv_free)
        able: NDArray[np.bool_] = room & self.accepting & (longest[:, None] <= self.length_max)
        able[:, source] = False
        ids = [self.view.requests.ids[row] for row in rows.tolist()]
        names = {instance.name: at for at, instance in enumerate(self.view.instances)}
        for moved in self.view.moved:
            if moved.id in ids and moved.source in names:
                able[ids.index(moved.id) :, names[moved.source]] = False
        return able


def _first(rows: Ints, merit: Floats) -> Ints:
    """Return the rows of most merit, the best first."""
    if len(rows) > SHIFTED_MAX:
        best = np.argpartition(-merit, SHIFTED_MAX)[:SHIFTED_MAX]
        rows, merit = rows[best], merit[best]
    return rows[np.argsort(-merit, kind="stable")]


def _added(bins: Ints, column: Floats | Ints, size: int) -> Floats:
    """Add up a column by bin, and leave out the first."""
    return np.asarray(np.bincount(bins, column, size)[1:], np.float64)


def _slowness(instances: tuple[Instance, ...], least: Ints, times: _StepTimes) -> Floats:
    """Return by how much each instance is slower than it should be, by what it yields: 1 or more.

    Within the noise of a measurement (`SLOW`) it is as fast as said; so it is while nothing is
    known, or where it may just have computed prompts, and yielded less for that: some of its
    requests wait or have several turns, or the one that has the `least` came within `SETTLED_S`.
    """
    running, waiting, kv_used, yields = np.array(
        [(i.running, i.waiting, i.kv_used_tokens, i.tokens_per_s) for i in instances], dtype=float
    ).T
    batch = np.maximum(running, 1.0)
    step_s = times.step_s(batch, kv_used)
    known = (yields > 0) & (running > 0) & (waiting == 0) & (least * step_s > SETTLED_S)
    slower = np.divide(batch / step_s, yields, out=np.ones(len(instances)), where=known)
    return np.clip(np.where(slower > 1 / SLOW, slower, 1.0), 1.0, SLOWEST)
