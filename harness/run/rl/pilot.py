"""A policy at the controls of the fleet: the slow loop plans layouts, the fast one moves requests.

Policies only see and decide; here it is done, and told. One thing at a time: a plan that is being
carried out, or weights that are being loaded, let the loops wait. Whatever a policy was told and
decided is journaled with what the truth would have made of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np

from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import StepFailed, UsageError
from harness.model.layout import Mix
from harness.model.placement import place
from harness.model.scenario import Generate, Rl
from harness.processes import think
from harness.run.generation.fleet import Fleet
from harness.run.generation.generate import switch_row
from harness.run.generation.ledger import Entry
from harness.run.generation.migrate import Migrations
from harness.run.generation.stages import Pace
from harness.run.generation.switch import Made, Switches
from harness.run.rl.columns import OpenColumns
from harness.run.rl.viewing import truth_of, view_of
from harness.scheduling.compute import Compute
from harness.scheduling.forecast import Forecast
from harness.scheduling.migration import Costs, choose
from harness.scheduling.planner import plan
from harness.scheduling.policies import Policy, foresee, rebalance
from harness.scheduling.view import Finished, Ints, Move, Moved, Plan, Settings, View
from harness.scheduling.waves import names
from harness.seeds import seeded

FABRIC_NS = 5 * NS_PER_S
"""For circuits to get where they are going; after that, traffic is electrical or as it was."""
PLANNING_SHARE = 0.2
"""Of the time at most: what thinks shares a processor, and Python's lock, with all that waits."""
MOVES_KEPT = 1000
"""Moves that policies are shown: more than any bounded rate makes within a request's rest."""
GUESS_S = 5.0
"""Of a switch, where nothing was measured and the scenario does not say: 4.52 s are published."""


@dataclass
class Counts:
    """What came of a policy's decisions."""

    taken: int = 0
    refused: int = 0
    wasted: int = 0
    moves: int = 0


