"""How a pool works off what is open: as it is, after a change, and until which later change. Pure.

A course follows instances request by request (`harness.scheduling.compute`), so it can tell at any
later moment what is left, and what a switch would give then. Seconds, tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from harness.model.layout import Layout, Mix
from harness.scheduling.compute import Compute
from harness.scheduling.dealing import FEW
from harness.scheduling.following import Followed, follow, left
from harness.scheduling.mixes import Option, Pool, soonest
from harness.scheduling.pooled import compute_s, shares, work_s
from harness.scheduling.view import Ints, Settings

FOLLOWED_MAX = 1024
"""Of more requests than that, none is followed to tell what an option takes."""
TIGHT = 1.2
"""KV is short where this times what is held at most, together, exceeds all that there is."""
RETIMED_MAX = 12
ENDED = (0.1, 0.3, 0.55, 0.75, 0.9, 0.96, 0.985)
"""Shares of the requests after whose end a later switch is looked at."""


@dataclass(frozen=True)
class Course:
    """How the pool works off what is open, with the layout that it has or with another."""

    lasts_s: float
    followed: tuple[Followed, ...]
    mix: Mix


def staying(
    pool: Pool, found: Sequence[Option], compute: Compute, settings: Settings
) -> Course | None:
    """Return how it goes on as it is; None where it cannot.

    Queued requests go where there is least for the GPUs. Where requests may be moved (the fast
    loop), they end up as evenly spread as after a switch, but no sooner than they can be moved.
    """
    if not pool.instances:
        return None
    placed = _as_placed(pool, compute)
    even = next((option for option in found if option.kept), None)
    if not np.isfinite(placed.lasts_s) or even is None:
        return placed if np.isfinite(placed.lasts_s) else None
    moves = _uneven(pool)
    if settings.moves_per_s_max <= 0 and (pool.at >= 0).any():
        return placed
    spread_s = max(even.total_s, moves / settings.moves_per_s_max if moves else 0.0)
    if spread_s >= placed.lasts_s:
        return placed
    return Course(spread_s, course_of(pool, even, compute).followed, pool.mix)


def _as_placed(pool: Pool, compute: Compute) -> Course:
    """Follow every instance with the requests that it has, and its part of the queued ones."""
    sizes = np.array([each.layout.gpus_per_instance for each in pool.instances])
    at, queued = pool.at.copy(), pool.at < 0
    counts = np.bincount(at[~queued], minlength=len(sizes))
    at[queued] = dealt(counts, sizes, int(queued.sum()))
    order = np.lexsort((np.arange(len(at)), pool.work.computes > 0, at))
    edges = np.searchsorted(at[order], np.arange(1, len(sizes)))
    layouts = [each.layout for each in pool.instances]
    sets = list(zip(layouts, np.split(order, edges), strict=True))
    followed = follow(pool.work, sets, compute)
    return Course(max(each.lasts_s for each in followed), followed, pool.mix)


def dealt(counts: Ints, sizes: Ints, more: int) -> Ints:
    """Deal out `more` requests, each to where there are fewest for the size; (more,) indices."""
    level = (counts.sum() + more) / sizes.sum() + float((counts / sizes).max()) + 1
    each = np.arange(min(more, int(level * sizes.max()) + 1))
    loads = (counts[:, None] + each) / sizes[:, None]
    return np.argsort(loads, axis=None, kind="stable")[:more] // max(1, len(each))


def _uneven(pool: Pool) -> int:
    """Return how many requests are at instances that have more than their GPUs' share."""
    placed = pool.at[pool.at >= 0]
    sizes = np.array([each.layout.gpus_per_instance for each in pool.instances])
    fair = np.ceil(len(pool.at) * sizes / sizes.sum())
    counts = np.bincount(placed, minlength=len(sizes))
    return int(np.maximum(counts - fair, 0).sum())


@dataclass(frozen=True)
class Coming:
    """The next batches: seconds that each takes from its beginning, by the layout it begins in.

    By default nobody comes. There are `batches` of them. A switch as they begin costs `switch_s`,
    and is only made for more than `margin` of what they take; in a layout that is not known here
    they begin with one to the best.
    """

    by_layout: Mapping[frozenset[Layout], float]
    switch_s: float
    here: Mix
    batches: int = 1
    margin: float = 0.0
    begins: bool = False

    def loses_s(self, mix: Mix) -> float:
        """Return how much longer they take after a change to this layout than without one.

        Less than 0 only where a batch `begins`: in its course, what is better for the next ones is
        left to be decided as they begin, when more is known, and costs no more then.
        """
        if not self.by_layout:
            return 0.0
        loses_s = self._takes_s(mix) - self._takes_s(self.here)
        return loses_s if self.begins else max(0.0, loses_s)

    def _takes_s(self, mix: Mix) -> float:
        """Return the cheaper of working them off in this layout, and of switching first."""
        best_s = min(self.by_layout.values())
        takes_s = self.by_layout.get(frozenset(mix), np.inf)
        margin_s = self.margin * min(takes_s, 2 * best_s)
        return min(self.batches * takes_s, self.switch_s + self.batches * (best_s + margin_s))


