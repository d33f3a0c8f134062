"""What nodes tell: outputs into the ledger, stats into places, who died, and who stalls."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import AgentLost
from harness.run.generation.places import Place
from harness.run.generation.roster import Roster
from harness.run.session import MESSAGE_NS
from harness.scheduling.watchdog import look, stalled
from harness.tasks import beside
from harness.wire.generation import Happened, Output, Stats, Watch

WATCH_NS = 250 * NS_PER_MS
"""How long a node may be silent; then it tells its stats at least. More where nodes are many."""
ANSWERS_PER_S = 32
"""Of nodes that have only progress to tell: a coordinator that hears more is busy with hearing."""
RATE_NS = NS_PER_S
"""Over how long a service rate is taken: tokens come in portions, which must not look like it."""


class Watching:
    """One long poll per node, and what is done about its answers.

    `queue` gets requests that are to be sent on (their next turn, or ended by their engine
    unasked), `give_up` instances that died or stall.
    """

    def __init__(
        self,
        roster: Roster,
        *,
        nodes: int,
        stall_ns: int,
        queue: Callable[[Iterable[str]], None],
        give_up: Callable[[Place, str], None],
    ) -> None:
        self._roster, self._stall_ns = roster, stall_ns
        self._queue, self._give_up = queue, give_up
        self._watch_ns = max(WATCH_NS, nodes * NS_PER_S // ANSWERS_PER_S)
        self._hurried: dict[str, asyncio.Future[None]] = {}
        """By node, done where somebody cannot wait for it to speak by itself."""
        self._asked: Counter[str] = Counter()
        self._answered: Counter[str] = Counter()
        self._upto: Counter[str] = Counter()

    def round(self, node: str) -> int:
        """Return the number of the watch that is under way."""
        return self._asked[node]

    async def delivered(self, node: str, upto: int, timeout_ns: int) -> bool:
        """Wait until the node's events up to `upto` are in the ledger, or the node is lost."""
        return await self._roster.changes.until(
            lambda: self._upto[node] >= upto or node in self._roster.nodes.lost, timeout_ns
        )

    async def caught_up(self, nodes: Iterable[str], timeout_ns: int) -> bool:
        """Wait until all that these nodes have to tell by now is known; they are asked at once."""
        rounds = {node: self._asked[node] + 1 for node in nodes}
        for node in rounds:
            if (hurried := self._hurried.get(node)) and not hurried.done():
                hurried.set_result(None)
        return await self._roster.changes.until(
            lambda: all(
                self._answered[node] >= round_ or node in self._roster.nodes.lost
                for node, round_ in rounds.items()
            ),
            timeout_ns,
        )

    async def watch(self, node: str) -> None:
        """Watch a node until it is lost."""
        wait_ns = self._watch_ns
        while True:
            self._asked[node] += 1
            body = Watch(after=self._upto[node], wait_ns=wait_ns)
            try:
                happened = await self._unless_hurried(node, body)
            except AgentLost:
                return  # its instances are given up already
            wait_ns = self._watch_ns if happened else 0
            if happened is None:
                continue
            self._deliver(node, happened.outputs)
            for name, stats in happened.stats.items():
                if place := self._told_of(node, name):
                    self._fares(place, stats)
            for name, reason in happened.dead.items():
                if place := self._told_of(node, name):
                    self._give_up(place, reason)
            self._answered[node], self._upto[node] = self._asked[node], happened.upto
            self._roster.changes.happened()

    # -- inside -----------------------------------------------------------------------------

    async def _unless_hurried(self, node: str, body: Watch) -> Happened | None:
        """Return the answer; None where somebody hurried before: a later watch ends this one."""
        hurried = self._hurried[node] = asyncio.get_running_loop().create_future()
        limit_ns = body.wait_ns + MESSAGE_NS
        async with beside(self._roster.nodes.ask(node, body, Happened, limit_ns)) as answer:
            await asyncio.wait({answer, hurried}, return_when=asyncio.FIRST_COMPLETED)
            return await answer if answer.done() else None

    def _told_of(self, node: str, name: str) -> Place | None:
        """Return the place that this round speaks of, if it speaks of one that is there."""
        place = self._roster.places.get(name)
        known = place is not None and self._asked[node] > place.built_in_round
        return place if known else None

    def _deliver(self, node: str, outputs: Iterable[Output]) -> None:
        fit = self._roster.session.bench.clocks[node]
        on: list[str] = []
        for output in outputs:
            first_ns, last_ns = (fit.to_coordinator(t) for t in (output.first_ns, output.last_ns))
            entry = self._roster.ledger.apply(output, first_ns, last_ns)
            if entry is None or not output.ended:
                continue
            if entry.state == "held":
                if entry.id in self._roster.places[output.instance].leaving:
                    continue  # whoever withdraws it has it
                self._roster.ledger.requeue(entry.id)
            if entry.state == "queued":
                on.append(entry.id)
        self._queue(on)  # also none: there may be room now for those that are queued

    def _fares(self, place: Place, told: Stats) -> None:
        """Take an instance's stats: progress, speed, and whether it got anywhere."""
        before, stats = place.stats, self._mapped(place.node, told)
        place.stats = stats
        if stats.beyond and not (before and before.beyond):
            text = f"step times go beyond what the profile knows: {', '.join(stats.beyond)}"
            self._roster.note("generation", text)
        self._roster.preemptions += stats.preemptions - (before.preemptions if before else 0)
        place.sent_since = len(place.arriving)
        self._progress(place, stats)
        _rate(place, stats)
        now_ns = self._roster.now_ns()
        place.life = look(
            place.life,
            busy=not place.loading
            and bool(stats.running or (place.admitting and self._roster.ledger.at(place.name))),
            work_tokens=stats.generated_tokens + stats.prefilled_tokens,
            now_ns=now_ns,
        )
        if not place.dead and stalled(place.life, now_ns, self._stall_ns):
            reason = f"no token for {self._stall_ns / NS_PER_S:g} s, with {stats.running} running"
            self._give_up(place, reason)

    def _mapped(self, node: str, stats: Stats) -> Stats:
        fit = self._roster.session.bench.clocks[node]
        stamps = {
            name: fit.to_coordinator(t_ns)
            for name in ("t_ns", "first_token_ns", "last_token_ns")
            if (t_ns := getattr(stats, name))
        }
        return msgspec.structs.replace(stats, **stamps)

    def _progress(self, place: Place, stats: Stats) -> None:
        """Write a row where it is time, or all work is done, and there is something to tell."""
        before = place.sampled
        lasted_ns = stats.t_ns - before.t_ns
        tokens = stats.generated_tokens - before.generated_tokens
        at_work = bool(stats.running or stats.waiting)
        if lasted_ns <= 0 or (lasted_ns < self._watch_ns and (at_work or not tokens)):
            return
        place.sampled = stats
        if not (tokens or at_work):
            return
        self._roster.speeds.measured(place.instance.layout, tokens * NS_PER_S / lasted_ns)
        self._roster.session.record.event(
            "progress",
            {
                "instance": place.name,
                "t0_ns": before.t_ns,
                "t1_ns": stats.t_ns,
                "generated_tokens": tokens,
                "running": stats.running,
                "waiting": stats.waiting,
                "kv_use_pct": 100 * stats.kv_blocks_used / max(1, stats.kv_blocks),
                "preemptions": stats.preemptions - before.preemptions,
            },
        )


def _rate(place: Place, stats: Stats) -> None:
    """Take the service rate of an instance that has been at work since the last time."""
    before = place.rated
    if not (stats.running and before.running):
        place.rated, place.tokens_per_s = stats, 0.0
    elif (lasted_ns := stats.t_ns - before.t_ns) >= RATE_NS:
        tokens = stats.generated_tokens - before.generated_tokens
        place.rated, place.tokens_per_s = stats, tokens * NS_PER_S / lasted_ns
