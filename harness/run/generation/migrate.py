"""Move a request to another instance while it generates: with its KV, or computed anew there.

It leaves the source with all of its output, is held by us for the time of two messages, and goes
on at the target. Whatever cannot be done that way (the KV did not arrive, the target is gone or
has no room) is done another way, and told; the request itself is never at stake.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import InfrastructureError, StepFailed
from harness.model.layout import Layout
from harness.model.scenario import Generate
from harness.run.generation.fleet import Fleet
from harness.run.generation.places import Place
from harness.run.generation.resumption import Resumption
from harness.run.generation.withdrawing import Left
from harness.scheduling.migration import By, Choice, Costs, choose
from harness.wire.generation import KvTarget

Outcome = Literal["moved", "ended", "elsewhere", "failed"]
"""It goes on at the target; it finished first; it goes on in another instance; nobody knows yet."""


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

    @property
    def expected_ms(self) -> float | None:
        """What it was expected to take, done the way it was."""
        return self.expected[self.by]


def pairs(fleet: Fleet) -> Iterator[tuple[str, str]]:
    """Yield (request, target): all that generate, and where each could go."""
    ready = [at for at in fleet.places.values() if at.accepting and not at.dead]
    for source in ready:
        for id_ in fleet.ledger.at(source.name):
            if fleet.ledger.entries[id_].resumed_ns:  # it has a seat
                yield from ((id_, target.name) for target in ready if target is not source)


class Migrations:
    """Moves requests one after the other; each is watched until it goes on."""

    def __init__(self, fleet: Fleet, step: Generate, costs: Costs, chance: random.Random) -> None:
        self._fleet, self._step, self._costs, self._chance = fleet, step, costs, chance
        self._clock = fleet.session.bench.clock
        self._timeout_ns = round(step.stage_timeout_s * NS_PER_S)
        self._count = 0

    async def begin(self) -> tuple[Move, Resumption | None] | None:
        """Move any request anywhere; None where there is none to move.

        Waits for a change of layout that is under way. What comes with the move tells when the
        request goes on: see `end`.
        """
        async with self._fleet.changing:
            choices = list(pairs(self._fleet))
            if not choices:
                return None
            id_, target = self._chance.choice(choices)
            return await self.move(id_, self._fleet.places[target])

    async def move(self, id_: str, target: Place) -> tuple[Move, Resumption | None]:
        """Take a request from where it is and send it to `target`."""
        fleet, entry = self._fleet, self._fleet.ledger.entries[id_]
        source = fleet.places[entry.at]
        choice = self._choose(source, target, entry.known_tokens)
        move = Move(
            request=id_,
            source=source.name,
            target=target.name,
            by=choice.by,
            context_tokens=entry.known_tokens,
            expected=choice.expected_ms,
            begin_ns=self._clock.now_ns(),
            layouts=(source.instance.layout, target.instance.layout),
        )
        self._count += 1
        try:
            return move, await self._carry(move, target)
        except (StepFailed, InfrastructureError) as error:
            move.error = str(error)
            return move, None
        finally:
            if entry.state == "held":
                fleet.requeue([id_])

    async def end(self, move: Move, resumption: Resumption | None) -> Move:
        """Wait until the request goes on, and learn what it took."""
        if resumption is None:
            return move
        fleet, entry = self._fleet, self._fleet.ledger.entries[move.request]
        await fleet.until(resumption.complete, self._timeout_ns)
        first_ns = resumption.resumed_ns.get(move.request)
        if entry.home != move.target:
            move.outcome = "elsewhere"
        elif first_ns is not None and move.outcome == "moved":
            move.cached_tokens = entry.cached_tokens
            move.total_ms = (first_ns - move.begin_ns) / NS_PER_MS
            self._costs.measured(*move.layouts, move.context_tokens, move.by, move.total_ms)
        return move

    def _choose(self, source: Place, target: Place, context_tokens: int) -> Choice:
        return choose(
            self._costs,
            source.instance.layout,
            target.instance.layout,
            context_tokens,
            kv_possible=bool(target.kv_peers) and all(target.kv_peers),
            wanted=self._step.migrate_by,
        )

    async def _carry(self, move: Move, target: Place) -> Resumption | None:
        fleet, transfer = self._fleet, f"{move.request}>{move.target}#{self._count}"
        left = await self._leave(move, target, transfer)
        if move.request not in left.ids:
            move.outcome = "ended"
            return None
        resumption = Resumption(
            fleet.ledger,
            fleet.places,
            ids=[move.request],
            ran=[move.request],
            since_ns=self._clock.now_ns(),
        )
        if fleet.places.get(move.target) is not target or target.dead:
            move.outcome, move.error = "elsewhere", f"{move.target} is gone"
            return resumption
        kv_tokens = left.carried[move.request].kv_tokens if move.by == "kv" else 0
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
        return resumption

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
