"""What a layout is worth to the batch that comes next: how long that takes, begun in it. Pure.

So a change that helps the last requests of a batch also pays for the switch back. The next batch is
as long as past batches let expect; without any, as this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from harness.model.layout import Layout
from harness.scheduling.compute import Compute
from harness.scheduling.courses import NOBODY, Coming, best_later, course_of
from harness.scheduling.forecast import Forecast, forecast
from harness.scheduling.mixes import Pool, options
from harness.scheduling.pooled import Open
from harness.scheduling.turns import fresh_tokens
from harness.scheduling.view import Floats, Requests, Settings, View

LOOKED_AT = 2
"""Layouts for which a switch in the course of the next batch is considered."""


def coming(
    view: View, open_now: Forecast, compute: Compute, kinds: Sequence[Layout], settings: Settings
) -> Coming:
    """Return what the next batch takes by layout, if one follows; `open_now`: of this one.

    Where a switch in its course ends it sooner, the way back counts too: another may follow it.
    """
    if not view.coming:
        return NOBODY
    lengths = next_lengths(view, open_now)
    pool = Pool(fresh(view, lengths), np.full(len(lengths), -1), ())
    found = options(pool, compute, kinds, view.gpus_of, 0.0)
    takes_s = {frozenset(option.mix): option.total_s for option in found}
    uniform = [option.mix for option in found if len(option.mix) == 1]
    for option in found[:LOOKED_AT]:
        later = best_later(course_of(pool, option, compute), uniform, compute, settings)
        if later is not None:
            back_s = later.ends_s + settings.switch_s
            takes_s[frozenset(option.mix)] = min(option.total_s, back_s)
    return Coming(takes_s, settings.switch_s)


def fresh(view: View, lengths: Floats) -> Open:
    """Return requests of these lengths that nothing has been done for, with the usual prompt."""
    prompts = view.requests.context - view.requests.produced
    prompt = np.full(len(lengths), float(np.median(prompts)) if len(prompts) else 0.0)
    mean = np.full(len(lengths), lengths.mean())
    later = fresh_tokens(view, lengths)
    return Open(lengths, mean, prompt, prompt, np.ones(len(lengths)), later)


def next_lengths(view: View, open_now: Forecast) -> Floats:
    """Return a length for each request of the next batch, such that the set is as expected.

    By the law of past batches; else evenly over this batch's, ended and expected; else half the
    cap.
    """
    under_way = set(view.requests.batch.tolist())
    past = tuple(each for each in view.history if len(each.length) and each.batch not in under_way)
    if past:
        none = np.zeros(view.coming, np.int64)
        number = max([each.batch for each in past] + list(under_way)) + 1
        requests = Requests(
            ("",) * view.coming, none, none, none, none - 1, none > 0, none + number
        )
        return forecast(replace(view, requests=requests, history=past, truth=None)).spread
    like = np.concatenate(
        [view.requests.produced + open_now.spread, *(each.length for each in view.history)]
    )
    if not len(like):
        like = np.array([view.cap_tokens / 2])
    levels = (np.arange(view.coming) + 0.5) / view.coming
    lengths: Floats = np.maximum(np.quantile(like.astype(np.float64), levels), 1.0)
    return lengths
