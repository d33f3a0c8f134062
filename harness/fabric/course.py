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

from harness.clock import NS_PER_MS
from harness.fabric.circuits import DARK, Plan
from harness.fabric.decision import Links, Settings, needed_ns
from harness.fabric.demand import Comm, Demand, Floats, total
from harness.fabric.prediction import capacity
from harness.fabric.refusals import refusal, sound
from harness.fabric.topology import Topology

PARTS_MAX = 6
"""Plans made for parts of a step: for each axis, then for the heaviest patterns of who sends."""

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

    @property
    def reason(self) -> str:
        """What was chosen, as a user reads it."""
        as_chosen, never, whole = (
            f"{ns / NS_PER_MS:.3g} ms" for ns in (self.course_ns, self.never_ns, self.whole_ns)
        )
        plans = len(self.segments)
        return (
            f"{plans} plan{'s' if plans > 1 else ''} in a step: {as_chosen} of communication;"
            f" {never} with the circuits that are up, {whole} with one plan for the step"
        )


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
    works = sound(topology, lit, broken)
    plans, whole = _candidates(topology, works, comms, plan_for, broken)
    sending = [i for i, comm in enumerate(comms) if comm.demand.total_bytes]
    if not sending:
        return Course((Segment(0, plans[0]),), 0.0, 0.0, 0.0)
    demands = np.stack([comms[i].demand.sent_bytes for i in sending])
    times = np.array([comms[i].times for i in sending])
    over_ns = np.stack([capacity(topology, p.links).finish_ns(demands) * times for p in plans], 1)
    change_ns = _not_hidden(topology, plans, _idle_ns(comms), settings)
    never_ns = float(over_ns[:, 0].sum())
    whole_ns = float(over_ns[:, whole].sum() + change_ns[0, 0, whole] / steps)
    path, best_ns = best_path(over_ns, change_ns, steps)
    if not np.isfinite(whole_ns):
        whole, whole_ns = 0, never_ns  # no time to change to it
    least = 1 - settings.gain_min
    if best_ns > least * never_ns:
        path, best_ns = [0] * len(path), never_ns
    elif best_ns > least * whole_ns and whole_ns <= least * never_ns:
        path, best_ns = [whole] * len(path), whole_ns
    firsts = [0, *(i + 1 for i in sending[:-1])]
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


def _candidates(
    topology: Topology,
    works: Links,
    comms: Sequence[Comm],
    plan_for: PlanFor,
    broken: Collection[str],
) -> tuple[list[Plan], int]:
    """Return the plans to choose from, what is up first; and which is that for the whole step."""
    whole = total(topology, (comm.whole for comm in comms), "step")
    plans = {plan.links: plan for plan in (Plan(works), DARK)}
    for_whole = works
    for demand in dict.fromkeys((whole, *_parts(topology, comms))):
        plan = plan_for(demand, works)
        if refusal(topology, plan.links, broken):
            continue
        plans.setdefault(plan.links, plan)
        for_whole = plan.links if demand is whole else for_whole
    return list(plans.values()), list(plans).index(for_whole)


def _parts(topology: Topology, comms: Sequence[Comm]) -> list[Demand]:
    """Return what is sent along each axis, and by each pattern of who sends to whom."""
    axes: dict[object, list[Demand]] = {}
    patterns: dict[object, list[Demand]] = {}
    for comm in comms:
        axes.setdefault(comm.axis, []).append(comm.whole)
        patterns.setdefault((comm.demand.sent_bytes > 0).tobytes(), []).append(comm.whole)
    found: list[Demand] = []
    for groups in (axes, patterns):
        summed = (total(topology, demands, "part of a step") for demands in groups.values())
        found += sorted(summed, key=lambda demand: -demand.total_bytes)
    return [demand for demand in dict.fromkeys(found) if demand.total_bytes][:PARTS_MAX]


def _idle_ns(comms: Sequence[Comm]) -> list[float]:
    """Return how long nothing crosses ToRs before each communication that does.

    What stays under the ToRs is taken to last no time; the gaps around it count.
    """
    found, idle_ns = [], 0.0
    for comm in comms:
        idle_ns += comm.gap_ns
        if comm.demand.total_bytes:
            found.append(idle_ns)
            idle_ns = 0.0
        else:
            idle_ns += comm.gap_ns * (comm.times - 1)
    return found


def _not_hidden(
    topology: Topology, plans: Sequence[Plan], idle_ns: Sequence[float], settings: Settings
) -> Floats:
    """Return [t, j, k]: what of a change from plan j to k the idle time before t does not hide.

    By the rule ``window`` there is none then: infinite.
    """
    needed = np.array(
        [[needed_ns(topology, a.links, b.links, settings) for b in plans] for a in plans]
    )
    over_ns = np.maximum(0.0, needed - np.array(idle_ns)[:, None, None])
    return np.where(over_ns > 0, np.inf, 0.0) if settings.rule == "window" else over_ns
