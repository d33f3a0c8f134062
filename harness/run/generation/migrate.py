"""Move a request to another instance while it generates: with its KV, or computed anew there.

It leaves the source with all of its output, is held by us for the time of two messages, and goes
on at the target. Whatever cannot be done that way (the KV did not arrive, the target is gone or
has no room) is done another way, and told; the request itself is never at stake.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import InfrastructureError, StepFailed
from harness.model.layout import Layout
from harness.model.scenario import Generate
from harness.run.generation.fleet import Fleet
from harness.run.generation.ledger import Entry
from harness.run.generation.places import Place
from harness.run.generation.resumption import Resumption
from harness.run.generation.withdrawing import Left
from harness.scheduling.migration import By, Choice, Costs, choose
from harness.tasks import end, together
from harness.wire.generation import KvTarget

AT_ONCE = 16
"""Requests under way between instances at a time, when an instance is left by all."""

Outcome = Literal["moved", "ended", "elsewhere", "failed"]
"""It goes on at the target; it finished first; it goes on in another instance; it did not leave."""


@dataclass(kw_only=True)
class Move:
    """One request's move: what was expected, and what became of it.

    `by` is how its KV really came to be there, whatever was chosen. `total_ms` is from its
    withdrawal to its next token, null where it ended before or went elsewhere.
    """

    request: str
    source: str
    target: str
    by: By
    context_tokens: int
    expected: Mapping[By, float | None]
    outcome: Outcome = "failed"
    error: str = ""
    sent_bytes: int = 0
    cached_tokens: int = 0
    send_ms: float | None = None
    total_ms: float | None = None
    begin_ns: int
    layouts: tuple[Layout, Layout]
    """Of source and target."""
    kv_tokens: int = 0
    """That it left with."""
    resumption: Resumption | None = None
    """How it goes on; None where it did not leave."""

    @property
    def expected_ms(self) -> float | None:
        """What it was expected to take, done the way it was."""
        return self.expected[self.by]

    @property
    def recomputed_tokens(self) -> int:
        """KV that it lost, and that is to be computed anew."""
        return 0 if self.outcome == "moved" and self.by == "kv" else self.kv_tokens


class Migrations:
    """The moves of one generate step, each watched until it goes on, and told in a row."""

    def __init__(
        self, fleet: Fleet, step: Generate, number: int, costs: Costs, chance: random.Random
    ) -> None:
        self._fleet, self._step, self._number = fleet, step, number
        self._costs, self._chance = costs, chance
        self._clock = fleet.session.bench.clock
        self._timeout_ns = round(step.stage_timeout_s * NS_PER_S)
        self._count = 0
        self._watching: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Make moves within; at the end, wait until it is known of each how it went on."""
        try:
            yield
            await asyncio.gather(*self._watching)
        finally:
            await end(self._watching)

    async def move_any(self) -> bool:
        """Move any request anywhere; return whether there was one to move.

        Waits for a change of layout that is under way.
        """
        async with self._fleet.changing:
            ready = [place for place in self._fleet.places.values() if place.accepting]
            ledger = self._fleet.ledger
            generating = [entry for place in ready for entry in ledger.generating(place.name)]
            if len(ready) < 2 or not generating:
                return False
            entry = self._chance.choice(generating)
            await self.move(entry, self._chance.choice([p for p in ready if p.name != entry.at]))
            return True

    async def move_all(self, names: Iterable[str]) -> list[Move]:
        """Move what generates in these instances, which accept nothing, to others with seats.

        Whoever calls it holds `changing`. The longest go first, for they are the most to compute
        anew. Those that find no seat stay, and so do those not begun with within the limit of a
        stage. Returns the moves, at whose end the requests are sent on but need not go on yet.
        """
        ledger, until_ns = self._fleet.ledger, self._clock.now_ns() + self._timeout_ns
        names, made = tuple(names), list[Move]()
        left = [entry for name in names for entry in ledger.generating(name)]
        left.sort(key=lambda entry: entry.known_tokens)

        async def some() -> None:
            while left and self._clock.now_ns() < until_ns:
                entry = left.pop()
                if entry.at in names and (target := self._fleet.seat_for(entry.id)):
                    made.append(await self.move(entry, target))

        await together(some() for _ in range(AT_ONCE))
        return made

    async def move(self, entry: Entry, target: Place) -> Move:
        """Take a request that generates from where it is and send it to `target`."""
        source = self._fleet.places[entry.at]
        choice = self._choose(source, target, entry.known_tokens)
        move = Move(
            request=entry.id,
            source=source.name,
            target=target.name,
            by=choice.by,
            context_tokens=entry.known_tokens,
            expected=choice.expected_ms,
            begin_ns=self._clock.now_ns(),
            layouts=(source.instance.layout, target.instance.layout),
        )
        target.moving[entry.id] = entry.known_tokens
        self._count += 1
        try:
            await self._carry(move, entry, target)
        except (StepFailed, InfrastructureError) as error:
            move.outcome = "elsewhere" if move.resumption else "failed"
            move.error = str(error)
        finally:
            target.moving.pop(entry.id, None)
            if entry.state == "held":
                self._fleet.requeue([entry.id])
        watching = self._fleet.beside(self._watch(move, entry))
        self._watching.add(watching)
        watching.add_done_callback(self._watching.discard)
        return move

    async def _watch(self, move: Move, entry: Entry) -> None:
        """Wait until the request goes on, learn what it took, and tell."""
        if move.resumption is not None:
            await self._fleet.until(move.resumption.complete, self._timeout_ns)
            self._learn(move, entry, move.resumption)
        self._fleet.session.record.event("migration", migration_row(self._number, move))

    def _learn(self, move: Move, entry: Entry, resumption: Resumption) -> None:
        first_ns = resumption.resumed_ns.get(move.request)
        if entry.home != move.target:
            move.outcome = "elsewhere"
        elif first_ns is not None and move.outcome == "moved":
            move.cached_tokens = entry.cached_tokens
            move.total_ms = (first_ns - move.begin_ns) / NS_PER_MS
            self._costs.measured(*move.layouts, move.context_tokens, move.by, move.total_ms)

    def _choose(self, source: Place, target: Place, context_tokens: int) -> Choice:
        return choose(
            self._costs,
            source.instance.layout,
            target.instance.layout,
            context_tokens,
            kv_possible=bool(target.kv_peers) and all(target.kv_peers),
            wanted=self._step.migrate_by,
        )

    async def _carry(self, move: Move, entry: Entry, target: Place) -> None:
        fleet, turn = self._fleet, entry.turn
        transfer = f"{move.request}>{move.target}#{self._count}"
        left = await self._leave(move, target, transfer)
        if move.request not in left.ids:
            ended = entry.state == "finished" or entry.turn > turn
            move.outcome = "ended" if ended else "elsewhere"
            move.error = "" if ended else f"{move.source} was given up"
            return
        found = left.carried.get(move.request)
        move.kv_tokens = found.kv_tokens if found else 0
        move.resumption = Resumption(
            fleet.ledger,
            fleet.places,
            ids=[move.request],
            ran=[move.request],
            since_ns=self._clock.now_ns(),
        )
        if fleet.places.get(move.target) is not target or target.dead:
            move.outcome, move.error = "elsewhere", f"{move.target} is gone"
            return
        kv_tokens = move.kv_tokens if move.by == "kv" else 0
        work = fleet.ledger.work_of(
            move.request, kv_tokens=kv_tokens, kv_transfer=transfer if kv_tokens else ""
        )
        submitted = await fleet.submit_to(move.target, [work], self._timeout_ns)
        if reason := submitted.refused.get(move.request):
            move.outcome, move.error = "elsewhere", reason
        else:
            move.outcome = "moved"
            if move.by == "kv" and move.request not in submitted.with_kv:
                move.by, move.error = "recompute", "its KV did not arrive, or found no room"

    async def _leave(self, move: Move, target: Place, transfer: str) -> Left:
        """Take the request from its source, its KV sent ahead where that was chosen."""
        to = KvTarget(transfer=transfer, instance=target.instance, peers=target.kv_peers)
        left = await self._fleet.withdraw(
            [move.source],
            ids=[move.request],
            verb="export" if move.by == "kv" else "abort",
            to=to if move.by == "kv" else None,
            timeout_ns=self._timeout_ns,
        )
        move.sent_bytes = left.sent_bytes.get(move.request, 0)
        sends = [s for spans in left.spans.values() for s in spans if s.stage == "kv_send"]
        if sends:
            begin_ns, end_ns = min(s.begin_ns for s in sends), max(s.end_ns for s in sends)
            move.send_ms = (end_ns - begin_ns) / NS_PER_MS
        if move.by == "kv" and move.request in left.ids and not move.sent_bytes:
            move.by, move.error = "recompute", "its KV could not be sent"
        return left


def migration_row(number: int, move: Move) -> dict[str, object]:
    """Return the row of one move."""
    return {
        "step": number,
        "request": move.request,
        "source": move.source,
        "target": move.target,
        "by": move.by,
        "context_tokens": move.context_tokens,
        "sent_bytes": move.sent_bytes,
        "cached_tokens": move.cached_tokens,
        "send_ms": move.send_ms,
        "total_ms": move.total_ms,
        "expected_ms": move.expected_ms,
        "outcome": move.outcome,
        "error": move.error,
    }
