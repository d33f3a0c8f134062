"""The fabric's controller: told of the work to come, it decides which circuits are to carry it.

A step's traffic is announced as a whole: the communications of training, the gathering of new
weights, their way to the engines. By that a course is set: which circuits from which communication
on. Where one begins, the change is weighed again with what is known then; the newest decision
replaces one that has not begun, and one whose window is over is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise

from harness.clock import NS_PER_MS, NS_PER_S
from harness.fabric.blame import parts_of
from harness.fabric.course import Course, Segment, course
from harness.fabric.decision import Decision, Settings, decide, still_pays
from harness.fabric.demand import Comm, Demand, total
from harness.fabric.links import Plan
from harness.fabric.planner import plan_demand
from harness.fabric.refusals import sound
from harness.fabric.windows import Window
from harness.model.fabric_rules import CIRCUITS, Arm
from harness.run.fabric.ahead import Ahead
from harness.run.fabric.circuits import Circuits
from harness.run.fabric.history import History
from harness.run.fabric.told import decision_row, part_row, traffic_row
from harness.run.fabric.traffic import ELECTRICAL, Crossed, Meter, Part
from harness.run.hearing import beacons_off, beacons_on
from harness.run.session import Session
from harness.tasks import to_the_end, together

STEPS_AHEAD = 4
"""Over which a change that leads to and fro is weighed."""
SETTLED_NS = 5 * NS_PER_S
"""For circuits without which traffic gets nowhere; then it begins all the same."""
BEACONS_NS = 5 * NS_PER_MS
"""Between two beacons on an uplink: how late a far end may be seen. They cost the nodes' cores."""
NOWHERE = Course((), 0.0, 0.0, 0.0)


