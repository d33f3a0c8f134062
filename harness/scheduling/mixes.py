"""Which layouts a pool could have, and how long each would take to work off what is open. Pure.

An option is a mix of one or two kinds of instances on the usable GPUs. With two, the faster kind
takes the requests that are expected to be longest, up to the cut that lets the later kind end
soonest. Its time is that of its slowest kind: work, prompts and contexts to compute, and the switch
where an instance is new. What is kept goes on with its requests and pays nothing. Seconds, tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from harness.model.layout import Layout, Mix
from harness.scheduling.compute import Compute, Costs
from harness.scheduling.dealing import FEW, Dealer, Instances
from harness.scheduling.placing import Candidate, Kind, mix_of
from harness.scheduling.pooled import Open, Shares, compute_s, cuts_of, shares, work_s
from harness.scheduling.view import Floats, Instance, Ints

IMPROVED = 6
"""So many of the best deals of few requests are improved."""


@dataclass(frozen=True)
class Pool:
    """What is there: instances, and at which of them each open request is, -1 for none."""

    work: Open
    at: Ints
    instances: tuple[Instance, ...]

    @property
    def few(self) -> bool:
        """Whether requests are so few that they are dealt one by one."""
        return len(self.work) <= FEW

    @cached_property
    def mix(self) -> Mix:
        """The layout that there is, the smallest instances first."""
        return mix_of(instance.layout for instance in self.instances)


@dataclass(frozen=True, eq=False)
class Option:
    """A mix: its kinds, the faster one first; `work_s` without what changing to it costs.

    With two kinds, the first `cut` requests are the faster one's. Few are `dealt` one by one: the
    number of each request's instance.
    """

    placed: Candidate
    kinds: tuple[Kind, ...]
    cut: int
    work_s: float
    total_s: float
    dealt: Ints | None = None

    @property
    def mix(self) -> Mix:
        """Its layout."""
        return self.placed.mix

    @property
    def kept(self) -> bool:
        """Nothing changes: it is what there is."""
        return self.placed.kept

    @property
    def cost_s(self) -> float:
        """What changing costs: the switch, and contexts computed anew."""
        return self.total_s - self.work_s


class Choice:
    """What a pool may become: looked at again and again, with other lengths of its requests."""

    def __init__(self, candidates: Sequence[Candidate], compute: Compute, switch_s: float) -> None:
        self._candidates, self._compute, self._switch_s = candidates, compute, switch_s
        kinds = (kind for placed in candidates for kind in placed.kinds)
        self._layouts = list(dict.fromkeys(kind.layout for kind in kinds))
        self._deals: dict[bytes, tuple[list[Instances], list[Ints]]] = {}
        """By all that a deal is made of, but the lengths that are drawn."""

    def options(self, pool: Pool, *, improved: int = IMPROVED) -> list[Option]:
        """Return what could be, the soonest to end first.

        Where requests are few, the best deals are `improved`.
        """
        if not pool.few:
            table = _Table(pool, self._compute, self._candidates)
            found = [table.option(placed, self._switch_s) for placed in self._candidates]
        else:
            found = self._few(pool, improved) if self._candidates else []
        return sorted((each for each in found if np.isfinite(each.total_s)), key=soonest)

    def _few(self, pool: Pool, improved: int) -> list[Option]:
        """Return the options, with few requests dealt one by one; the best ones are improved."""
        dealer = Dealer(pool.work, self._compute, self._layouts)
        mixes, deals = self._dealt(pool, dealer)
        tried = sorted(
            zip(dealer.timed(mixes, deals), mixes, self._candidates, strict=True),
            key=lambda each: each[0].total_s,
        )
        dealt = [each for each, *_ in tried]
        if best := [mix for _, mix, _ in tried[:improved]]:
            better = [dealer.improved(mix, each.at) for mix, each in zip(best, dealt, strict=False)]
            dealt[:improved] = dealer.timed(best, better)
        return [
            Option(placed, placed.kinds, 0, each.work_s, each.total_s, mix.number[each.at])
            for each, (_, mix, placed) in zip(dealt, tried, strict=True)
        ]

    def _dealt(self, pool: Pool, dealer: Dealer) -> tuple[list[Instances], list[Ints]]:
        """Return the instances of each candidate, and each request's."""
        work = pool.work
        columns = (work.expected, work.context, work.computes, work.later, pool.at)
        made_of = b"".join(column.tobytes() for column in columns)
        if made_of not in self._deals:
            mixes = [
                _instances(pool, placed, self._layouts, self._switch_s)
                for placed in self._candidates
            ]
            self._deals[made_of] = mixes, dealer.deals(mixes)
        return self._deals[made_of]


