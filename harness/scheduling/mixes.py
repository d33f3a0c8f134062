"""Which layouts a pool could have, and how long each would take to work off what is open. Pure.

An option is a mix of one or two kinds of instances on the usable GPUs. With two, the faster kind
takes the requests that are expected to be longest, up to the cut that lets the later kind end
soonest. Its time is that of its slowest kind: work, prompts and contexts to compute, and the switch
where an instance is new. What is kept goes on with its requests and pays nothing. Seconds, tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np

from harness.model.layout import Layout, Mix
from harness.model.placement import place
from harness.scheduling.compute import Compute, Costs
from harness.scheduling.dealing import FEW, Dealer
from harness.scheduling.pooled import Open, Shares, compute_s, cuts_of, shares, work_s
from harness.scheduling.view import Floats, Instance, Ints

COUNTS = 8
"""So many ways to divide the GPUs between two kinds of instances are looked at, at most."""
IMPROVED = 6
"""So many of the best deals of few requests are improved."""

Placed = Mapping[str, Layout]
"""Name -> layout of each instance alone."""


@dataclass(frozen=True)
class Pool:
    """What is there: instances by name, and at which of them each open request is, "" for none."""

    work: Open
    at: Ints
    instances: tuple[Instance, ...]

    @property
    def placed(self) -> Placed:
        """The instances that there are."""
        return {instance.name: instance.layout for instance in self.instances}

    @property
    def mix(self) -> Mix:
        """The layout that there is, the smallest instances first."""
        return mix_of(instance.layout for instance in self.instances)


@dataclass(frozen=True)
class Kind:
    """Instances of one layout within an option; the first `cut` requests are the faster kind's."""

    layout: Layout
    names: tuple[str, ...]
    kept: frozenset[str]


@dataclass(frozen=True)
class Option:
    """A mix: its kinds, the faster one first; `work_s` without what changing to it costs."""

    mix: Mix
    kinds: tuple[Kind, ...]
    cut: int
    work_s: float
    total_s: float
    kept: bool
    """Nothing changes: it is what there is."""
    dealt: tuple[str, ...] = ()
    """Name of each request's instance, where few are dealt one by one."""

    @property
    def cost_s(self) -> float:
        """What changing costs: the switch, and contexts computed anew."""
        return self.total_s - self.work_s


def mix_of(layouts: Iterable[Layout]) -> Mix:
    """Return the mix of these instances, the smallest ones first."""
    counts = Counter(layouts)
    ordered = sorted(counts, key=lambda layout: (layout.gpus_per_instance, str(layout)))
    return Mix(_times(layout, counts[layout]) for layout in ordered)


def mixes(kinds: Sequence[Layout], gpus_of: Mapping[str, int], *, three: bool = False) -> list[Mix]:
    """Return the mixes worth a look: every kind alone, every two that share the GPUs, or three."""
    alone = [(kind, sum(_left(gpus_of, [], kind))) for kind in kinds]
    found = [Mix((_times(kind, count),)) for kind, count in alone if count]
    for several in [*combinations(kinds, 2), *(combinations(kinds, 3) if three else ())]:
        small, *larger = several
        for counts in product(*(_spaced(sum(_left(gpus_of, [], kind))) for kind in larger)):
            parts = [_times(kind, n) for kind, n in zip(larger, counts, strict=True)]
            rest = sum(_left(gpus_of, parts[::-1], small))
            if rest:
                found.append(Mix((_times(small, rest), *parts)))
    return found


def options(
    pool: Pool,
    compute: Compute,
    kinds: Sequence[Layout],
    gpus_of: Mapping[str, int],
    switch_s: float,
    *,
    improved: int = IMPROVED,
) -> list[Option]:
    """Return what could be, the soonest to end first; what there is is among them if it can be.

    Where requests are few, the best deals are `improved`.
    """
    few = len(pool.work) <= FEW
    candidates = [(mix, _placed(mix, gpus_of)) for mix in mixes(kinds, gpus_of, three=few)]
    here = pool.placed
    if here:
        candidates = [(mix, placed) for mix, placed in candidates if placed != here]
        if len(pool.mix) <= 2 + few:
            candidates.append((pool.mix, here))
    if few:
        found = _few(pool, compute, candidates, switch_s, improved)
    else:
        found = _many(pool, compute, candidates, switch_s)
    return sorted((each for each in found if np.isfinite(each.total_s)), key=soonest)


def _many(
    pool: Pool, compute: Compute, candidates: Sequence[tuple[Mix, Placed]], switch_s: float
) -> list[Option]:
    """Return the options, with shares of the requests for each kind of instance."""
    counts: dict[Layout, set[int]] = {}
    for mix, _ in candidates:
        for part in mix:
            counts.setdefault(one_of(part), set()).add(part.instances)
    table = _Table(pool, compute, counts)
    return [table.option(mix, placed, pool.placed, switch_s) for mix, placed in candidates]


