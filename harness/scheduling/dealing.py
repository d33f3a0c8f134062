"""Few requests are dealt to instances one by one; then what they are matters more than how many.

Among few, one long prompt or two that do not fit one KV together decide, which shares of a crowd
(`harness.scheduling.pooled`) do not see. Each request, the heaviest first, goes where all would
then end soonest (list scheduling, LPT), by sums over an instance's requests: with L its longest, or
as many steps as seats and KV allow, S the tokens to produce and Q the tokens of context read
meanwhile, it works ``L * fixed + S * a sequence's + Q * a KV token's`` time, after what it must
compute. What that gives is then timed exactly.

Hundreds of mixes are dealt side by side, in arrays. Of empty instances that are alike only as many
are looked at as there are requests: the others would stay empty. Seconds, tokens; pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.model.layout import Layout
from harness.scheduling.compute import Compute
from harness.scheduling.pooled import Open
from harness.scheduling.view import Floats, Ints

FEW = 64
"""So many requests are dealt one by one."""
ROUNDS = 8
"""Of improvements to a deal; each saves at least `LEAST` of the time."""
LEAST = 0.005
FILLS = (0.75, 0.8, 0.85, 0.9, 0.95)
"""Of the time that a deal takes: up to which instances are filled to make another."""
SIDE_BY_SIDE = 16_384
"""Instances of as many mixes as are dealt at once: their arrays fit a cache."""


class Dealt(NamedTuple):
    """Index of each request's instance, and when all would have ended: of the work, and in all."""

    at: Ints
    work_s: float
    total_s: float


@dataclass(frozen=True, eq=False)
class Instances:
    """Instances of a mix that may get a request, in their order.

    `kind`: index of the layout of each; `delay_s`: until it is there; `number` in the whole mix.
    `stays`: by request, the index of the one that has its KV, -1 for none.
    """

    kind: Ints
    delay_s: Floats
    number: Ints
    stays: Ints

    @classmethod
    def of(cls, kind: Ints, delay_s: Floats, stays: Ints) -> Instances:
        """Leave out those that would stay empty; `stays` by number in the whole mix."""
        wanted = np.zeros(len(kind), np.bool_)
        wanted[stays[stays >= 0]] = True
        unlike = 2 * kind + (delay_s > 0)
        for alike in np.flatnonzero(np.bincount(unlike)):
            wanted[np.flatnonzero(unlike == alike)[: len(stays)]] = True
        number = np.flatnonzero(wanted)
        index = np.append(np.cumsum(wanted) - 1, -1)
        return cls(kind[number], delay_s[number], number, index[stays])

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.kind)


class _Sets(NamedTuple):
    """Sets of requests, each at an instance: entries of a `row` that is in a set, `of` number.

    By entry whether its KV `is_there`; by set the `kind` and the `delay_s` of its instance.
    """

    of: Ints
    row: Ints
    is_there: NDArray[np.bool_]
    kind: Ints
    delay_s: Floats


