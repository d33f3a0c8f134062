"""Whether circuits change before a demand, and why: values in, one sentence with figures out. Pure.

A change takes *needed* time: what an uplink still holds gets out (settle), the slowest plane that
moves switches and its ports come up (switching + hold), routes follow (steer). If nobody sends for
that long (the *window*), it is free. Else the *overhang*, what the window is too short by, falls
into the traffic's time: the traffic goes on meanwhile over the circuits that stay and the
electrical path, or it `waits`, where nothing is steered away.

With traffic that waits, an electrical path of B/r and a collective of k n bytes a rank, a change
pays from n > overhang * B / (k (r - 1)) on (facts: break-even); going on meanwhile, from
n > overhang * B / (k r).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from drivers.base import Circuit
from harness.clock import NS_PER_MS
from harness.fabric.demand import Demand
from harness.fabric.links import DARK, Link, Plan
from harness.fabric.prediction import capacity, finish_ns, ideal_ns
from harness.fabric.refusals import refusal, sound
from harness.fabric.stranding import stranded
from harness.fabric.topology import Plane, Topology
from harness.fabric.windows import Window
from harness.model.scenario import Fabric

Links = frozenset[Link]
Action = Literal["change", "keep", "electrical", "dropped"]
SOON = 2.0
"""Within the rest after a change, the next must save so many times as much."""


@dataclass(frozen=True)
class Settings:
    """How careful decisions are; see `harness.model.scenario.Fabric`."""

    rule: Literal["window", "gain"] = "gain"
    gain_min: float = 0.05
    """Of the time that the traffic takes as it is."""
    rest_ns: float = 0.0
    steer_ns: float = 0.0
    """To send traffic elsewhere, there and back, as measured."""
    settle_ns: float = 0.0
    waits: bool = False
    """Whether traffic stands still while circuits change, for nothing steers it away."""

    @classmethod
    def of(cls, fabric: Fabric, steer_ns: float = 0.0, *, waits: bool = False) -> Settings:
        """Return those of a scenario's table ``[fabric]``."""
        return cls(
            rule=fabric.rule,
            gain_min=fabric.gain_min_pct / 100,
            rest_ns=fabric.rest_ms * NS_PER_MS,
            steer_ns=steer_ns,
            settle_ns=fabric.settle_ms * NS_PER_MS,
            waits=waits,
        )


@dataclass(frozen=True)
class Numbers:
    """What a decision rests on: how long the demand takes, and the change.

    Over the circuits as they are (keep), as planned (change), without any (electrical), on a
    non-blocking fabric (ideal), and over those that stay lit during the change (meanwhile).
    `window_ns` None: when traffic begins is not known, and nobody waits.
    """

    window_ns: float | None
    needed_ns: float
    keep_ns: float
    change_ns: float
    electrical_ns: float
    ideal_ns: float
    meanwhile_ns: float
    waits: bool = False

    @property
    def overhang_ns(self) -> float:
        """What of the change falls into the traffic's time."""
        return 0.0 if self.window_ns is None else max(0.0, self.needed_ns - self.window_ns)

    @property
    def total_ns(self) -> float:
        """How long the traffic takes with the change, from when it could begin."""
        over_ns = self.overhang_ns
        if self.waits or not over_ns:
            return over_ns + self.change_ns
        if over_ns >= self.meanwhile_ns:
            return self.meanwhile_ns
        return over_ns + (1 - over_ns / self.meanwhile_ns) * self.change_ns

    @property
    def gain_ns(self) -> float:
        """What the change saves."""
        return self.keep_ns - self.total_ns

    def later(self, window_left_ns: float) -> Numbers:
        """Return them for the window that is left; below 0, traffic began so long ago."""
        gone = max(0.0, -window_left_ns)
        left = max(0.0, 1 - gone / self.keep_ns) if self.keep_ns else 0.0
        return replace(
            self,
            window_ns=max(0.0, window_left_ns),
            keep_ns=self.keep_ns * left,
            change_ns=self.change_ns * left,
            electrical_ns=self.electrical_ns * left,
            ideal_ns=self.ideal_ns * left,
            meanwhile_ns=self.meanwhile_ns * left,
        )


@dataclass(frozen=True)
class Decision:
    """What to do, for a `reason` that a user reads, and the `numbers` behind it.

    `plan`: the circuits that are then to carry traffic; on keep and dropped, those of `lit` that
    can. `share_min`: of the time as it is, what a change had to save.
    """

    action: Action
    plan: Plan
    reason: str
    numbers: Numbers
    lit: Links
    settings: Settings
    share_min: float


