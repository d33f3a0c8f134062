"""A bench whose nodes generate by the pure life cycle, in virtual time, and fail as they are told.

Nodes answer the messages of generation as agents do; engines make tokens by
`harness.model.advance`. Every node has a clock of its own. With a vocabulary the ids of tokens are
a function of prompt and position, and a request that comes back must bring the ids it was given:
so a continuation that is wrong fails at once.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import AgentLost
from harness.fabric.topology import topology_of
from harness.model import intake
from harness.model.advance import advance_until
from harness.model.batching import Batching, Limits
from harness.model.bench import Bench, Node, Tor
from harness.model.placement import Instance
from harness.model.profile import costs_of as profile_costs
from harness.model.replay import ReplayRequest, Turn
from harness.model.requests import Carried
from harness.model.scenario import Collectives, Scenario
from harness.model.steptime import FittedCosts, StepCosts
from harness.run.session import Session
from harness.virtual import VirtualClock
from harness.wire.asks import CommandFailed
from harness.wire.generation import (
    Admission,
    Build,
    Built,
    Capacity,
    CloseGeneration,
    EngineSpec,
    GenerationOpen,
    Happened,
    Memory,
    OpenGeneration,
    Output,
    Prepare,
    Prepared,
    Span,
    Stats,
    Submit,
    Submitted,
    TearDown,
    Torn,
    Watch,
    Withdraw,
    Withdrawn,
)
from harness.wire.messages import Done, Failure, Hello, Message
from harness.wire.timesync import ClockFit

MESSAGE_NS = 100_000
QUANTUM_NS = 20 * NS_PER_MS
BUILD_NS = 200 * NS_PER_MS
TEAR_DOWN_NS = 50 * NS_PER_MS
RESEND_NS = NS_PER_S
KV_BYTES_PER_TOKEN = 100


def token_at(prompt: Iterable[int], position: int, vocab: int) -> int:
    """The model: the token at a position of the response to a prompt."""
    return 3 + zlib.crc32(repr((tuple(prompt), position)).encode()) % (vocab - 3)


def costs_of(instance: Instance) -> FittedCosts:
    """Steps of 4 ms and 0.1 ms per sequence on one GPU, half of it on two."""
    return FittedCosts(
        fixed_us=4000 / instance.tp,
        sequence_us=100 / instance.tp,
        kv_token_ns=100 / instance.tp,
        prefill_token_us=2 / instance.tp,
        batch_max=256,
        kv_max_tokens=10**6,
        prefill_max_tokens=8192,
    )


class Engine:
    """An instance at work. Commands come between its quanta."""

    def __init__(self, node: FakeNode, instance: Instance, version: int) -> None:
        spec, blocks = node.spec, (node.spec.kv_max_tokens or 65536) // 16
        self.node, self.instance = node, instance
        self.costs: StepCosts = (
            profile_costs(spec.profile, instance.layout) if spec.profile else costs_of(instance)
        )
        self.limits = Limits(
            sequences_max=spec.sequences_max,
            step_max_tokens=spec.step_max_tokens,
            blocks=blocks * instance.tp,
            length_max_tokens=spec.length_max_tokens or 32768,
        )
        self.state = Batching(self.limits, version=version)
        self.works: dict[str, Any] = {}
        self.told: dict[str, int] = {}
        self.cached: dict[str, int] = {}
        self.sums: Counter[str] = Counter()
        self.first_ns = self.last_ns = 0
        self.beyond: frozenset[str] = frozenset()
        self.stalled = asyncio.Event()
        self.free = asyncio.Lock()
        self.poked = asyncio.Event()
        self.task = asyncio.create_task(self.generate())

    async def generate(self) -> None:
        clock = self.node.bench.clock
        while True:
            await self.poked.wait()
            async with self.free:
                if self.stalled.is_set():
                    await asyncio.Event().wait()
                before_ns = clock.now_ns()
                done = advance_until(self.state, self.costs, before_ns, before_ns + QUANTUM_NS)
                if done.idle:
                    self.poked.clear()
                await clock.sleep_ns(done.now_ns - before_ns)
                self.sums["steps"] += done.steps
                self.beyond |= done.beyond
                self.sums["prefilled"] += done.prefilled_tokens
                for event in done.events:
                    self.sums["preemptions"] += event.what == "preempted"
                ended = {e.request.id: e.request for e in done.events if e.what == "finished"}
                self.tell(before_ns, ended)

    def tell(self, since_ns: int, ended: Mapping[str, Carried]) -> None:
        """Tell what every request has produced since it was last told of."""
        for id_ in list(self.told):
            if id_ in ended:
                self.output(id_, ended[id_].response_tokens, since_ns, "finished")
            elif (now := intake.view(self.state, id_)) and now.produced_tokens > self.told[id_]:
                self.output(id_, now.produced_tokens, since_ns)
        self.node.changed.set()

    def output(self, id_: str, produced: int, since_ns: int, ended: Any = "") -> None:
        start, work, vocab = self.told[id_], self.works[id_], self.node.bench.vocab
        count = produced - start
        now_ns = self.node.now_ns()
        first_ns = min(now_ns, self.node.mapped(since_ns) + NS_PER_MS)
        self.sums["tokens"] += count
        if count:
            self.first_ns, self.last_ns = self.first_ns or first_ns, now_ns
        ids = [token_at(work.prompt, p, vocab) for p in range(start, produced)] if vocab else []
        self.node.events.append(
            Output(
                instance=self.instance.name, id=id_, start=start, count=count, first_ns=first_ns,
                last_ns=now_ns, ids=tuple(ids), ended=ended, version=self.state.version,
                cached_tokens=self.cached.pop(id_, 0) if count else 0,
            )
        )  # fmt: skip
        self.told[id_] = produced
        if ended:
            del self.told[id_], self.works[id_]

    def submit(self, work: Any) -> tuple[str, bool]:
        """Take one; return why not, or "", and whether it came with KV."""
        carried, vocab = work.carried, self.node.bench.vocab
        if vocab:
            assert len(work.prompt) == carried.prompt_tokens
            assert list(work.output) == [
                token_at(work.prompt, p, vocab) for p in range(carried.produced_tokens)
            ]
        sent = self.node.bench.transfers.get(work.kv_transfer, {})
        with_kv = carried.id in sent
        try:
            if with_kv:
                intake.import_with_kv(self.state, carried)
            else:
                intake.submit(self.state, carried)
        except intake.Refused as refused:
            if not with_kv:
                return str(refused), False
            with_kv = False
            intake.submit(self.state, carried)
        self.works[carried.id], self.told[carried.id] = work, carried.produced_tokens
        self.cached[carried.id] = carried.kv_tokens if with_kv else 0
        self.poked.set()
        return "", with_kv

    def withdraw(self, id_: str, message: Withdraw, sent: dict[str, int]) -> Carried | None:
        leave = intake.export if message.verb == "export" else intake.abort
        left = leave(self.state, id_)
        if left is None:
            return None
        if message.to and left.kv_tokens:
            transfers = self.node.bench.transfers.setdefault(message.to.transfer, {})
            transfers[id_] = left.kv_tokens
            sent[id_] = left.kv_tokens * KV_BYTES_PER_TOKEN
        ended = "exported" if message.verb == "export" else "aborted"
        self.output(id_, left.produced_tokens, self.node.bench.clock.now_ns(), ended)
        return left

    def stats(self) -> Stats:
        running = len(self.state.running)
        return Stats(
            t_ns=self.node.now_ns(), running=running, waiting=len(self.state.requests) - running,
            kv_blocks_used=self.state.blocks_used, kv_blocks=self.limits.blocks,
            generated_tokens=self.sums["tokens"], prefilled_tokens=self.sums["prefilled"],
            cached_tokens=0, preemptions=self.sums["preemptions"], steps=self.sums["steps"],
            first_token_ns=self.first_ns, last_token_ns=self.last_ns,
            beyond=tuple(sorted(self.beyond)),
        )  # fmt: skip

    def capacity(self) -> Capacity:
        return Capacity(
            sequences_max=self.limits.sequences_max, step_max_tokens=self.limits.step_max_tokens,
            blocks=self.limits.blocks, block_tokens=self.limits.block_tokens,
            length_max_tokens=self.limits.length_max_tokens, vocab=self.node.bench.vocab or 1000,
            weights_bytes=10**6,
        )  # fmt: skip


@dataclass(eq=False)
class FakeNode:
    """An agent that runs engines; its clock is `ahead_ns` of the coordinator's."""

    bench: FakeBench
    name: str
    ahead_ns: int
    gpus: int = 0
    spec: EngineSpec = field(default_factory=lambda: EngineSpec(engine="paced"))
    engines: dict[str, Engine] = field(default_factory=dict)
    dead: dict[str, str] = field(default_factory=dict)
    events: list[Output] = field(default_factory=list)
    forgotten: int = 0
    watching: bool = False
    reshaping: str = ""
    lost: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def now_ns(self) -> int:
        return self.mapped(self.bench.clock.now_ns())

    def mapped(self, t_ns: int) -> int:
        return t_ns + self.ahead_ns

    def span(self, stage: str, begin_ns: int) -> Span:
        return Span(stage=stage, begin_ns=begin_ns, end_ns=self.now_ns())

    async def answer(self, message: Any) -> Message:
        return await self.verbs()[type(message)](message)

    def verbs(self) -> dict[type[Message], Callable[[Any], Coroutine[Any, Any, Message]]]:
        return {
            OpenGeneration: self.open,
            Prepare: self.prepare,
            TearDown: self.tear_down,
            Build: self.build,
            CloseGeneration: self.close,
            Submit: self.submit,
            Admission: self.admission,
            Withdraw: self.withdraw,
            Watch: self.watch,
        }

    async def open(self, message: OpenGeneration) -> Message:
        self.spec, self.gpus = message.spec, message.gpus
        pids = {gpu: 1000 + gpu for gpu in range(message.gpus)}
        facts = {"engine": message.spec.engine, "version": "1", "device": "fake"}
        return GenerationOpen(pids=pids, facts=facts)

    async def prepare(self, message: Prepare) -> Message:
        if self.reshaping:
            return Failure(error="Busy", text=f"{self.reshaping} is under way")
        gpus = Counter(gpu for instance in message.instances for gpu in instance.gpus)
        if bad := [gpu for gpu, n in gpus.items() if gpu >= self.gpus or n > 1]:
            return Failure(error="Infeasible", text=f"GPUs {bad}")
        return Prepared(
            memory=tuple(
                Memory(
                    gpu=gpu, total_bytes=10**9, weights_bytes=10**6, workspace_bytes=0,
                    asleep_bytes=0, kv_bytes=10**6, basis="modelled",
                )
                for gpu in sorted(gpus)
            )
        )  # fmt: skip

    @asynccontextmanager
    async def reshape(self, what: str) -> Any:
        assert not self.reshaping, f"{what} while {self.reshaping} is under way"
        self.reshaping = what
        try:
            yield
        finally:
            self.reshaping = ""

    async def tear_down(self, message: TearDown) -> Message:
        begin_ns = self.now_ns()
        async with self.reshape("tear_down"):
            await self.bench.clock.sleep_ns(TEAR_DOWN_NS)
            for name in message.instances:
                engine = self.engines.pop(name, None)
                self.dead.pop(name, None)
                if engine is not None:
                    assert message.force or not engine.state.requests, f"{name} holds requests"
                    engine.task.cancel()
        return Torn(spans=(self.span("teardown", begin_ns),))

    async def build(self, message: Build) -> Message:
        used = {gpu for engine in self.engines.values() for gpu in engine.instance.gpus}
        if taken := [i.name for i in message.instances if used & set(i.gpus)]:
            return Failure(error="Occupied", text=f"GPUs of {taken} are in use")
        spans = []
        async with self.reshape("build"):
            for stage in ("groups", "weights", "kv_cache"):
                begin_ns = self.now_ns()
                await self.bench.clock.sleep_ns(BUILD_NS // 3)
                spans.append(self.span(stage, begin_ns))
        for instance in message.instances:
            self.engines[instance.name] = Engine(self, instance, message.version)
        return Built(
            spans=tuple(spans),
            capacities={i.name: self.engines[i.name].capacity() for i in message.instances},
            kv_peers={i.name: tuple(f"10.0.0.1:{g}" for g in i.gpus) for i in message.instances},
        )

    async def close(self, message: CloseGeneration) -> Message:
        for engine in self.engines.values():
            engine.task.cancel()
        self.engines.clear()
        return Done(t_ns=self.now_ns())

    def living(self, name: str) -> Engine | Failure:
        if name in self.dead:
            return Failure(error="Dead", text=f"{name}: {self.dead[name]}")
        return self.engines.get(name) or Failure(error="Unknown", text=f"no instance {name}")

    async def submit(self, message: Submit) -> Message:
        engine = self.living(message.instance)
        if isinstance(engine, Failure):
            return engine
        if reason := self.bench.refusing.get(message.instance):
            return Submitted(refused={work.carried.id: reason for work in message.works})
        async with engine.free:
            if self.living(message.instance) is not engine:
                return Failure(error="Dead", text="it died meanwhile")
            answers = {work.carried.id: engine.submit(work) for work in message.works}
        return Submitted(
            refused={id_: reason for id_, (reason, _) in answers.items() if reason},
            with_kv=tuple(id_ for id_, (_, with_kv) in answers.items() if with_kv),
        )

    async def admission(self, message: Admission) -> Message:
        for name in message.instances:
            engine = self.living(name)
            if isinstance(engine, Failure):
                return engine
            async with engine.free:
                (intake.admit_again if message.open else intake.stop_admitting)(engine.state)
            engine.poked.set()
        return Done(t_ns=self.now_ns())

    async def withdraw(self, message: Withdraw) -> Message:
        begin_ns, left, sent = self.now_ns(), [], dict[str, int]()
        for name in message.instances:
            engine = self.living(name)
            if isinstance(engine, Failure):
                return engine
            async with engine.free:
                ids = message.ids or tuple(engine.state.requests)
                found = (engine.withdraw(id_, message, sent) for id_ in ids)
                left += [carried for carried in found if carried]
        self.changed.set()
        spans = (self.span("withdraw", begin_ns),)
        return Withdrawn(upto=self.upto, left=tuple(left), sent_bytes=sent, spans=spans)

    @property
    def upto(self) -> int:
        return self.forgotten + len(self.events)

    async def watch(self, message: Watch) -> Message:
        assert not self.watching, "two watches at a time"
        self.watching = True
        try:
            del self.events[: message.after - self.forgotten]
            self.forgotten = message.after
            over = asyncio.create_task(self.bench.clock.sleep_ns(message.wait_ns))
            while not self.events and not over.done():
                self.changed.clear()
                news = asyncio.create_task(self.changed.wait())
                await asyncio.wait({over, news}, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
                if self.changed.is_set() and self.dead:
                    break
            over.cancel()
        finally:
            self.watching = False
        return Happened(
            upto=self.upto,
            outputs=tuple(self.events),
            stats={name: engine.stats() for name, engine in self.engines.items()},
            dead=dict(self.dead),
        )


class FakeBench:
    """Nodes ``n0``, ``n1``, ...; what is to go wrong is said by its methods."""

    def __init__(self, nodes: int = 2, *, vocab: int = 0) -> None:
        names = [f"n{i}" for i in range(nodes)]
        spec = Bench(
            name="fake", world="live", tors={"t0": Tor()},
            nodes={name: Node(tor="t0", pod="generate") for name in names},
        )  # fmt: skip
        self.topology = topology_of(spec)
        self.clock = VirtualClock()
        self.vocab = vocab
        self.nodes = {name: FakeNode(self, name, (i + 1) * 10**12) for i, name in enumerate(names)}
        self.hellos: Mapping[str, Hello] = {}
        self.switches: Mapping[str, Any] = {}
        self.clocks = {
            name: ClockFit(
                node=name, offset_ns=node.ahead_ns, drift_ppb=0.0, at_ns=0, delay_ns=0,
                bound_ns=0, samples=1,
            )
            for name, node in self.nodes.items()
        }  # fmt: skip
        self.store = ""
        self.transfers: dict[str, dict[str, int]] = {}
        self.asked: list[tuple[str, Message]] = []
        """All that was asked, but for watches."""
        self.refusing: dict[str, str] = {}
        """By instance, why it refuses every request."""
        self._rules: list[tuple[str, type[Message], Callable[[Message], Any]]] = []

    # -- faults ---------------------------------------------------------------------------

    def engine(self, name: str) -> Engine:
        return self.nodes[name.partition(":")[0]].engines[name]

    def die(self, name: str, reason: str = "rank 0 was killed by signal 9") -> None:
        """Let an instance die; its requests and what it had not told are gone."""
        node = self.nodes[name.partition(":")[0]]
        node.engines[name].task.cancel()
        node.dead[name] = reason
        node.changed.set()

    def stall(self, name: str) -> None:
        """Let an instance hang: it answers nothing and makes no token."""
        self.engine(name).stalled.set()

    def lose(self, name: str, reason: str = "no beat for 3 s") -> None:
        """Let a node be lost."""
        node = self.nodes[name]
        node.lost = f"{name}: {reason}"
        for engine in node.engines.values():
            engine.task.cancel()
        node.gone.set()

    def fail(self, node: str, kind: type[Message], *failures: Failure) -> None:
        """Answer the next commands of a kind with these failures."""
        for failure in failures:
            self._rules.append((node, kind, lambda _, failure=failure: failure))

    def lose_answer(self, node: str, kind: type[Message]) -> None:
        """Lose one answer: the command is sent again, and answered from memory."""
        self._rules.append((node, kind, lambda _: RESEND_NS))

    def hang(self, node: str, kind: type[Message]) -> None:
        """Never answer one command: the agent lets it expire."""
        self._rules.append((node, kind, lambda _: None))

    # -- a bench --------------------------------------------------------------------------

    async def ask(self, agent: str, body: Any, reply: type[Any], timeout_ns: int) -> Any:
        node = self.nodes[agent]
        if not isinstance(body, Watch):
            self.asked.append((agent, body))
        answering = asyncio.create_task(self._answer(node, body, timeout_ns))
        leaving = asyncio.create_task(node.gone.wait())
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if node.lost:
                raise AgentLost(node.lost)
            answer = answering.result()
        finally:
            answering.cancel()
            leaving.cancel()
        if isinstance(answer, Failure):
            raise CommandFailed(type(body).__struct_config__.tag, {agent: answer})
        assert isinstance(answer, reply), f"{answer} is no {reply}"
        return answer

    async def ask_all(self, bodies: Mapping[str, Any], reply: type[Any], timeout_ns: int) -> Any:
        asks = [self.ask(agent, body, reply, timeout_ns) for agent, body in bodies.items()]
        return dict(zip(bodies, await asyncio.gather(*asks), strict=True))

    async def _answer(self, node: FakeNode, body: Message, timeout_ns: int) -> Message:
        await self.clock.sleep_ns(MESSAGE_NS)
        rule = next((r for r in self._rules if r[:2] == (node.name, type(body))), None)
        if rule is not None:
            self._rules.remove(rule)
        what = rule[2](body) if rule is not None else 0
        if isinstance(what, Failure):
            return what
        try:
            async with asyncio.timeout(timeout_ns / NS_PER_S):
                if what is None:
                    await asyncio.Event().wait()
                answer = await node.answer(body)
                await self.clock.sleep_ns(what)
        except TimeoutError:
            return Failure(error="Expired", text=f"not done in {timeout_ns / NS_PER_S:g} s")
        await self.clock.sleep_ns(MESSAGE_NS)
        return answer


class Events(list[tuple[str, Mapping[str, Any]]]):
    """A record in a list."""

    def event(self, stream: str, data: Mapping[str, object]) -> None:
        self.append((stream, data))

    def of(self, stream: str) -> list[Mapping[str, Any]]:
        return [data for name, data in self if name == stream]


def session_of(bench: FakeBench) -> Session:
    """A session on it; its record is an `Events`."""
    scenario = Scenario(question="?", steps=(Collectives(),))
    fake: Any = bench
    return Session(bench=fake, scenario=scenario, record=Events(), plans={})


def requests(count: int, prompt: int = 100, response: int = 50, samples: int = 1) -> Any:
    """`count` requests of one turn, `samples` to a prompt."""
    return [
        ReplayRequest(
            id=f"0-{i // samples}-{i % samples}", step=0, prompt=i // samples, sample=i % samples,
            turns=(Turn(prompt, response),),
        )
        for i in range(count)
    ]  # fmt: skip
