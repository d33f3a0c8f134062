"""Which circuits carry which part of a training step, where they may change within it. Pure.

A step is a known sequence of communications with gaps. By dynamic programming over (communication,
plan in force), each is given one of a few candidate plans such that all of them, and what of the
changes the gaps do not hide, take least (the question of Harvest, arXiv 2602.09188, between
collectives instead of within one). The optimum over the candidates includes never to change, so it
is never predicted worse. Traffic waits for what a gap does not hide.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.fabric.decision import Links, Settings, circuits_of, needed_for_ns
from harness.fabric.demand import Comm, Demand, Floats
from harness.fabric.links import DARK, Plan
from harness.fabric.prediction import capacity
from harness.fabric.refusals import refusal, sound
from harness.fabric.topology import Topology

PARTS_MAX = 6
"""Plans made for parts of a step: for each axis, then for the heaviest patterns of who sends."""

ALIKE = 12
"""Decimals of a share of the bytes up to which two patterns are one."""

PlanFor = Callable[[Demand, Links], Plan]
"""The best circuits for a demand, near to those that are lit."""


class Segment(NamedTuple):
    """From communication `first` on, `plan` is to carry traffic.

    Its change begins when the communication before `first` has ended.
    """

    first: int
    plan: Plan


@dataclass(frozen=True)
class Course:
    """Segments of a step, in order; the first begins with it.

    Times of communication of one step, gaps left out, with what they do not hide of changes: as
    chosen, with the circuits as they are, and with one plan for the whole step.
    """

    segments: tuple[Segment, ...]
    course_ns: float
    never_ns: float
    whole_ns: float


def course(
    topology: Topology,
    lit: Links,
    comms: Sequence[Comm],
    plan_for: PlanFor,
    *,
    settings: Settings,
    broken: Collection[str] = (),
    steps: int = 1,
) -> Course:
    """Return the best course of `steps` such steps on end, its first one; times are their mean.

    Where it saves less than `settings.gain_min` over never changing, or over one plan for the
    step, that is chosen.
    """
    step = _Step.of(topology, comms)
    works = sound(topology, lit, broken)
    if not len(step.sending):
        return Course((Segment(0, Plan(works)),), 0.0, 0.0, 0.0)
    plans, whole = _candidates(topology, works, step.demands(topology), plan_for, broken)
    over_ns = np.stack([step.over_ns(topology, plan) for plan in plans], 1)
    change_ns = _not_hidden(topology, plans, step.idle_ns, settings)
    never_ns = float(over_ns[:, 0].sum())
    whole_ns = float(over_ns[:, whole].sum() + change_ns[0, 0, whole] / steps)
    if not np.isfinite(whole_ns):
        whole, whole_ns = 0, never_ns  # no time to change to it
    path, best_ns = best_path(over_ns, change_ns, steps)
    least = 1 - settings.gain_min
    if best_ns > least * never_ns:
        path, best_ns = [0] * len(path), never_ns
    elif best_ns > least * whole_ns and whole_ns <= least * never_ns:
        path, best_ns = [whole] * len(path), whole_ns
    firsts = [0, *(step.sending[:-1] + 1).tolist()]
    turns = [t for t, k in enumerate(path) if t == 0 or k != path[t - 1]]
    segments = tuple(Segment(firsts[t], plans[path[t]]) for t in turns)
    return Course(segments, best_ns, never_ns, whole_ns)


def best_path(over_ns: Floats, change_ns: Floats, steps: int = 1) -> tuple[list[int], float]:
    """Return the plan for each communication of the first of `steps` steps, and the mean of a step.

    `over_ns[t, k]`: communication t over plan k. `change_ns[t, j, k]`: what changing from j to k
    right before it costs. Plan 0 is in force at first. Backward induction, for no step ahead is
    free of what this one leaves behind; between equals all stays as it is.
    """
    each_ns = change_ns + over_ns[:, None, :]
    stay = np.arange(over_ns.shape[1])
    ahead_ns = np.zeros(len(stay))
    for _ in range(steps):
        choices = []
        for step_ns in each_ns[::-1]:
            from_ns = step_ns + ahead_ns
            choice = from_ns.argmin(1)
            ahead_ns, stays_ns = from_ns[stay, choice], from_ns[stay, stay]
            choices.append(np.where(stays_ns <= ahead_ns * (1 + 1e-12), stay, choice))
    path, at = [], 0
    for choice in reversed(choices):
        at = int(choice[at])
        path.append(at)
    return path, float(ahead_ns[0]) / steps


@dataclass(frozen=True, eq=False)
class _Step:
    """A step as columns, of the communications that cross ToRs; `sending`: which those are.

    A time grows with the bytes, so those that send in the same proportions are one `pattern`, of
    one byte in all; `bytes_` are of all times together.
    """

    sending: NDArray[np.int64]
    axes: tuple[str, ...]
    patterns: Floats
    pattern: NDArray[np.int64]
    bytes_: Floats
    idle_ns: Floats
    """How long nothing crosses ToRs before each: what stays under them is taken for no time."""

    @classmethod
    def of(cls, topology: Topology, comms: Sequence[Comm]) -> _Step:
        n = len(topology.tors)
        sent = np.array([comm.demand.sent_bytes for comm in comms]).reshape(len(comms), n * n)
        once = sent.sum(1)
        sending = np.flatnonzero(once)
        times = np.array([comm.times for comm in comms], np.int64)
        shares = (sent[sending] / once[sending, None]).round(ALIKE)
        patterns, pattern = np.unique(shares, axis=0, return_inverse=True)
        gaps_ns = np.array([comm.gap_ns for comm in comms], np.float64)
        idle_ns = np.cumsum(gaps_ns * np.where(once > 0, 1, times))
        return cls(
            sending,
            tuple(comms[i].axis for i in sending),
            patterns.reshape(-1, n, n),
            pattern.reshape(-1),
            once[sending] * times[sending],
            np.diff(idle_ns[sending], prepend=0.0),
        )

    def over_ns(self, topology: Topology, plan: Plan) -> Floats:
        """Return how long each takes over a plan, all times of it."""
        each_ns = capacity(topology, plan.links).finish_ns(self.patterns)
        return each_ns[self.pattern] * self.bytes_

    def demands(self, topology: Topology) -> list[Demand]:
        """Return the whole step, then what is sent along each axis, then the heaviest patterns."""
        axes = dict.fromkeys(self.axes)
        chosen = [np.array([axis == each for each in self.axes]) for axis in axes]
        weights = np.bincount(self.pattern, self.bytes_)
        chosen += [self.pattern == k for k in np.argsort(-weights, kind="stable")]
        found: dict[bytes, Floats] = {}
        for which in (np.ones(len(self.sending), bool), *chosen):
            weights = np.bincount(self.pattern, np.where(which, self.bytes_, 0.0))
            sent: Floats = np.tensordot(weights, self.patterns, 1).astype(np.float64)
            found.setdefault((sent / sent.sum()).round(ALIKE).tobytes(), sent)
            if len(found) > PARTS_MAX:
                break
        return [Demand("part of a step", tuple(topology.tors), sent) for sent in found.values()]


def _candidates(
    topology: Topology,
    works: Links,
    demands: Sequence[Demand],
    plan_for: PlanFor,
    broken: Collection[str],
) -> tuple[list[Plan], int]:
    """Return the plans to choose from, what is up first; and which is that of the first demand."""
    plans = {plan.links: plan for plan in (Plan(works), DARK)}
    whole = works
    for i, demand in enumerate(demands):
        plan = plan_for(demand, works)
        if not refusal(topology, plan.links, broken):
            plans.setdefault(plan.links, plan)
            whole = whole if i else plan.links
    return list(plans.values()), list(plans).index(whole)


def _not_hidden(
    topology: Topology, plans: Sequence[Plan], idle_ns: Floats, settings: Settings
) -> Floats:
    """Return [t, j, k]: what of a change from plan j to k the idle time before t does not hide.

    By the rule ``window`` there is none then: infinite.
    """
    up = [circuits_of(plan.links) for plan in plans]
    needed = np.array([[needed_for_ns(topology, a, b, settings) for b in up] for a in up])
    over_ns = np.maximum(0.0, needed - idle_ns[:, None, None])
    return np.where(over_ns > 0, np.inf, 0.0) if settings.rule == "window" else over_ns
