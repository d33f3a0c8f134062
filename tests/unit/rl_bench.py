"""A bench that generates and trains in virtual time: nodes ``n0``... generate, ``t0``... train.

Training takes `TRAIN_NS` a step and the weights' bytes their time; every weights file is a number.
What is to go wrong is said as on the bench of generation, which this one extends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from generation_bench import Events, FakeBench, FakeNode

from harness.clock import NS_PER_MS, NS_PER_S
from harness.fabric.topology import topology_of
from harness.model import intake
from harness.model.bench import Bench, Node, Tor
from harness.model.degrees import Degrees
from harness.model.layout import parse_layout
from harness.model.profile import Profile
from harness.model.replay import Replay, ReplayRequest, Turn, replay_of
from harness.model.scenario import Rl, Scenario
from harness.model.training.trainer import TrainerSpec
from harness.run.generation.asked import GenerationAsked
from harness.run.rl.asked import TrainingAsked
from harness.run.session import Session
from harness.wire.generation import EngineSpec, Span, UpdateWeights, WeightsUpdated
from harness.wire.messages import Done, Failure, Message
from harness.wire.timesync import ClockFit
from harness.wire.training import (
    CloseTraining,
    KeepTrainer,
    OpenTraining,
    PlanStep,
    PublishWeights,
    StepPlan,
    Trained,
    TrainingHappened,
    TrainingOpen,
    TrainStep,
    WatchTraining,
    WeightsPublished,
)
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

TRAIN_NS = 2 * NS_PER_S
CARRY_NS = 300 * NS_PER_MS
LOAD_NS = 50 * NS_PER_MS
KEEP_NS = 100 * NS_PER_MS


class RlNode(FakeNode):
    """An agent that generates, or trains, or both."""

    version = 0
    train_ns = TRAIN_NS
    carry_ns = CARRY_NS
    ranks: tuple[int, ...] = ()
    files: dict[str, int]
    stepped: list[tuple[int, tuple[str, ...]]]

    def verbs(self) -> dict[type[Message], Callable[[Any], Coroutine[Any, Any, Message]]]:
        return super().verbs() | {
            OpenPorter: self.open_porter,
            ExpectWeights: self.expect,
            SendWeights: self.send,
            ForgetWeights: self.done,
            ClosePorter: self.done,
            UpdateWeights: self.update,
            OpenTraining: self.open_training,
            PlanStep: self.plan,
            TrainStep: self.step,
            PublishWeights: self.publish,
            KeepTrainer: self.keep,
            WatchTraining: self.watch_training,
            CloseTraining: self.done,
        }

    async def done(self, message: Message) -> Message:
        return Done(t_ns=self.now_ns())

    async def open_porter(self, message: OpenPorter) -> Message:
        return PorterOpen(listen=f"{self.name}:1", pid=1)

    async def expect(self, message: ExpectWeights) -> Message:
        begin_ns = self.now_ns()
        await self.bench.came(message.transfer, self.name).wait()
        self.pass_on(message)
        path = f"{self.name}/{message.version}"
        self.files[path] = message.version
        return WeightsArrived(
            path=path, version=message.version, moved_bytes=10**6, checksum=self.bench.checksum,
            spans=(self.span("receive", begin_ns),),
        )  # fmt: skip

    async def send(self, message: SendWeights) -> Message:
        begin_ns = self.now_ns()
        names = [child.removesuffix(":1") for child in message.children]
        if lost := [n for n in names if n not in self.bench.nodes or self.bench.nodes[n].lost]:
            return Failure(error="ChildLost", text=f"{lost[0]} took 0 of 3 buckets")
        assert message.path == f"{self.name}/published"
        await self.bench.clock.sleep_ns(self.carry_ns)
        self.pass_on(message)
        return WeightsSent(
            moved_bytes=10**6, buckets=3, checksum=self.bench.checksum,
            spans=(self.span("send", begin_ns),),
        )  # fmt: skip

    def pass_on(self, message: ExpectWeights | SendWeights) -> None:
        for child in message.children:
            self.bench.came(message.transfer, child.removesuffix(":1")).set()

    async def update(self, message: UpdateWeights) -> Message:
        begin_ns = self.now_ns()
        assert not message.source or self.files[message.source] <= message.version
        for name in message.instances:
            engine = self.living(name)
            if isinstance(engine, Failure):
                return engine
            async with engine.free:
                await self.bench.clock.sleep_ns(LOAD_NS)
                intake.set_version(engine.state, message.version)
                if message.drop_kv:
                    intake.drop_kv(engine.state)
            engine.poked.set()
        return WeightsUpdated(spans=(self.span("weights", begin_ns),), moved_bytes=10**6)

    async def open_training(self, message: OpenTraining) -> Message:
        self.version, self.ranks = 0, message.ranks
        pids = dict.fromkeys(message.ranks, 1)
        return TrainingOpen(pids=pids, facts={"backend": "none"}, parameters=1, weights_bytes=1)

    async def plan(self, message: PlanStep) -> Message:
        return StepPlan(phases=())

    async def step(self, message: TrainStep) -> Message:
        assert message.version == self.version, f"{message.version} after {self.version}"
        begin_ns = self.now_ns()
        await self.bench.clock.sleep_ns(self.train_ns)
        self.version += 1
        self.stepped.append((message.version, tuple(s.id for s in message.samples)))
        assert all(0 <= s.version_first <= s.version_last for s in message.samples)
        if self.bench.vocab:
            assert all(len(s.response) == s.response_tokens for s in message.samples)
        tokens = sum(s.response_tokens for s in message.samples)
        return Trained(
            version=message.version, tokens=tokens, micro_batches=1,
            spans=(self.span("compute", begin_ns),),
        )  # fmt: skip

    async def publish(self, message: PublishWeights) -> Message:
        spans = (Span(stage="gather", begin_ns=self.now_ns(), end_ns=self.now_ns()),)
        self.bench.checksum = 100 + self.version
        writes = bool(set(self.ranks) & set(message.writers))
        return WeightsPublished(
            version=self.version, path=f"{self.name}/published" if writes else "",
            bytes=10**6 * writes, checksum=writes * (100 + self.version), spans=spans,
        )  # fmt: skip

    async def keep(self, message: KeepTrainer) -> Message:
        kept = self.bench.kept
        if message.load:
            self.version = kept[message.path]
        else:
            kept.pop(message.path, None)  # half of it is written over
            await self.bench.clock.sleep_ns(KEEP_NS)
            kept[message.path] = self.version
            kept.pop(message.instead_of, None)
        return Done(t_ns=self.now_ns())

    async def watch_training(self, message: WatchTraining) -> Message:
        await self.bench.clock.sleep_ns(message.wait_ns)
        return TrainingHappened(upto=message.after, phases=(), dead={})


class RlBench(FakeBench):
    """`nodes` that generate with `gpus` each, and `trainers`, each with one rank."""

    def __init__(self, nodes: int = 1, gpus: int = 4, *, vocab: int = 0, trainers: int = 1) -> None:
        super().__init__(nodes, vocab=vocab)
        generating = {
            name: Node(tor="t0", pod="generate", emulated_gpus=gpus) for name in self.nodes
        }
        spec = Bench(
            name="fake", world="live", tors={"t0": Tor()},
            nodes=generating | {f"t{i}": Node(tor="t0", pod="train") for i in range(trainers)},
        )  # fmt: skip
        self.spec = spec
        self.topology = topology_of(spec)
        self.trainers = trainers
        self.nodes = {
            name: RlNode(self, name, (i + 1) * 10**12) for i, name in enumerate(spec.nodes)
        }
        for node in self.nodes.values():
            node.files, node.stepped = {}, []
        self.clocks = {
            name: ClockFit(
                node=name, offset_ns=node.ahead_ns, drift_ppb=0.0, at_ns=0, delay_ns=0,
                bound_ns=0, samples=1,
            )
            for name, node in self.nodes.items()
        }  # fmt: skip
        self.transferred: dict[tuple[str, str], asyncio.Event] = {}
        self.kept: dict[str, int] = {}
        self.checksum = 0

    def came(self, transfer: str, node: str) -> asyncio.Event:
        """Set when a transfer has come to a node."""
        return self.transferred.setdefault((transfer, node), asyncio.Event())

    @property
    def trainer(self) -> RlNode:
        return self.nodes["t0"]


def replay(
    steps: int = 3,
    prompts: int = 4,
    samples: int = 2,
    length: Callable[[int, int], int] | None = None,
) -> Replay:
    """Requests of one turn; `length` of (step, index) tells how long each is."""
    found = length or (lambda step, index: 20 + 10 * (index % 5))
    return replay_of(
        ReplayRequest(
            id=f"{step}-{p}-{s}", step=step, prompt=p, sample=s,
            turns=(Turn(50, found(step, p * samples + s)),),
        )
        for step in range(steps)
        for p in range(prompts)
        for s in range(samples)
    )  # fmt: skip


def rl_session(
    bench: RlBench,
    folder: Path,
    step: Rl,
    requests: Replay,
    *,
    layout: str = "4xTP1",
    profile: Profile | None = None,
    resume: Path | None = None,
) -> Session:
    """A session that is asked to do one `rl` step."""
    scenario = Scenario(question="?", steps=(step,), timeout_s=3600)
    spec = EngineSpec(
        engine="vllm" if bench.vocab else "paced",
        profile=profile,
        sequences_max=16,
        kv_max_tokens=65536,
    )
    gpus: Mapping[str, int] = {
        name: node.emulated_gpus for name, node in bench.spec.nodes.items() if node.pod != "train"
    }
    trainers = [name for name, node in bench.spec.nodes.items() if node.pod == "train"]
    fake: Any = bench
    return Session(
        bench=fake,
        scenario=scenario,
        record=Events(),
        plans={},
        generation_asked=GenerationAsked(
            spec=spec, layout=parse_layout(layout), replay=requests, gpus_of=gpus
        ),
        training_asked=TrainingAsked(
            spec=TrainerSpec(mode="paced", degrees=Degrees(dp=len(trainers))),
            ranks_of={name: (rank,) for rank, name in enumerate(trainers)},
        ),
        keep=folder,
        resume=resume,
    )