@dataclass
class Controller:
    """Decides for one arm; `expect`, `reached` and `during` tell it what happens."""

    session: Session
    arm: Arm
    number: int
    history: History = field(default_factory=History)

    def __post_init__(self) -> None:
        """Begin with nothing ahead."""
        self.clock = self.session.bench.clock
        self.topology = self.session.bench.topology
        self.circuits = Circuits(self.session, self.arm, self.number)
        self.meter = Meter(self.session)
        self._ahead: Ahead | None = None
        self._decided: tuple[Demand, Decision] | None = None
        self._changing = self._unweighed = self._tended = False
        self._static: tuple[object, Plan] | None = None
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._ended: tuple[str, int] | None = None

    @classmethod
    @asynccontextmanager
    async def opened(cls, session: Session, arm: Arm, number: int) -> AsyncIterator[Controller]:
        """Watch all uplinks while the body runs; then take the circuits down.

        Arms without circuits of their own follow nothing.
        """
        controller = cls(session, arm, number)
        if not controller.follows:
            yield controller
            return
        watch = await beacons_on(session, controller.topology.uplinks, BEACONS_NS)
        try:
            yield controller
        finally:
            controller._ahead = controller._decided = None
            try:
                await to_the_end(controller.circuits.take_down())
            finally:
                await beacons_off(session, watch)

    @property
    def follows(self) -> bool:
        """Whether it has circuits to light."""
        return self.arm.fabric in CIRCUITS

    # -- what it is told ------------------------------------------------------------------------

    def expect(self, parts: Sequence[Part]) -> None:
        """Announce a step's traffic, in the order in which it comes."""
        parts = tuple(self.history.corrected(part) for part in parts if part.comms)
        if not self.follows or not parts:
            return
        due_ns, first = None, parts[0]
        if self._ended is not None:
            ended, at_ns = self._ended
            window = self.history.window(ended, first.kind)
            if window.seen:
                due_ns = at_ns + round(window.ns + first.comms[0].gap_ns)
        later = (self._after(before.kind, part) for before, part in pairwise(parts))
        self._ahead = Ahead((first, *later), NOWHERE, 0, due_ns)
        self._again()

    def _after(self, before: str, part: Part) -> Part:
        """Return a part whose first gap holds also the window before it."""
        first, *others = part.comms
        window = self.history.window(before, part.kind)
        first = first._replace(gap_ns=first.gap_ns + window.ns)
        return part._replace(comms=(first, *others))

    def reached(self, kind: str, number: int = 0) -> None:
        """All that was announced before this communication of this kind has ended."""
        ahead = self._ahead
        at = ahead.place_of(kind, number) if ahead else None
        if ahead is None or at is None or at <= ahead.at:
            return
        due_ns = self.clock.now_ns() + round(ahead.comms[at].gap_ns)
        was, self._ahead = ahead.segment, ahead._replace(at=at, due_ns=due_ns)
        if self._ahead.segment != was:
            self._decide(self.clock.now_ns())

    @asynccontextmanager
    async def during(self, part: Part) -> AsyncIterator[None]:
        """Traffic that was announced is under way while the body runs; what crosses is counted."""
        await self._read()
        if self.topology.cut:  # what has no circuit yet would get nowhere
            await self.settled(SETTLED_NS)
        begin_ns = self.clock.now_ns()
        if self._ended is not None:
            ended, at_ns = self._ended
            self.history.waited(ended, part.kind, begin_ns - at_ns)
            self._ended = None
        if self._ahead is not None and self._ahead.kind == part.kind:
            gap_ns = round(part.comms[0].gap_ns) if part.comms else 0
            self._ahead = self._ahead._replace(due_ns=begin_ns + gap_ns)
        yield
        end_ns = self.clock.now_ns()
        self._ended = (part.kind, end_ns)
        await self._count(part, end_ns - begin_ns)

    async def _count(self, part: Part, took_ns: int) -> None:
        """Tell what crossed beside what was announced, and remember it for the next time."""
        crossed = await self._read()
        announced = total(self.topology, _whole(part.comms), part.kind)
        if crossed is not None:
            self.history.crossed(announced, crossed)
        row = traffic_row(part.kind, announced.total_bytes, crossed, took_ns)
        self.circuits.tell("fabric_traffic", row)

    async def _read(self) -> Crossed | None:
        """Return what crossed; plan anew where an electrical link went down, or is up again."""
        crossed, known = await self.meter.read(), self.topology.cut
        if self.follows and self.meter.cut != known:
            self.topology = replace(self.topology, cut=self.meter.cut)
            for tor in sorted(self.meter.cut ^ known):
                part, is_cut = f"{tor}:{ELECTRICAL}", tor in self.meter.cut
                why = "no link: what the ToR sends and gets needs circuits" if is_cut else "a link"
                row = part_row(part, "broken" if is_cut else "back", why)
                self.circuits.tell("fabric_part", row)
            self._again()
        return crossed

    async def settled(self, limit_ns: int) -> bool:
        """Wait until no change is decided or under way; whether that came about in time.

        Before `tend` runs, nobody carries anything out.
        """
        if not self._tended:
            return True
        try:
            async with asyncio.timeout(limit_ns / NS_PER_S):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    # -- what it decides ------------------------------------------------------------------------

    def _course(self, ahead: Ahead) -> Course:
        """Set the course from here on; in the arm ``static`` one plan carries all of all steps."""
        if self.arm.fabric == "static":
            return replace(NOWHERE, segments=(Segment(ahead.at, self._static_plan(ahead)),))
        found = course(
            self.topology,
            self.session.lit,
            ahead.left(self.clock.now_ns()),
            lambda demand, _: self._plan(demand),
            settings=self._settings(),
            broken=self.circuits.faults.broken,
            steps=STEPS_AHEAD,
        )
        segments = tuple(Segment(ahead.at + first, plan) for first, plan in found.segments)
        return replace(found, segments=segments)

    def _static_plan(self, ahead: Ahead) -> Plan:
        """Return the scenario's shape, or one plan for a step: anew only where something broke."""
        faults, shape = self.circuits.faults, self.session.scenario.fabric.static
        key = faults.names | self.topology.cut, tuple(part.kind for part in ahead.parts)
        if self._static is None or self._static[0] != key:
            if shape:
                links = sound(self.topology, self.session.plans[shape].links, faults.broken)
                plan = Plan(links, self.session.plans[shape].unserved)
            else:
                plan = self._plan(total(self.topology, _whole(ahead.comms), "step"))
            self._static = key, plan
        return self._static[1]

    def _plan(self, demand: Demand) -> Plan:
        """Plan without what is broken; over a ToR that cannot be steered all stays as it is."""
        held, faults = self.circuits.held, self.circuits.faults
        stiff = (str(up) for up in self.topology.uplinks if up.tor in faults.unsteered)
        taken = (str(part) for link in held for part in parts_of(link))
        plan = plan_demand(
            self.topology,
            demand.sent_bytes + self.history.unannounced_bytes,
            lit=self.session.lit,
            broken=frozenset({*faults.broken, *stiff, *taken}),
        )
        return Plan(plan.links | held, plan.unserved)

    def _settings(self) -> Settings:
        waits = not self.topology.is_steered
        return Settings.of(self.session.scenario.fabric, self.circuits.steer_ns, waits=waits)

    def _decide(self, begin_ns: int) -> None:
        """Weigh what the course says for now, and have it carried out if anything is to be done.

        It has taken since `begin_ns`. While circuits change nobody knows what will be lit: it is
        weighed right after.
        """
        ahead = self._ahead
        if ahead is None:
            return
        if self._changing:
            self._unweighed = True
            return
        demand = total(self.topology, _whole(ahead.rest), ahead.kind)
        decided = self._weighed(ahead, demand)
        self._tell(demand, decided, self.clock.now_ns() - begin_ns)
        self._decided = None
        if decided.action in ("change", "electrical") and decided.plan.links != self.session.lit:
            self._decided = demand, decided
            self._idle.clear()
            self._wake.set()

    def _weighed(self, ahead: Ahead, demand: Demand) -> Decision:
        now_ns, changed_ns = self.clock.now_ns(), self.circuits.changed_ns
        due_ns = ahead.due_ns
        return decide(
            self.topology,
            self.session.lit,
            demand,
            [ahead.plan],
            None if due_ns is None else Window(max(0.0, due_ns - now_ns)),
            settings=self._settings(),
            since_change_ns=None if changed_ns is None else now_ns - changed_ns,
            broken=self.circuits.faults.broken,
            busy=self.circuits.held,
        )

    # -- what it does ---------------------------------------------------------------------------

    async def tend(self) -> None:
        """Carry decisions out, one at a time, as long as the arm lasts."""
        self._tended = self.follows
        while self.follows:
            await self._wake.wait()
            self._wake.clear()
            while self._decided is not None:
                (demand, decided), self._decided = self._decided, None
                await self._commit(demand, decided)
            self._idle.set()

    async def guard(self) -> None:
        """Watch the circuits; plan again when one went dark, or a switch or a ToR is back."""
        if self.follows:
            await together(map(self._watch, (self.circuits.guard, self.circuits.ask)))

    async def _watch(self, look: Callable[[], Awaitable[bool]]) -> None:
        while True:
            if await look():
                self._again()

    async def _commit(self, demand: Demand, decided: Decision) -> None:
        """Make a change, if it still pays; weigh again what that showed, or was told meanwhile."""
        due_ns = self._ahead.due_ns if self._ahead else None
        if due_ns is not None:
            decided = still_pays(decided, due_ns - self.clock.now_ns())
            if decided.action == "dropped":
                return self._tell(demand, decided, None)
        faults = self.circuits.faults.names
        self._changing, self._unweighed = True, False
        await to_the_end(self.circuits.change(demand.name, decided.plan))
        self._changing = False
        if self._unweighed or self.circuits.faults.names != faults:
            self._again()
        return None

    def _again(self) -> None:
        """Set the course anew for what is left of the step, with what of the fabric is left."""
        begin_ns = self.clock.now_ns()
        if self._ahead is not None:
            self._ahead = self._ahead._replace(course=self._course(self._ahead))
            self._decide(begin_ns)

    def _tell(self, demand: Demand, decided: Decision, took_ns: int | None) -> None:
        solve_ms = None if took_ns is None else took_ns / NS_PER_MS
        row = decision_row(demand.name, demand.total_bytes, decided, solve_ms)
        self.circuits.tell("fabric", row)


def _whole(comms: Sequence[Comm]) -> list[Demand]:
    return [comm.whole for comm in comms]
