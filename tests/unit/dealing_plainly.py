"""How few requests are dealt, told plainly: one mix, one request and one instance after another.

What `harness.scheduling.dealing` does side by side must come to exactly this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from harness.model.layout import Layout
from harness.scheduling.compute import Compute
from harness.scheduling.dealing import FILLS, LEAST, ROUNDS, Dealt
from harness.scheduling.pooled import Open
from harness.scheduling.view import Floats, Ints


class PlainDealer:
    """Deals requests to these instances, all of them; see `harness.scheduling.dealing`.

    `stays`: index of the instance that has a request's KV, -1 for none; `delay_s`: until each
    instance is there. Times of sets of requests are kept, for they are asked for again.
    """

    def __init__(
        self,
        work: Open,
        compute: Compute,
        layouts: Sequence[Layout],
        stays: Ints,
        delay_s: Floats,
    ) -> None:
        self._drawn, self._work = work, replace(work, remaining=work.expected)
        self._compute, self._layouts = compute, tuple(layouts)
        self._stays, self._delay_s = stays, delay_s
        self._all = (self._work, compute, self._layouts, stays, delay_s)
        self._known: dict[tuple[int, bytes], tuple[float, float]] = {}

    def deal(self) -> Ints:
        """Return each request's instance, by one pass."""
        return _greedy(*self._all)

    def improved(self, at: Ints) -> Ints:
        """Move or swap requests of the instance that ends last, while all then ends sooner.

        It begins with what is best of `at` and of instances filled one after another, the longest
        requests first, up to a time: then those of a length share an instance.
        """
        ends_s = self._ends_s(at)
        filled = [
            _greedy(*self._all, fill_s=part * ends_s) for part in FILLS if np.isfinite(ends_s)
        ]
        at = min([at, *filled], key=self._ends_s)
        for _ in range(ROUNDS):
            better = self._better(at)
            if better is None:
                break
            at = better
        return at

    def timed(self, at: Ints) -> Dealt:
        """Return when all would have ended, with the lengths that were drawn for them."""
        works, ends = zip(
            *(
                self._timed_s(index, np.flatnonzero(at == index), self._drawn)
                for index in range(len(self._layouts))
            ),
            strict=True,
        )
        return Dealt(at, max(works), max(ends))

    def _ends_s(self, at: Ints) -> float:
        return max(self._time_s(index, at == index)[1] for index in range(len(self._layouts)))

    def _better(self, at: Ints) -> Ints | None:
        """Return the best move or swap that lets all end sooner; None where there is none."""
        ends_s = [self._time_s(index, at == index)[1] for index in range(len(self._layouts))]
        last = int(np.argmax(ends_s))
        best, found = ends_s[last] * (1 - LEAST), None
        mine, others = self._unlike(np.flatnonzero(at == last)), np.flatnonzero(at != last)
        for row in mine:
            targets = [(index, -1) for index in range(len(ends_s)) if index != last]
            targets += [(int(at[other]), other) for other in self._unlike(others, at)]
            for index, other in targets:
                changed = at.copy()
                changed[row] = index
                if other >= 0:
                    changed[other] = last
                ends = (self._time_s(each, changed == each)[1] for each in (last, index))
                if (later := max(ends)) < best:
                    best, found = later, changed
        return found

    def _unlike(self, rows: Ints, at: Ints | None = None) -> list[int]:
        """Return one of each set of rows that are alike."""
        work = self._work
        keys = [work.remaining, work.context, work.computes, work.later, self._stays]
        table = np.stack([*keys, np.zeros(len(work)) if at is None else at])[:, rows]
        return rows[np.unique(table, axis=1, return_index=True)[1]].tolist() if len(rows) else []

    def _time_s(self, index: int, mask: NDArray[np.bool_]) -> tuple[float, float]:
        """Return how long an instance works on these, and when it ends."""
        key = (index, mask.tobytes())
        if key not in self._known:
            self._known[key] = self._timed_s(index, np.flatnonzero(mask), self._work)
        return self._known[key]

    def _timed_s(self, index: int, rows: Ints, work: Open) -> tuple[float, float]:
        if not len(rows):
            return 0.0, 0.0
        layout = self._layouts[index]
        rows = rows[np.argsort(-work.remaining[rows], kind="stable")]
        computes = work.computes[rows]
        moved = np.where(self._stays[rows] == index, 0.0, work.context[rows] - computes)
        moved_s = float(self._compute.prefill_s(layout, moved).sum())
        work_s = self._compute.makespan_s(
            layout, work.remaining[rows], work.context[rows], computes, work.later[rows]
        )
        return work_s, work_s + moved_s + float(self._delay_s[index])


def _greedy(
    work: Open,
    compute: Compute,
    layouts: Sequence[Layout],
    stays: Ints,
    delay_s: Floats,
    *,
    fill_s: float = 0.0,
) -> Ints:
    """Deal the heaviest first to whoever ends soonest; or the longest to the first below `fill_s`.

    Where nobody ends before `fill_s`, it is whoever ends soonest.
    """
    costs = [compute.costs(layout) for layout in layouts]
    fixed = np.array([each.fixed_s[1] for each in costs])
    sequence = np.array(
        [(each.fixed_s[-1] - each.fixed_s[1]) / len(each.fixed_s) for each in costs]
    )
    kv_token = np.array([each.kv_token_s[1] for each in costs])
    capacity = np.array([float(each.kv_capacity_tokens) for each in costs])
    prefill_s = np.stack([each.prefill_s(work.context) for each in costs], axis=1)
    has = stays[:, None] == np.arange(len(costs))
    later_s = np.stack([each.prefill_s(work.later, work.context) for each in costs], axis=1)
    first_s = np.where(has & (work.computes == 0)[:, None], 0.0, prefill_s) + later_s
    reads = work.remaining * (work.context + work.remaining / 2)
    fits = (work.context + work.remaining)[:, None] <= capacity
    alone = prefill_s + later_s + work.remaining[:, None] * fixed + reads[:, None] * kv_token
    longest, produces, read = np.zeros((3, len(costs)))
    begins_s = delay_s.astype(np.float64)
    at = np.zeros(len(work), np.int64)
    weight = work.remaining if fill_s else alone.min(axis=1)
    for row in np.argsort(-weight, kind="stable"):
        length = work.remaining[row]
        most = np.maximum(longest, length)
        steps = np.maximum(most, (read + reads[row]) / capacity)
        steps = np.maximum(steps, (produces + length) / compute.sequences_max)
        ends_s = begins_s + first_s[row] + steps * fixed
        ends_s = ends_s + (produces + length) * sequence + (read + reads[row]) * kv_token
        ends_s = np.where(fits[row], ends_s, np.inf)
        best = int(np.argmax(ends_s <= fill_s) if ends_s.min() <= fill_s else np.argmin(ends_s))
        at[row] = best
        longest[best], begins_s[best] = most[best], begins_s[best] + first_s[row, best]
        produces[best] += length
        read[best] += reads[row]
    return at