def decide(
    topology: Topology,
    lit: Links,
    demand: Demand,
    candidates: Sequence[Plan],
    window: Window | None,
    *,
    settings: Settings,
    since_change_ns: float | None = None,
    broken: Collection[str] = (),
    busy: Collection[Link] = (),
) -> Decision:
    """Return the best of the candidates, of no circuits and of all as it is, if it pays to change.

    `window` None: when the demand begins is not known (speculative provisioning). `broken`: names
    of parts, switches or ToRs. `busy`: links that carry something else now, so they stay. Raises
    nothing: what must not be made is refused, with the reason.
    """
    works = sound(topology, lit, broken)
    if stranded(topology, demand, works):
        settings = replace(settings, rule="gain")  # what gets nowhere waits for no window
    case = _Case(topology, works, demand, window, settings, since_change_ns)
    refusals = [
        refusal(topology, plan.links, broken) or _torn(works, plan.links, busy)
        for plan in candidates
    ]
    fit = [plan for plan, why in zip(candidates, refusals, strict=True) if not why]
    why = next(filter(None, refusals), "")
    if not demand.total_bytes:
        return case.kept("nothing is sent from ToR to ToR")
    if not works and not any(plan.links for plan in fit):
        return case.stays_electrical(fit, why)
    options = [_Option(plan, case.numbers(plan.links)) for plan in fit if plan.links != works]
    if works and not _torn(works, DARK.links, busy):
        options.append(_Option(DARK, case.numbers(DARK.links)))
    if any(plan.links == works for plan in fit):
        why = "the circuits that are up are those planned"
    return case.judged(options, why)


def still_pays(decision: Decision, window_left_ns: float) -> Decision:
    """Return the decision at the time of its commit: as it is, or dropped for a window too short.

    `window_left_ns` below 0: the traffic began so long ago, over the circuits as they are.
    """
    if decision.plan.links == decision.lit:
        return decision
    numbers = decision.numbers.later(window_left_ns)
    why = _against(numbers, decision.settings.rule, decision.share_min)
    if not why:
        return replace(decision, numbers=numbers)
    late = f"{time_text(window_left_ns)} are left" if window_left_ns > 0 else "the window is over"
    plan = Plan(decision.lit)
    return replace(
        decision, action="dropped", plan=plan, numbers=numbers, reason=f"dropped: {late}: {why}"
    )


def needed_ns(topology: Topology, lit: Links, links: Links, settings: Settings) -> float:
    """Return how long it takes until traffic goes over `links`: 0 where nothing moves.

    Planes switch at once, so the slowest that lights a circuit counts. Where circuits only go,
    nobody waits for the light: traffic is steered off them.
    """
    return needed_for_ns(topology, circuits_of(lit), circuits_of(links), settings)


def circuits_of(links: Links) -> frozenset[tuple[str, Circuit]]:
    """Return the cross-connects that carry links, with their switches."""
    return frozenset(each for link in links for each in link.circuits)


def needed_for_ns(
    topology: Topology,
    before: frozenset[tuple[str, Circuit]],
    after: frozenset[tuple[str, Circuit]],
    settings: Settings,
) -> float:
    """Return `needed_ns` by the cross-connects, for who asks about the same ones often."""
    if before == after:
        return 0.0
    switches = {switch for switch, _ in after - before}
    if not switches:
        return settings.steer_ns
    planes = (topology.planes.get(switch, Plane(switch)) for switch in switches)
    slowest_ns = max(plane.switching_ns + plane.hold_ns for plane in planes)
    return settings.settle_ns + slowest_ns + settings.steer_ns


# -- weighing --------------------------------------------------------------------------------------


def _torn(lit: Links, links: Links, busy: Collection[Link]) -> str:
    """Return which link in use would be taken away, or ""."""
    torn = min(lit.intersection(busy) - links, default=None)
    return f"{torn} is in use" if torn else ""


class _Option(NamedTuple):
    """A plan, and what it would mean."""

    plan: Plan
    numbers: Numbers


