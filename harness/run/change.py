"""Bring one plan of circuits up: steer away, switch all switches at once, verify, steer back.

The order is the guarantee. Traffic leaves a circuit before it goes dark, and returns only when its
light is measured and the expected far end was heard through it. What fails stays on the electrical
path, and the change says which circuits and why; it raises nothing a run could not go on from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from drivers.base import Applied
from drivers.errors import DriverError, NoLight
from harness.bench.base import SwitchHandle
from harness.clock import NS_PER_S
from harness.fabric.circuits import Plan
from harness.fabric.topology import Link
from harness.run.hearing import HEAR_NS, hear
from harness.run.session import ELECTRICAL, Session


@dataclass
class Change:
    """One change of circuits, as it happened. Stamps on the coordinator's clock."""

    before: frozenset[Link]
    wanted: frozenset[Link]
    stamps: dict[str, int | None] = field(default_factory=dict)
    device_ns: int = 0
    link_ns: int = 0
    applied: dict[str, Applied] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """By switch or ToR: what went wrong, with the circuits that differ."""

    @property
    def kept(self) -> frozenset[Link]:
        """Links that stay lit throughout."""
        return self.before & self.wanted

    @property
    def moved(self) -> frozenset[Link]:
        """Links that come up."""
        return self.wanted - self.before


@dataclass(frozen=True)
class _Outcome:
    """What one switch did: when its light was there, and how long we waited for it."""

    end_ns: int
    waited_ns: int
    light_ns: int | None
    applied: Applied | None = None
    dark: frozenset[int] | None = frozenset()
    """Egress ports that failed: those without light, or None for all of the switch."""
    error: str = ""

    def fails(self, link: Link) -> bool:
        """Tell whether `link`, on this switch, must not carry traffic."""
        return self.dark is None or not self.dark.isdisjoint((link.a.egress, link.b.egress))


async def switch_over(
    session: Session, plan: Plan, shape: str, *, steer_first: bool = True
) -> Change:
    """Bring `plan` up and account for it; afterwards `session.lit` is what really carries traffic.

    Without `steer_first` traffic stays on the circuits while they move (ride-through).
    """
    change = Change(before=session.lit, wanted=plan.links)
    if steer_first and session.lit != change.kept:
        await session.steer(change.kept)
        change.stamps["steered_away"] = session.bench.clock.now_ns()
    verified = await _switch_and_verify(session, change)
    if session.lit != verified:
        await session.steer(verified)
    change.stamps["steered"] = session.bench.clock.now_ns()
    session.shape = name_of(shape, plan, verified)
    return change


def name_of(shape: str, plan: Plan, lit: frozenset[Link]) -> str:
    """Return the label of results: the shape's name only when all of it is lit."""
    if not lit:
        return ELECTRICAL
    return shape if lit == plan.links else f"{shape}-degraded"


async def _switch_and_verify(session: Session, change: Change) -> frozenset[Link]:
    """Switch, and listen for the far ends meanwhile; return the links that may carry traffic.

    Listening begins with the command, so that no round trip is left when the light is there. When
    a switch fails, only what it does not carry is waited for.
    """
    since_ns = session.bench.clock.now_ns()
    slowest_s = max(
        (one.spec.apply_timeout_s + one.spec.light_timeout_s for one in _switches(session)),
        default=0.0,
    )
    wait_ns = HEAR_NS + round(slowest_s * NS_PER_S)
    hearing = asyncio.create_task(hear(session, change.moved, since_ns, wait_ns))
    try:
        healthy = await _switch(session, change)
        started_ns = session.bench.clock.now_ns()
        if healthy == change.wanted:
            verdict = await hearing
        else:
            verdict = await hear(session, healthy - change.kept, since_ns)
    finally:
        hearing.cancel()
    if verdict.heard_ns:
        # A power meter averages: packets may cross before it shows light. Verified is both.
        change.stamps["path_verified"] = max(*verdict.heard_ns, started_ns)
        change.link_ns = max(0, max(verdict.heard_ns) - started_ns)
    for link, reason in verdict.wrong.items():
        change.failures[str(link)] = f"{link}: {reason}; it stays electrical"
    return healthy - frozenset(verdict.wrong)


def _switches(session: Session) -> Iterable[SwitchHandle]:
    return session.bench.switches.values()


async def _switch(session: Session, change: Change) -> frozenset[Link]:
    """Apply every switch's part at once; return the wanted links that are switched and lit."""
    names = session.bench.topology.switches
    async with asyncio.TaskGroup() as group:
        tasks = {name: group.create_task(_apply(session, name, change.wanted)) for name in names}
    outcomes = {name: task.result() for name, task in tasks.items()}
    for name, outcome in outcomes.items():
        if outcome.error:
            change.failures[name] = outcome.error
        if outcome.applied and outcome.applied.delta:
            change.applied[name] = outcome.applied
    _stamp_devices(change, outcomes)
    return frozenset(link for link in change.wanted if not outcomes[link.switch].fails(link))


def _stamp_devices(change: Change, outcomes: Mapping[str, _Outcome]) -> None:
    """Stamp the first command, the last completion; charge the device wait of the last switch."""
    if change.applied:
        applied = change.applied.values()
        change.stamps["command_sent"] = min(done.sent_ns for done in applied)
        change.stamps["device_acknowledged"] = max(done.acknowledged_ns for done in applied)
        change.stamps["device_done"] = max(done.done_ns for done in applied)
        lights = [outcomes[name].light_ns for name in change.applied]
        if lights and all(light is not None for light in lights):
            change.stamps["light"] = max(light for light in lights if light is not None)
    if outcomes:
        change.device_ns = max(outcomes.values(), key=lambda outcome: outcome.end_ns).waited_ns


async def _apply(session: Session, name: str, wanted: frozenset[Link]) -> _Outcome:
    switch, clock = session.bench.switches[name], session.bench.clock
    waited_before_ns = switch.waited_ns
    applied: Applied | None = None
    try:
        applied = await switch.apply(session.bench.topology.matching(wanted, name))
        waited_ns = switch.waited_ns - waited_before_ns
        asked_ns = clock.now_ns()
        light_ns = None
        if applied.delta.make:
            light_ns = await switch.wait_for_light(tuple(b for _, b in applied.delta.make))
        end_ns = clock.now_ns()
    except DriverError as fault:
        dark = frozenset(fault.ports) if isinstance(fault, NoLight) else None
        return _Outcome(
            end_ns=clock.now_ns(),
            waited_ns=switch.waited_ns - waited_before_ns,
            light_ns=None,
            applied=applied,
            dark=dark,
            error=f"{name}: {str(fault).removeprefix(f'{name}: ')}",
        )
    # All the time until there is light is the device's: we only poll.
    return _Outcome(end_ns, waited_ns + end_ns - asked_ns, light_ns, applied)
