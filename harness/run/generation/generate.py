"""The generate step: a step of the workload, while layouts are switched and requests are moved.

The fleet is opened by the first such step and stays for the later ones, in the layout that is up.
Requests are fed as others end; while there is still something to be done to them they are
repeated, so that it happens under load. The step ends when every request has ended.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import StepFailed, UsageError
from harness.model.layout import parse_layout
from harness.model.replay import digest_of
from harness.model.scenario import Generate
from harness.run.generation.asked import GenerationAsked
from harness.run.generation.fleet import Fleet
from harness.run.generation.migrate import Migrations
from harness.run.generation.opening import open_fleet
from harness.run.generation.stages import Pace
from harness.run.generation.switch import Made, Switches
from harness.run.session import Session
from harness.scheduling.feed import Feed
from harness.scheduling.migration import Costs, estimates_of
from harness.seeds import seeded
from harness.tasks import beside

WINDOW_NS = 2 * NS_PER_S
"""Before and after a switch: over how much of it the speed is told."""
LOOK_NS = 50 * NS_PER_MS


async def generate(session: Session, step: Generate, number: int) -> None:
    """Run the step. Raises `StepFailed` when tokens were lost or doubled, or no engine is left."""
    asked = session.generation_asked
    if asked is None:
        raise UsageError("a generate step needs the table [generation] in the scenario")
    if session.fleet is None:
        session.fleet = await open_fleet(
            session, asked, stall_s=step.stall_s, stage_timeout_s=step.stage_timeout_s
        )
        session.all_up()
    await _Step(session.fleet, asked, step, number).run()


class _Step:
    """One generate step under way."""

    def __init__(self, fleet: Fleet, asked: GenerationAsked, step: Generate, number: int) -> None:
        self.fleet, self.step, self.number = fleet, step, number
        self.session, self.clock = fleet.session, fleet.session.bench.clock
        self.requests = asked.replay.step(step.workload_step)[: step.requests_max or None]
        self.digest = digest_of(self.requests, asked.replay.block_tokens)
        self.begin_ns = self.clock.now_ns()
        self.feed = Feed(self.requests, number, self.begin_ns)
        self.pace = Pace()
        self.switched = False
        """Whether all switches have been made."""
        estimates = estimates_of(asked.spec.profile, asked.spec.bytes_scale, asked.link_bytes_per_s)
        chance = seeded(self.session.scenario.seed, f"migrations of step {number}")
        self.migrations = Migrations(fleet, step, number, Costs(estimates), chance)
        self.switches = Switches(fleet, step, self.migrations)
        self.preemptions_before = fleet.preemptions
        self.before = replace(fleet.ledger)
        """The sums as they were, for a ledger counts through all steps."""

    async def run(self) -> None:
        """Feed requests and act on them until all have ended; the row is written in any case."""
        if not self.requests:
            raise UsageError(f"the workload has no requests of step {self.step.workload_step}")
        try:
            async with beside(self._look()), beside(self._act()) as acting:
                await self._generate(acting)
        finally:
            self.session.record.event("generated", self._row())
        self._judge()

    # -- requests -------------------------------------------------------------------------

    async def _generate(self, acting: asyncio.Task[None]) -> None:
        """Keep as many requests in flight as are wanted, until all have ended."""
        ledger, wanted = self.fleet.ledger, self.step.in_flight_max or len(self.requests)
        deadline_ns = self.begin_ns + round(self.step.timeout_s * NS_PER_S)
        acting.add_done_callback(lambda _: self.fleet.look())
        while True:
            if acting.done():
                await acting  # for its error
            now_ns, acts = self.clock.now_ns(), not acting.done()
            if now_ns >= deadline_ns:
                raise StepFailed(
                    f"{ledger.open} requests have not ended within the step's timeout_s of "
                    f"{self.step.timeout_s:g} s"
                )
            repeat = acts and ledger.finished > self.before.finished
            self.fleet.add(self.feed.due(wanted - ledger.open, now_ns, repeat=repeat))
            if not ledger.open and self.feed.over and not repeat:
                return
            next_ns = min(self.feed.next_ns(now_ns) or deadline_ns, deadline_ns)
            changed = partial(self._changed, acting, ledger.open, acts)
            await self.fleet.until(changed, next_ns - now_ns)

    def _changed(self, acting: asyncio.Task[None], left: int, acts: bool) -> bool:
        """Whether a request has ended since, or all has been done to them."""
        return self.fleet.ledger.open < left or acting.done() is acts

    # -- what is done to them ---------------------------------------------------------------

    async def _act(self) -> None:
        """Switch and migrate, each at its own pace."""
        async with self.migrations.watched(), beside(self._migrate()) as migrating:
            await self._switch()
            self.switched = True
            await migrating

    async def _switch(self) -> None:
        """Make the switches, with a rest before each; a row tells what became of it."""
        step, layouts = self.step, [parse_layout(text) for text in self.step.layouts]
        rest_ns = rested_ns = round(step.rest_s * NS_PER_S)
        for index in range((step.count or len(layouts)) if layouts else 0):
            await self.clock.sleep_ns(rested_ns)
            made, window_ns = await self.switches.make(layouts[index % len(layouts)]), 0
            try:
                if made.outcome == "switched":
                    window_ns = min(rest_ns, WINDOW_NS)
                    await self.clock.sleep_ns(window_ns)
            finally:
                self.session.record.event(
                    "parallelism", switch_row(self.step, self.number, index, made, self.pace)
                )
            if not any(at.node not in self.fleet.lost for at in self.fleet.places.values()):
                raise StepFailed(f"no instance is left to generate: {made.error}")
            rested_ns = rest_ns - window_ns

    async def _migrate(self) -> None:
        """Move requests, one now and then."""
        for _ in range(self.step.migrations):
            if not await self._move_one():
                self._warn("requests are not moved any more: only one instance is left")
                return

    async def _move_one(self) -> bool:
        """Move a request as soon as one can be; return whether it could, or ever will be."""
        pause_ns = round(self.step.migrate_every_ms * NS_PER_MS)
        while self.fleet.instances > 1 or not self.switched:
            await self.clock.sleep_ns(pause_ns)
            if await self.migrations.move_any():
                return True
            pause_ns = max(pause_ns, LOOK_NS)
        return False

    async def _look(self) -> None:
        """Note how many tokens there are, for the speed around switches."""
        while True:
            self.pace.note(self.clock.now_ns(), self.fleet.ledger.tokens)
            await self.clock.sleep_ns(LOOK_NS)

    # -- what is told -------------------------------------------------------------------------

    def _row(self) -> dict[str, object]:
        """Return what came of the step, by the ledger."""
        took_ns = self.clock.now_ns() - self.begin_ns
        entries = [self.fleet.ledger.entries[id_] for id_ in self.feed.ids]
        tokens = self.fleet.ledger.tokens - self.before.tokens
        return {
            "step": self.number,
            "layout": str(self.fleet.layout),
            "requests": len(entries),
            "finished": sum(entry.state == "finished" for entry in entries),
            "refused": sum(entry.state == "refused" for entry in entries),
            "tokens": tokens,
            "lost": self.fleet.ledger.lost_tokens - self.before.lost_tokens,
            "doubled": self.fleet.ledger.doubled_tokens - self.before.doubled_tokens,
            "took_s": took_ns / NS_PER_S,
            "tokens_per_s": tokens / (took_ns / NS_PER_S) if took_ns else None,
            "preemptions": self.fleet.preemptions - self.preemptions_before,
            "digest": self.digest,
            "responses_digest": self.fleet.ledger.digest(self.feed.ids),
        }

    def _judge(self) -> None:
        """Raise `StepFailed` where tokens do not add up, or nothing could be generated."""
        ledger, before = self.fleet.ledger, self.before
        lost = ledger.lost_tokens - before.lost_tokens
        doubled = ledger.doubled_tokens - before.doubled_tokens
        if lost or doubled:
            raise StepFailed(f"{lost} tokens were lost and {doubled} delivered twice")
        entries = [ledger.entries[id_] for id_ in self.feed.ids]
        refused = [entry for entry in entries if entry.state == "refused"]
        if not refused:
            owed = sum(entry.request.response_tokens for entry in entries)
            if (told := ledger.tokens - before.tokens) != owed:
                raise StepFailed(f"{told} tokens were delivered of responses of {owed} tokens")
            return
        text = f"{len(refused)} of {len(entries)} requests were refused"
        text += f"; {refused[0].request.id}: {refused[0].reason}"
        if len(refused) == len(entries):
            raise StepFailed(text)
        self._warn(text)

    def _warn(self, text: str) -> None:
        row = {"level": "warning", "who": "generation", "text": text}
        self.session.record.event("note", row)


def switch_row(
    step: Generate, number: int, index: int, made: Made, pace: Pace
) -> dict[str, object]:
    """Return the row of one switch, the `index`-th of step `number`, made as `step` says."""
    begin_ns, end_ns = made.begin_ns, made.end_ns
    return {
        "index": index,
        "step": number,
        "layout_from": made.layout_from,
        "layout_to": made.layout_to,
        "strategy": step.strategy,
        "requests": step.requests,
        "order": step.order,
        "nodes": list(made.nodes),
        "stages": made.accounts.stages,
        "residual_ms": made.accounts.residual_ms,
        "total_ms": made.accounts.total_ms,
        "blackout_ms": made.blackout_ms(),
        "carried": made.carried,
        "recomputed_tokens": made.recomputed_tokens,
        "before_tokens_per_s": pace.per_s(begin_ns - WINDOW_NS, begin_ns),
        "during_tokens_per_s": pace.per_s(begin_ns, end_ns),
        "after_tokens_per_s": pace.per_s(end_ns, end_ns + WINDOW_NS),
        "outcome": made.outcome,
        "error": made.error,
    }