NOBODY = Coming({}, 0.0, Mix())


class Later(NamedTuple):
    """A later switch: to what, when, with how many requests left, and when all end with it.

    `next_s`: and what the next batch, if one comes, then loses.
    """

    mix: Mix
    at_s: float
    left: int
    ends_s: float
    next_s: float


def course_of(pool: Pool, option: Option, compute: Compute) -> Course:
    """Follow an option: every instance, or of each kind the one that has the longest requests."""
    work = pool.work
    sets: list[tuple[Layout, Ints]] = []
    if option.dealt is not None:
        for kind in option.kinds:
            numbers = np.intersect1d(kind.at, option.dealt)
            sets += [(kind.layout, np.flatnonzero(option.dealt == number)) for number in numbers]
        return Course(option.total_s, follow(work, sets, compute, option.cost_s), option.mix)
    order = np.argsort(-work.expected, kind="stable")
    parts = [order] if len(option.kinds) == 1 else [order[: option.cut], order[option.cut :]]
    for kind, part in zip(option.kinds, parts, strict=True):
        dealt = part[np.argsort(-work.remaining[part], kind="stable")][:: kind.count]
        sets.append((kind.layout, dealt[np.lexsort((dealt, work.computes[dealt] > 0))]))
    followed = tuple(
        replace(each, times=option.kinds[int(each.number[0])].count)
        for each in follow(work, sets, compute, option.cost_s)
    )
    return Course(option.total_s, followed, option.mix)


def retimed(pool: Pool, found: Sequence[Option], compute: Compute) -> list[Option]:
    """Follow the options in which KV or seats may be short: shares are too rough for those.

    Only where requests are few enough to be followed one by one, the soonest options first.
    """
    work = pool.work
    if not FEW < len(work) <= FOLLOWED_MAX or (work.count > 1).any():
        return list(found)
    lengths, together = np.unique(work.remaining, return_inverse=True)
    contexts = np.bincount(together, work.context)
    above = np.cumsum(np.bincount(together)[::-1])[::-1]
    most = float((np.cumsum(contexts[::-1])[::-1] + above * lengths).max())
    exact: list[Option] = []
    for option in found:
        held = sum(part.instances * compute.kv_capacity_tokens(part) for part in option.mix)
        seats = compute.sequences_max * sum(part.instances for part in option.mix)
        if (most * TIGHT > held or len(work) > seats) and len(exact) < RETIMED_MAX:
            ends_s = max(one.lasts_s for one in course_of(pool, option, compute).followed)
            exact.append(replace(option, work_s=ends_s, total_s=ends_s + option.cost_s))
        else:
            exact.append(option)
    return sorted(exact, key=soonest)


def best_later(
    course: Course,
    uniform: Sequence[Mix],
    compute: Compute,
    settings: Settings,
    then: Coming = NOBODY,
) -> Later | None:
    """Return the best later switch on this course, to instances all alike."""
    targets = [mix[0] for mix in uniform if mix != course.mix]
    ends_s = [np.repeat(each.ends_s, each.times) for each in course.followed]
    found: list[Later] = []
    if not targets:
        return None
    earliest_s = max(each.after_s for each in course.followed)
    for at_s in np.unique(np.quantile(np.concatenate(ends_s), ENDED)):
        remain = left(course.followed, float(at_s))
        if at_s <= earliest_s or not len(remain):
            continue
        given = shares(remain, np.zeros(1, np.int64))
        for target in targets:
            costs, count = compute.costs(target), target.instances
            computing_s = compute_s(costs, given.first + given.moved)[1] / count
            working_s = work_s(costs, compute.sequences_max, given, [count])[0, 1]
            ends = float(at_s + settings.switch_s + computing_s + working_s)
            mix = Mix((target,))
            next_s = ends + then.loses_s(mix)
            found.append(Later(mix, float(at_s), round(remain.count.sum()), ends, next_s))
    return min(found, key=lambda later: later.next_s, default=None)
