"""Bring new weights from the train pod to every engine: gathered, carried, loaded; timed apart.

The file crosses the network once per node, the way that `harness.run.rl.edges` says, while
everything goes on. Only then do engines load it from their node's memory, which is what interrupts
them. A transfer that fails is made again, whole, from and to the nodes that are left. Whatever is
built from now on is built with the new weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

from harness.clock import NS_PER_S
from harness.errors import AgentLost, StepFailed
from harness.model.scenario import Rl
from harness.model.sizes import parse_size
from harness.run.generation.fleet import Fleet
from harness.run.rl.edges import Edge, children_of, edges_of, sources_of
from harness.run.rl.loading import Loading, longest_s
from harness.run.rl.traffic import StepTraffic
from harness.run.rl.trainees import Trainees
from harness.run.session import MESSAGE_NS, Session
from harness.seeds import unpredictable
from harness.tasks import beside, together
from harness.wire.asks import CommandFailed
from harness.wire.messages import Done, Message
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

R = TypeVar("R", bound=Message)

OPEN_NS = 3 * MESSAGE_NS
NOBODY = "127.0.0.1:1"
"""Where nobody listens: what the fault `fail` sends to."""


class Way(NamedTuple):
    """How weights get everywhere: all of `edges` carry the whole file, at the same time."""

    sources: tuple[str, ...]
    receivers: tuple[str, ...]
    edges: tuple[Edge, ...]


class _Gathered(NamedTuple):
    """Published weights, alike on each source, and how long ranks worked on that."""

    paths: dict[str, str]
    bytes: int
    checksum: int
    gather_s: float


@dataclass(kw_only=True)
class Synced:
    """One attempt to bring a version to all; times in s."""

    version: int
    attempt: int
    way: Way
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
    _out: set[str] = field(default_factory=set)
    """Sources that failed in the sync that is under way."""
    _paths: dict[str, str] = field(default_factory=dict)
    _first: dict[str, str] = field(default_factory=dict)
    """The first that were brought: what the fault `noop` loads again and again."""

    def __post_init__(self) -> None:
        """Have whoever trains tell the fabric of all that a step sends, syncs included."""
        self.traffic = StepTraffic(self.session, self.trainees, self.way)
        self.trainees.traffic = self.traffic

    async def open(self) -> None:
        """Start a porter on every node that sends or receives; those that run stay.

        They end when the run does: engines that are built later need the files.
        """
        if not self.session.porters:
            self.session.closing.push_async_callback(self.close)
        answers = await self.session.bench.ask_all(self._openings(), PorterOpen, OPEN_NS)
        self.session.porters.update({node: answer.listen for node, answer in answers.items()})

    async def close(self) -> None:
        """End all porters that can be reached, and their files."""
        there = (node for node in self.session.porters if node not in self.fleet.lost)
        await self._each({node: ClosePorter() for node in there}, Done, "a porter was not closed")

    def way(self, trainers: Sequence[str] = ()) -> Way:
        """Return who would send to whom in a sync that begins now; `trainers`: () is all."""
        receivers = tuple(node for node in self.fleet.gpus_of if node not in self.fleet.lost)
        sources = sources_of(trainers or self.trainees.nodes, receivers, self.step.sync)
        return Way(sources, receivers, edges_of(sources, receivers, self.step.sync))

    async def sync(self, version: int) -> None:
        """Bring the trainees' weights, which are of `version`, to all engines.

        Raises `StepFailed` when it fails more often than `sync_retries`, with what failed last.
        """
        fault = dict(enumerate(self.step.sync_faults, start=1)).get(version, "")
        async with self.traffic.gathering():
            gathered = await self._gather(version)
        self._out.clear()
        for attempt in range(self.step.sync_retries + 1):
            made = Synced(
                version=self.base + version,
                attempt=attempt,
                way=self.way([node for node in gathered.paths if node not in self._out]),
                begin_ns=self._now(),
                gather_s=gathered.gather_s,
                bytes=gathered.bytes,
            )
            try:
                broken = fault == "fail" and attempt == 0
                async with self.traffic.carrying(last=version >= self.step.steps):
                    await self._carry(made, gathered, broken=broken)
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
        """Have the weights published on every source. Raises `StepFailed` where these differ."""
        begin_ns, sources = self._now(), self.way().sources
        answers = await self.trainees.publish(sources)
        took_s = (self._now() - begin_ns) / NS_PER_S
        gather_s = min(took_s, longest_s({node: a.spans for node, a in answers.items()}))
        first = answers[sources[0]]
        if first.version != self.trainees.base + version:
            raise StepFailed(f"weights {version} were asked for, {first.version} published")
        if differ := [node for node in sources if answers[node].checksum != first.checksum]:
            text = f"{', '.join(differ)}: weights {version} are not those of {sources[0]}"
            raise StepFailed(f"{text}: their files have other checksums")
        paths = {node: answers[node].path for node in sources}
        return _Gathered(paths, first.bytes, first.checksum, gather_s)

    async def _carry(self, made: Synced, gathered: _Gathered, *, broken: bool) -> None:
        """Send the file along all edges; receivers answer when they have it, verified."""
        way = made.way
        if not way.receivers:
            raise AgentLost("; ".join(self.fleet.lost.values()))
        transfer = f"{unpredictable().getrandbits(128):032x}"  # whoever knows it may send
        timeout_ns = round(self.step.sync_timeout_s * NS_PER_S)
        expects = {
            node: ExpectWeights(
                transfer=transfer, version=made.version, children=self._below(node, way)
            )
            for node in way.receivers
        }
        sends = {
            node: SendWeights(
                transfer=transfer,
                version=made.version,
                path=gathered.paths[node],
                children=(NOBODY,) if broken else self._below(node, way),
                bucket_bytes=parse_size(self.step.bucket),
                stall_ns=timeout_ns // 2,
            )
            for node in way.sources
        }
        bench, begin_ns = self.session.bench, self._now()
        async with beside(bench.ask_all(expects, WeightsArrived, timeout_ns)) as arriving:
            # if it fails, nobody waits for receivers to which nothing will ever come
            works = (self._send(node, send, timeout_ns) for node, send in sends.items())
            sent = dict(zip(sends, await together(works), strict=True))
            arrived = await arriving
        took_s = (self._now() - begin_ns) / NS_PER_S
        made.wire_s = min(took_s, self._wire_s(sent, arrived))
        made.rpc_s += took_s - made.wire_s
        made.buckets = sent[way.sources[0]].buckets
        wrong = [node for node, a in arrived.items() if a.checksum != gathered.checksum]
        if wrong:
            raise StepFailed(f"{', '.join(wrong)}: weights {made.version} have another checksum")
        self._paths = {node: answer.path for node, answer in arrived.items()}

    async def _send(self, source: str, send: SendWeights, timeout_ns: int) -> WeightsSent:
        """Have a source send; one that fails itself, not a child of its, serves no more here."""
        try:
            return await self.session.bench.ask(source, send, WeightsSent, timeout_ns)
        except AgentLost:
            self._out.add(source)
            raise
        except CommandFailed as error:
            if any(failure.error != "ChildLost" for failure in error.failures.values()):
                self._out.add(source)
            raise

    def _wire_s(
        self, sent: Mapping[str, WeightsSent], arrived: Mapping[str, WeightsArrived]
    ) -> float:
        """Return the time from the first source's first bucket to the last end anywhere.

        Stamps are brought onto one clock: no less than it took any source, by its own.
        """
        at, spans = self.session.at, {node: answer.spans for node, answer in sent.items()}
        begins = [at(node, span.begin_ns) for node, its in spans.items() for span in its]
        ends = [at(node, span.end_ns) for node, its in spans.items() for span in its]
        ends += [at(node, span.end_ns) for node, its in arrived.items() for span in its.spans]
        return max((max(ends) - min(begins)) / NS_PER_S, longest_s(spans))

    async def _load(self, made: Synced, *, noop: bool) -> None:
        """Have every engine load the file; whoever is given up is built with it."""
        fleet = self.fleet
        async with fleet.changing:
            self._first = self._first or dict(self._paths)
            fleet.version = made.version
            fleet.sources = dict(self._first if noop else self._paths)
            load = await Loading(fleet, self.session.bench.clock, self.step).everywhere()
        made.load_s = load.load_s
        made.rpc_s += load.rpc_s
        made.outcome, made.error = "noop" if noop else "synced", ""
        await self._forget(made)

    async def _forget(self, made: Synced) -> None:
        """Let nodes delete what no engine will ask for again."""
        if any(self.step.sync_faults):
            return  # the first ones are loaded again
        body = ForgetWeights(keep_from=made.version)
        bodies = dict.fromkeys(made.way.receivers, body)
        await self._each(bodies, Done, "old weights were not deleted")

    async def _reopen(self, made: Synced) -> None:
        """Start porters that are gone again, so that the next attempt can succeed."""
        what = f"no porter, after attempt {made.attempt}"
        answers = await self._each(self._openings(), PorterOpen, what, OPEN_NS)
        self.session.porters.update({node: answer.listen for node, answer in answers.items()})

    # -- inside -----------------------------------------------------------------------------

    def _openings(self) -> dict[str, OpenPorter]:
        """Return what opens a porter on every node that sends or receives, where none is yet."""
        nodes, (sources, receivers, _) = self.session.bench.topology.nodes, self.way()
        return {n: OpenPorter(address=nodes[n].address) for n in (*sources, *receivers)}

    def _below(self, node: str, way: Way) -> tuple[str, ...]:
        """Return where those listen to whom a node sends."""
        return tuple(self.session.porters[child] for child in children_of(node, way.edges))

    async def _each(
        self,
        bodies: Mapping[str, Message],
        reply: type[R],
        what: str,
        timeout_ns: int = MESSAGE_NS,
    ) -> dict[str, R]:
        """Ask each node by itself; one that fails is noted, and keeps no other from its answer."""
        found: dict[str, R] = {}

        async def ask(node: str) -> None:
            try:
                found[node] = await self.session.bench.ask(node, bodies[node], reply, timeout_ns)
            except (CommandFailed, AgentLost) as error:
                self._note(f"{what}: {error}")

        await together(map(ask, bodies))
        return found

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
                "sources": len(made.way.sources),
                "receivers": len(made.way.receivers),
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
