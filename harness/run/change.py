"""Bring one plan of circuits up: steer away, switch all switches at once, verify, steer back.

The order is the guarantee. Traffic leaves a circuit before it goes dark, and returns only when its
light is measured and the expected far end was heard through it. What fails stays on the electrical
path, and the change says which circuits and why; it raises nothing a run could not go on from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drivers.errors import DriverError
from harness.bench.base import Switched
from harness.clock import NS_PER_S
from harness.errors import SteeringFailed
from harness.fabric.links import Link, Plan
from harness.run.hearing import HEAR_NS, Verdict, hear
from harness.run.session import ELECTRICAL, Session


@dataclass
class Change:
    """One change of circuits, as it happened. Stamps on the coordinator's clock."""

    before: frozenset[Link]
    wanted: frozenset[Link]
    stamps: dict[str, int | None] = field(default_factory=dict)
    device_ns: int = 0
    link_ns: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    """By switch or link: what went wrong, with the circuits that differ."""
    lost: dict[str, str] = field(default_factory=dict)
    """Switches that did not do as they were told, and why."""
    dark: dict[str, frozenset[int]] = field(default_factory=dict)
    """By switch, egress ports without light."""
    refused: dict[str, str] = field(default_factory=dict)
    """ToRs that were not steered onto the new circuits, and why."""
    unlit: dict[Link, str] = field(default_factory=dict)
    """Links that did not come up though their switches did as they were told, and why."""

    @property
    def kept(self) -> frozenset[Link]:
        """Links that stay lit throughout."""
        return self.before & self.wanted

    @property
    def moved(self) -> frozenset[Link]:
        """Links that come up."""
        return self.wanted - self.before


async def switch_over(
    session: Session,
    plan: Plan,
    shape: str,
    hearing: asyncio.Task[Verdict],
    *,
    preparing: asyncio.Task[None] | None = None,
    steer_first: bool = True,
    settle_ns: int = 0,
    switches: Collection[str] | None = None,
) -> Change:
    """Bring `plan` up and account for it; afterwards `session.lit` is what really carries traffic.

    `hearing` and `preparing`, the tasks of `listen` and `prepare`, began earlier, so that what they
    do costs no time here. Without `steer_first` traffic stays on the circuits while they move
    (ride-through). Where traffic goes on, what it left on the way has `settle_ns` to get through.
    Only `switches` are touched; None is all: others, with the links they carry, are as they were.
    """
    change = Change(before=session.lit, wanted=plan.links)
    if steer_first and session.lit != change.kept:
        await session.steer(change.kept)
        change.stamps["steered_away"] = session.bench.clock.now_ns()
        await session.bench.clock.sleep_ns(settle_ns)
    reading_ns = 0
    if preparing and not preparing.done():
        asked_ns = session.bench.clock.now_ns()
        await preparing
        reading_ns = session.bench.clock.now_ns() - asked_ns
    names = session.bench.topology.switches if switches is None else sorted(switches)
    healthy = await _switch(session, change, names)
    change.device_ns += reading_ns
    verified = await _verify(session, change, healthy, hearing)
    if session.lit != verified:
        await _steer_back(session, change, verified)
    change.stamps["steered"] = session.bench.clock.now_ns()
    session.shape = name_of(shape, plan, verified)
    return change


async def _steer_back(session: Session, change: Change, verified: frozenset[Link]) -> None:
    """Send traffic over what is up; what a ToR sends over that refuses, is told as `refused`."""
    try:
        await session.steer(verified)
    except SteeringFailed as refusal:
        session.lit = verified
        change.refused |= refusal.failures
        change.failures |= refusal.failures


def listen(session: Session, plan: Plan) -> Coroutine[Any, Any, Verdict]:
    """Listen, from now on, for the far ends of the links that will come up."""
    now_ns = session.bench.clock.now_ns()
    limits_s = (switch.spec.apply_timeout_s for switch in session.bench.switches.values())
    wait_ns = round(max(limits_s, default=0.0) * NS_PER_S) + HEAR_NS
    return hear(session, plan.links - session.lit, now_ns, wait_ns)


def moving(session: Session, plan: Plan) -> set[str]:
    """Return the switches that must do something for `plan`, as far as is known."""
    return {switch for link in session.lit ^ plan.links for switch in link.switches}


async def prepare(session: Session, plan: Plan, switches: Collection[str] | None = None) -> None:
    """Have switches read their map and work out their change, while traffic still flows.

    A fault is not told here: the switch meets it again when it is to change.
    """
    names = session.bench.switches if switches is None else switches
    topology, units = session.bench.topology, session.bench.switches
    await asyncio.gather(
        *(units[name].prepare(topology.matching(plan.links, name)) for name in names)
    )


