"""Switch the layout under load, in two phases, and lose nothing.

First everything that can be known is checked, on every node, and nothing is changed. Then requests
leave with their partial output (or end), engines give way to others, and the requests go on.
Whatever fails after that is undone: the old layout is built again on every node that was touched;
a node where that fails too is out, and its requests go to the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

from harness.clock import NS_PER_S
from harness.errors import InfrastructureError, StepFailed, UsageError
from harness.model.layout import Layout, Mix
from harness.model.placement import Instance, place
from harness.model.scenario import Generate
from harness.run.generation.fleet import Fleet
from harness.run.generation.migrate import Migrations
from harness.run.generation.places import Place
from harness.run.generation.resumption import Resumption
from harness.run.generation.stages import Silence, Table, blackout_ms, table
from harness.scheduling.waves import Wave, names, waves
from harness.wire.generation import Built, Span, Strategy

Outcome = Literal["switched", "refused", "rolled_back", "lost"]
FAILURES = (StepFailed, InfrastructureError)
"""What undoes a switch; anything else is a bug of ours, or the run being interrupted."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """What became of a switch. `error` names the stage that failed, and why."""

    outcome: Outcome
    error: str
    layout_from: str
    layout_to: str
    nodes: tuple[str, ...]
    begin_ns: int
    end_ns: int
    """Steady; or when it was refused, or undone."""
    accounts: Table
    blackout_ms: Callable[[], float | None]
    """Asked late, for what came may be heard only after the switch."""
    carried: int
    recomputed_tokens: int


class Switches:
    """Makes one switch at a time; another one meanwhile is refused."""

    def __init__(self, fleet: Fleet, step: Generate, migrations: Migrations) -> None:
        self._fleet, self._step, self._migrations = fleet, step, migrations
        self._under_way: Layout | Mix | None = None
        fleet.out.clear()

    async def make(self, target: Layout | Mix) -> Made:
        """Switch to `target`; what failed is in the answer. Raises only bugs and cancellation."""
        if self._under_way is not None:
            text = f"the switch to {self._under_way} is under way"
            return self._switch(target).made("refused", text)
        self._under_way = target
        try:
            async with self._fleet.changing:
                return await self._switch(target).run()
        finally:
            self._under_way = None

    def _switch(self, target: Layout | Mix) -> _Switch:
        return _Switch(self._fleet, self._step, self._migrations, target)


class _GivenWay(NamedTuple):
    """A wave: the last token of what went, when what came was built, how requests went on."""

    wave: Wave
    last_ns: int
    built_ns: int
    resumption: Resumption


class _Switch:
    """One switch, from now on."""

    def __init__(
        self,
        fleet: Fleet,
        step: Generate,
        migrations: Migrations,
        target: Layout | Mix,
    ) -> None:
        self.fleet, self.step, self.migrations = fleet, step, migrations
        self.target = target
        self.clock = fleet.session.bench.clock
        self.timeout_ns = round(step.stage_timeout_s * NS_PER_S)
        self.before = _placed(fleet.places.values())
        self.layout_from = str(fleet.layout)
        self.begin_ns = self.clock.now_ns()
        self.stage = "prepare"
        self.spans: list[Span] = []
        self.waves: tuple[Wave, ...] = ()
        self.touched: tuple[str, ...] = ()
        """Nodes that are not as they were."""
        self.carried: set[str] = set()
        self.recomputed_tokens = 0
        self.given_way: list[_GivenWay] = []
        self.steady_ns = 0
        """When all that ran went on, after the last wave; 0: nothing ran then."""

    async def run(self) -> Made:
        """Prepare, change wave after wave, undo what fails."""
        try:
            await self._prepare()
        except (UsageError, *FAILURES) as error:
            return self.made("refused", str(error))
        try:
            for wave in self.waves:
                await self._change(wave)
        except FAILURES as error:
            return await self._undo(f"{self.stage}: {error}")
        self.fleet.layout = self.target
        return self.made("switched")

    def made(self, outcome: Outcome, error: str = "") -> Made:
        """Return what became of it, now."""
        end_ns = self.steady_ns if outcome == "switched" else self.clock.now_ns()
        return Made(
            outcome=outcome,
            error=error,
            layout_from=self.layout_from,
            layout_to=str(self.target),
            nodes=tuple(dict.fromkeys(node for wave in self.waves for node in wave.nodes)),
            begin_ns=self.begin_ns,
            end_ns=end_ns,
            accounts=table(self.spans, self.begin_ns, end_ns),
            blackout_ms=lambda: blackout_ms(map(self._silence, self.given_way)),
            carried=len(self.carried),
            recomputed_tokens=self.recomputed_tokens,
        )

    # -- the two phases -----------------------------------------------------------------------

    async def _prepare(self) -> None:
        """Check all that can be known; nothing is changed."""
        fleet = self.fleet
        after = place(self.target, fleet.usable)
        dead = [name for name, at in fleet.places.items() if at.dead]
        self.waves = waves(self.before, after, self.step.order, dead)
        if not self.waves:
            raise UsageError(f"{self.target} is up already")
        nodes = [node for wave in self.waves for node in wave.nodes]
        with self._stamped("prepare"):
            await fleet.prepare(
                {node: after.get(node, ()) for node in nodes}, self.step.strategy, self.timeout_ns
            )

    async def _change(self, wave: Wave) -> None:
        """Let one layout give way to the other on the nodes of a wave."""
        self.touched += wave.nodes
        self.steady_ns = 0
        last_ns, resumption = await self._empty(wave)
        await self._rebuild(wave)
        self.given_way.append(_GivenWay(wave, last_ns, self.clock.now_ns(), resumption))
        await self._resume(wave, resumption)

    async def _empty(self, wave: Wave) -> tuple[int, Resumption]:
        """Stop admitting; let requests end, move or leave. These wait for whoever takes them.

        Returns when the last token came from there (0: none did), and how requests go on.
        """
        fleet, going = self.fleet, self._going(wave, dead=False)
        resumption = Resumption(fleet.ledger, fleet.places)
        if not going:
            return 0, resumption
        with self._stamped("stop_admitting"):
            fleet.refuse(going)
            await fleet.admission(going, allowed=False, timeout_ns=self.timeout_ns)
        if self.step.requests == "drain":
            with self._stamped("drain"):
                if not await fleet.drained(going, self.timeout_ns):
                    raise StepFailed(f"requests still run after {self.step.stage_timeout_s:g} s")
        if self.step.requests == "migrate":
            with self._stamped("migrate"):
                for move in await self.migrations.move_all(going):
                    if move.resumption:
                        resumption.add(move.resumption)
                    self.recomputed_tokens += move.recomputed_tokens
        with self._stamped("withdraw"):  # it lasts until all that they produced is delivered
            left = await fleet.withdraw(going, timeout_ns=self.timeout_ns)
        self.recomputed_tokens += sum(carried.kv_tokens for carried in left.carried.values())
        told = [stats.last_token_ns for name in going if (stats := fleet.places[name].stats)]
        told += [fleet.ledger.entries[id_].last_token_ns for id_ in left.ids]
        resumption.add(
            Resumption(
                fleet.ledger,
                fleet.places,
                ids=left.ids,
                ran=[id_ for id_, carried in left.carried.items() if carried.kv_tokens],
                since_ns=self.clock.now_ns(),
            )
        )
        self.carried.update(resumption.ids)
        fleet.requeue(left.ids)
        return max(told, default=0), resumption

    def _going(self, wave: Wave, *, dead: bool) -> list[str]:
        """Return what is still to go; one may die, or be given up, at any time."""
        places = [at for name in wave.gone_names if (at := self.fleet.places.get(name))]
        return [at.name for at in places if bool(at.dead) is dead]

    async def _rebuild(self, wave: Wave) -> None:
        """Put one layout in the place of the other."""
        fleet, strategy = self.fleet, self.step.strategy
        with self._stamped("teardown"):
            if going := self._going(wave, dead=False):
                await fleet.tear_down(going, strategy, self.timeout_ns)
            if dead := self._going(wave, dead=True):
                await fleet.tear_down(dead, strategy, self.timeout_ns, force=True)
        if wave.fresh:
            self.stage = "build"
            built = await fleet.build(wave.fresh, strategy, self.timeout_ns)
            self._spans_of(built)

    async def _resume(self, wave: Wave, resumption: Resumption) -> None:
        """Let requests go on, until all that ran before do so again."""
        with self._stamped("resubmit"):
            self.fleet.accept(wave.fresh_names)
            await self._until(resumption.sent, wave)
        begin_ns = self.steady_ns = self.clock.now_ns()
        if not resumption.any_ran:
            return
        self.stage = "first_token"  # some may have gone on elsewhere before all was built
        await self._until(resumption.begun, wave)
        first_ns = max(begin_ns, min(resumption.resumed_ns.values(), default=begin_ns))
        self.spans.append(Span(stage="first_token", begin_ns=begin_ns, end_ns=first_ns))
        self.stage = "steady"
        await self._until(resumption.steady, wave)
        self.steady_ns = max([first_ns, *resumption.resumed_ns.values()])
        self.spans.append(Span(stage="steady", begin_ns=first_ns, end_ns=self.steady_ns))

    async def _until(self, predicate: Callable[[], bool], wave: Wave) -> None:
        """Wait for something that only instances which live can bring about."""

        def fallen() -> list[str]:
            fresh = [name for name in wave.fresh_names if name in self.fleet.places]
            return [f"{name}: {dead}" for name in fresh if (dead := self.fleet.places[name].dead)]

        come = await self.fleet.until(lambda: predicate() or bool(fallen()), self.timeout_ns)
        if gone := fallen():
            raise StepFailed("; ".join(gone))
        if not come:
            raise StepFailed(f"not within {self.step.stage_timeout_s:g} s")

    # -- undoing ------------------------------------------------------------------------------

    async def _undo(self, error: str) -> Made:
        """Build the old layout on every node that was touched; requests go on wherever they can."""
        fleet = self.fleet
        tries = await asyncio.gather(*map(self._restore, self.touched), return_exceptions=True)
        outcome: Outcome = "rolled_back"
        for node, failed in zip(self.touched, tries, strict=True):
            if isinstance(failed, FAILURES):
                outcome, error = "lost", f"{error}; {node} is out: {failed}"
                fleet.abandon(node, str(failed))
                await self._abandon(node)
            elif isinstance(failed, BaseException):
                raise failed
        fleet.requeue(fleet.ledger.held)
        return self.made(outcome, error)

    async def _restore(self, node: str) -> None:
        """Bring a node back to what it ran before."""
        fleet, wanted = self.fleet, self.before.get(node, ())
        there = [at for at in fleet.places.values() if at.node == node]
        kept = [at.instance for at in there if at.instance in wanted and not at.dead]
        forced = await self._clear(node, [at for at in there if at.instance not in kept])
        missing = tuple(instance for instance in wanted if instance not in kept)
        if missing:
            # what was killed does not sleep, it is gone
            again: Strategy = (
                "rebuild" if forced and self.step.strategy == "pool" else (self.step.strategy)
            )
            await fleet.build({node: missing}, again, self.timeout_ns)
        if kept:
            here = names({node: tuple(kept)})
            await fleet.admission(here, allowed=True, timeout_ns=self.timeout_ns)
        fleet.accept(names({node: wanted}))

    async def _clear(self, node: str, going: list[Place]) -> bool:
        """End instances, in good order where they let us; return whether any had to be killed."""
        fleet, strategy = self.fleet, self.step.strategy
        good = [at.name for at in going if not at.dead]
        try:
            if good:
                left = await fleet.withdraw(good, timeout_ns=self.timeout_ns)
                fleet.requeue(left.ids)
                await fleet.tear_down(good, strategy, self.timeout_ns)
        except FAILURES as error:
            self._warn(f"{node}: its engines are ended by force: {error}")
        rest = [at.name for at in going if at.name in fleet.places]
        if rest:
            await fleet.tear_down(rest, strategy, self.timeout_ns, force=True)
        return bool(rest)

    async def _abandon(self, node: str) -> None:
        """Take a node's instances out, whatever it answers."""
        there = [name for name, at in self.fleet.places.items() if at.node == node]
        try:
            await self.fleet.tear_down(there, "rebuild", self.timeout_ns, force=True)
        except FAILURES as error:
            self._warn(f"{node}: its engines were not ended: {error}")

    def _warn(self, text: str) -> None:
        row = {"level": "warning", "who": "generation", "text": text}
        self.fleet.session.record.event("note", row)

    # -- stamps -------------------------------------------------------------------------------

    @contextmanager
    def _stamped(self, stage: str) -> Iterator[None]:
        """Stamp work of the coordinator's own."""
        self.stage, begin_ns = stage, self.clock.now_ns()
        try:
            yield
        finally:
            end_ns = self.clock.now_ns()
            self.spans.append(Span(stage=stage, begin_ns=begin_ns, end_ns=end_ns))

    def _silence(self, given: _GivenWay) -> Silence:
        """Return when what went fell silent, and what came in its place was first heard."""
        fleet, comes = self.fleet, given.wave.fresh_names
        stats = [fleet.places[name].stats for name in comes if name in fleet.places]
        firsts = [told.first_token_ns for told in stats if told and told.first_token_ns]
        firsts += [
            first_ns
            for id_, first_ns in given.resumption.resumed_ns.items()
            if first_ns > given.built_ns
            and (entry := fleet.ledger.entries.get(id_))
            and entry.home in comes
        ]
        return Silence(given.last_ns, min(firsts, default=0))

    def _spans_of(self, answers: Mapping[str, Built]) -> None:
        """Map the nodes' spans onto our clock."""
        at = self.fleet.session.at
        self.spans += [
            Span(stage=s.stage, begin_ns=at(node, s.begin_ns), end_ns=at(node, s.end_ns))
            for node, answer in answers.items()
            for s in answer.spans
        ]


def _placed(places: Iterable[Place]) -> dict[str, tuple[Instance, ...]]:
    """Return each node's instances, by their GPUs."""
    nodes: dict[str, tuple[Instance, ...]] = {}
    for at in sorted(places, key=lambda at: at.instance.gpus):
        nodes[at.node] = (*nodes.get(at.node, ()), at.instance)
    return nodes