def _instances(
    pool: Pool, placed: Candidate, layouts: Sequence[Layout], switch_s: float
) -> Instances:
    """Return the instances of a mix that few requests may go to."""
    number = np.full(len(pool.instances) + 1, -1)  # the last of them answers for -1, nowhere
    kept = np.flatnonzero(placed.there >= 0)
    number[placed.there[kept]] = kept
    stays = np.where(pool.work.computes > 0, -1, number[pool.at])
    kinds = np.array([layouts.index(kind.layout) for kind in placed.kinds])
    delay_s = np.where(placed.there >= 0, 0.0, switch_s)
    return Instances.of(kinds[placed.kind], delay_s, stays)


class _Table:
    """Times of all kinds and numbers of instances on all shares of the open requests."""

    def __init__(self, pool: Pool, compute: Compute, candidates: Sequence[Candidate]) -> None:
        counts: dict[Layout, set[int]] = {}
        for kind in (kind for placed in candidates for kind in placed.kinds):
            counts.setdefault(kind.layout, set()).add(kind.count)
        self.given: Shares = shares(pool.work, cuts_of(len(pool.work)))
        self._nobody = self.given.count.sum(axis=1) == 0
        self._costs: dict[Layout, Costs] = {layout: compute.costs(layout) for layout in counts}
        self._work_s: dict[tuple[Layout, int], Floats] = {}
        for layout, several in counts.items():
            ordered = sorted(several)
            rows = work_s(self._costs[layout], compute.sequences_max, self.given, ordered)
            self._work_s.update(((layout, k), row) for k, row in zip(ordered, rows, strict=True))
        context = float(np.mean(pool.work.context))
        one = np.ones(1)
        self._pace_s = {
            layout: float(costs.step_s(one, one * context)[0])
            for layout, costs in self._costs.items()
        }
        running = pool.at[(pool.work.computes == 0) & (pool.at >= 0)]
        self._seated = np.bincount(running, minlength=len(pool.instances))

    def option(self, placed: Candidate, switch_s: float) -> Option:
        """Return the option with the cut that is best."""
        kinds = sorted(placed.kinds, key=lambda kind: self._pace_s[kind.layout])
        timed = [self._times_s(kind, switch_s) for kind in kinds]
        cuts = len(self.given.cuts)
        if len(kinds) == 1:
            work, total, best = timed[0][0][cuts:], timed[0][1][cuts:], 0
        else:
            (fast, fast_total), (slow, slow_total) = timed
            work = np.maximum(fast[:cuts], slow[cuts:])
            total = np.maximum(fast_total[:cuts], slow_total[cuts:])
            best = int(np.argmin(total))
        cut = int(self.given.cuts[best])
        return Option(placed, tuple(kinds), cut, float(work[best]), float(total[best]))

    def _times_s(self, kind: Kind, switch_s: float) -> tuple[Floats, Floats]:
        """Return the time of every share on these instances, (R,): of the work, and in all.

        Of the requests that run, as many stay where they are as run on instances that are kept.
        """
        costs, count = self._costs[kind.layout], kind.count
        kept, seated = kind.there[kind.there >= 0], int(self._seated.sum())
        stay = int(self._seated[kept].sum()) / seated if seated else 1.0
        work = self._work_s[kind.layout, count] + compute_s(costs, self.given.first) / count
        changed = switch_s if len(kept) < count else 0.0
        moved_s = compute_s(costs, self.given.moved) / count * (1 - stay)
        return work, np.where(self._nobody, 0.0, work + moved_s + changed)


def soonest(option: Option) -> tuple[float, bool, int]:
    """Of equals what is there goes first, then the mix of fewer kinds."""
    return option.total_s, not option.kept, len(option.mix)
