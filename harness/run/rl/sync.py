"""Bring new weights from the train pod to every engine: gathered, carried, loaded; timed apart.

The file crosses the network once per node, along a chain or a tree that begins at the first node
that generates, while everything goes on. Only then do engines load it from their node's memory,
which is what interrupts them. A transfer that fails is made again, whole, to the nodes that are
left. Whatever is built from now on is built with the new weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from harness.clock import NS_PER_S
from harness.errors import AgentLost, StepFailed
from harness.model.scenario import Rl
from harness.model.sizes import parse_size
from harness.run.generation.fleet import Fleet
from harness.run.generation.loading import load_weights
from harness.run.generation.places import by_node
from harness.run.rl.trainees import Trainees
from harness.run.session import MESSAGE_NS, Session
from harness.seeds import unpredictable
from harness.tasks import beside, together
from harness.wire.asks import CommandFailed
from harness.wire.generation import Span
from harness.wire.messages import Done
from harness.wire.training import WeightsPublished
from harness.wire.weights import (
    ClosePorter,
    ExpectWeights,
    ForgetWeights,
    OpenPorter,
    PorterOpen,
    SendWeights,
    WeightsArrived,
    WeightsSent,
)

Path = Literal["chain", "tree"]
NOBODY = "127.0.0.1:1"
"""Where nobody listens: what the fault `fail` sends to."""


class _Gathered(NamedTuple):
    """Published weights, and how long ranks worked on that."""

    answer: WeightsPublished
    gather_s: float


def children_of(receivers: Sequence[str], path: Path) -> dict[str, tuple[str, ...]]:
    """Return to whom each receiver passes weights on; the first gets them from the train pod.

    `chain`: to the next. `tree`: to two, as in a heap, so that none is far from the first.
    """
    last = len(receivers) - 1
    if path == "chain":
        return {name: tuple(receivers[i + 1 : i + 2]) for i, name in enumerate(receivers)}
    return {
        name: tuple(receivers[j] for j in (2 * i + 1, 2 * i + 2) if j <= last)
        for i, name in enumerate(receivers)
    }


class _Load(NamedTuple):
    """How long engines of a node loaded, and how long asking them took beyond that."""

    load_s: float = 0.0
    rpc_s: float = 0.0


@dataclass(kw_only=True)
class Synced:
    """One attempt to bring a version to all; times in s."""

    version: int
    attempt: int
    receivers: tuple[str, ...]
    bytes: int = 0
    buckets: int = 0
    gather_s: float = 0.0
    rpc_s: float = 0.0
    """Asking and answering: what all asks took beyond the work in them."""
    wire_s: float | None = None
    load_s: float | None = None
    begin_ns: int = 0
    total_s: float = 0.0
    outcome: Literal["synced", "noop", "failed"] = "failed"
    error: str = "interrupted"


@dataclass
class Syncs:
    """Syncs of one loop, over the porters of all nodes, which are opened by the first."""

    session: Session
    fleet: Fleet
    trainees: Trainees
    step: Rl
    number: int = 0
    policy: str = ""
    base: int = 0
    """What engines call version 0 of this loop: for them, versions never go back."""
    _paths: dict[str, str] = field(default_factory=dict)
    _first: dict[str, str] = field(default_factory=dict)
    """The first that were brought: what the fault `noop` loads again and again."""

    async def open(self) -> None:
        """Start a porter on every node that sends or receives; those that run stay.

        They end when the run does: engines that are built later need the files.
        """
        if not self.session.porters:
            self.session.closing.push_async_callback(self.close)
        nodes = self.session.bench.topology.nodes
        bodies = {node: OpenPorter(address=nodes[node].address) for node in self._all()}
        answers = await self.session.bench.ask_all(bodies, PorterOpen, 3 * MESSAGE_NS)
        self.session.porters.update({node: answer.listen for node, answer in answers.items()})

    async def close(self) -> None:
        """End all porters that can be reached, and their files."""
        there = (node for node in self.session.porters if node not in self.fleet.lost)
        bodies = {node: ClosePorter() for node in there}
        try:
            await self.session.bench.ask_all(bodies, Done, MESSAGE_NS)
        except (CommandFailed, AgentLost) as error:
            self._note(f"porters were not closed: {error}")

    async def sync(self, version: int) -> None:
        """Bring the trainees' weights, which are of `version`, to all engines.

        Raises `StepFailed` when it fails more often than `sync_retries`, with what failed last.
        """
        fault = dict(enumerate(self.step.sync_faults, start=1)).get(version, "")
        published = await self._gather(version)
        for attempt in range(self.step.sync_retries + 1):
            made = Synced(
                version=self.base + version,
                attempt=attempt,
                receivers=tuple(n for n in self.fleet.gpus_of if n not in self.fleet.lost),
                begin_ns=self._now(),
                gather_s=published.gather_s,
                bytes=published.answer.bytes,
            )
            try:
                broken = fault == "fail" and attempt == 0
                await self._carry(made, published.answer, broken=broken)
                await self._load(made, noop=fault == "noop")
            except (StepFailed, AgentLost) as error:
                made.error = str(error)
            else:
                return
            finally:
                self._tell(made)
            await self._reopen(made)
        raise StepFailed(f"weights {version} did not get to all that generate: {made.error}")

    # -- the phases ---------------------------------------------------------------------------

    async def _gather(self, version: int) -> _Gathered:
        begin_ns = self._now()
        answer, spans = await self.trainees.publish()
        took_s = (self._now() - begin_ns) / NS_PER_S
        if answer.version != self.trainees.base + version:
            raise StepFailed(f"weights {version} were asked for, {answer.version} published")
        return _Gathered(answer, min(took_s, _longest_s(spans)))

    async def _carry(self, made: Synced, published: WeightsPublished, *, broken: bool) -> None:
        """Send the file along the path; all receivers answer when they have it, verified."""
        if not made.receivers:
            raise AgentLost("; ".join(self.fleet.lost.values()))
        transfer = f"{unpredictable().getrandbits(128):032x}"  # whoever knows it may send
        children = children_of(made.receivers, self.step.sync)
        timeout_ns = round(self.step.sync_timeout_s * NS_PER_S)
        expects = {
            node: ExpectWeights(
                transfer=transfer,
                version=made.version,
                children=tuple(self.session.porters[child] for child in children[node]),
            )
            for node in made.receivers
        }
        send = SendWeights(
            transfer=transfer,
            version=made.version,
            path=published.path,
            children=(NOBODY if broken else self.session.porters[made.receivers[0]],),
            bucket_bytes=parse_size(self.step.bucket),
            stall_ns=timeout_ns // 2,
        )
        bench, begin_ns = self.session.bench, self._now()
        async with beside(bench.ask_all(expects, WeightsArrived, timeout_ns)) as arriving:
            # if it fails, nobody waits for receivers to which nothing will ever come
            sent = await bench.ask(self.trainees.root, send, WeightsSent, timeout_ns)
            arrived = await arriving
        took_s = (self._now() - begin_ns) / NS_PER_S
        made.wire_s = _longest_s({"": sent.spans})
        made.rpc_s += max(0.0, took_s - made.wire_s)
        made.buckets = sent.buckets
        wrong = [node for node, a in arrived.items() if a.checksum != published.checksum]
        if wrong:
            raise StepFailed(f"{', '.join(wrong)}: weights {made.version} have another checksum")
        self._paths = {node: answer.path for node, answer in arrived.items()}

    async def _load(self, made: Synced, *, noop: bool) -> None:
        """Have every engine load the file, by the way that `across_sync` says.

        An engine that fails to has no weights that anybody knows: it is given up, and started anew
        with the new ones like any other that is built from now on.
        """
        fleet = self.fleet
        async with fleet.changing:
            self._first = self._first or dict(self._paths)
            fleet.version = made.version
            fleet.sources = dict(self._first if noop else self._paths)
            places = by_node(place for place in fleet.places.values() if not place.dead)
            loads = await together(self._load_node(there) for there in places.values())
        made.load_s = max((load.load_s for load in loads), default=0.0)
        made.rpc_s += max((load.rpc_s for load in loads), default=0.0)
        made.outcome, made.error = "noop" if noop else "synced", ""
        await self._forget(made)

    async def _load_node(self, names: Sequence[str]) -> _Load:
        """Give a node's engines the weights: all at once, or each as soon as it is empty."""
        if self.step.across_sync != "finish":
            return await self._load_these(names)
        one_at_a_time = asyncio.Lock()  # a node changes one thing at a time

        async def drained(name: str) -> _Load:
            if not await self._empty(name):
                return _Load()
            async with one_at_a_time:
                return await self._load_these([name])

        loads = await together(map(drained, names))
        return _Load(max(load.load_s for load in loads), max(load.rpc_s for load in loads))

    async def _empty(self, name: str) -> bool:
        """Let what runs in an engine end under the old weights; whether it did."""
        fleet, timeout_ns = self.fleet, round(self.step.stage_timeout_s * NS_PER_S)
        reason = f"requests still run after {self.step.stage_timeout_s:g} s, and weights wait"
        try:
            await fleet.admission(self._alive([name]), allowed=False, timeout_ns=timeout_ns)
            if await fleet.drained(self._alive([name]), timeout_ns):
                return True
        except (StepFailed, AgentLost) as error:
            reason = str(error)
        fleet.give_up([name], reason)
        return False

    async def _load_these(self, names: Sequence[str]) -> _Load:
        """Give engines of one node the weights; those that fail are given up."""
        fleet, timeout_ns = self.fleet, round(self.step.stage_timeout_s * NS_PER_S)
        drop_kv = self.step.across_sync != "continue"
        begin_ns = self._now()
        try:
            answers = await load_weights(
                fleet, self._alive(names), drop_kv=drop_kv, timeout_ns=timeout_ns
            )
            if self.step.across_sync == "finish":
                await fleet.admission(self._alive(names), allowed=True, timeout_ns=timeout_ns)
        except (StepFailed, AgentLost) as error:
            fleet.give_up(names, f"it could not be given weights {fleet.version}: {error}")
            return _Load()
        load_s = _longest_s({node: answer.spans for node, answer in answers.items()})
        return _Load(load_s, (self._now() - begin_ns) / NS_PER_S - load_s)

    def _alive(self, names: Sequence[str]) -> list[str]:
        places = self.fleet.places
        return [name for name in names if name in places and not places[name].dead]

    async def _forget(self, made: Synced) -> None:
        """Let nodes delete what no engine will ask for again."""
        if any(self.step.sync_faults):
            return  # the first ones are loaded again
        body = ForgetWeights(keep_from=made.version)
        try:
            await self.session.bench.ask_all(dict.fromkeys(made.receivers, body), Done, MESSAGE_NS)
        except (CommandFailed, AgentLost) as error:
            self._note(f"old weights were not deleted: {error}")

    async def _reopen(self, made: Synced) -> None:
        """Start porters that are gone again, so that the next attempt can succeed."""
        try:
            await self.open()
        except (CommandFailed, AgentLost) as error:
            self._note(f"porters, after attempt {made.attempt}: {error}")

    # -- inside -----------------------------------------------------------------------------

    def _all(self) -> tuple[str, ...]:
        receivers = (node for node in self.fleet.gpus_of if node not in self.fleet.lost)
        return tuple(dict.fromkeys((self.trainees.root, *receivers)))

    def _now(self) -> int:
        return self.session.bench.clock.now_ns()

    def _note(self, text: str) -> None:
        self.session.record.event("note", {"level": "warning", "who": "sync", "text": text})

    def _tell(self, made: Synced) -> None:
        made.total_s = made.gather_s + (self._now() - made.begin_ns) / NS_PER_S
        self.session.record.event(
            "sync",
            {
                "step": self.number,
                "policy": self.policy,
                "version": made.version,
                "path": self.step.sync,
                "receivers": len(made.receivers),
                "attempt": made.attempt,
                "bytes": made.bytes,
                "buckets": made.buckets,
                "gather_s": made.gather_s,
                "rpc_s": made.rpc_s,
                "wire_s": made.wire_s,
                "load_s": made.load_s,
                "total_s": made.total_s,
                "outcome": made.outcome,
                "error": made.error,
            },
        )


def _longest_s(spans: Mapping[str, Sequence[Span]]) -> float:
    """Return the time from the first begin to the last end on the node that took longest."""
    took_ns = (
        max(span.end_ns for span in there) - min(span.begin_ns for span in there)
        for there in spans.values()
        if there
    )
    return max(took_ns, default=0) / NS_PER_S
