"""Instances followed side by side, request by request: when each ends, and what is left when. Pure.

A pool has a thousand instances, of which many have one layout and as many requests: those are
arrays of (instances, requests). Seconds, tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from harness.model.layout import Layout
from harness.scheduling.compute import Compute, Drain
from harness.scheduling.pooled import Open
from harness.scheduling.view import Floats, Ints


@dataclass(frozen=True, eq=False)
class Followed:
    """Instances of one layout that have as many requests: how each goes, and what it has.

    `number`: the place of each among all that are followed. Each stands for as many `times`, and
    begins after `after_s`.
    """

    drain: Drain
    context: Floats
    computes: Floats
    later: Floats
    number: Ints
    times: int = 1
    after_s: float = 0.0

    @property
    def lasts_s(self) -> float:
        """Until all have ended, from when they begin."""
        return float(self.drain.time_s[:, -1].max())

    @cached_property
    def ends_s(self) -> Floats:
        """When each request ends, (instances, requests)."""
        drain = self.drain
        curves = zip(drain.ends, drain.steps, drain.time_s, strict=True)
        return self.after_s + np.stack([np.interp(*curve) for curve in curves])


def follow(
    work: Open, sets: Sequence[tuple[Layout, Ints]], compute: Compute, after_s: float = 0.0
) -> tuple[Followed, ...]:
    """Follow instances from the rows of `work` that each has; those that have none are left out."""
    alike: dict[tuple[Layout, int], list[int]] = {}
    for number, (layout, rows) in enumerate(sets):
        if len(rows):
            alike.setdefault((layout, len(rows)), []).append(number)
    found: list[Followed] = []
    for (layout, _), numbers in alike.items():
        rows = np.stack([sets[number][1] for number in numbers])
        for drain, which in _drained(work, rows, layout, compute):
            mine, those = rows[which], np.array(numbers)[which]
            context, computes, later = work.context[mine], work.computes[mine], work.later[mine]
            found.append(Followed(drain, context, computes, later, those, after_s=after_s))
    return tuple(found)


def _drained(
    work: Open, rows: Ints, layout: Layout, compute: Compute
) -> Iterator[tuple[Drain, Ints]]:
    """Yield how instances work off their rows, and which: those that fit at once together."""
    columns = [work.remaining, work.context, work.computes, work.later]
    at_once = compute.fits_at_once(layout, work.remaining[rows], work.context[rows])
    if at_once.any():
        which = np.flatnonzero(at_once)
        yield compute.drains(layout, *(column[rows[which]] for column in columns)), which
    for which in np.flatnonzero(~at_once)[:, None]:
        one = compute.drain(layout, *(column[rows[which[0]]] for column in columns))
        yield Drain(one.starts[None], one.ends[None], one.steps[None], one.time_s[None]), which


def left(followed: Sequence[Followed], at_s: float) -> Open:
    """Return what is still open at a moment, instance after instance."""
    columns, numbers = [], []
    for each in followed:
        drain = each.drain
        remain, whole = drain.left(at_s - each.after_s), drain.ends - drain.starts
        waiting = np.where(whole > remain, 0.0, each.computes)
        turns = each.later * remain / np.maximum(whole, 1.0)
        count = np.full(remain.shape, float(each.times))
        table = np.stack([remain, each.context + whole - remain, waiting, count, turns])
        columns.append(table.reshape(len(table), -1))
        numbers.append(np.repeat(each.number, remain.shape[1]))
    together = np.concatenate(columns, axis=1)[
        :, np.argsort(np.concatenate(numbers), kind="stable")
    ]
    remain, context, computes, count, later = together[:, together[0] > 0]
    return Open(remain, remain, context, computes, count, later)
