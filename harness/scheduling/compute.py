"""The cost model of generation: what a step takes, what an instance holds, when a set is done.

A policy asks for each layout how long an instance would work off some requests. Step times come
from a latency profile, tabulated once: by batch, and linear in the tokens of KV. Without a profile
(vllm) they are the speeds measured so far. Seconds and tokens; pure.

An instance is followed in *steps*: all that run advance by a token in each, so who runs when
depends on lengths and limits alone, and time is the sum of what the steps take. Approximations:
prompts are computed in full steps, during which nobody decodes; a trajectory of several turns
decodes as if it were one, and keeps its seat between them. Where KV does not hold all at once, they
are followed one by one (`harness.scheduling.crowded`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.clock import NS_PER_S
from harness.errors import UsageError
from harness.model.layout import Layout, infeasible, kv_capacity_tokens
from harness.model.profile import Profile, costs_of, gpu_of
from harness.model.steptime import StepCosts, step_ns
from harness.scheduling.crowded import crowded
from harness.scheduling.view import Floats

CONTEXTS_TOKENS = (64, 512, 2048, 8192, 16384)
"""At which a line in KV is fitted to measured tables; other costs are lines anyway."""


@dataclass(frozen=True)
class Costs:
    """One instance of one layout. `fixed_s` and `kv_token_s` by batch, 0 to the seats.

    A prompt of n tokens takes ``n * prefill_token_s + n * n / 2 * prefill_pair_s``.
    """

    fixed_s: Floats
    kv_token_s: Floats
    prefill_token_s: float
    prefill_pair_s: float
    kv_capacity_tokens: int

    def step_s(self, batch: Floats, kv_tokens: Floats) -> Floats:
        """Return the time of a decode step; a fraction of a sequence costs as a whole one."""
        seats = np.minimum(np.ceil(batch), len(self.fixed_s) - 1).astype(np.int64)
        step_s: Floats = self.fixed_s[seats] + self.kv_token_s[seats] * kv_tokens
        return step_s

    def prefill_s(self, tokens: Floats, each: Floats | None = None) -> Floats:
        """Return the time to compute contexts, each its own; or such a sum of them `each`."""
        pairs = tokens * (tokens if each is None else each)
        return tokens * self.prefill_token_s + pairs * (self.prefill_pair_s / 2)


@dataclass(frozen=True)
class Drain:
    """How one instance works off its requests: when each begins and ends, in steps and seconds.

    Arrays of requests in their order; `steps` and `time_s` are the curve from step to time. Of
    several instances that have as many requests: (instances, requests).
    """

    starts: Floats
    ends: Floats
    steps: Floats
    time_s: Floats

    @property
    def lasts_s(self) -> float:
        """Until the last has ended."""
        return float(self.time_s[-1]) if len(self.time_s) else 0.0

    def left(self, at_s: float) -> Floats:
        """Return what each still has to produce `at_s` from the beginning, in tokens."""
        time_s, steps = self.time_s, self.steps
        if not time_s.size:
            return np.asarray(self.ends - self.starts)
        before = np.maximum((time_s <= at_s).sum(axis=-1, keepdims=True) - 1, 0)
        after = np.minimum(before + 1, time_s.shape[-1] - 1)
        begin_s, end_s = (np.take_along_axis(time_s, which, -1) for which in (before, after))
        first, last = (np.take_along_axis(steps, which, -1) for which in (before, after))
        within = (at_s > begin_s) & (end_s > begin_s)
        pace = np.divide(last - first, end_s - begin_s, out=np.zeros(first.shape), where=within)
        step = first + np.where(within, pace * (at_s - begin_s), 0.0)
        return np.asarray(self.ends - np.clip(step, self.starts, self.ends))


class Compute:
    """How fast instances of one model are, and what they hold; seconds and tokens."""

    def __init__(
        self,
        costs_of_layout: Callable[[Layout], Costs],
        layouts_of: Callable[[int], tuple[Layout, ...]],
        sequences_max: int,
    ) -> None:
        self.sequences_max = sequences_max
        self._costs_of, self._layouts_of = costs_of_layout, layouts_of
        self._known: dict[Layout, Costs] = {}

    @classmethod
    def of(
        cls,
        profile: Profile,
        *,
        sequences_max: int,
        step_max_tokens: int = 2048,
        kv_max_tokens: int = 0,
        speed: float = 1.0,
    ) -> Compute:
        """Take speeds from a profile; steps take 1 / `speed` of its times."""

        def costs(layout: Layout) -> Costs:
            held = kv_capacity_tokens(layout, profile.shape, gpu_of(profile))
            return _tabulated(
                costs_of(profile, layout),
                sequences_max,
                step_max_tokens,
                min(held, kv_max_tokens or held),
                speed,
            )

        return cls(costs, lambda gpus: _feasible(profile, gpus), sequences_max)

    @classmethod
    def measured(
        cls,
        layouts: Sequence[Layout],
        tokens_per_s: Mapping[Layout, float],
        *,
        sequences_max: int,
        kv_capacity_tokens: int,
    ) -> Compute:
        """Take speeds as measured: what an instance yields, taken to hold at any batch.

        One never measured is taken to be as good per GPU as the best known. Prefill is part of
        what was measured, and costs nothing extra.
        """
        best = max((v / k.gpus_per_instance for k, v in tokens_per_s.items()), default=0.0)

        def costs(layout: Layout) -> Costs:
            rate = tokens_per_s.get(layout) or (best or 1.0) * layout.gpus_per_instance
            batches = np.arange(sequences_max + 1, dtype=np.float64)
            return Costs(batches / rate, np.zeros_like(batches), 0.0, 0.0, kv_capacity_tokens)

        def fitting(gpus: int) -> tuple[Layout, ...]:
            return tuple(layout for layout in layouts if gpus % layout.gpus_per_instance == 0)

        return cls(costs, fitting, sequences_max)

    def layouts(self, gpus_per_node: int) -> tuple[Layout, ...]:
        """Return the instances that fit a node of so many GPUs, evenly; the smallest first."""
        return self._layouts_of(gpus_per_node)

    def costs(self, layout: Layout) -> Costs:
        """Return the table of one instance's costs, however many the layout counts."""
        one = Layout(1, layout.tp, layout.pp, layout.ep, layout.dp)
        if one not in self._known:
            self._known[one] = self._costs_of(one)
        return self._known[one]

    def step_s(self, layout: Layout, batch: Floats | float, kv_tokens: Floats | float) -> Floats:
        """Return the time of one decode step of `batch` sequences over `kv_tokens` in all."""
        return self.costs(layout).step_s(
            np.asarray(batch, np.float64), np.asarray(kv_tokens, np.float64)
        )

    def prefill_s(self, layout: Layout, tokens: Floats | float) -> Floats:
        """Return the time to compute contexts of `tokens`, each its own, in full steps."""
        return self.costs(layout).prefill_s(np.asarray(tokens, np.float64))

    def kv_capacity_tokens(self, layout: Layout) -> int:
        """Return the tokens whose KV one instance holds."""
        return self.costs(layout).kv_capacity_tokens

    def makespan_s(
        self,
        layout: Layout,
        remaining: Floats,
        context: Floats,
        prefill: Floats | float = 0.0,
        later: Floats | float = 0.0,
    ) -> float:
        """Return how long one instance works until all of these requests have ended.

        Per request: tokens still to produce, tokens in KV now, tokens to compute first, and those
        that its later turns compute, in pieces as long as its context. They are seated in their
        order; infinite where one alone exceeds the KV.
        """
        return self.drain(layout, remaining, context, prefill, later).lasts_s

    def makespans_s(
        self, layout: Layout, remaining: Floats, context: Floats, prefill: Floats, later: Floats
    ) -> Floats:
        """Return it for many sets of as many requests at once: (sets, requests) -> (sets,)."""
        columns = (remaining, context, prefill, later)
        lasts_s = np.full(len(remaining), np.inf)
        possible = (context + remaining).max(axis=1) <= self.costs(layout).kv_capacity_tokens
        at_once = self.fits_at_once(layout, remaining, context)
        lasts_s[at_once] = self.drains(layout, *(each[at_once] for each in columns)).time_s[:, -1]
        crowds = np.stack(columns, axis=1)[possible & ~at_once]
        unlike, which = np.unique(crowds, axis=0, return_inverse=True)
        each_s = np.array([self.makespan_s(layout, *crowd) for crowd in unlike])
        lasts_s[possible & ~at_once] = each_s[which]
        return lasts_s

    def fits_at_once(self, layout: Layout, remaining: Floats, context: Floats) -> NDArray[np.bool_]:
        """Whether KV holds sets of requests, each alone and together, whatever their order.

        (sets, requests) -> (sets,).
        """
        costs = self.costs(layout)
        possible = (context + remaining).max(axis=1) <= costs.kv_capacity_tokens
        together = _fits_at_once(costs, self.sequences_max, remaining, context)
        return np.asarray(possible & together)

    def drains(
        self, layout: Layout, remaining: Floats, context: Floats, prefill: Floats, later: Floats
    ) -> Drain:
        """Return how instances work off a set of requests each that fit at once; see `drain`."""
        costs = self.costs(layout)
        paid_s = costs.prefill_s(prefill), costs.prefill_s(later, context)
        return _timed(costs, _seated(remaining, self.sequences_max), remaining, context, paid_s)

    def drain(
        self,
        layout: Layout,
        remaining: Floats,
        context: Floats,
        prefill: Floats | float = 0.0,
        later: Floats | float = 0.0,
    ) -> Drain:
        """Return how one instance works off these requests; see `makespan_s`."""
        costs, count = self.costs(layout), len(remaining)
        if not count:
            nothing = np.zeros(0)
            return Drain(nothing, nothing, nothing, nothing)
        lengths, held = np.asarray(remaining, np.float64), np.asarray(context, np.float64)
        if float((held + lengths).max()) > costs.kv_capacity_tokens:
            never = np.array([0.0, lengths.max()]), np.array([0, np.inf])
            return Drain(np.zeros(count), lengths, *never)
        first_s = np.broadcast_to(costs.prefill_s(np.asarray(prefill, np.float64)), count)
        later_s = np.broadcast_to(costs.prefill_s(np.asarray(later, np.float64), held), count)
        if not _fits_at_once(costs, self.sequences_max, lengths, held):
            return Drain(*crowded(costs, self.sequences_max, lengths, held, (first_s, later_s)))
        starts = _seated(lengths, self.sequences_max)
        return _timed(costs, starts, lengths, held, (first_s, later_s))