@dataclass(frozen=True)
class _Case:
    """What is decided upon. `works`: lit, and able to carry traffic."""

    topology: Topology
    works: Links
    demand: Demand
    window: Window | None
    settings: Settings
    since_change_ns: float | None

    @property
    def is_soon(self) -> bool:
        """Whether the last change is not long ago."""
        since_ns = self.since_change_ns
        return since_ns is not None and since_ns < self.settings.rest_ns

    @property
    def share_min(self) -> float:
        """Of the time as it is, what a change must save."""
        return self.settings.gain_min * (SOON if self.is_soon else 1.0)

    def numbers(self, links: Links) -> Numbers:
        """Return what changing to `links` would mean."""
        topology, demand, works = self.topology, self.demand, self.works
        return Numbers(
            window_ns=None if self.window is None else self.window.ns,
            needed_ns=needed_ns(topology, works, links, self.settings),
            keep_ns=finish_ns(topology, demand, works),
            change_ns=finish_ns(topology, demand, links),
            electrical_ns=finish_ns(topology, demand, ()),
            ideal_ns=ideal_ns(topology, demand),
            meanwhile_ns=finish_ns(topology, demand, works & links),
            waits=self.settings.waits,
        )

    def judged(self, options: Sequence[_Option], otherwise: str) -> Decision:
        """Return what comes of the best option; `otherwise` says why there is no other plan."""
        if not options:
            return self.kept(otherwise)
        rule = self.settings.rule
        in_time = [o for o in options if not o.numbers.overhang_ns or rule == "gain"]
        best = min(in_time or options, key=lambda o: (o.numbers.total_ns, o.numbers.needed_ns))
        numbers, why = best.numbers, _against(best.numbers, rule, self.share_min)
        if why and otherwise and not best.plan.links:
            return self.kept(otherwise)
        if why and self.is_soon and not _against(numbers, rule, self.settings.gain_min):
            why += f" so soon after the last change, {time_text(self.since_change_ns)} ago"
        if why:
            return self.kept(why, numbers)
        if not best.plan.links:
            times = f"{time_text(numbers.total_ns)} without circuits"
            times += f", {time_text(numbers.keep_ns)} over those that are up"
            return self._said("electrical", best.plan, numbers, f"electrical: {times}")
        saves = self._freed(best.plan)
        saves = saves or f"saves {time_text(numbers.gain_ns)} of {time_text(numbers.keep_ns)}"
        reason = f"changed: {saves}, {_hidden(numbers)}{self._rest(best.plan)}"
        return self._said("change", best.plan, numbers, reason)

    def kept(self, why: str, numbers: Numbers | None = None) -> Decision:
        """Return that all stays as it is."""
        numbers = numbers or self.numbers(self.works)
        return self._said("keep", Plan(self.works), numbers, f"kept: {why}")

    def stays_electrical(self, fit: Sequence[Plan], why: str) -> Decision:
        """Return that nothing is lit and nothing can be."""
        edges = dict.fromkeys(edge for plan in fit for edge in plan.unserved)
        names = ", ".join(f"{a}-{b}" for a, b in edges)
        none = "no circuits are planned for this traffic"
        why = why or (f"no plane serves {names}" if names else none)
        return self._said(
            "electrical", fit[0] if fit else DARK, self.numbers(self.works), f"electrical: {why}"
        )

    def _rest(self, plan: Plan) -> str:
        lit = capacity(self.topology, plan.links).circuits > 0
        rest = float(np.where(lit, 0.0, self.demand.sent_bytes).sum()) / self.demand.total_bytes
        return f"; {100 * rest:.2g} % of the bytes go the electrical path" if rest > 1e-9 else ""

    def _freed(self, plan: Plan) -> str:
        """Return which stranded pairs a plan joins, or ""."""
        lost, left = (stranded(self.topology, self.demand, x) for x in (self.works, plan.links))
        freed = ", ".join(f"{a}-{b}" for a, b in lost if (a, b) not in left)
        return f"{freed} would be stranded" * bool(freed)

    def _said(self, action: Action, plan: Plan, numbers: Numbers, reason: str) -> Decision:
        if lost := stranded(self.topology, self.demand, plan.links):
            reason += f"; {', '.join(f'{a}-{b}' for a, b in lost)} stranded: no electrical link"
        return Decision(action, plan, reason, numbers, self.works, self.settings, self.share_min)


def _against(numbers: Numbers, rule: str, share_min: float) -> str:
    """Return why the change is not made, or ""."""
    keep_ns, gain_ns = numbers.keep_ns, numbers.gain_ns
    if rule == "window" and numbers.overhang_ns:
        window_ns = numbers.window_ns or 0.0
        return (
            f"a change takes {time_text(numbers.needed_ns)}, the window is {time_text(window_ns)}"
        )
    if gain_ns <= 1e-9 * keep_ns:
        return (
            f"a change saves nothing: {time_text(numbers.total_ns)} instead of {time_text(keep_ns)}"
        )
    if gain_ns < share_min * keep_ns:
        return (
            f"saves {time_text(gain_ns)} of {time_text(keep_ns)}, less than {100 * share_min:.3g} %"
        )
    return ""


def _hidden(numbers: Numbers) -> str:
    """Return what becomes of the time that the change takes."""
    needed = time_text(numbers.needed_ns)
    if numbers.window_ns is None:
        return f"with {needed} ahead of it, while nobody waits"
    if numbers.overhang_ns:
        return f"of the {needed} that it takes {time_text(numbers.window_ns)} are idle"
    return f"its {needed} hidden in a window of {time_text(numbers.window_ns)}"


def time_text(ns: float | None) -> str:
    """Return a time as a user reads it."""
    ms = (ns or 0.0) / NS_PER_MS
    return f"{ms / 1e3:.3g} s" if abs(ms) >= 1e3 else f"{ms:.3g} ms"
