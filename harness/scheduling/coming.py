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
from harness.scheduling.courses import NOBODY, Coming, best_later, course_of, retimed
from harness.scheduling.forecast import GOLDEN, forecast
from harness.scheduling.mixes import Choice, Pool
from harness.scheduling.placing import Ground, mix_of
from harness.scheduling.pooled import Open
from harness.scheduling.turns import fresh_tokens
from harness.scheduling.view import Floats, Ints, Requests, Settings, View

LOOKED_AT = 2
"""Layouts for which a switch in the course of the next batch is considered."""
ROWS = 1024
"""Of a larger batch, so many are looked at: the longest, and means of the others."""

LONGEST = (0.5, 1 / 6, 5 / 6)
"""Chances with which the longest of a batch is no longer than it is taken to be."""
LEVELS = 128
"""At which the law of lengths is taken; linear between them."""


def coming(
    view: View,
    sets: Sequence[Floats],
    compute: Compute,
    ground: Ground,
    settings: Settings,
) -> Coming:
    """Return what the next batch takes by layout, on average, if one follows.

    `sets`: what the open requests may have left; by these, where there are no past batches.
    """
    if not view.coming:
        return NOBODY
    each = [_takes_s(view, lengths, compute, ground, settings) for lengths in _likely(view, sets)]
    known = frozenset.intersection(*(frozenset(takes_s) for takes_s in each))
    mean_s = {mix: sum(takes_s[mix] for takes_s in each) / len(each) for mix in known}
    here = mix_of(each.layout for each in view.instances)
    return Coming(mean_s, settings.switch_s, here, view.coming_batches, settings.gain_min)


def _takes_s(
    view: View,
    lengths: Floats,
    compute: Compute,
    ground: Ground,
    settings: Settings,
) -> dict[frozenset[Layout], float]:
    """Return what a batch of these lengths takes by layout.

    Where a switch in its course ends it sooner, the way back counts too: another may follow it.
    That is only looked at request by request, so not of more than `ROWS`.
    """
    lengths, count = _thinned(lengths)
    pool = Pool(replace(fresh(view, lengths), count=count), np.full(len(count), -1), ())
    choice = Choice(ground.candidates((), three=pool.few), compute, 0.0)
    found = retimed(pool, choice.options(pool, improved=0), compute)
    takes_s = {frozenset(option.mix): option.total_s for option in found}
    uniform = [option.mix for option in found if len(option.mix) == 1]
    for option in found[: LOOKED_AT if len(lengths) == view.coming else 0]:
        later = best_later(course_of(pool, option, compute), uniform, compute, settings)
        if later is not None:
            back_s = later.ends_s + settings.switch_s
            takes_s[frozenset(option.mix)] = min(option.total_s, back_s)
    return takes_s


def _thinned(lengths: Floats) -> tuple[Floats, Floats]:
    """Return `ROWS` lengths at most, the longest and means of the others; and of how many each."""
    if len(lengths) <= ROWS:
        return lengths, np.ones(len(lengths))
    rising = np.sort(lengths)
    several, alone = np.array_split(rising[: -ROWS // 2], ROWS // 2), rising[-ROWS // 2 :]
    means, counts = [part.mean() for part in several], [float(len(part)) for part in several]
    order = _shuffled(ROWS)
    count = np.concatenate([counts, np.ones(len(alone))])
    return np.concatenate([means, alone])[order], count[order]


def _shuffled(count: int) -> Ints:
    """Return an order of which any stretch is like the whole: nobody knows who will be long."""
    order: Ints = np.argsort(np.arange(count) * GOLDEN % 1.0)
    return order


def fresh(view: View, lengths: Floats) -> Open:
    """Return requests of these lengths that nothing has been done for, with the usual prompt.

    Who is told the truth will know which are long; else they are all alike.
    """
    prompts = view.requests.context - view.requests.produced
    prompt = np.full(len(lengths), float(np.median(prompts)) if len(prompts) else 0.0)
    expected = np.full(len(lengths), lengths.mean()) if view.truth is None else lengths
    later = fresh_tokens(view, lengths)
    return Open(lengths, expected, prompt, prompt, np.ones(len(lengths)), later)


def next_lengths(view: View, open_now: Floats) -> Floats:
    """Return a length for each request of the next batch, such that the set is as expected.

    By the law of past batches; else evenly over this batch's, ended and what is `open_now`; else
    half the cap.
    """
    return _likely(view, [open_now])[0]


def _likely(view: View, sets: Sequence[Floats]) -> list[Floats]:
    """Return sets of lengths that the next batch may have: by the past, else as each of `sets`."""
    levels = (_shuffled(view.coming) + 0.5) / view.coming
    under_way = set(view.requests.batch.tolist())
    past = tuple(each for each in view.history if len(each.length) and each.batch not in under_way)
    if not past:
        return [_like(view, levels, left) for left in sets]
    one = np.zeros(1, np.int64)
    number = max([each.batch for each in past] + list(under_way)) + 1
    requests = Requests(("",), one, one, one, one - 1, one > 0, one + number)
    law = forecast(replace(view, requests=requests, history=past, truth=None))
    asked = 1 - np.geomspace(1.0, 0.05 / view.coming, LEVELS)  # dense where the longest are
    lengths = law.quantiles(asked.tolist())[0]
    found = []
    for chance in LONGEST:  # in the middle, as the longest of so many is
        levels[np.argmax(levels)] = chance ** (1 / view.coming)
        found.append(np.asarray(np.interp(levels, asked, lengths), np.float64))
    return found


def _like(view: View, levels: Floats, left: Floats) -> Floats:
    """Return lengths as those of the batch under way, with so much left of what is open."""
    like = np.concatenate([view.requests.produced + left, *(each.length for each in view.history)])
    if not len(like):
        like = np.array([view.cap_tokens / 2])
    lengths: Floats = np.maximum(np.quantile(like.astype(np.float64), levels), 1.0)
    return lengths