def _fits_at_once(
    costs: Costs, sequences_max: int, remaining: Floats, context: Floats
) -> NDArray[np.bool_]:
    """Whether KV holds these requests together, as many as have seats, whatever their order.

    Of one set (requests,), or of each of several (sets, requests).
    """
    if remaining.shape[-1] > sequences_max:
        largest = np.sort(context + remaining)[..., -sequences_max:]
        return np.asarray(largest.sum(axis=-1) <= costs.kv_capacity_tokens)
    order = np.argsort(remaining)
    ends, contexts = (np.take_along_axis(each, order, -1) for each in (remaining, context))
    held = np.cumsum(contexts[..., ::-1], axis=-1)[..., ::-1]
    held = held + ends * np.arange(ends.shape[-1], 0, -1)
    return np.asarray(held.max(axis=-1) <= costs.kv_capacity_tokens)


def _seated(remaining: Floats, seats: int) -> Floats:
    """Return at which step each gets a seat, in their order: whichever is free first.

    Of one set (requests,), or of each of several (sets, requests).
    """
    sets = remaining.reshape(-1, remaining.shape[-1])
    starts = np.zeros(sets.shape)
    for row, lengths in enumerate(sets if seats < sets.shape[1] else ()):
        ends = lengths[:seats].tolist()
        heapq.heapify(ends)
        later = lengths[seats:].tolist()
        starts[row, seats:] = [heapq.heapreplace(ends, ends[0] + length) for length in later]
    return starts.reshape(remaining.shape)


