"""What a pool could become, on average over the sets of lengths that its requests may have. Pure.

Whether one of 500 runs away decides what they take, and nobody knows it: so the planner looks at
several sets that are equally likely, and takes what is best on average. Seconds, tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

from harness.model.layout import Mix
from harness.scheduling.compute import Compute
from harness.scheduling.courses import (
    Coming,
    Course,
    Later,
    best_later,
    course_of,
    retimed,
    staying,
)
from harness.scheduling.mixes import IMPROVED, Choice, Option, Pool
from harness.scheduling.placing import Candidate, Ground
from harness.scheduling.view import Settings


@dataclass(frozen=True)
class Case:
    """One set of lengths: what could be then, and how it goes on as it is (None: it cannot)."""

    pool: Pool
    found: tuple[Option, ...]
    stay: Course | None

    @property
    def uniform(self) -> list[Mix]:
        """The layouts of instances all alike."""
        return [option.mix for option in self.found if len(option.mix) == 1]

    def option(self, like: Option) -> Option | None:
        """Return its option for the same change."""
        return self._by_place.get(like.placed)

    @cached_property
    def _by_place(self) -> dict[Candidate, Option]:
        return {option.placed: option for option in self.found}


@dataclass(frozen=True)
class Outlook:
    """All cases, the typical one first. Times of `found` and `stay` are means over them."""

    cases: tuple[Case, ...]
    found: tuple[Option, ...]
    stay: Course | None

    def ends_s(
        self, option: Option, then: Coming, compute: Compute, settings: Settings
    ) -> list[float]:
        """Return when all ends after a change, in each case, with a later one in sight.

        What the next batches lose is part of it.
        """
        each_s = []
        for case in self.cases:
            there = case.option(option)
            if there is not None:
                course = course_of(case.pool, there, compute)
                later = best_later(course, case.uniform, compute, settings, then)
                ends_s = there.total_s + then.loses_s(option.mix)
                each_s.append(min(ends_s, later.next_s) if later else ends_s)
        return each_s

    def gain(self, option: Option) -> float:
        """Return which part of the time left a change saves: the mean of the cases' ratios."""
        parts = []
        for case in self.cases:
            there = case.option(option)
            if there is not None and case.stay is not None:
                parts.append(1 - there.total_s / case.stay.lasts_s)
        return fmean(parts)

    def waits(self, then: Coming, compute: Compute, settings: Settings) -> Later | None:
        """Return the later switch to wait for as it is; `next_s` is a mean over the cases."""
        found, each_s = [], []
        for case in self.cases:
            if case.stay is not None:
                later = best_later(case.stay, case.uniform, compute, settings, then)
                found += [later] if later else []
                each_s.append(min(case.stay.lasts_s, later.next_s) if later else case.stay.lasts_s)
        return found[0]._replace(next_s=fmean(each_s)) if found else None


def outlook(
    pools: Sequence[Pool],
    compute: Compute,
    ground: Ground,
    settings: Settings,
) -> Outlook:
    """Look at all pools, which differ in the lengths of requests only; the first is typical."""
    candidates = ground.candidates(pools[0].instances, three=pools[0].few)
    choice = Choice(candidates, compute, settings.switch_s)
    cases: list[Case] = []
    for pool in pools:
        found = choice.options(pool, improved=0 if cases else IMPROVED)
        found = retimed(pool, found, compute)
        stay = staying(pool, found, compute, settings) if found else None
        if not cases or (found and (stay is None) == (cases[0].stay is None)):
            cases.append(Case(pool, tuple(found), stay))
    means = [_mean(option, cases) for option in cases[0].found]
    known = sorted((each for each in means if each is not None), key=lambda one: one.total_s)
    stays = [case.stay.lasts_s for case in cases if case.stay is not None]
    typical = cases[0].stay
    return Outlook(tuple(cases), tuple(known), typical and replace(typical, lasts_s=fmean(stays)))


def _mean(option: Option, cases: Sequence[Case]) -> Option | None:
    """Return an option with the means of its times; None where it is not always possible."""
    each = [found for case in cases if (found := case.option(option)) is not None]
    if len(each) < len(cases):
        return None
    return replace(
        option,
        work_s=fmean(one.work_s for one in each),
        total_s=fmean(one.total_s for one in each),
    )
