"""The RL loop as a step of a scenario: generate, train, bring the weights back, under each policy.

Generation and training are a pipeline. Batches are asked for as soon as the staleness bound allows;
as soon as the groups of a step are complete they train; the new weights go to the engines while
those generate on. The coordinator owns all of it: which samples exist, which were used, and under
which weights each began.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from contextlib import AsyncExitStack
from typing import NamedTuple

import msgspec

from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import StepFailed, UsageError
from harness.model.fabric_rules import Arm, arms_of
from harness.model.lengths import generate
from harness.model.replay import Replay, ReplayRequest
from harness.model.scenario import Rl
from harness.model.workload import GeneratedWorkload
from harness.run.fabric.opening import network
from harness.run.generation.asked import GenerationAsked
from harness.run.generation.ledger import Entry
from harness.run.generation.opening import open_fleet
from harness.run.generation.stages import Pace
from harness.run.rl.asked import TrainingAsked
from harness.run.rl.checkpoint import Kept, read_checkpoint, trainer_folder, write_checkpoint
from harness.run.rl.columns import EndedColumns
from harness.run.rl.dropping import drop
from harness.run.rl.rollouts import Group, Rollouts
from harness.run.rl.samples import batches_of, flat, learned_from, named
from harness.run.rl.steering import compute_of, first_layout, pilot_of, searched
from harness.run.rl.sync import Syncs
from harness.run.rl.told import Bubbles, Totals, loop_row, pool_row, step_row
from harness.run.rl.trainees import Trainees
from harness.run.session import Session
from harness.scheduling.policies import Policy, assign, parse_policy
from harness.scheduling.view import Finished
from harness.tasks import end, together

LOOK_NS = 50 * NS_PER_MS
POOL_NS = 500 * NS_PER_MS
"""Between two rows of what the pool looks like."""
HISTORY = 10
"""Batches that are remembered for forecasts."""


async def rl(session: Session, step: Rl, number: int) -> None:
    """Run the loop once under each arm; each begins with version 0, and forgets the others."""
    asked = session.generation_asked
    if asked is None or session.training_asked is None:
        raise UsageError("an rl step needs the tables [generation] and [training] in the scenario")
    repeat = number // len(session.scenario.steps)
    replay, seed = _drawn(asked, repeat)
    kept = read_checkpoint(session.resume) if session.resume else None
    for index, arm in enumerate(arms_of(step)):
        left_at = (kept.checkpoint.step, kept.checkpoint.policy) if kept else (0, 0)
        if (number, index) < left_at:
            continue
        mine = kept if (number, index) == left_at else None
        place = Place(number, index, repeat, seed)
        with session.pressed(number, str(arm)):
            await Loop(session, step, place, arm, replay).run(mine)


def _drawn(asked: GenerationAsked, repeat: int) -> tuple[Replay, int]:
    """Return a repeat's requests, drawn with a seed of its own, and that; a trace is the same."""
    workload = asked.workload
    if not isinstance(workload, GeneratedWorkload):
        return asked.replay, 0
    seed = workload.seed + repeat
    again = generate(msgspec.structs.replace(workload, seed=seed)) if repeat else asked.replay
    return again, seed


class Place(NamedTuple):
    """Which loop of a run: step of the scenario, arm of the step, repeat, and its requests."""

    number: int
    policy: int
    repeat: int
    workload_seed: int