def name_of(shape: str, plan: Plan, lit: frozenset[Link]) -> str:
    """Return the label of results: the shape's name only when all of it is lit."""
    if not lit:
        return ELECTRICAL
    return shape if lit == plan.links else f"{shape}-degraded"


async def _switch(session: Session, change: Change, names: Sequence[str]) -> frozenset[Link]:
    """Switch each unit's part at once; return the wanted links that are switched and lit."""
    async with asyncio.TaskGroup() as group:
        tasks = {name: group.create_task(_switch_one(session, name, change)) for name in names}
    done = {name: switched for name, task in tasks.items() if (switched := task.result())}
    _stamp_devices(change, [switched for switched in done.values() if switched.applied.delta])
    lit = frozenset(link for link in change.wanted if _is_lit(link, names, done))
    obeyed = (link for link in change.wanted - lit if change.lost.keys().isdisjoint(link.switches))
    change.unlit |= {link: f"{link}: no light" for link in obeyed}
    return lit


async def _switch_one(session: Session, name: str, change: Change) -> Switched | None:
    """Switch one unit; what fails is told in `change.failures`."""
    wanted = session.bench.topology.matching(change.wanted, name)
    began_ns = session.bench.clock.now_ns()
    try:
        switched = await session.bench.switches[name].switch(wanted)
    except DriverError as fault:
        change.lost[name] = f"{name}: {str(fault).removeprefix(f'{name}: ')}"
        change.failures[name] = change.lost[name]
        change.device_ns = max(change.device_ns, session.bench.clock.now_ns() - began_ns)
        return None
    if switched.dark:
        change.failures[name] = f"{name}: {switched.dark}"
        change.dark[name] = frozenset(switched.dark.ports)
    return switched


def _is_lit(link: Link, names: Sequence[str], done: Mapping[str, Switched]) -> bool:
    """Tell whether a link may carry traffic, as far as those of its switches know that were asked.

    A link that comes up has only such.
    """
    asked = [(switch, egress) for switch, (_, egress) in link.circuits if switch in names]
    if not done.keys() >= {switch for switch, _ in asked}:
        return False
    return all((dark := done[s].dark) is None or egress not in dark.ports for s, egress in asked)


def _stamp_devices(change: Change, moved: Sequence[Switched]) -> None:
    """Stamp the first command, the last completion; charge the device wait of the last unit."""
    if not moved:
        return
    change.stamps["command_sent"] = min(one.applied.sent_ns for one in moved)
    change.stamps["device_acknowledged"] = max(one.applied.acknowledged_ns for one in moved)
    change.stamps["device_done"] = max(one.applied.done_ns for one in moved)
    lights = [one.light_ns for one in moved if one.light_ns is not None]
    if len(lights) == len(moved):
        change.stamps["light"] = max(lights)
    last = max(moved, key=lambda one: one.light_ns or one.applied.done_ns)
    change.device_ns = max(change.device_ns, last.device_ns)


async def _verify(
    session: Session, change: Change, healthy: frozenset[Link], hearing: asyncio.Task[Verdict]
) -> frozenset[Link]:
    """Wait until every moved link's far ends are heard; return the links that may carry traffic.

    Where a switch failed, only what it does not carry is waited for.
    """
    started_ns = session.bench.clock.now_ns()
    if healthy == change.wanted:
        heard, _ = await asyncio.wait({hearing}, timeout=HEAR_NS / NS_PER_S)
        verdict = hearing.result() if heard else await hear(session, change.moved, started_ns, 0)
    else:
        verdict = await hear(session, healthy - change.kept, started_ns)
    if verdict.heard_ns:
        # A power meter averages: packets may cross before it shows light. Verified is both.
        change.stamps["path_verified"] = max(*verdict.heard_ns, started_ns)
        change.link_ns = max(0, max(verdict.heard_ns) - started_ns)
    change.unlit |= {link: f"{link}: {reason}" for link, reason in verdict.wrong.items()}
    for name, reasons in _by_name(verdict.wrong).items():
        change.failures[name] = f"{name}: {'; '.join(reasons)}; it stays electrical"
    return healthy - frozenset(verdict.wrong)


def _by_name(wrong: Mapping[Link, str]) -> dict[str, list[str]]:
    """Return the reasons by the links' name, which links side by side share."""
    reasons: dict[str, list[str]] = {}
    for link, reason in sorted(wrong.items()):
        reasons.setdefault(str(link), []).append(reason)
    return reasons
