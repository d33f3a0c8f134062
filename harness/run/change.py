"""Bring one plan of circuits up: steer away, switch all switches at once, verify, steer back.

The order is the guarantee. Traffic leaves a circuit before it goes dark, and returns only when its
light is measured and the expected far end was heard through it. What fails stays on the electrical
path, and the change says which circuits and why; it raises nothing a run could not go on from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from drivers.base import Applied
from drivers.errors import DriverError, NoLight
from harness.clock import NS_PER_MS, NS_PER_S
from harness.fabric.circuits import Plan
from harness.fabric.topology import Link, Uplink
from harness.run.session import ELECTRICAL, Session
from harness.wire.messages import Beacons, Done, Heard, StartBeacons, StopBeacons

BEACON_NS = NS_PER_MS
"""Interval of beacons: the resolution of the dark time."""
HEAR_NS = 2 * NS_PER_S
"""How long a lit circuit may take until its far end is heard (NIC hold included)."""
MESSAGE_NS = 10 * NS_PER_S
"""Limit of a command that does no work."""


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
    healthy = await _switch(session, change)
    verified = await _verify(session, change, healthy)
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


async def _verify(session: Session, change: Change, healthy: frozenset[Link]) -> frozenset[Link]:
    """Hear every moved link's far ends; return the links that may carry traffic."""
    fresh = healthy - change.kept
    watched = {link for link in fresh if {link.a.tor, link.b.tor} <= set(session.watchers)}
    if not watched:
        return healthy
    started_ns = session.bench.clock.now_ns()
    since_ns = change.stamps.get("command_sent") or started_ns
    expect = expected_far_ends(watched)
    heard = await session.bench.ask_all(
        {
            tor: Heard(
                since_ns=session.bench.clocks[tor].to_node(since_ns),
                expect=far_ends,
                wait_ns=HEAR_NS,
            )
            for tor, far_ends in expect.items()
        },
        Beacons,
        HEAR_NS + MESSAGE_NS,
    )
    wrong = unheard(watched, heard)
    change.failures.update(
        {str(link): f"{link}: {reason}; it stays electrical" for link, reason in wrong.items()}
    )
    stamps = [
        session.at(tor, heard[tor].first_ns[device])
        for tor, far_ends in expect.items()
        for device in far_ends
        if device in heard[tor].first_ns
    ]
    if stamps:
        # A power meter averages: packets may cross before it shows light. Verified is both.
        change.stamps["path_verified"] = max(*stamps, started_ns)
        change.link_ns = max(0, max(stamps) - started_ns)
    return healthy - frozenset(wrong)


def expected_far_ends(links: set[Link]) -> dict[str, dict[str, str]]:
    """Return, per ToR and device, the far end ("tor:device") that must be heard."""
    expect: dict[str, dict[str, str]] = {}
    for link in links:
        for near, far in ((link.a, link.b), (link.b, link.a)):
            expect.setdefault(near.tor, {})[near.device] = str(far)
    return expect


def unheard(links: set[Link], heard: Mapping[str, Beacons]) -> dict[Link, str]:
    """Return the links through which the wrong end, or nobody, is heard, with the reason."""
    wrong = {}
    for link in links:
        for near, far in ((link.a, link.b), (link.b, link.a)):
            last = heard[near.tor].last.get(near.device, "")
            fresh = near.device in heard[near.tor].first_ns
            if last != str(far) or not fresh:
                found = f"hears {last}" if last and fresh else "hears nobody"
                wrong[link] = f"{near} {found} instead of {far}"
    return wrong


# -- beacons -----------------------------------------------------------------------------


def uplinks_of(links: frozenset[Link]) -> set[Uplink]:
    """Return both ends of every link."""
    return {end for link in links for end in (link.a, link.b)}


async def beacons_on(session: Session, links: frozenset[Link]) -> tuple[str, ...]:
    """Start beacons on both ends of `links` where an agent can; return the ToRs that send."""
    devices: dict[str, list[str]] = {}
    for end in sorted(uplinks_of(links)):
        if end.tor in session.watchers:
            devices.setdefault(end.tor, []).append(end.device)
    await session.bench.ask_all(
        {
            tor: StartBeacons(devices=tuple(names), interval_ns=BEACON_NS)
            for tor, names in devices.items()
        },
        Done,
        MESSAGE_NS,
    )
    return tuple(devices)


async def beacons_off(session: Session, tors: tuple[str, ...]) -> dict[str, Beacons]:
    """Stop beacons; return what each ToR heard since they started."""
    return await session.bench.ask_all(dict.fromkeys(tors, StopBeacons()), Beacons, MESSAGE_NS)


def dark_ns(heard: Mapping[str, Beacons], moved: frozenset[Link]) -> int | None:
    """Return the longest silence on a moved uplink between two lit states; None if unseen."""
    ends = {str(end) for end in uplinks_of(moved)}
    silences = [
        gap.first_ns - gap.last_ns
        for tor, beacons in heard.items()
        for gap in beacons.gaps
        if f"{tor}:{gap.device}" in ends
    ]
    return max(silences, default=None)


def lost_on(heard: Mapping[str, Beacons], kept: frozenset[Link]) -> int:
    """Return how many beacons were lost on links that stayed."""
    ends = {str(end) for end in uplinks_of(kept)}
    return sum(
        lost
        for tor, beacons in heard.items()
        for device, lost in beacons.lost.items()
        if f"{tor}:{device}" in ends
    )