def _few(
    pool: Pool,
    compute: Compute,
    candidates: Sequence[tuple[Mix, Placed]],
    switch_s: float,
    improved: int,
) -> list[Option]:
    """Return the options, with few requests dealt one by one; the best ones are improved."""
    here, tried = pool.placed, []
    for mix, placed in candidates:
        names = tuple(placed)
        place_of = {name: index for index, name in enumerate(names)}
        same = [name if here.get(name) == placed.get(name) else "" for name in here]
        stays = np.array([*(place_of.get(name, -1) for name in same), -1])[pool.at]
        stays = np.where(pool.work.computes > 0, -1, stays)
        delay_s = np.array([0.0 if name in same else switch_s for name in names])
        dealer = Dealer(pool.work, compute, tuple(placed.values()), stays, delay_s)
        tried.append((dealer.timed(dealer.deal()), dealer, mix, placed))
    tried.sort(key=lambda each: each[0].total_s)
    found = []
    for rank, (dealt, dealer, mix, placed) in enumerate(tried):
        better = dealer.timed(dealer.improved(dealt.at)) if rank < improved else dealt
        names = tuple(placed)
        kinds = tuple(_kind(one_of(part), placed, here) for part in mix)
        found.append(
            Option(mix, kinds, 0, better.work_s, better.total_s, placed == here,
                   tuple(names[index] for index in better.at))
        )  # fmt: skip
    return found


def _kind(layout: Layout, placed: Placed, here: Placed) -> Kind:
    names = tuple(name for name, each in placed.items() if each == layout)
    return Kind(layout, names, frozenset(name for name in names if here.get(name) == layout))


class _Table:
    """Times of all kinds and numbers of instances on all shares of the open requests."""

    def __init__(self, pool: Pool, compute: Compute, counts: Mapping[Layout, set[int]]) -> None:
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
        seated = np.bincount(running, minlength=len(pool.instances))
        self._running = {i.name: int(n) for i, n in zip(pool.instances, seated, strict=True)}

    def option(self, mix: Mix, placed: Placed, here: Placed, switch_s: float) -> Option:
        """Return the option with the cut that is best."""
        by_pace = sorted(map(one_of, mix), key=self._pace_s.__getitem__)
        kinds = [_kind(layout, placed, here) for layout in by_pace]
        timed = [self._times_s(kind, switch_s) for kind in kinds]
        cuts = len(self.given.cuts)
        if len(kinds) == 1:
            work, total, best = timed[0][0][cuts:], timed[0][1][cuts:], 0
        else:
            (fast, fast_total), (slow, slow_total) = timed
            work = np.maximum(fast[:cuts], slow[cuts:])
            total = np.maximum(fast_total[:cuts], slow_total[cuts:])
            best = int(np.argmin(total))
        is_kept = placed == here
        return Option(
            mix, tuple(kinds), int(self.given.cuts[best]), float(work[best]), float(total[best]),
            is_kept,
        )  # fmt: skip

    def _times_s(self, kind: Kind, switch_s: float) -> tuple[Floats, Floats]:
        """Return the time of every share on these instances, (R,): of the work, and in all.

        Of the requests that run, as many stay where they are as run on instances that are kept.
        """
        costs, count = self._costs[kind.layout], len(kind.names)
        seated = sum(self._running.values())
        stay = sum(self._running[name] for name in kind.kept) / seated if seated else 1.0
        work = self._work_s[kind.layout, count] + compute_s(costs, self.given.first) / count
        changed = switch_s if len(kind.kept) < count else 0.0
        moved_s = compute_s(costs, self.given.moved) / count * (1 - stay)
        return work, np.where(self._nobody, 0.0, work + moved_s + changed)


def soonest(option: Option) -> tuple[float, bool, int]:
    """Of equals what is there goes first, then the mix of fewer kinds."""
    return option.total_s, not option.kept, len(option.mix)


def _placed(mix: Mix, gpus_of: Mapping[str, int]) -> Placed:
    return {each.name: each.layout for several in place(mix, gpus_of).values() for each in several}


def one_of(layout: Layout) -> Layout:
    """Return the layout of one instance."""
    return _times(layout, 1)


def _times(layout: Layout, instances: int) -> Layout:
    return Layout(instances, layout.tp, layout.pp, layout.ep, layout.dp)


def _left(gpus_of: Mapping[str, int], before: Sequence[Layout], kind: Layout) -> list[int]:
    """Return how many instances each node has room for behind others; none if those do not fit."""
    free = list(gpus_of.values())
    for layout in before:
        left = layout.instances
        for node, gpus in enumerate(free):
            here = min(left, gpus // layout.gpus_per_instance)
            left -= here
            free[node] -= here * layout.gpus_per_instance
        if left:
            return []
    return [gpus // kind.gpus_per_instance for gpus in free]


def _spaced(most: int) -> list[int]:
    """Return numbers from 1 to `most`, all of them or few that grow."""
    if most <= COUNTS:
        return list(range(1, most + 1))
    return sorted({round(float(x)) for x in np.geomspace(1, most, COUNTS)})
