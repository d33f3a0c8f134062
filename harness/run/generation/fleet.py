"""The instances of a run and the requests in them, as one thing to command.

State changes only on the event loop. Beside whoever commands it, the fleet watches each node (one
long poll at a time: outputs into the ledger, stats, deaths), sends queued requests to instances,
gives up instances that died or stall and starts them anew. Whoever changes the layout holds
`changing` meanwhile, so that no restart comes in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from harness.clock import NS_PER_S
from harness.model.layout import Layout, Mix
from harness.model.placement import Instance
from harness.model.prompts import Prompts
from harness.model.replay import ReplayRequest
from harness.run.generation.changes import Background, Changes, Changing
from harness.run.generation.dispatch import Dispatcher
from harness.run.generation.keeper import Keeper
from harness.run.generation.nodes import Nodes
from harness.run.generation.places import Place, built_place, by_node, engine_row
from harness.run.generation.roster import Roster
from harness.run.generation.watching import Watching
from harness.run.generation.withdrawing import Left, Withdrawing
from harness.run.session import MESSAGE_NS, Session
from harness.scheduling.speed import Speeds
from harness.scheduling.waves import Placed
from harness.tasks import to_the_end
from harness.wire.generation import (
    Admission,
    Build,
    Built,
    CloseGeneration,
    EngineSpec,
    GenerationOpen,
    KvTarget,
    OpenGeneration,
    Prepare,
    Prepared,
    Strategy,
    Submitted,
    TearDown,
    Torn,
    Verb,
    Work,
)
from harness.wire.messages import Done

RESTART_NS = 120 * NS_PER_S
"""To end an instance that was given up, and as much to build it anew."""
CLOSE_NS = 30 * NS_PER_S
CATCH_UP_NS = 2 * MESSAGE_NS
"""A node that takes longer to tell what it has is lost."""


class Fleet:
    """See the module. Names are of instances; `placed` gives each node's instances.

    Commands ask all nodes concerned at once and return when all have answered. Spans in answers
    are on the nodes' clocks (``session.at``), but for `Left`. They raise `CommandFailed` where
    nodes answered `Failure` (``.failures`` by node) and `AgentLost` where nodes are lost; what
    succeeded on the other nodes is registered all the same.
    """

    def __init__(
        self,
        session: Session,
        spec: EngineSpec,
        gpus_of: Mapping[str, int],
        *,
        stall_ns: int,
        block_tokens: int = 0,
    ) -> None:
        self.session, self.spec, self.gpus_of = session, spec, dict(gpus_of)
        self.layout: Layout | Mix | None = None
        """What is up, as whoever changes it says."""
        self.version = 0
        """Weights that engines are built with."""
        self.sources: dict[str, str] = {}
        """By node, the file that holds weights of that version; none: engines have their own."""
        self.facts: dict[str, dict[str, str]] = {}
        self.out: set[str] = set()
        """Nodes that answer, but where no layout could be built; another step tries them anew."""
        self.changing = Changing()
        self._serials, self._block_tokens = count(1), block_tokens
        self._changes = Changes()
        self._background = Background(self._changes)
        self.nodes = Nodes(session.bench)
        self.speeds = Speeds(spec.profile if spec.engine == "paced" else None)
        self._roster = Roster(session, self.nodes, self.speeds, self._changes)
        self.ledger, self.places = self._roster.ledger, self._roster.places
        self._keeper = Keeper(
            self._roster,
            self.changing,
            take_all=self._take_all,
            tear_down=lambda at: self.tear_down([at.name], "restart", RESTART_NS, force=True),
            build=lambda at: self.build({at.node: (at.instance,)}, "restart", RESTART_NS),
        )
        self._dispatcher = Dispatcher(
            self._roster,
            changing=lambda: self.changing.locked() or self._keeper.starting > 0,
            failed=self._keeper.give_up,
        )
        self.waiting = self._dispatcher.waiting
        self._watching = Watching(
            self._roster,
            nodes=len(gpus_of),
            stall_ns=stall_ns,
            queue=lambda ids: self._dispatcher.queue(ids, ahead=True),
            give_up=self._keeper.give_up,
        )
        self._withdrawing = Withdrawing(self._roster, self._watching)

    @property
    def preemptions(self) -> int:
        """How often requests were put off for want of KV, in all instances so far."""
        return self._roster.preemptions

    @classmethod
    @asynccontextmanager
    async def opened(
        cls,
        session: Session,
        spec: EngineSpec,
        gpus_of: Mapping[str, int],
        prebuild: Sequence[Placed] = (),
        *,
        stall_ns: int,
        timeout_ns: int,
        block_tokens: int = 0,
    ) -> AsyncIterator[Fleet]:
        """Start the ranks, watch the nodes while the body runs, and close all of it.

        `block_tokens` is the length of the blocks of prompts in the requests, if they have any.
        """
        fleet = cls(session, spec, gpus_of, stall_ns=stall_ns, block_tokens=block_tokens)
        try:
            await fleet._open(prebuild, timeout_ns)
            yield fleet
            fleet._changes.check()
        finally:
            await to_the_end(fleet._close())

    @property
    def lost(self) -> Mapping[str, str]:
        """Nodes that are out for good, and why."""
        return self.nodes.lost

    @property
    def usable(self) -> dict[str, int]:
        """GPUs of the nodes on which engines can be built, in node order."""
        return {n: gpus for n, gpus in self.gpus_of.items() if n not in {*self.lost, *self.out}}

    @property
    def queued(self) -> int:
        """Requests that wait here for an instance."""
        return self._dispatcher.queued

    @property
    def instances(self) -> int:
        """How many live, or are being started again."""
        return len(self._roster.living) + self._keeper.starting

    # -- engines ------------------------------------------------------------------------

    async def prepare(
        self, placed: Placed, strategy: Strategy, timeout_ns: int
    ) -> dict[str, Prepared]:
        """Ask whether these could be all that runs on these nodes; nothing is changed."""
        bodies = {node: Prepare(instances=each, strategy=strategy) for node, each in placed.items()}
        return (await self.nodes.each(bodies, Prepared, timeout_ns)).complete()

    async def build(self, placed: Placed, strategy: Strategy, timeout_ns: int) -> dict[str, Built]:
        """Build instances; they are registered, but not accepting."""
        bodies = {
            node: Build(
                instances=instances,
                strategy=strategy,
                version=self.version,
                source=self.sources.get(node, ""),
            )
            for node, instances in placed.items()
            if instances
        }
        answers = await self.nodes.each(bodies, Built, timeout_ns)
        for node, built in answers.items():
            for instance in placed[node]:
                self._register(node, instance, built)
        return answers.complete()

    async def tear_down(
        self, names: Iterable[str], strategy: Strategy, timeout_ns: int, *, force: bool = False
    ) -> dict[str, Torn]:
        """End instances; they are registered no longer. On nodes that are lost, nobody is asked.

        Without `force` they must hold no request (else `ValueError`); with it their requests go
        back to the queue, and are sent wherever `accept` allows.
        """
        places = [self.places[name] for name in names]
        self.refuse(place.name for place in places)
        if force:
            for place in places:
                self._take_all(place)
                del self.places[place.name]
        elif full := [place.name for place in places if self.ledger.at(place.name)]:
            raise ValueError(f"{', '.join(full)}: torn down with requests in them")
        bodies = {
            node: TearDown(instances=there, strategy=strategy, force=force)
            for node, there in by_node(places).items()
            if node not in self.lost
        }
        answers = await self.nodes.each(bodies, Torn, timeout_ns)
        if force:  # what they still told comes to nothing, before they are built anew
            await self._watching.caught_up(answers, CATCH_UP_NS)
        for place in places:
            if place.node in answers or place.node in self.lost:
                self.places.pop(place.name, None)
        return answers.complete()

    async def admission(self, names: Iterable[str], *, allowed: bool, timeout_ns: int) -> None:
        """Let engines admit waiting requests, or not; the dead are left out."""
        places = [place for name in names if not (place := self.places[name]).dead]
        bodies = {
            node: Admission(instances=there, open=allowed)
            for node, there in by_node(places).items()
        }
        answers = await self.nodes.each(bodies, Done, timeout_ns)
        for place in places:
            if place.node in answers:
                place.admitting = allowed
        answers.complete()

    def abandon(self, node: str, reason: str) -> None:
        """Build nothing on a node any more, for nothing could be."""
        self.out.add(node)
        self._keeper.stays_out(node, reason)

    def give_up(self, names: Iterable[str], reason: str) -> None:
        """Take instances for dead: their requests go elsewhere, and they are started anew."""
        for name in names:
            if (place := self.places.get(name)) is not None:
                self._keeper.give_up(place, reason)

    # -- requests -----------------------------------------------------------------------

    def accept(self, names: Iterable[str]) -> None:
        """Let the router send requests to these instances; the dead get some when they are back."""
        for name in names:
            self.places[name].wanted = True
        self._dispatcher.look()

    def refuse(self, names: Iterable[str]) -> None:
        """Let it send them none; those under way still arrive."""
        for name in names:
            self.places[name].wanted = False

    def add(
        self, requests: Iterable[ReplayRequest], assignment: Mapping[str, str] | None = None
    ) -> None:
        """Queue new requests, each to be sent to the least loaded instance that can hold it.

        Those in `assignment` (id -> name) only to the one that they are given.
        """
        added = self.ledger.add(requests, self.session.bench.clock.now_ns())
        for id_, name in (assignment or {}).items():
            self.ledger.entries[id_].assigned = name
        self._dispatcher.queue(added, ahead=False)

    def resume(self, ids: Iterable[str]) -> None:
        """Queue requests that the ledger has queued, as an earlier run left them."""
        self._dispatcher.queue(ids, ahead=False)

    def assign(self, assignment: Mapping[str, str]) -> None:
        """Bind open requests to instances (id -> name; "" to any), from when they are sent next."""
        for id_, name in assignment.items():
            if (entry := self.ledger.entries.get(id_)) is not None:
                entry.assigned = name
        self._dispatcher.look()

    def let_go(self, ids: Iterable[str]) -> None:
        """Forget held or queued requests that nobody wants any longer."""
        ids = list(ids)
        self._dispatcher.unqueue(ids)
        for id_ in ids:
            self.ledger.drop(id_)

    def requeue(self, ids: Iterable[str]) -> None:
        """Queue held requests, ahead of those that never began."""
        ids = list(ids)
        for id_ in ids:
            self.ledger.requeue(id_)
        self._dispatcher.queue(ids, ahead=True)

    def seat_for(self, id_: str) -> Place | None:
        """Return the least loaded instance that has a seat for a request at once, if one has."""
        return self._dispatcher.seat_for(id_)

    async def submit_to(self, name: str, works: Sequence[Work], timeout_ns: int) -> Submitted:
        """Send held requests to one instance, past the router; those it refuses stay held."""
        return await self._dispatcher.submit(self.places[name], works, timeout_ns)

    async def withdraw(
        self,
        names: Iterable[str],
        *,
        ids: Iterable[str] = (),
        verb: Verb = "abort",
        to: KvTarget | None = None,
        timeout_ns: int,
    ) -> Left:
        """Take requests out: `ids` of one instance, or all of several, which then `refuse` more.

        Returns when all of their output is in the ledger; one that finished meanwhile is finished.
        The dead have none. What was taken before an error is `held` too: see `Ledger.held`.
        """
        places, ids = [self.places[name] for name in names], tuple(ids)
        if not ids:
            self.refuse(place.name for place in places)
        return await self._withdrawing.take(places, ids, verb, to, timeout_ns=timeout_ns)

    async def drained(self, names: Iterable[str], timeout_ns: int) -> bool:
        """Wait until nothing runs in these instances (whose admission is closed), or they died."""
        places = [self.places[name] for name in names]
        await self._watching.caught_up({place.node for place in places}, timeout_ns)
        return await self.until(
            lambda: all(p.dead or (p.stats and not p.stats.running) for p in places), timeout_ns
        )

    async def caught_up(self, nodes: Iterable[str]) -> None:
        """Wait until all that these nodes have to tell by now is known, or they are lost."""
        await self._watching.caught_up(nodes, CATCH_UP_NS)

    async def until(self, predicate: Callable[[], bool], timeout_ns: int) -> bool:
        """Wait until `predicate` holds, looked at again whenever something happened.

        Returns whether it holds in the end. Raises `StepFailed` when no instance is left.
        """
        return await self._changes.until(predicate, timeout_ns)

    def beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` as long as the fleet is open; an error of it ends all who wait."""
        return self._background.start(work)

    def look(self) -> None:
        """Let whoever waits for more than the fleet itself brings about look again."""
        self._changes.happened()

    # -- inside -------------------------------------------------------------------------

    async def _open(self, prebuild: Sequence[Placed], timeout_ns: int) -> None:
        bodies = {
            node: OpenGeneration(
                spec=self.spec,
                gpus=gpus,
                address=self.session.bench.topology.nodes[node].address,
                prebuild=tuple(placed[node] for placed in prebuild),
            )
            for node, gpus in self.gpus_of.items()
        }
        answers = await self.nodes.each(bodies, GenerationOpen, timeout_ns)
        for node, answer in answers.complete().items():
            self.facts[node] = answer.facts
            for text in answer.warnings:
                self._roster.note(node, text)
        for node in self.gpus_of:
            self._background.start(self._watching.watch(node))
        self._background.start(self._dispatcher.run(self._background))

    async def _close(self) -> None:
        await self._keeper.close()
        await self._background.close()
        bodies = {node: CloseGeneration() for node in self.gpus_of if node not in self.lost}
        answers = await self.nodes.each(bodies, Done, CLOSE_NS)
        if answers.error is not None:
            self._roster.note("generation", f"not closed: {answers.error}")

    def _register(self, node: str, instance: Instance, built: Built) -> None:
        now_ns = self.session.bench.clock.now_ns()
        place = built_place(node, instance, built, next(self._serials), now_ns)
        place.built_in_round = self._watching.round(node)
        if self.spec.engine == "vllm" and self.ledger.prompts is None:
            self.ledger.prompts = Prompts(place.capacity.vocab, self.spec.seed, self._block_tokens)
        self.places[instance.name] = place
        self._keeper.built(node, instance.name)
        self.session.record.event("engine", engine_row(place, self.facts[node]))

    def _take_all(self, place: Place) -> list[str]:
        """Queue whatever the ledger has at a place: it continues from what was delivered."""
        ids = list(self.ledger.at(place.name))
        for id_ in ids:
            self.ledger.hold(id_)
        self.requeue(ids)
        return ids
