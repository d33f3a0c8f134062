"""The slow loop: which layout the pool should have from now on, and who belongs where. Pure.

It minimises when the last open request ends: compute, contexts computed anew, and the switch, of
the slowest instance (`harness.scheduling.mixes`). Where a batch follows, what it loses by a change
counts too, for it begins in the layout that this one ends in (`harness.scheduling.coming`). A
switch is taken if it saves more than it costs and a margin of the time that is left, and not while
another one is under way or just over. The margin doubles with each switch within a batch, for
another one was promised to be the best. Without past batches lengths are a guess: it is twice as
large at first, and the less so the more have ended.

The best TP rises as requests drain, so the first switch that pays is seldom the one that pays most.
Before it switches, the planner follows the pool as it is to a few later moments, and takes stock at
each of what a switch would give then (optimal stopping by the same cost model). It also lets the
best options have a later switch. It waits where waiting gives more: with one switch ahead of it,
every look asks the same question anew, with what has been learnt meanwhile.

As a batch begins, what is cheapest to begin with and to leave later counts, here as well.

Where nothing is open, the next batch is planned for, as if its requests were queued. Times in
seconds, lengths in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

import numpy as np

from harness.model.layout import Layout
from harness.scheduling.coming import LOOKED_AT, coming, fresh, next_lengths
from harness.scheduling.compute import Compute
from harness.scheduling.courses import (
    NOBODY,
    Coming,
    Course,
    Later,
    dealt,
)
from harness.scheduling.forecast import Forecast
from harness.scheduling.mixes import Option, Pool
from harness.scheduling.outlook import Outlook, outlook
from harness.scheduling.placing import Ground, Kind, one_of
from harness.scheduling.pooled import Open
from harness.scheduling.turns import later_tokens
from harness.scheduling.view import Ints, Plan, Settings, View

SETS_ROWS = 2048
"""Of more requests than that, only the typical set of lengths is looked at."""
BEGUN_LOOKED_AT = 4
"""Changes as a batch begins, for which a later switch in its course is considered."""
FIRST_LOOKED_AT = 6
"""Layouts to begin with, for which a switch in the course is considered."""
PATIENCE = 0.01
"""Of the time left: what waiting must save to be worth it; at the best moment it saves nothing."""


def plan(
    view: View,
    forecast: Forecast,
    compute: Compute,
    settings: Settings,
    *,
    layouts: Sequence[Layout] | None = None,
    must: bool = False,
) -> Plan:
    """Return what the pool should become, or why it stays as it is.

    `layouts`: kinds of instances to choose from; else all that are feasible. `must`: nothing is
    lost by a switch (a batch begins): what ends soonest is wanted, with neither margin nor rest.
    Where there is nothing to stay with, no instance or one too small for a request, `stay_s` is 0
    and the best is wanted too.
    """
    pools = _pools(view, forecast)
    pool = pools[0]
    if not len(pool.work) or view.changing:
        return Plan(None, "a switch is under way" if len(pool.work) else "nothing is open", 0.0)
    several = layouts or compute.layouts(max(view.gpus_of.values(), default=0))
    kinds = tuple(dict.fromkeys(map(one_of, several)))
    ground = Ground(view.gpus_of, kinds)
    ahead = outlook(pools, compute, ground, settings)
    if not ahead.found:
        return Plan(None, _nothing_fits(pool, kinds, view), 0.0)
    then = replace(_then(view, pools, compute, ground, settings), begins=must)
    found = sorted(ahead.found, key=lambda option: option.total_s + then.loses_s(option.mix))
    stay = ahead.stay
    kept = next((option for option in found if option.kept), None)
    best, waits = _chosen(ahead, found, then, compute, settings)
    left_s = stay.lasts_s if stay else 0.0
    if best is None:
        reason = f"{pool.mix} is the best there is: {left_s:.1f} s are left"
        return Plan(None, reason, left_s, best=view.layout, assignment=_assigned(view, pool, kept))
    margin, reason = _margin(view, forecast, settings), ""
    if stay is not None and not must:
        reason = _tired(view, settings) or _little(best, stay, then, margin)
        reason = reason or _patience(best, stay, then, waits)
        if not reason and forecast.parts and not forecast.past_batches:
            reason = _guess(best, ahead, margin)
    return Plan(
        None if reason else best.mix,
        reason or _praise(best, stay),
        left_s,
        best.work_s,
        best.cost_s,
        best.mix,
        _assigned(view, pool, kept if reason else best),
    )


# -- what is open ----------------------------------------------------------------------------------


def _pools(view: View, forecast: Forecast) -> list[Pool]:
    """Look at the view: instances on usable nodes, and requests, or those that are coming.

    One for each set of lengths that the requests may have, if they are not too many; a typical one
    first.
    """
    usable = [at for at, each in enumerate(view.instances) if each.node in view.gpus_of]
    instances = tuple(view.instances[each] for each in usable)
    new_place = np.full(len(view.instances) + 1, -1)
    new_place[usable] = np.arange(len(usable))
    requests, rows = view.requests, len(view.requests)
    if not rows and view.coming:
        work = fresh(view, next_lengths(view, forecast.spread))
        return [Pool(work, np.full(len(work), -1), instances)]
    at = new_place[requests.at]  # the last of them answers for -1, nowhere
    expected = np.maximum(forecast.expected.astype(np.float64), 1.0)
    context = requests.context.astype(np.float64)
    computes = np.where(requests.running & (at >= 0), 0.0, context)
    sets = forecast.sets() if rows <= SETS_ROWS else (forecast.spread,)
    middle = len(sets) // 2
    pools = []
    for lengths in (sets[middle], *sets[:middle], *sets[middle + 1 :]):
        remaining = np.maximum(lengths.astype(np.float64), 1.0)
        later = later_tokens(view, remaining)
        work = Open(remaining, expected, context, computes, np.ones(rows), later)
        pools.append(Pool(work, at, instances))
    return pools


def _then(
    view: View,
    pools: Sequence[Pool],
    compute: Compute,
    ground: Ground,
    settings: Settings,
) -> Coming:
    """Return what the next batches take, where they are not what is planned for."""
    if not len(view.requests):
        return NOBODY
    return coming(view, [each.work.remaining for each in pools], compute, ground, settings)


def _saved_s(option: Option, stay: Course, then: Coming) -> float:
    """Return by how much sooner this batch ends after a change, less what the next one loses."""
    return stay.lasts_s - option.total_s - then.loses_s(option.mix)


class Margin(NamedTuple):
    """What a switch must save: a `part` of the time left; and why it is more than was asked for."""

    part: float
    why: str

    def __str__(self) -> str:
        """Return it in words."""
        return f"{100 * self.part:.3g} %{self.why}"


def _margin(view: View, forecast: Forecast, settings: Settings) -> Margin:
    """Return the margin; how much of a forecast is a guess: with no past batch, what is open."""
    part, why = settings.gain_min * 2.0**view.switches, ""
    if view.switches:
        why = f", after {view.switches} in this batch"
    if forecast.parts and not forecast.past_batches:
        ended = sum(len(batch.length) for batch in view.history)
        part *= 1 + len(view.requests) / max(1, len(view.requests) + ended)
        why += ", with no batch to go by"
    return Margin(part, why)


def _best(found: Sequence[Option], stay: Course | None, then: Coming) -> Option | None:
    """Return the change after which all would have ended soonest; None where none is sooner.

    One that would be sooner if it cost nothing is worth telling.
    """
    changing = [option for option in found if not option.kept]
    if not changing or stay is None or _saved_s(changing[0], stay, then) > 0:
        return changing[0] if changing else None
    best = min(changing, key=lambda option: option.work_s)
    return None if best.work_s >= stay.lasts_s else best


def _chosen(
    ahead: Outlook, found: Sequence[Option], then: Coming, compute: Compute, settings: Settings
) -> tuple[Option | None, Later | None]:
    """Return the change that is best, None where none is better, and what to wait for, if so."""
    best = _best(found, ahead.stay, then)
    if ahead.stay is None:
        return best and _first(ahead, found, compute, settings), None
    if then.begins:
        return _begun(ahead, ahead.stay, found, then, compute=compute, settings=settings), None
    if best is None or _saved_s(best, ahead.stay, then) <= 0:
        return best, None
    return _ahead(ahead, ahead.stay, found, then, compute=compute, settings=settings)


def _first(ahead: Outlook, found: Sequence[Option], compute: Compute, settings: Settings) -> Option:
    """Return what to begin with: what is least behind the best of each case, as a ratio.

    Before anything is known the longest case is ten times as long as the typical one, and would
    decide alone. But there is time in it to learn better: then no more is lost than a switch, and
    about as much again for contexts computed anew.
    """
    looked_at = found[:FIRST_LOOKED_AT]
    ends_s = np.array([ahead.ends_s(option, NOBODY, compute, settings) for option in looked_at])
    best_s = ends_s.min(axis=0)
    behind_s = np.minimum(ends_s - best_s, 2 * settings.switch_s)
    return looked_at[int(np.argmin((behind_s / best_s).mean(axis=1)))]


def _begun(
    ahead: Outlook,
    stay: Course,
    found: Sequence[Option],
    then: Coming,
    *,
    compute: Compute,
    settings: Settings,
) -> Option | None:
    """Return what to change to as a batch begins, with later switches in sight; None: stay."""
    changing = [option for option in found if not option.kept][:BEGUN_LOOKED_AT]
    waits = ahead.waits(then, compute, settings)
    best_s = min(stay.lasts_s, waits.next_s if waits else np.inf)
    best = None
    for option in changing:
        ends_s = fmean(ahead.ends_s(option, then, compute, settings))
        if ends_s < best_s:
            best, best_s = option, ends_s
    return best


def _ahead(
    ahead: Outlook,
    stay: Course,
    found: Sequence[Option],
    then: Coming,
    *,
    compute: Compute,
    settings: Settings,
) -> tuple[Option, Later | None]:
    """Return the change that is best with a later one in sight, and what to wait for, if so."""
    changing = [option for option in found if not option.kept][:LOOKED_AT]
    ends_s = [fmean(ahead.ends_s(option, then, compute, settings)) for option in changing]
    best = int(np.argmin(ends_s))
    waits = ahead.waits(then, compute, settings)
    if waits is None or waits.next_s >= ends_s[best] - PATIENCE * stay.lasts_s:
        return changing[best], None
    return changing[best], waits


# -- the decision, in words ------------------------------------------------------------------------


def _tired(view: View, settings: Settings) -> str:
    """Return why nothing changes so soon after a switch; "": it may."""
    rested_s = settings.rest_s if view.switched_s is None else view.now_s - view.switched_s
    if rested_s >= settings.rest_s:
        return ""
    return f"the last switch ended {rested_s:.1f} s ago: rests {settings.rest_s:g} s"


def _little(best: Option, stay: Course, then: Coming, margin: Margin) -> str:
    """Return why a switch saves too little; "": it saves enough."""
    if _saved_s(best, stay, then) > margin.part * stay.lasts_s:
        return ""
    loses_s = then.loses_s(best.mix)
    late = f", {loses_s:.1f} s of the next batch" if loses_s > 0 else ""
    return (
        f"{best.mix} would end in {best.work_s:.1f} s against {stay.lasts_s:.1f} s as it is: "
        f"not worth a switch of {best.cost_s:.1f} s{late} and a margin of {margin}"
    )


def _guess(best: Option, ahead: Outlook, margin: Margin) -> str:
    """Return why a switch is too much of a guess: it helps if lengths turn out so, else it harms.

    Ratios are averaged here, for the longest of all cases has most of the seconds.
    """
    gain = ahead.gain(best)
    if gain > margin.part:
        return ""
    return (
        f"{best.mix} would save {100 * gain:.1f} % on average over what lengths may be: not worth "
        f"a margin of {margin}"
    )


def _patience(best: Option, stay: Course, then: Coming, waits: Later | None) -> str:
    """Return what is worth waiting for; "": nothing."""
    if waits is None:
        return ""
    return (
        f"{best.mix} would save {_saved_s(best, stay, then):.1f} s now; {waits.mix} in "
        f"{waits.at_s:.1f} s, with {waits.left} requests left, saves "
        f"{stay.lasts_s - waits.next_s:.1f} s"
    )


def _praise(best: Option, stay: Course | None) -> str:
    """Return why it changes."""
    ends = f"{best.mix} ends in {best.work_s:.1f} s"
    if stay is None:
        return f"{ends}, the soonest of all that fit"
    later = "" if best.work_s < stay.lasts_s else ", but then another switch pays"
    adds = f"; the switch adds {best.cost_s:.1f} s"
    return f"{ends} against {stay.lasts_s:.1f} s as it is{later}{adds}"


def _nothing_fits(pool: Pool, kinds: Sequence[Layout], view: View) -> str:
    most = int(np.max(pool.work.context + pool.work.remaining))
    there = ", ".join(f"{node} has {gpus} GPUs" for node, gpus in view.gpus_of.items())
    tried = ", ".join(map(str, kinds)) or "none"
    return f"no instance holds a request of {most} tokens: {tried}; {there or 'no node is usable'}"


# -- who belongs where -----------------------------------------------------------------------------


def _assigned(view: View, pool: Pool, option: Option | None) -> dict[str, str]:
    """Return the instance of each request where that matters: with several kinds, or few requests.

    Whoever runs on a kept instance of its kind stays; the others go where there are fewest. As
    long as nothing changes, only queued requests are told where to go.
    """
    if option is None or (len(option.kinds) == 1 and (option.kept or option.dealt is None)):
        return {}
    names = option.placed.names
    if option.dealt is not None:  # who comes has no id yet
        given = [names[number] for number in option.dealt.tolist()]
        assigned = dict(zip(view.requests.ids, given, strict=False))
    else:
        assigned, (fast, slow) = {}, option.kinds
        order = np.argsort(-pool.work.expected, kind="stable")
        for kind, part in ((fast, order[: option.cut]), (slow, order[option.cut :])):
            rows = part[part < len(view.requests)]
            numbers = _dealt(pool, kind, rows).tolist()
            for row, number in zip(rows.tolist(), numbers, strict=True):
                assigned[view.requests.ids[row]] = names[number]
    if not option.kept:
        return assigned
    return {
        id_: assigned[id_] for id_, at in zip(view.requests.ids, pool.at, strict=False) if at < 0
    }


def _dealt(pool: Pool, kind: Kind, rows: Ints) -> Ints:
    """Give each of these rows, the longest first, an instance of this kind; return its number."""
    is_kept = kind.there >= 0
    kept = np.full(len(pool.instances) + 1, -1)
    kept[kind.there[is_kept]] = np.flatnonzero(is_kept)
    at = kept[pool.at[rows]]
    homeless = (at < 0) | (pool.work.computes[rows] > 0)
    counts = np.bincount(at[~homeless], minlength=kind.count)
    at[homeless] = dealt(counts, np.ones(kind.count, np.int64), int(homeless.sum()))
    numbers: Ints = kind.at[at]
    return numbers