def _timed(
    costs: Costs, starts: Floats, lengths: Floats, context: Floats, prefill_s: tuple[Floats, Floats]
) -> Drain:
    """Add up the steps between what changes the batch: of one set of requests, or of each of many.

    Prefill is paid as a request begins, and that of its later turns evenly while it decodes.
    """
    ends = starts + lengths
    first_s, later_s = prefill_s
    count = starts.shape[-1]
    moments = np.concatenate([starts, ends], axis=-1)
    order = np.argsort(moments, axis=-1, kind="stable")
    sign = np.repeat([1.0, -1.0], count)[order]
    place = order + (np.arange(len(order))[:, None] * 2 * count if order.ndim > 1 else 0)

    def both(begin: Floats, end: Floats) -> Floats:
        return np.concatenate([begin, end], axis=-1).take(place)

    batch = np.cumsum(sign, axis=-1)
    offset = np.cumsum(sign * both(context - starts, context - starts), axis=-1)
    steps = moments.take(place)
    width = np.diff(steps, append=steps[..., -1:])
    kv_tokens = offset + batch * (steps + (width + 1) / 2)
    paid_s = both(first_s, np.zeros(first_s.shape))
    each_s = later_s / np.maximum(ends - starts, 1.0)
    beside_s = np.cumsum(sign * both(each_s, each_s), axis=-1)
    step_s = costs.step_s(batch, kv_tokens) + np.maximum(beside_s, 0.0)
    before_s = np.cumsum(width * step_s, axis=-1) + np.cumsum(paid_s, axis=-1)
    begin = np.zeros((*steps.shape[:-1], 1))
    rising = np.concatenate([begin, steps[..., 1:], steps[..., -1:]], axis=-1)
    return Drain(starts, ends, rising, np.concatenate([begin, before_s], axis=-1))