class Loop:
    """One arm's run of the loop."""

    def __init__(self, session: Session, step: Rl, place: Place, arm: Arm, replay: Replay) -> None:
        self.session, self.step = session, step
        self.number, self.index, self.repeat, self.workload_seed = place
        self.name, self.arm = str(arm), arm
        self.policy: Policy = parse_policy(arm.policy)
        self.digest = replay.digest
        self.clock = session.bench.clock
        self.batches = batches_of(replay, step)
        self.rollouts = Rollouts(
            bound=step.staleness_max,
            per_step=len(self.batches[0]),
            order=step.order,
            over_age=step.over_age,
        )
        self.version = self.base = 0
        self.open: dict[str, Entry] = {}
        """Samples that have not ended."""
        self.ended: dict[int, EndedColumns] = {}
        """By batch, samples that have, as long as no step has used them."""
        self.history: list[Finished] = []
        self.asked_ns: dict[int, int] = {}
        self.begin_ns = self.step_end_ns = self.clock.now_ns()
        self.pace, self.bubbles, self.totals = Pace(), Bubbles(), Totals()
        self.refused: Entry | None = None

    async def run(self, kept: Kept | None) -> None:
        """Open what is needed, make all steps, and tell what came of it."""
        session, step = self.session, self.step
        asked, training = session.generation_asked, session.training_asked
        assert asked is not None
        assert training is not None
        compute = compute_of(asked, session.fleet)
        self.policy = searched(self.policy, asked, flat(self.batches))
        first = first_layout(self.policy, asked, compute)
        async with AsyncExitStack() as stack:
            if session.fleet is None:
                session.fleet = await open_fleet(
                    session,
                    asked,
                    stall_s=step.stall_s,
                    stage_timeout_s=step.stage_timeout_s,
                    layout=first,
                )
            self.fleet = session.fleet
            ledger = self.fleet.ledger
            self.tokens_before = ledger.tokens
            self.amiss_before = ledger.lost_tokens, ledger.doubled_tokens
            self.pilot = pilot_of(self, asked, compute)
            self.trainees = await self._trainees(stack, training)
            self.syncs = Syncs(session, self.fleet, self.trainees, step, self.number)
            self.syncs.policy = self.name
            self.base = self.syncs.base = self.fleet.version + (
                self.trainees.real and bool(self.fleet.version)
            )
            await self.syncs.open()
            await self.pilot.bring_up(first)
            self.fleet.ledger.on_end = self._on_end
            session.fabric = await stack.enter_async_context(
                network(session, self.arm, self.number)
            )
            stack.callback(setattr, session, "fabric", None)
            await self._begin(kept)
            await self._make_steps()
            ledger.on_end = None
        if self.totals.steps:  # none where it goes on from one that had made all of them
            session.record.event("rl", loop_row(self))
        self._judge()

    async def _make_steps(self) -> None:
        """Make all steps; an error of those beside, who look and steer, ends whatever waits."""
        works = [self._look(), self.pilot.run()]
        if fabric := self.session.fabric:
            works += [fabric.tend(), fabric.guard()]
        beside = [self.fleet.beside(work) for work in works]
        try:
            while self.version < self.step.steps:
                groups = await self._complete(self.version)
                await together([self._train(groups), self._ask()])
                await self._ask()
        finally:
            await end(beside)

    def _judge(self) -> None:
        """Raise `StepFailed` where tokens do not add up."""
        ledger, (lost, doubled) = self.fleet.ledger, self.amiss_before
        if (ledger.lost_tokens, ledger.doubled_tokens) != (lost, doubled):
            raise StepFailed(
                f"{ledger.lost_tokens - lost} tokens were lost and "
                f"{ledger.doubled_tokens - doubled} delivered twice"
            )

    # -- begin and end --------------------------------------------------------------------------

    async def _trainees(self, stack: AsyncExitStack, asked: TrainingAsked) -> Trainees:
        """Return the ranks that train: fresh ones where they learn, else those of the run."""
        timeout_ns = round(self.step.train_timeout_s * NS_PER_S)
        opened = Trainees.opened(self.session, asked, timeout_ns=timeout_ns)
        if asked.spec.mode == "real":
            trainees = await stack.enter_async_context(opened)
        else:
            session = self.session
            if session.trainees is None:
                session.trainees = await session.closing.enter_async_context(opened)
            trainees = session.trainees
        trainees.number, trainees.base = self.number, trainees.version
        return trainees

    async def _begin(self, kept: Kept | None) -> None:
        """Have the first weights everywhere, and the first batches asked for."""
        if kept is not None:
            await self._go_on(kept)
        elif self.trainees.real:
            await self.syncs.sync(0)
        await self._ask()
        self.begin_ns = self.step_end_ns = self.clock.now_ns()
        self.asked_ns = dict.fromkeys(self.asked_ns, self.begin_ns)
        self.trainees.busy_ns = 0
        self.session.all_up()

    async def _go_on(self, kept: Kept) -> None:
        """Take over what a run that was killed had: weights, samples, and how old they are."""
        saved = kept.checkpoint
        if saved.digest != self.digest:
            text = "its requests were others: same scenario, workload and seed are needed"
            raise UsageError(f"{kept.folder}: cannot go on from it; {text}")
        await self.trainees.load(kept.trainer, saved.trained_version, saved.version)
        self.version = saved.version
        await self.syncs.sync(saved.version)
        saved.restore(self.rollouts)
        self.history = saved.history()
        for entry in saved.entries(self.clock.now_ns()):
            self.fleet.ledger.restore(entry)
            if entry.state == "finished":
                self._keep(entry)
            else:
                self.open[entry.id] = entry
        self.fleet.resume(self.open)

    # -- the pipeline ---------------------------------------------------------------------------

    async def _ask(self) -> None:
        """Ask for every batch that may begin under the weights that are up; then plan for them."""
        idle = not self.open
        while self._may_ask():
            batch = self.rollouts.asked
            groups = [self._named(batch, samples) for samples in self.batches[batch]]
            self.rollouts.ask(groups)
            self._send([request for group in groups for request in group])
            self.asked_ns[batch] = self.clock.now_ns()
            self.pilot.batch = batch
            self.pilot.look()
        if idle and self.open and self.policy.plans:
            await self.pilot.replan(first=True)

    def _may_ask(self) -> bool:
        if self.open and self.step.batches == "one_at_a_time":
            return False
        return self.rollouts.asked < self.step.steps and self.rollouts.may_ask(self.version)

    def _named(
        self, batch: int, samples: Sequence[ReplayRequest], attempt: int = 0
    ) -> list[ReplayRequest]:
        return named(f"{self.number}.{self.index}.{batch}.{attempt}", samples)

    def _send(self, requests: Sequence[ReplayRequest]) -> None:
        if self.policy.knows:
            requests = sorted(requests, key=lambda request: -request.response_tokens)
        assignment = {}
        if self.policy.routing == "assigned":
            view, _ = self.pilot.view()
            if view.instances:
                assignment = assign(view, [request.id for request in requests])
        self.fleet.add(requests, assignment)
        entries = self.fleet.ledger.entries
        self.open |= {request.id: entries[request.id] for request in requests}

    async def _complete(self, version: int) -> list[Group]:
        """Wait until the groups of a step are complete; drop what will be too old, if asked."""
        if self.step.order == "first_ready":
            await self._note_begun()
        await self._until(lambda: self.rollouts.ready(version) is not None)
        if self.step.over_age == "drop":
            await self._drop_late(version)
        groups = self.rollouts.ready(version)  # also what has ended while it was to be dropped
        assert groups is not None
        return groups

    async def _until(self, predicate: Callable[[], bool]) -> None:
        """Wait as long as the scenario may last; raises what cannot run."""
        timeout_ns = round(self.session.scenario.timeout_s * NS_PER_S)
        came = await self.fleet.until(lambda: predicate() or self.refused is not None, timeout_ns)
        if self.refused is not None:
            raise StepFailed(f"sample {self.refused.id} can run nowhere: {self.refused.reason}")
        if not came:
            raise StepFailed(self._incomplete())

    def _incomplete(self) -> str:
        """Say which samples are still being waited for."""
        oldest = min(self.open.values(), key=lambda entry: (entry.request.batch, entry.arrived_ns))
        return (
            f"the samples of step {self.version} are not complete within the scenario's timeout_s: "
            f"{len(self.open)} are open, the first {oldest.id}, which has {oldest.total_tokens} "
            f"tokens and is {'at ' + oldest.at if oldest.at else oldest.state}"
        )

    async def _drop_late(self, version: int) -> None:
        """Generate anew what this step goes without, and would be too old for the next one."""
        timeout_ns = round(self.step.stage_timeout_s * NS_PER_S)
        for group in self.rollouts.late(version):
            await drop(self.fleet, [i for i in group.ids if i in self.open], timeout_ns)
            if group.state != "open":
                continue  # the last of it ended meanwhile
            for id_ in group.ids:
                self.open.pop(id_, None)
            self._let_go({id_ for id_ in group.ids if id_ in self.fleet.ledger.entries})
            again = self._named(group.batch, group.requests, self.rollouts.dropped + 1)
            self.rollouts.drop(group, again)
            self._send(again)

    async def _train(self, groups: Sequence[Group]) -> None:
        """Make one step, bring the weights to the engines, and tell."""
        version, entries = self.version, self.fleet.ledger.entries
        self.rollouts.use(groups, version)
        used = [entries[id_] for group in groups for id_ in group.ids]
        samples = learned_from(groups, self.fleet.ledger, self.base)
        keep = trainer_folder(self.session.keep, self.number, self.index, version + 1)
        made = await self.trainees.step(version, samples, keep if self.step.checkpoint else None)
        await self.syncs.sync(version + 1)
        self.version = version + 1
        self.session.record.event("rl_step", step_row(self, used, samples, made))
        self.step_end_ns = self.clock.now_ns()
        self._forget(groups, used)
        if self.step.checkpoint:
            write_checkpoint(self, self.session.keep)

    # -- what is noted --------------------------------------------------------------------------

    def _on_end(self, entry: Entry) -> None:
        """Note a sample that has ended."""
        if self.open.pop(entry.id, None) is None:
            return  # it was dropped
        if entry.state == "refused":
            self.refused = entry
            return
        self._keep(entry)
        self.rollouts.ended(entry.id, (entry.version_oldest or 0) - self.base)

    def _keep(self, entry: Entry) -> None:
        """Keep a sample that has ended until a step has used it."""
        batch = entry.request.batch
        self.ended.setdefault(batch, EndedColumns(batch)).add(entry)

    async def _note_begun(self) -> None:
        """Note under which weights each sample began, also where its first token is not told yet.

        Else one might be found to be too old only when its step is over.
        """
        places, silent = self.fleet.places, [e.at for e in self.open.values() if not e.total_tokens]
        await self.fleet.caught_up({places[at].node for at in silent if at in places})
        for entry in self.open.values():
            if entry.version_oldest is not None:
                self.rollouts.begun(entry.id, entry.version_oldest - self.base)

    def _forget(self, groups: Sequence[Group], used: Sequence[Entry]) -> None:
        """Let go of what was used: forecasts remember its lengths."""
        self.history = [*self.history, EndedColumns(self.version - 1, used).finished()][-HISTORY:]
        self._let_go({entry.id for entry in used})
        for group in groups:
            self.rollouts.forget(group)
        self.asked_ns.pop(self.version - 1, None)

    def _let_go(self, gone: Set[str]) -> None:
        """Keep samples that have ended no longer."""
        left = [there.without(gone) for there in self.ended.values()]
        self.ended = {there.batch: there for there in left if len(there)}
        self.fleet.ledger.forget(gone)

    def seen_history(self) -> list[Finished]:
        """Return past batches, and last what has ended of those in flight."""
        return [*self.history, *(self.ended[batch].finished() for batch in sorted(self.ended))]

    async def _look(self) -> None:
        """Note tokens, idle engines, and now and then what the pool looks like."""
        told_ns = 0
        while True:
            now_ns = self.clock.now_ns()
            self.pace.note(now_ns, self.fleet.ledger.tokens)
            self.bubbles.note(now_ns, self.fleet)
            if now_ns - told_ns >= POOL_NS:
                told_ns = now_ns
                self.session.record.event("pool", pool_row(self))
            await self.clock.sleep_ns(LOOK_NS)
