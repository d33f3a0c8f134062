"""Circuits that change beside the traffic, and what of the fabric is sound. One change at a time.

Traffic never waits for a circuit. It is steered off those that move before they go dark, goes on
over what is left, and is steered onto the new ones once their light and their far end are seen.
What fails stays electrical, is told, and is not planned with again; the run goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from drivers.errors import DriverError
from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import SteeringFailed
from harness.fabric.blame import blamed
from harness.fabric.circuits import Plan
from harness.fabric.links import Link
from harness.model.fabric_rules import Arm
from harness.run.change import Change, listen, moving, prepare, switch_over
from harness.run.fabric.told import change_row, failed_row, part_row
from harness.run.hearing import hear
from harness.run.session import Session
from harness.tasks import beside

GUARD_NS = 100 * NS_PER_MS
"""Between two looks at the circuits that carry traffic."""
SILENCE_NS = 400 * NS_PER_MS
"""A circuit through which nobody was heard for so long carries nothing: many beacons in a row."""
AGAIN_NS = 5 * NS_PER_S
"""After which a switch that failed is asked whether it is there again."""
STEER_NS = NS_PER_MS
"""What steering takes before any was measured."""


@dataclass
class Circuits:
    """The fabric's state in one arm: what is lit is `session.lit`."""

    session: Session
    arm: Arm
    number: int
    broken: dict[str, str] = field(default_factory=dict)
    """Parts and switches that are not planned with, and why."""
    unsteered: dict[str, str] = field(default_factory=dict)
    """ToRs that did not take their routes, and why: what leads over them stays as it is."""
    changed_ns: int | None = None
    """When the last change ended."""
    epoch: int = 0
    """Counts changes: what was heard before one says nothing after it."""
    steer_ns: float = STEER_NS
    """What steering takes, away and back together, as measured last."""

    def __post_init__(self) -> None:
        """Nobody changes anything yet."""
        self.clock = self.session.bench.clock
        self.changing = asyncio.Lock()
        self._lost_ns: dict[str, int] = {}

    async def change(self, kind: str, plan: Plan) -> None:
        """Bring a plan up beside the traffic, and account for what came of it."""
        async with self.changing:
            session, begin_ns = self.session, self.clock.now_ns()
            names = moving(session, plan)
            settle_ns = round(session.scenario.fabric.settle_ms * NS_PER_MS)
            try:
                async with (
                    beside(listen(session, plan)) as hearing,
                    beside(prepare(session, plan, names)) as preparing,
                ):
                    change = await switch_over(
                        session, plan, kind, hearing,
                        preparing=preparing, settle_ns=settle_ns, switches=names,
                    )  # fmt: skip
            except SteeringFailed as refusal:
                await self._stayed(kind, begin_ns, refusal)
            else:
                self._made(kind, change, begin_ns)
            self.epoch += 1
            self.changed_ns = self.clock.now_ns()

    def _made(self, kind: str, change: Change, begin_ns: int) -> None:
        """Tell a change, and what of the fabric it showed to be broken."""
        now_ns = self.clock.now_ns()
        row = change_row(self.session.lit, change, now_ns - begin_ns)
        self._tell("fabric_change", {"kind": kind, **row})
        if (verified_ns := change.stamps.get("path_verified")) and change.moved:
            self.steer_ns = max(0, now_ns - verified_ns) * 2
        for name, reason in change.lost.items():
            self._lost_ns[name] = now_ns
            self._lose(name, reason)
        self._unsteer(change.refused)
        for part, reason in blamed(change.unlit, self.session.lit, change.dark).items():
            self._lose(part, reason)

    async def _stayed(self, kind: str, begin_ns: int, refusal: SteeringFailed) -> None:
        """Go on over the circuits that are up: traffic could not be steered off them."""
        row = failed_row(self.session.lit, self.clock.now_ns() - begin_ns, str(refusal))
        self._tell("fabric_change", {"kind": kind, **row})
        self._unsteer(refusal.failures)
        with suppress(SteeringFailed):  # those who refuse do as they did before
            await self.session.steer(self.session.lit)

    # -- what is watched ------------------------------------------------------------------------

    async def guard(self) -> bool:
        """Look once whether what carries traffic is dark; whether anything was found."""
        await self.clock.sleep_ns(GUARD_NS)
        if self.changing.locked():
            return False
        found = await self._ask_lost()
        if not self.session.lit:
            return found
        epoch, lit = self.epoch, self.session.lit
        verdict = await hear(self.session, lit, self.clock.now_ns(), SILENCE_NS)
        if not verdict.wrong or epoch != self.epoch or self.changing.locked():
            return found
        async with self.changing:
            await self._went_dark(verdict.wrong)
        return True

    async def _went_dark(self, wrong: Mapping[Link, str]) -> None:
        """Steer off circuits that went dark by themselves; what is at fault is not used again."""
        left = self.session.lit - wrong.keys()
        try:
            await self.session.steer(left)
        except SteeringFailed as refusal:
            self._unsteer(refusal.failures)
            self.session.lit = left
        self.epoch += 1
        for part, reason in blamed(wrong, left, {}).items():
            self._lose(part, f"went dark: {reason}")

    async def _ask_lost(self) -> bool:
        """Ask switches that failed whether they are there again; whether one is."""
        found = False
        for name, since_ns in list(self._lost_ns.items()):
            if self.clock.now_ns() - since_ns < AGAIN_NS:
                continue
            self._lost_ns[name] = self.clock.now_ns()
            try:
                await self.session.bench.switches[name].read()
            except DriverError:
                continue
            del self._lost_ns[name], self.broken[name]
            self._tell("fabric_part", part_row(name, "back", "it answers again"))
            found = True
        return found

    # -- what is told ---------------------------------------------------------------------------

    def _lose(self, part: str, reason: str) -> None:
        """Plan with this no more."""
        if part not in self.broken:
            self.broken[part] = reason
            self._tell("fabric_part", part_row(part, "broken", reason))

    def _unsteer(self, failures: Mapping[str, str]) -> None:
        """Leave ToRs that do not steer as they are."""
        for tor, reason in failures.items():
            if tor not in self.unsteered:
                self.unsteered[tor] = reason
                self._tell("fabric_part", part_row(tor, "unsteered", reason))

    def _tell(self, stream: str, row: Mapping[str, object]) -> None:
        whose = {"step": self.number, "policy": str(self.arm)}
        self.session.record.event(stream, whose | dict(row))