def _tabulated(
    costs: StepCosts, sequences_max: int, step_max_tokens: int, capacity: int, speed: float
) -> Costs:
    """Fit a line in KV at every batch; exact but for measured tables, which are nearly lines."""
    unit_s = 1 / NS_PER_S / speed
    batches = range(1, sequences_max + 1)
    rows = [[step_ns(costs, n, n * context) for context in CONTEXTS_TOKENS] for n in batches]
    step_s = np.array(rows) * unit_s
    kv_tokens = np.outer(batches, CONTEXTS_TOKENS)
    off = kv_tokens - kv_tokens.mean(axis=1, keepdims=True)
    slope = np.maximum(0.0, (off * step_s).sum(axis=1) / (off * off).sum(axis=1))
    fixed = step_s.mean(axis=1) - slope * kv_tokens.mean(axis=1)
    full = step_ns(costs, 0, 0, step_max_tokens, 0)
    pairs = step_max_tokens * step_max_tokens
    with_pairs = step_ns(costs, 0, 0, step_max_tokens, pairs)
    return Costs(
        np.concatenate([[0.0], np.maximum(fixed, 0.0)]),
        np.concatenate([[0.0], slope]),
        full * unit_s / step_max_tokens,
        (with_pairs - full) * unit_s / pairs,
        capacity,
    )


def _feasible(profile: Profile, gpus: int) -> tuple[Layout, ...]:
    """Return the instances whose GPUs divide a node's and of which the profile has figures."""
    sizes = [size for size in range(1, gpus + 1) if gpus % size == 0]
    found = []
    for layout in (each for size in sizes for each in _of_size(size, profile)):
        if infeasible(layout, profile.shape, gpu_of(profile), gpus, gpus):
            continue
        try:
            costs_of(profile, layout)
        except UsageError:
            continue
        found.append(layout)
    return tuple(found)


def _of_size(size: int, profile: Profile) -> list[Layout]:
    """Return TP over all its GPUs, and for experts EP with every division into TP and DP."""
    plain = [Layout(1, tp=size)]
    if not profile.shape.experts or size == 1:
        return plain
    degrees = [tp for tp in range(1, size + 1) if size % tp == 0]
    return plain + [Layout(1, tp=tp, dp=size // tp, ep=size) for tp in degrees]
