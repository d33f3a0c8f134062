"""The coordinator's queue: which requests are sent where, as instances have room for them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from harness.clock import NS_PER_S
from harness.errors import AgentLost
from harness.run.generation.changes import Background
from harness.run.generation.ledger import Entry
from harness.run.generation.places import Place
from harness.run.generation.roster import Roster
from harness.scheduling.router import Candidate, Router, Wanted, nowhere, seat
from harness.wire.asks import CommandFailed
from harness.wire.generation import Submit, Submitted, Work

SUBMIT_NS = 60 * NS_PER_S
"""A submit may queue behind new weights; an instance that hangs is found by its stall before."""
LOOK_PAST_MAX = 64
"""Requests without a place that the dispatcher looks past for one that has a place."""


class Dispatcher:
    """Sends queued requests to instances.

    One that can run nowhere is refused, but not while the layout changes (`changing`): it may be
    able to after. `failed` is told of instances that did not take what was sent.
    """

    def __init__(
        self,
        roster: Roster,
        *,
        changing: Callable[[], bool],
        failed: Callable[[Place, str], None],
    ) -> None:
        self._ledger, self._places, self._nodes = roster.ledger, roster.places, roster.nodes
        self._roster, self._changing, self._failed = roster, changing, failed
        self._queue: deque[str] = deque()
        self._wanted = asyncio.Event()
        self._waits = False

    @property
    def queued(self) -> int:
        """Requests that wait here."""
        return len(self._queue)

    def queue(self, ids: Iterable[str], *, ahead: bool) -> None:
        """Queue requests behind all others, or ahead of them; in their order."""
        if ahead:
            self._queue.extendleft(reversed(list(ids)))
        else:
            self._queue.extend(ids)
        self.look()

    def unqueue(self, ids: Iterable[str]) -> None:
        """Take requests out of the queue, whether they are in it or not."""
        gone = set(ids)
        self._queue = deque(id_ for id_ in self._queue if id_ not in gone)

    def look(self) -> None:
        """Look for places soon: something has changed."""
        self._wanted.set()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Send nothing from the queue while inside."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False
            self.look()

    def seat_for(self, id_: str) -> Place | None:
        """Return the least loaded instance that has a seat for a request at once, if one has."""
        living = self._roster.living
        wanted = self._wanted_of(self._ledger.entries[id_], living)
        chosen = seat(wanted, map(self._candidate, living))
        return self._places[chosen.name] if chosen else None

    async def run(self, beside: Background) -> None:
        """Send requests as long as the fleet is open."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            if self._waits:
                continue
            for name, ids in self._assign().items():
                works = [self._ledger.work_of(id_) for id_ in ids]
                beside.start(self._send(self._places[name], works))

    async def submit(self, place: Place, works: Sequence[Work], timeout_ns: int) -> Submitted:
        """Send queued or held requests to a place; those it refuses, or all on a failure, are held.

        Raises `CommandFailed` and `AgentLost`.
        """
        ids = [work.carried.id for work in works]
        for id_ in ids:
            self._note_sent(id_, place)
        try:
            answer = await self._ask(place, works, timeout_ns)
        except (CommandFailed, AgentLost):
            self._take_back(place, ids)
            raise
        self._take_back(place, answer.refused)
        return answer

    # -- inside -----------------------------------------------------------------------------

    async def _ask(self, place: Place, works: Sequence[Work], timeout_ns: int) -> Submitted:
        try:
            body = Submit(instance=place.name, works=tuple(works))
            answer = await self._nodes.ask(place.node, body, Submitted, timeout_ns)
        finally:
            place.arriving.difference_update(work.carried.id for work in works)
            self._roster.changes.happened()
        for id_, reason in answer.refused.items():
            if entry := self._ledger.entries.get(id_):
                entry.refusals[place.serial] = reason
        return answer

    def _note_sent(self, id_: str, place: Place) -> None:
        self._ledger.send(id_, place.name)
        place.moving.pop(id_, None)
        place.arriving.add(id_)
        place.sent_since += 1

    def _take_back(self, place: Place, ids: Iterable[str]) -> list[str]:
        """Hold and return those still said to be there: none if it was given up meanwhile."""
        if self._places.get(place.name) is not place:
            return []
        there = set(self._ledger.at(place.name))
        back = [id_ for id_ in ids if id_ in there]
        for id_ in back:
            self._ledger.hold(id_)
        return back

    async def _send(self, place: Place, works: Sequence[Work]) -> None:
        ids: Iterable[str] = [work.carried.id for work in works]
        try:
            ids = (await self._ask(place, works, SUBMIT_NS)).refused
        except AgentLost:
            pass  # whoever asked first has said so, and the place is given up
        except CommandFailed as error:
            self._failed(place, str(error))
        back = self._take_back(place, ids)
        for id_ in back:
            self._ledger.requeue(id_)
        self.queue(back, ahead=True)

    def _assign(self) -> dict[str, list[str]]:
        """Take from the queue whatever has a place now; returns it by instance, noted as sent."""
        if not self._queue:
            return {}
        living = self._roster.living
        router = Router(map(self._candidate, living))
        found: dict[str, list[str]] = {}
        passed: list[str] = []
        looked_past = 0  # of those that any could have: one that is bound is in nobody's way
        while self._queue and looked_past < LOOK_PAST_MAX and not router.is_full:
            entry = self._ledger.entries[self._queue.popleft()]
            bound = router[entry.assigned]
            coming = bound is None and entry.assigned and self._changing()
            if coming or (bound is not None and not bound.takes(1)):
                passed.append(entry.id)
                continue
            wanted = self._wanted_of(entry, living)
            if chosen := router.route(wanted):
                self._note_sent(entry.id, self._places[chosen.name])
                found.setdefault(chosen.name, []).append(entry.id)
                self._took(chosen, wanted.known_tokens)
                router.replace(chosen)
            elif reason := self._nowhere(wanted, router.candidates):
                self._refuse(entry, reason)
            else:
                passed.append(entry.id)
                looked_past += bound is None
        self._queue.extendleft(reversed(passed))
        return found

    def _refuse(self, entry: Entry, reason: str) -> None:
        """End a request; the first is told at once, the others are counted: it may be all."""
        if not self._ledger.refused:
            self._roster.note("generation", f"request {entry.id} can run nowhere: {reason}")
        self._ledger.refuse(entry.id, reason)
        self._roster.changes.happened()

    def _nowhere(self, wanted: Wanted, everywhere: Sequence[Candidate]) -> str:
        return "" if self._changing() else nowhere(wanted, everywhere)

    def _candidate(self, place: Place) -> Candidate:
        name, capacity = place.name, place.capacity
        kv_tokens = self._ledger.known_tokens_at(name) + sum(place.moving.values())
        candidate = Candidate(
            name=name,
            accepting=place.accepting,
            requests=self._ledger.count_at(name) + len(place.moving),
            waiting=(place.stats.waiting if place.stats else 0) + place.sent_since,
            sequences_max=capacity.sequences_max,
            kv_free_tokens=capacity.blocks * capacity.block_tokens - kv_tokens,
            length_max_tokens=place.length_max_tokens,
            tokens_per_s=1.0,
        )
        candidate.tokens_per_s = self._tokens_per_s(candidate)
        return candidate

    def _tokens_per_s(self, candidate: Candidate) -> float:
        """Return its speed with one more request in its batch, if it has a seat."""
        place = self._places[candidate.name]
        batch = min(candidate.requests + 1, candidate.sequences_max)
        kv_tokens = self._ledger.known_tokens_at(candidate.name)
        return self._roster.speeds.expected(place.instance.layout, batch, kv_tokens)

    def _took(self, candidate: Candidate, known_tokens: int) -> None:
        candidate.requests += 1
        candidate.waiting += 1
        candidate.kv_free_tokens -= known_tokens
        candidate.tokens_per_s = self._tokens_per_s(candidate)

    def _wanted_of(self, entry: Entry, living: Iterable[Place]) -> Wanted:
        refusals = entry.refusals
        bound = self._places.get(entry.assigned)
        if bound is not None and (bound.dead or bound.length_max_tokens < entry.length_tokens):
            bound = None
        return Wanted(
            known_tokens=entry.known_tokens,
            length_tokens=entry.length_tokens,
            home=entry.home,
            sibling=self._ledger.siblings_home.get(entry.sibling, ""),
            only=bound.name if bound is not None else "",
            refused={p.name: refusals[p.serial] for p in living if p.serial in refusals}
            if refusals
            else {},
        )
