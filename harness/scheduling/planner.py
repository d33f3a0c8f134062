"""The slow loop: which layout the pool should have from now on, and who belongs where. Pure.

It minimises when the last open request ends: compute, contexts computed anew, and the switch, of
the slowest instance (`harness.scheduling.mixes`). A switch is taken if it saves more than it costs
and a margin of the time that is left, and not while another one is under way or just over.

The best TP rises as requests drain, so the first switch that pays is seldom the one that pays most.
Before it switches, the planner follows the pool as it is to a few later moments, and takes stock at
each of what a switch would give then (optimal stopping by the same cost model). It also lets the
best options have a later switch. It waits where waiting gives more: with one switch ahead of it,
every look asks the same question anew, with what has been learnt meanwhile.

Requests that are coming now are counted as open and queued. Their lengths are those of queued ones
that have nothing yet, else of past batches, else of what is open, else half the cap; evenly over
that distribution. Times in seconds, lengths in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness.model.layout import Layout
from harness.scheduling.compute import Compute
from harness.scheduling.courses import Course, Later, best_later, course_of, dealt, staying
from harness.scheduling.forecast import Forecast
from harness.scheduling.mixes import Kind, Option, Pool, one_of, options
from harness.scheduling.pooled import Open
from harness.scheduling.view import Floats, Ints, Plan, Settings, View

LOOKED_AT = 2
"""Options for which a later switch is considered, besides staying."""
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
    pool = _pool(view, forecast)
    if not len(pool.work):
        return Plan(None, "nothing is open", 0.0)
    if view.changing:
        return Plan(None, "a switch is under way", 0.0)
    kinds = layouts or compute.layouts(max(view.gpus_of.values(), default=0))
    kinds = tuple(dict.fromkeys(map(one_of, kinds)))
    found = options(pool, compute, kinds, view.gpus_of, settings.switch_s)
    if not found:
        return Plan(None, _nothing_fits(pool, kinds, view), 0.0)
    stay = staying(pool, found, compute, settings)
    kept = next((option for option in found if option.kept), None)
    best, waits = _best(found, stay, must=must), None
    if stay is not None and best is not None and not must and best.total_s < stay.lasts_s:
        best, waits = _ahead(pool, found, stay, compute, settings)
    if best is None:
        left_s = stay.lasts_s if stay else 0.0
        reason = f"{pool.mix} is the best there is: {left_s:.1f} s are left"
        return Plan(None, reason, left_s, best=view.layout, assignment=_assigned(view, pool, kept))
    reason = _refusal(view, best, stay, waits, settings) if stay and not must else ""
    return Plan(
        None if reason else best.mix,
        reason or _praise(best, stay),
        stay.lasts_s if stay else 0.0,
        best.work_s,
        best.cost_s,
        best.mix,
        _assigned(view, pool, kept if reason else best),
    )


# -- what is open ----------------------------------------------------------------------------------


def _pool(view: View, forecast: Forecast) -> Pool:
    """Look at the view: instances on usable nodes, and requests, with those that are coming."""
    usable = [at for at, each in enumerate(view.instances) if each.node in view.gpus_of]
    new_place = np.full(len(view.instances) + 1, -1)
    new_place[usable] = np.arange(len(usable))
    requests, rows = view.requests, len(view.requests)
    at = new_place[requests.at]  # the last of them answers for -1, nowhere
    remaining = np.maximum(forecast.spread.astype(np.float64), 1.0)
    expected = np.maximum(forecast.expected.astype(np.float64), 1.0)
    context = requests.context.astype(np.float64)
    computes = np.where(requests.running & (at >= 0), 0.0, context)
    more = view.coming if len(remaining) == rows else 0
    if more:
        lengths = _lengths(view, remaining[:rows])
        prompts = requests.context - requests.produced
        prompt = float(np.median(prompts)) if rows else 0.0
        remaining = np.concatenate([remaining, lengths])
        expected = np.concatenate([expected, np.full(more, lengths.mean())])
        context = np.concatenate([context, np.full(more, prompt)])
        computes = np.concatenate([computes, np.full(more, prompt)])
        at = np.concatenate([at, np.full(more, -1)])
    work = Open(remaining, expected, context, computes, np.ones(len(remaining)))
    return Pool(work, at, tuple(view.instances[each] for each in usable))


def _lengths(view: View, remaining: Floats) -> Floats:
    """Return lengths for those that are coming, evenly over the distribution of the likest."""
    requests = view.requests
    fresh = (requests.at < 0) & (requests.produced == 0)
    known = [remaining[fresh], *(batch.length for batch in view.history)]
    like = known[0] if len(known[0]) else np.concatenate(known)
    if not len(like):
        like = requests.produced + remaining if len(remaining) else np.array([view.cap_tokens / 2])
    ranks = (np.arange(view.coming) + 0.5) / view.coming
    lengths: Floats = np.maximum(np.quantile(like.astype(np.float64), ranks), 1.0)
    return lengths


def _best(found: Sequence[Option], stay: Course | None, *, must: bool) -> Option | None:
    """Return the change after which all would have ended soonest; None where none is sooner.

    Unless it must be decided now, one that would be sooner if it cost nothing is worth telling.
    """
    changing = [option for option in found if not option.kept]
    if not changing or stay is None or changing[0].total_s < stay.lasts_s:
        return changing[0] if changing else None
    best = min(changing, key=lambda option: option.work_s)
    return None if must or best.work_s >= stay.lasts_s else best


def _ahead(
    pool: Pool,
    found: Sequence[Option],
    stay: Course,
    compute: Compute,
    settings: Settings,
) -> tuple[Option, Later | None]:
    """Return the change that is best with a later one in sight, and what to wait for, if so."""
    uniform = [option.mix for option in found if len(option.mix) == 1]
    ends_s: dict[Option, float] = {}
    for option in [option for option in found if not option.kept][:LOOKED_AT]:
        later = best_later(course_of(pool, option, compute), uniform, compute, settings)
        ends_s[option] = min(option.total_s, later.ends_s if later else np.inf)
    best = min(ends_s, key=ends_s.__getitem__)
    waits = best_later(stay, uniform, compute, settings)
    if waits is None or waits.ends_s >= ends_s[best] - PATIENCE * stay.lasts_s:
        return best, None
    return best, waits


# -- the decision, in words ------------------------------------------------------------------------


def _refusal(
    view: View, best: Option, stay: Course, waits: Later | None, settings: Settings
) -> str:
    """Return why it stays as it is; "": it does not."""
    rested_s = settings.rest_s if view.switched_s is None else view.now_s - view.switched_s
    if rested_s < settings.rest_s:
        return f"the last switch ended {rested_s:.1f} s ago: rests {settings.rest_s:g} s"
    saved_s = stay.lasts_s - best.work_s - best.cost_s
    margin = 100 * settings.gain_min
    if saved_s <= settings.gain_min * stay.lasts_s:
        return (
            f"{best.mix} would end in {best.work_s:.1f} s against {stay.lasts_s:.1f} s as it is: "
            f"not worth a switch of {best.cost_s:.1f} s and a margin of {margin:g} %"
        )
    if waits is not None:
        return (
            f"{best.mix} would save {saved_s:.1f} s now; {waits.mix} in {waits.at_s:.1f} s, "
            f"with {waits.left} requests left, saves {stay.lasts_s - waits.ends_s:.1f} s"
        )
    return ""


def _praise(best: Option, stay: Course | None) -> str:
    """Return why it changes."""
    ends = f"{best.mix} ends in {best.work_s:.1f} s"
    if stay is None:
        return f"{ends}, the soonest of all that fit"
    return f"{ends} against {stay.lasts_s:.1f} s as it is; the switch adds {best.cost_s:.1f} s"


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
    if option is None or (len(option.kinds) == 1 and (option.kept or not option.dealt)):
        return {}
    assigned = dict(zip(view.requests.ids, option.dealt, strict=False))  # who comes has no id yet
    if not option.dealt:
        fast, slow = option.kinds
        order = np.argsort(-pool.work.expected, kind="stable")
        for kind, rows in ((fast, order[: option.cut]), (slow, order[option.cut :])):
            _deal(view, pool, kind, rows, assigned)
    if not option.kept:
        return assigned
    return {
        id_: assigned[id_] for id_, at in zip(view.requests.ids, pool.at, strict=False) if at < 0
    }


def _deal(view: View, pool: Pool, kind: Kind, rows: Ints, assigned: dict[str, str]) -> None:
    """Give each of these rows, the longest first, an instance of this kind."""
    index = {name: place for place, name in enumerate(kind.names)}
    kept = [index[each.name] if each.name in kind.kept else -1 for each in pool.instances]
    rows = rows[rows < len(view.requests)]
    at = np.array([*kept, -1])[pool.at[rows]]
    homeless = (at < 0) | (pool.work.computes[rows] > 0)
    counts = np.bincount(at[~homeless], minlength=len(index))
    at[homeless] = dealt(counts, np.ones(len(index), np.int64), int(homeless.sum()))
    ids = view.requests.ids
    for row, place in zip(rows.tolist(), at.tolist(), strict=True):
        assigned[ids[row]] = kind.names[place]