class Dealer:
    """Deals requests to instances of these `layouts`, by what is expected of each.

    What it deals is timed with the lengths that were `drawn` for the requests.
    """

    def __init__(self, drawn: Open, compute: Compute, layouts: Sequence[Layout]) -> None:
        self._drawn, self._work = drawn, replace(drawn, remaining=drawn.expected)
        self._compute, self._layouts = compute, tuple(layouts)

    def deals(self, mixes: Sequence[Instances], fills_s: Sequence[float] = ()) -> list[Ints]:
        """Return each request's instance, for all of these mixes, by one pass.

        With `fills_s`, one a mix, the longest go to the first that then ends before that.
        """
        greedy = _Greedy(self._work, self._compute, self._layouts)
        found: list[Ints] = []
        widest = max(map(len, mixes), default=1)
        several = max(1, SIDE_BY_SIDE // widest)
        for first in range(0, len(mixes), several):
            part = slice(first, first + several)
            found += greedy.deal(mixes[part], np.array(fills_s[part]) if fills_s else None)
        return found

    def timed(self, mixes: Sequence[Instances], deals: Sequence[Ints]) -> list[Dealt]:
        """Return when all would have ended, with the lengths that were drawn for them."""
        works, ends = self._each_s(mixes, deals, self._drawn)
        times = zip(deals, works.max(axis=1).tolist(), ends.max(axis=1).tolist(), strict=True)
        return [Dealt(at, work_s, total_s) for at, work_s, total_s in times]

    def improved(self, mix: Instances, at: Ints) -> Ints:
        """Move or swap requests of the instance that ends last, while all then ends sooner.

        It begins with what is best of `at` and of instances filled one after another, the longest
        requests first, up to a time: then those of a length share an instance.
        """
        ends_s = float(self._each_s([mix], [at], self._work)[1].max())
        if np.isfinite(ends_s):
            fills_s = [part * ends_s for part in FILLS]
            deals = [at, *self.deals([mix] * len(fills_s), fills_s)]
            each_s = self._each_s([mix] * len(deals), deals, self._work)[1].max(axis=1)
            at = deals[int(np.argmin(each_s))]
        for _ in range(ROUNDS):
            better = self._better(mix, at)
            if better is None:
                break
            at = better
        return at

    # -- inside ---------------------------------------------------------------------------------

    def _better(self, mix: Instances, at: Ints) -> Ints | None:
        """Return the best move or swap that lets all end sooner; None where there is none."""
        ends_s = self._each_s([mix], [at], self._work)[1][0]
        last = int(np.argmax(ends_s))
        mine = self._unlike(mix, np.flatnonzero(at == last))
        others = self._unlike(mix, np.flatnonzero(at != last), at)
        elsewhere = np.delete(np.arange(len(mix)), last)
        targets = np.concatenate([elsewhere, at[others]])
        swapped = np.concatenate([np.full(len(elsewhere), -1), others])
        row, index = np.repeat(mine, len(targets)), np.tile(targets, len(mine))
        other = np.tile(swapped, len(mine))
        changed = np.tile(at, (len(row), 1))
        changed[np.arange(len(row)), row] = index
        swaps = np.flatnonzero(other >= 0)
        changed[swaps, other[swaps]] = last
        limit_s = ends_s[last] * (1 - LEAST)
        lasts_s = self._at_s(mix, changed, np.full(len(row), last))
        sooner = lasts_s < limit_s
        changed, index = changed[sooner], index[sooner]
        later_s = np.maximum(lasts_s[sooner], self._at_s(mix, changed, index))
        return changed[np.argmin(later_s)] if (later_s < limit_s).any() else None

    def _unlike(self, mix: Instances, rows: Ints, at: Ints | None = None) -> Ints:
        """Return one of each set of rows that are alike."""
        work = self._work
        keys = [work.remaining, work.context, work.computes, work.later, mix.stays]
        table = np.stack([*keys, np.zeros(len(work)) if at is None else at])[:, rows]
        return rows[np.unique(table, axis=1, return_index=True)[1]] if len(rows) else rows

    def _each_s(
        self, mixes: Sequence[Instances], deals: Sequence[Ints], work: Open
    ) -> tuple[Floats, Floats]:
        """Return how long every instance works, and when it ends: (deals, instances), 0 beyond."""
        width = max(map(len, mixes))
        at, stays = np.stack(deals), np.stack([mix.stays for mix in mixes])
        kind, delay_s = np.zeros((len(mixes), width), np.int64), np.zeros((len(mixes), width))
        for number, mix in enumerate(mixes):
            kind[number, : len(mix)], delay_s[number, : len(mix)] = mix.kind, mix.delay_s
        of = at + width * np.arange(len(mixes))[:, None]
        row = np.broadcast_to(np.arange(len(work)), at.shape)
        sets = _Sets(of.ravel(), row.ravel(), (stays == at).ravel(), kind.ravel(), delay_s.ravel())
        works_s, ends_s = self._filled_s(sets, work)
        return works_s.reshape(kind.shape), ends_s.reshape(kind.shape)

    def _at_s(self, mix: Instances, deals: Ints, where: Ints) -> Floats:
        """Return of each of these deals (deals, rows) when one instance ends."""
        of, row = np.nonzero(deals == where[:, None])
        is_there = mix.stays[row] == where[of]
        sets = _Sets(of, row, is_there, mix.kind[where], mix.delay_s[where])
        return self._filled_s(sets, self._work)[1]

    def _filled_s(self, sets: _Sets, work: Open) -> tuple[Floats, Floats]:
        """Return how long the instance of each set works, and when it ends; 0 if it is empty.

        The longest are seated first. Sets as large, at instances of one layout, are timed at once.
        """
        rank = np.empty(len(work), np.int64)
        rank[np.argsort(-work.remaining, kind="stable")] = np.arange(len(work))
        order = np.lexsort((rank[sets.row], sets.of))
        row, is_there = sets.row[order], sets.is_there[order]
        size = np.bincount(sets.of, minlength=len(sets.kind))
        first = np.cumsum(size) - size
        works_s, ends_s = np.zeros(len(size)), np.zeros(len(size))
        unlike = np.where(size > 0, sets.kind * (len(work) + 1) + size, -1)
        for alike in np.unique(unlike[size > 0]).tolist():
            kind, many = divmod(alike, len(work) + 1)
            these = np.flatnonzero(unlike == alike)
            entries = first[these, None] + np.arange(many)
            rows, layout = row[entries], self._layouts[kind]
            context, computes = work.context[rows], work.computes[rows]
            moved = np.where(is_there[entries], 0.0, context - computes)
            moved_s = self._compute.prefill_s(layout, moved).sum(axis=1)
            works_s[these] = self._compute.makespans_s(
                layout, work.remaining[rows], context, computes, work.later[rows]
            )
            ends_s[these] = works_s[these] + moved_s + sets.delay_s[these]
        return works_s, ends_s


class _Greedy:
    """Deals the heaviest first to whoever ends soonest: columns are layouts, rows requests."""

    def __init__(self, work: Open, compute: Compute, layouts: Sequence[Layout]) -> None:
        self._work, self._seats = work, compute.sequences_max
        costs = [compute.costs(layout) for layout in layouts]
        self._fixed = np.array([each.fixed_s[1] for each in costs])
        self._sequence = np.array(
            [(each.fixed_s[-1] - each.fixed_s[1]) / len(each.fixed_s) for each in costs]
        )
        self._kv_token = np.array([each.kv_token_s[1] for each in costs])
        self._capacity = np.array([float(each.kv_capacity_tokens) for each in costs])
        self._prefill_s = np.stack([each.prefill_s(work.context) for each in costs], axis=1)
        later_s = [each.prefill_s(work.later, work.context) for each in costs]
        self._later_s = np.stack(later_s, axis=1)
        self._reads = work.remaining * (work.context + work.remaining / 2)
        self._fits = (work.context + work.remaining)[:, None] <= self._capacity
        decodes_s = work.remaining[:, None] * self._fixed
        self._alone_s = self._prefill_s + self._later_s + decodes_s
        self._alone_s = self._alone_s + self._reads[:, None] * self._kv_token

    def deal(self, mixes: Sequence[Instances], fills_s: Floats | None) -> list[Ints]:
        """Return each request's instance, by mix; the longest to the first below `fills_s`.

        Where nobody ends before that, or there are none, it is whoever ends soonest.
        """
        shape = len(mixes), max(map(len, mixes))
        kind, begins_s = np.zeros(shape, np.int64), np.full(shape, np.inf)  # inf: nobody is there
        for number, mix in enumerate(mixes):
            kind[number, : len(mix)], begins_s[number, : len(mix)] = mix.kind, mix.delay_s
        stays = np.stack([mix.stays for mix in mixes])
        at, lines = np.zeros(stays.shape, np.int64), np.arange(len(mixes))
        fixed, sequence = self._fixed[kind], self._sequence[kind]
        kv_token, capacity = self._kv_token[kind], self._capacity[kind]
        longest, produces, read = np.zeros((3, *shape))
        for row in self._order(mixes, fills_s is not None).T:
            length, reads = self._work.remaining[row, None], self._reads[row, None]
            first_s = self._prefill_s[row[:, None], kind]
            there = np.flatnonzero((stays[lines, row] >= 0) & (self._work.computes[row] == 0))
            first_s[there, stays[there, row[there]]] = 0.0
            first_s += self._later_s[row[:, None], kind]
            most, reading = np.maximum(longest, length), read + reads
            steps = np.maximum(most, reading / capacity)
            steps = np.maximum(steps, (produces + length) / self._seats)
            ends_s = begins_s + first_s + steps * fixed
            ends_s = ends_s + (produces + length) * sequence + reading * kv_token
            ends_s[~self._fits[row[:, None], kind]] = np.inf
            best = np.argmin(ends_s, axis=1)
            if fills_s is not None:
                below = ends_s <= fills_s[:, None]
                best = np.where(below.any(axis=1), np.argmax(below, axis=1), best)
            at[lines, row] = best
            longest[lines, best], read[lines, best] = most[lines, best], reading[lines, best]
            begins_s[lines, best] += first_s[lines, best]
            produces[lines, best] += length[:, 0]
        return list(at)

    def _order(self, mixes: Sequence[Instances], longest_first: bool) -> Ints:
        """Return the requests of each mix in the order in which they are dealt: (mixes, rows)."""
        if longest_first:
            weight = np.tile(self._work.remaining, (len(mixes), 1))
        else:
            weight = np.stack([self._alone_s[:, np.unique(m.kind)].min(axis=1) for m in mixes])
        return np.argsort(-weight, axis=1, kind="stable")
