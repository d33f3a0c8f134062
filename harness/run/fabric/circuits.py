"""Circuits that change beside the traffic, and what of the fabric is sound. One change at a time.

Traffic never waits for a circuit. It is steered off those that move before they go dark, goes on
over what is left, and is steered onto the new ones once their light and their far end are seen.
What fails stays electrical, is told, and is not planned with again; the run goes on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median_low

from drivers.base import Circuit, Matching
from drivers.errors import DriverError
from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import SteeringFailed
from harness.fabric.blame import blamed
from harness.fabric.decision import Links, Settings, circuits_of, needed_ns
from harness.fabric.links import DARK, Link, Plan
from harness.fabric.refusals import sound
from harness.model.fabric_rules import Arm
from harness.run.change import Change, listen, moving, prepare, switch_over
from harness.run.fabric.faults import Faults
from harness.run.fabric.told import change_row, failed_row, part_row
from harness.run.hearing import hear
from harness.run.session import Session
from harness.tasks import beside

GUARD_NS = 100 * NS_PER_MS
"""Between two looks at the circuits that carry traffic, and at those who failed."""
SILENCE_NS = 400 * NS_PER_MS
"""A circuit through which nobody was heard for so long carries nothing: many beacons in a row."""
READ_NS = NS_PER_S
"""A switch that does not tell its map for so long is taken for lost. Also between two looks at it,
where no agents on ToRs tell whom they hear."""
STEER_NS = NS_PER_MS
"""What a change takes beside its light, before any was measured."""
CHANGES_KEPT = 5
"""Of which the median is believed: one that met a busy moment must not end all changes."""


@dataclass
class Circuits:
    """The fabric's state in one arm: what is lit is `session.lit`."""

    session: Session
    arm: Arm
    number: int
    faults: Faults = field(default_factory=Faults)
    changed_ns: int | None = None
    """When the last change ended."""

    def __post_init__(self) -> None:
        """Nobody changes anything yet."""
        self.clock, self.topology = self.session.bench.clock, self.session.bench.topology
        self.changing = asyncio.Lock()
        self._epoch = 0  # counts changes: a look that began before some of them is old
        self._mapped_ns = -READ_NS
        self._touched: set[str] = set()
        self._beside_ns = deque([STEER_NS], CHANGES_KEPT)

    @property
    def steer_ns(self) -> int:
        """What a change takes beside settling, switching and hold, as measured."""
        return median_low(self._beside_ns)

    @property
    def held(self) -> Links:
        """Links that must stay, for ToRs that refused send over them."""
        return self.session.lit & self.faults.led_over

    async def change(self, kind: str, plan: Plan) -> None:
        """Bring what is sound of a plan up beside the traffic, and account for what came of it."""
        async with self.changing:
            links = sound(self.topology, plan.links, self.faults.broken)
            if links != self.session.lit:
                sound_plan = Plan(links, plan.unserved)
                await self._change(kind, sound_plan, moving(self.session, sound_plan))

    async def take_down(self) -> None:
        """Send all traffic the electrical path; what was lit goes dark, wherever it still is.

        A switch that is lost is left to whoever gives switches back.
        """
        async with self.changing:
            if self._touched:
                await self._change("end", DARK, self._touched - self.faults.broken.keys())

    async def _change(self, kind: str, plan: Plan, names: Collection[str]) -> None:
        session, before, begin_ns = self.session, self.session.lit, self.clock.now_ns()
        async with (
            beside(listen(session, plan)) as hearing,
            beside(prepare(session, plan, names)) as preparing,
        ):
            try:
                left_ns = await self._leave(before & plan.links)
            except SteeringFailed as refusal:
                await self._stayed(kind, begin_ns, refusal)
            else:
                self._touched |= {*names}
                change = await switch_over(
                    session, plan, kind, hearing,
                    preparing=preparing, steer_first=False, switches=names,
                )  # fmt: skip
                change.stamps["steered_away"] = left_ns
                self._made(kind, change, before, begin_ns)
        self._epoch += 1
        self.changed_ns = self.clock.now_ns()

    async def _leave(self, links: Links) -> int | None:
        """Steer off all but `links`, and let what is under way there get out; return when it left.

        Raises `SteeringFailed` where a ToR goes on sending over others.
        """
        if self.session.lit | self.faults.led_over <= links:
            return None
        await self._steer(links)
        left_ns = self.clock.now_ns()
        await self.clock.sleep_ns(round(self.session.scenario.fabric.settle_ms * NS_PER_MS))
        return left_ns

    async def _steer(self, links: Links) -> None:
        """Send traffic over `links`; ToRs that refused before, and send over no others, may again.

        Raises `SteeringFailed`.
        """
        lit = self.session.lit
        try:
            await self.session.steer(links)
        except SteeringFailed as refusal:
            self._unsteer(refusal.failures, lit)
            if not all(self.faults.may_refuse(tor, links) for tor in refusal.failures):
                raise
            self.session.lit = links

    def _made(self, kind: str, change: Change, before: Links, begin_ns: int) -> None:
        """Tell a change, and what of the fabric it showed to be broken."""
        took_ns = self.clock.now_ns() - begin_ns
        row = change_row(self.session.lit, change, took_ns)
        self.tell("fabric_change", {"kind": kind, **row})
        if change.moved and not change.failures:
            settings = Settings.of(self.session.scenario.fabric)
            light_ns = needed_ns(self.topology, before, change.wanted, settings)
            self._beside_ns.append(max(0, took_ns - round(light_ns)))
        for name, reason in change.lost.items():
            self._lose_switch(name, reason)
        # what a ToR took before it was out of reach, nobody knows: it may send over new ones
        self._unsteer(change.refused, change.kept | self.session.lit)
        for part, reason in blamed(change.unlit, self.session.lit, change.dark).items():
            self._lose(part, reason)

    async def _stayed(self, kind: str, begin_ns: int, refusal: SteeringFailed) -> None:
        """Go on over the circuits that are up: traffic could not be steered off them."""
        row = failed_row(self.session.lit, self.clock.now_ns() - begin_ns, str(refusal))
        self.tell("fabric_change", {"kind": kind, **row})
        with suppress(SteeringFailed):  # those who refuse do as they did before
            await self._steer(self.session.lit)

    # -- what is watched ------------------------------------------------------------------------

    async def guard(self) -> bool:
        """Look once whether what carries traffic is dark; whether anything was found.

        Also while a change is under way: what stays lit in it must not be forgotten.
        """
        await self.clock.sleep_ns(GUARD_NS)
        epoch, lit = self._epoch, self.session.lit
        if not lit:
            return False
        verdict = await hear(self.session, lit, self.clock.now_ns(), SILENCE_NS)
        found = {**verdict.wrong, **await self._unmapped(lit)}
        if not found:
            return False
        async with self.changing:
            # after one change, what is still lit was not touched by it; after two it may have been
            wrong = {link: why for link, why in found.items() if link in self.session.lit}
            if not wrong or self._epoch > epoch + 1:
                return False
            await self._went_dark(wrong)
        return True

    async def _unmapped(self, lit: Links) -> dict[Link, str]:
        """Return which links their switches carry no more, of those whose ends nobody can hear.

        A switch that does not answer may well go on: its light needs nobody who commands it.
        """
        now_ns, watched = self.clock.now_ns(), {*self.session.watchers}
        unheard = [link for link in lit if not {link.a.tor, link.b.tor} <= watched]
        if not unheard or now_ns < self._mapped_ns + READ_NS:
            return {}
        self._mapped_ns = now_ns
        names = sorted({name for link in unheard for name in link.switches})
        read = dict(zip(names, await asyncio.gather(*map(self._map_of, names)), strict=True))
        maps = {name: found.circuits for name, found in read.items() if isinstance(found, Matching)}
        return {
            link: f"{link} is gone from the map of {name}"
            for link in unheard
            for name, circuit in link.circuits
            if name in maps and circuit not in maps[name]
        }

    async def _went_dark(self, wrong: Mapping[Link, str]) -> None:
        """Steer off circuits that went dark by themselves; what is at fault is not used again."""
        left = self.session.lit - wrong.keys()
        try:
            await self._steer(left)
        except SteeringFailed:
            self.session.lit = left
        circuits = circuits_of(frozenset(wrong))
        names = sorted({switch for switch, _ in circuits})
        asked = (self._fault_of(name, {c for at, c in circuits if at == name}) for name in names)
        faults = zip(names, await asyncio.gather(*asked), strict=True)
        lost = {name: reason for name, reason in faults if reason}
        for name, reason in lost.items():
            self._lose_switch(name, reason)
        unlit = {link: why for link, why in wrong.items() if lost.keys().isdisjoint(link.switches)}
        for part, reason in blamed(unlit, left, {}).items():
            self._lose(part, f"went dark: {reason}")

    async def _fault_of(self, name: str, circuits: Collection[Circuit]) -> str:
        """Return why a switch does not carry these circuits, as far as it knows, or ""."""
        there = await self._map_of(name)
        if isinstance(there, str):
            return there
        lacking = len({*circuits} - there.circuits)
        return f"{name}: {lacking} circuits that were made are gone from its map" * bool(lacking)

    async def _map_of(self, name: str) -> Matching | str:
        """Return the map of a switch, or why it does not tell it."""
        try:
            async with asyncio.timeout(READ_NS / NS_PER_S):
                return await self.session.bench.switches[name].read()
        except TimeoutError:
            return f"{name}: it does not answer"
        except DriverError as fault:
            return f"{name}: {str(fault).removeprefix(f'{name}: ')}"

    async def ask(self) -> bool:
        """Ask switches and ToRs that failed, when it is time; whether one is there again."""
        await self.clock.sleep_ns(GUARD_NS)
        found = False
        for name in self.faults.to_ask(self.clock.now_ns()):
            is_switch = name in self.session.bench.switches
            if await (self._fault_of(name, ()) if is_switch else self._refuses(name)):
                self.faults.failed(name, self.clock.now_ns())
                continue
            self.faults.back(name)
            self.tell("fabric_part", part_row(name, "back", "it does as it is told again"))
            found = True
        return found

    async def _refuses(self, tor: str) -> bool:
        """Steer a ToR to what is lit, as all others are; whether it refuses again."""
        async with self.changing:
            routes = self.topology.routes(self.session.lit)[tor]
            try:
                await self.session.bench.steer({tor: routes})
            except SteeringFailed:
                return True
        return False

    # -- what is told ---------------------------------------------------------------------------

    def _lose(self, part: str, reason: str) -> None:
        """Plan with this no more."""
        if part not in self.faults.broken:
            self.faults.broken[part] = reason
            self.tell("fabric_part", part_row(part, "broken", reason))

    def _lose_switch(self, name: str, reason: str) -> None:
        """Plan with a switch no more, until it answers."""
        self._lose(name, reason)
        self.faults.failed(name, self.clock.now_ns())

    def _unsteer(self, failures: Mapping[str, str], lit: Links) -> None:
        """Leave ToRs that do not steer as they are: over what is `lit`."""
        for tor in self.faults.unsteer(failures, lit, self.clock.now_ns()):
            self.tell("fabric_part", part_row(tor, "unsteered", failures[tor]))

    def tell(self, stream: str, row: Mapping[str, object]) -> None:
        """Record a row of this arm."""
        whose = {"step": self.number, "policy": str(self.arm)}
        self.session.record.event(stream, whose | dict(row))