@dataclass
class Pilot:
    """Drives one policy through one run of the loop.

    `entries` gives the requests that are open, `history` what has ended, oldest batch first,
    `coming` how many requests each batch has that follows.
    """

    fleet: Fleet
    step: Rl
    number: int
    policy: Policy
    compute: Compute
    costs: Costs
    cap_tokens: int
    entries: Callable[[], Sequence[Entry]]
    history: Callable[[], Sequence[Finished]]
    pace: Pace
    name: str = ""
    """Of the arm, in rows."""
    turns_max: int = 1
    """Of a request: how often it may go on after an answer."""
    coming: Callable[[], Sequence[int]] = tuple
    guess_s: float = GUESS_S
    """What a switch costs before one was measured."""
    counts: Counts = field(default_factory=Counts)
    moved: deque[Moved] = field(default_factory=lambda: deque(maxlen=MOVES_KEPT))
    switched_s: float | None = None
    batch: int = 0
    """The newest that was asked for."""

    def __post_init__(self) -> None:
        """Make what carries decisions out."""
        self.session = self.fleet.session
        self.clock = self.session.bench.clock
        asked = Generate(
            strategy=self.step.strategy, stage_timeout_s=self.step.stage_timeout_s, rest_s=0.0
        )
        chance = seeded(self.session.scenario.seed, "moves nobody asked for")
        self.migrations = Migrations(self.fleet, asked, self.number, self.costs, chance)
        self.switches = Switches(self.fleet, asked, self.migrations)
        self._asked, self._columns = asked, OpenColumns()
        self._switch_s: list[float] = []
        self._switches_in: dict[int, int] = {}
        """By the newest batch that was asked for; one before anybody runs is none."""
        self._due = self._planning = False
        self._index, self._rest_s = 0, 0.0

    async def run(self) -> None:
        """Look again and again, as long as the loop goes on."""
        async with self.migrations.watched():
            planned_s = self._now_s()
            while True:
                await self.clock.sleep_ns(round(self.step.balance_ms * NS_PER_MS))
                if self.fleet.changing.locked():
                    continue
                rested_s = self._now_s() - planned_s
                if self.policy.plans and (
                    self._due or rested_s >= max(self.step.replan_s, self._rest_s)
                ):
                    self._due = False
                    await self.replan()
                    planned_s = self._now_s()
                elif self.policy.balances:
                    await self.rebalance()

    def look(self) -> None:
        """Plan at the next look: something has changed that matters."""
        self._due = True

    # -- the slow loop --------------------------------------------------------------------------

    async def replan(self, *, first: bool = False) -> None:
        """Decide whether another layout should be up, and bring it up; one plan at a time.

        `first`: nothing that is queued is sent before that is decided.
        """
        if self._planning:
            return self.look()
        self._planning = True
        try:
            await self._replan(self.fleet.waiting() if first else nullcontext())
        finally:
            self._planning = False

    async def _replan(self, meanwhile: AbstractContextManager[None]) -> None:
        with meanwhile:
            await self._settled()
            view, entries = self.view()
            truth, settings = truth_of(entries), self._settings()

            def decide() -> tuple[Forecast, Plan]:
                expected = foresee(view)
                return expected, plan(view, expected, self.compute, settings)

            begin_ns = self.clock.now_ns()
            expected, decided = await think(decide)
            solve_ns = self.clock.now_ns() - begin_ns
            wasted = decided.wanted is not None and await self._would_stay(view, truth)
        self._rest_s = solve_ns / NS_PER_S * (1 / PLANNING_SHARE - 1)
        self._tell_forecast(view, expected, truth)
        outcome = "taken" if decided.wanted else "stayed"
        if not decided.wanted and decided.best is not None and decided.best != view.layout:
            outcome = "refused"
        self.counts.refused += outcome == "refused"
        try:
            if decided.wanted is not None:
                made = await self._switch(decided.wanted, decided.assignment)
                if made.outcome == "switched":
                    self.counts.taken += 1
                    before = self._switches_in.get(self.batch, 0)
                    self._switches_in[self.batch] = before + bool(view.requests.running.any())
                    self.counts.wasted += wasted
                else:
                    outcome = "failed"
            else:
                self.fleet.assign(decided.assignment)
        finally:
            self._tell_plan(view, decided, outcome, solve_ns / NS_PER_MS)

    async def _settled(self) -> None:
        """Wait for circuits that are moving: neither plans nor layouts begin meanwhile."""
        if self.session.fabric is not None:
            await self.session.fabric.settled(FABRIC_NS)

    async def bring_up(self, wanted: Mix) -> None:
        """Bring a layout up, whole, that was not planned: a static one.

        One failure is put up with. Raises `UsageError` where all of the bench refuses it, and
        `StepFailed` where it failed again.
        """
        for last in (False, True):
            if self._is_up(wanted):
                return
            made = await self._switch(wanted)
            self.switched_s = None  # it was no decision that others are to rest after
            if made.outcome == "switched" or self._is_up(wanted):
                return
            text = f"{wanted} could not be brought up: {made.error}"
            if made.outcome == "refused" and self.fleet.usable == dict(self.fleet.gpus_of):
                raise UsageError(text)
            if last:
                raise StepFailed(text)

    def _is_up(self, wanted: Mix) -> bool:
        """Whether all instances of a layout live."""
        if str(self.fleet.layout) != str(wanted):
            return False
        places = self.fleet.places
        named = names(place(wanted, self.fleet.gpus_of))
        return all(name in places and not places[name].dead for name in named)

    async def _switch(self, wanted: Mix, assignment: Mapping[str, str] | None = None) -> Made:
        """Bring a layout up; requests that are queued wait for their instance from now on.

        What earlier plans assigned them to counts no longer: nobody would wait for it in vain.
        """
        going = self._going(wanted)
        self.fleet.refuse(going)
        self.fleet.assign({entry.id: "" for entry in self.entries()} | dict(assignment or {}))
        await self._settled()
        made = await self.switches.make(wanted)
        if made.outcome == "refused":
            self.fleet.accept(name for name in going if name in self.fleet.places)
        self.switched_s = self._now_s()
        if made.outcome == "switched":
            self._switch_s.append((made.end_ns - made.begin_ns) / NS_PER_S)
        row = switch_row(self._asked, self.number, self._index, made, self.pace)
        self.session.record.event("parallelism", row)
        self._index += 1
        return made

    def _going(self, wanted: Mix) -> list[str]:
        """Return instances that accept requests, and would not be kept; none if it does not fit."""
        try:
            placed = place(wanted, self.fleet.usable)
            kept = {instance for there in placed.values() for instance in there}
        except UsageError:
            return []
        places = self.fleet.places.values()
        return [at.name for at in places if at.accepting and at.instance not in kept]

    async def _would_stay(self, view: View, truth: Ints) -> bool:
        """Whether somebody who knows all lengths would not switch: then it is wasted."""
        if not len(truth):
            return False
        certain, settings = Forecast.certain(truth), self._settings()
        wanted = await think(lambda: plan(view, certain, self.compute, settings).wanted)
        return wanted is None

    # -- the fast loop --------------------------------------------------------------------------

    async def rebalance(self) -> None:
        """Move requests off instances that would end last."""
        view, _ = self.view()
        if len(view.instances) < 2:
            return
        moves = rebalance(self.policy, view, self.compute, self._settings(), self._move_s(view))
        if not moves:
            return
        async with self.fleet.changing:
            for move in moves:
                await self._move(move)

    async def _move(self, move: Move) -> None:
        entry = self.fleet.ledger.entries.get(move.id)
        target = self.fleet.places.get(move.target)
        if entry is None or target is None or not target.accepting or entry.at != move.source:
            return  # the pool has changed since it was looked at
        entry.assigned = ""
        await self.migrations.move(entry, target)
        self.counts.moves += 1
        self.moved.append(Moved(move.id, move.source, move.target, self._now_s()))

    def _move_s(self, view: View) -> Callable[[str, str, int], float]:
        layouts = {instance.name: instance.layout for instance in view.instances}
        peers = {place.name: place.kv_peers for place in self.fleet.places.values()}

        def move_s(source: str, target: str, context_tokens: int) -> float:
            choice = choose(
                self.costs,
                layouts[source],
                layouts[target],
                context_tokens,
                kv_possible=bool(peers[target]) and all(peers[target]),
                wanted="auto",
            )
            return (choice.expected_ms[choice.by] or 0.0) / 1e3

        return move_s

    # -- what is seen ---------------------------------------------------------------------------

    def view(self) -> tuple[View, Sequence[Entry]]:
        """Return the pool now, and the open requests in the order of its rows."""
        entries = self.entries()
        seen = view_of(
            self.fleet,
            entries,
            self._columns,
            self.history(),
            cap_tokens=self.cap_tokens,
            turns_max=self.turns_max,
            coming=self.coming(),
            switched_s=self.switched_s,
            switches=self._switches_in.get(self.batch, 0),
            moved=self.moved,
            knows=self.policy.knows,
        )
        return seen, entries

    def _settings(self) -> Settings:
        measured = float(np.mean(self._switch_s[-5:])) if self._switch_s else 0.0
        return Settings(
            gain_min=self.step.gain_min_pct / 100,
            switch_s=measured or self.step.switch_s or self.guess_s,
            rest_s=self.step.replan_s,
            moves_per_s_max=self.step.moves_per_s_max if self.policy.balances else 0.0,
        )

    def _now_s(self) -> float:
        return self.clock.now_ns() / NS_PER_S

    # -- what is told ---------------------------------------------------------------------------

    def _tell_plan(self, view: View, decided: Plan, outcome: str, solve_ms: float) -> None:
        self.session.record.event(
            "planned",
            {
                "step": self.number,
                "policy": self.name,
                "layout": str(view.layout),
                "best": str(decided.wanted or decided.best or view.layout),
                "outcome": outcome,
                "reason": decided.reason,
                "open": len(view.requests),
                "stay_s": decided.stay_s,
                "change_s": decided.change_s,
                "cost_s": decided.cost_s,
                "solve_ms": solve_ms,
            },
        )

    def _tell_forecast(self, view: View, expected: Forecast, truth: Ints) -> None:
        if view.truth is not None or not len(truth):
            return
        low, high = np.asarray(expected.quantiles((0.1, 0.9))).T
        covered = np.mean((low <= truth) & (truth <= high))
        total, longest = expected.total, expected.longest
        self.session.record.event(
            "forecast",
            {
                "step": self.number,
                "policy": self.name,
                "batch": self.batch,
                "at_s": view.now_s,
                "open": len(truth),
                "past_batches": expected.past_batches,
                "total_tokens": total.mid,
                "total_low_tokens": total.low,
                "total_high_tokens": total.high,
                "total_true_tokens": int(truth.sum()),
                "longest_tokens": longest.mid,
                "longest_low_tokens": longest.low,
                "longest_high_tokens": longest.high,
                "longest_true_tokens": int(truth.max()),
                "covered_pct": 100 * float(covered),
            },
        )
