"""The reconfigure step: change shape under traffic, again and again, every stage stamped.

Drain, steer to the electrical path, switch, verify, steer back, resume. With `ride_through` the
traffic is neither drained nor steered away first, which shows what that costs.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace

from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import HarnessError, InfrastructureError, StepFailed
from harness.model.scenario import Reconfigure
from harness.model.sizes import parse_size
from harness.model.streams import STAGES
from harness.run.change import Change, listen, moving, prepare, switch_over
from harness.run.hearing import Watch, beacons_off, beacons_on, dark_ns, lost_on, uplinks_of
from harness.run.session import MESSAGE_NS, Session
from harness.run.stages import Breakdown, Waits, breakdown, in_order
from harness.tasks import beside
from harness.wire.messages import (
    Beacons,
    Done,
    EndTraffic,
    Held,
    Hold,
    Quiesced,
    Resume,
    Resumed,
    StartTraffic,
    StopAt,
    TrafficSoFar,
    TrafficTimes,
)

ANY_PCT = 1e9
"""`within_pct` where the new shape may be slower than the old: steady at the first iteration."""


ACCOUNTS = tuple(account.name for account in fields(Breakdown))


async def reconfigure(session: Session, step: Reconfigure, number: int) -> None:
    """Run the step; raises `InfrastructureError` when a change failed, after traffic went on."""
    await session.ensure_groups(session.subgroups)
    timeout_ns = round(step.timeout_s * NS_PER_S)
    await session.everyone(
        StartTraffic(
            op=step.op,
            size_bytes=parse_size(step.size),
            dtype=step.dtype,
            timeout_ns=timeout_ns,
        ),
        Done,
        timeout_ns,
    )
    for index in range(step.count):
        await session.bench.clock.sleep_ns(round(step.rest_ms * NS_PER_MS))
        shape = step.shapes[index % len(step.shapes)]
        if reason := refusal(session, step, shape):
            session.record.event("reconfigure", refused(session, number, index, shape, reason))
            continue
        change = await _Once(session, step, shape).run(number, index)
        if change.failures:
            await drain(session, timeout_ns)
            await session.everyone(EndTraffic(), Done, MESSAGE_NS)
            raise InfrastructureError("; ".join(change.failures.values()))
    await drain(session, timeout_ns)
    await session.everyone(EndTraffic(), Done, MESSAGE_NS)


def refusal(session: Session, step: Reconfigure, shape: str) -> str:
    """Return why a change to `shape` is not made, or "": it is up, or darker than pays."""
    wanted = session.plans[shape].links
    if wanted == session.lit:
        return f"{shape} is up already"
    names = moving(session, session.plans[shape])
    slowest_ns = max((session.bench.switches[name].typical_switch_ns for name in names), default=0)
    if step.window_ms and slowest_ns > step.window_ms * NS_PER_MS:
        return f"switching takes {slowest_ns / NS_PER_MS:g} ms, the window is {step.window_ms:g} ms"
    return ""


@dataclass
class _Once:
    """One reconfiguration under way: its stamps, and what was waited for."""

    session: Session
    step: Reconfigure
    shape: str
    stamps: dict[str, int | None] = field(default_factory=dict)
    waits: Waits = field(default_factory=Waits)

    async def run(self, number: int, index: int) -> Change:
        """Go from beacons on to beacons off; what happened is recorded."""
        session, step = self.session, self.step
        before, plan = session.shape, session.plans[self.shape]
        reference_ns = await _iteration_ns(session)
        watch = await beacons_on(session, uplinks_of(session.lit | plan.links))
        intent_ns = self._stamp("intent")
        drains = not step.ride_through
        async with (
            beside(listen(session, plan)) as hearing,
            beside(prepare(session, plan)) as preparing,
        ):
            if drains:
                await self._quiet(intent_ns)
            change = await switch_over(
                session, plan, self.shape, hearing, preparing=preparing, steer_first=drains
            )
        self.stamps |= change.stamps
        self._waited(device_ns=change.device_ns, link_ns=change.link_ns)
        try:
            await self._resume(change, reference_ns)
        except HarnessError as error:
            if change.failures:  # where it began, which no row will tell
                raise InfrastructureError("; ".join([*change.failures.values(), str(error)])) from (
                    error
                )
            raise
        heard = await beacons_off(session, watch)
        row = {"step": number, "index": index, "path_from": before, "path_to": session.shape}
        row |= {"mode": "ride_through" if step.ride_through else "drain", "groups": step.groups}
        row |= _accounts(session, self.stamps, self.waits) | _beacons(change, watch, heard)
        session.record.event("reconfigure", row)
        return change

    def _stamp(self, stage: str) -> int:
        now_ns = self.stamps[stage] = self.session.bench.clock.now_ns()
        return now_ns

    def _waited(self, **spans_ns: int) -> None:
        """Add to the spans of waiting for others."""
        sums = {name: getattr(self.waits, name) + span for name, span in spans_ns.items()}
        self.waits = replace(self.waits, **sums)

    async def _quiet(self, intent_ns: int) -> None:
        """Drain the traffic and, where communicators are to be made anew, destroy them."""
        session = self.session
        last_good_ns = await drain(session, round(self.step.timeout_s * NS_PER_S))
        quiesced_ns = self._stamp("quiesced")
        self._waited(drain_ns=max(0, last_good_ns - intent_ns))
        if self.step.groups == "rebuild":
            destroyed_ns = self.stamps["groups_destroyed"] = await session.destroy_groups()
            self._waited(groups_ns=max(0, destroyed_ns - quiesced_ns))

    async def _resume(self, change: Change, reference_ns: int) -> None:
        """Make communicators anew where asked, let the traffic go on, wait until it is steady."""
        session, step = self.session, self.step
        if step.groups == "rebuild" and not step.ride_through:
            asked_ns = session.bench.clock.now_ns()
            ready_ns = self.stamps["groups_ready"] = await session.make_groups(session.subgroups)
            self._waited(groups_ns=max(0, ready_ns - asked_ns))
        slower = bool(change.failures) or len(session.lit) < len(change.before)
        resumed = await session.everyone(
            Resume(
                reference_ns=reference_ns,
                within_pct=ANY_PCT if slower else step.steady_within_pct,
                watch_only=step.ride_through,
            ),
            Resumed,
            round(step.timeout_s * NS_PER_S),
        )

        def mapped(name: str) -> list[int]:
            return [
                session.at(agent, t_ns) if t_ns else 0
                for agent, answer in resumed.items()
                for t_ns in getattr(answer, name).values()
            ]

        if all(mapped("first_good_ns")):
            self.stamps["first_good"] = max(mapped("first_good_ns"))
        if all(mapped("steady_ns")):
            steady_ns = self.stamps["steady"] = max(mapped("steady_ns"))
            self._waited(traffic_ns=max(0, steady_ns - max(mapped("released_ns"))))


async def drain(session: Session, timeout_ns: int) -> int:
    """Let every rank stand still after the same iteration; return the end of the last one, mapped.

    Two rounds: *hold* answers at once with what each rank has entered; a collective that any rank
    has entered must be finished by all, so the largest of these is where everyone stops. Without
    the first round a rank could stop before an iteration that another is already waiting in.
    """
    held = await session.everyone(Hold(), Held, MESSAGE_NS)
    last = max(entered for answer in held.values() for entered in answer.entered.values())
    quiet = await session.everyone(StopAt(iteration=last), Quiesced, timeout_ns)
    return max(
        session.at(agent, t_ns)
        for agent, answer in quiet.items()
        for t_ns in answer.last_good_ns.values()
    )


async def _iteration_ns(session: Session) -> int:
    """Return the median duration of the last iterations: what steady is measured against."""
    recent = await session.everyone(TrafficSoFar(), TrafficTimes, MESSAGE_NS)
    times = [t for answer in recent.values() for row in answer.times_ns.values() for t in row]
    if not times:
        raise StepFailed("traffic: no iteration was completed before the reconfiguration")
    return round(statistics.median(times))


def _accounts(
    session: Session, stamps: Mapping[str, int | None], waits: Waits
) -> dict[str, object]:
    """Return the stamps and where the time went; null where it never became steady."""
    if early := in_order(stamps, session.bound_ns()):
        text = f"stamps earlier than the clock bound allows: {', '.join(early)}"
        session.record.event("note", {"level": "warning", "who": "clock", "text": text})
    parts = asdict(breakdown(stamps, waits)) if stamps.get("steady") else dict.fromkeys(ACCOUNTS)
    return {"stages": {name: stamps.get(name) for name in STAGES}} | parts


def _beacons(change: Change, watch: Watch, heard: Mapping[str, Beacons]) -> dict[str, object]:
    """Return what was seen from outside: dark time, circuits moved and kept, losses."""
    dark = dark_ns(heard, change.moved)
    return {
        "dark_ms": None if dark is None else dark / NS_PER_MS,
        "dark_plus_minus_ms": None if dark is None else watch.interval_ns / NS_PER_MS,
        "moved": len(change.moved),
        "kept": len(change.kept),
        "kept_lost": lost_on(heard, change.kept) if heard and change.kept else None,
        "refused_reason": "",
        "error": "; ".join(change.failures.values()),
    }


def refused(
    session: Session, number: int, index: int, shape: str, reason: str
) -> dict[str, object]:
    """Return the row of a reconfiguration that was not made."""
    return {
        "step": number,
        "index": index,
        "path_from": session.shape,
        "path_to": shape,
        "mode": "refused",
        "groups": "keep",
        "stages": dict.fromkeys(STAGES),
        **dict.fromkeys(ACCOUNTS),
        "dark_ms": None,
        "dark_plus_minus_ms": None,
        "moved": 0,
        "kept": len(session.lit),
        "kept_lost": None,
        "refused_reason": reason,
        "error": "",
    }
