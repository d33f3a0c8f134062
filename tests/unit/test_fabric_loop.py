"""The fabric's controller over many random runs, and under the RL loop."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import fabric_random
import msgspec
import pytest
import rl_random
from fabric_world import CHANGING_MS, World
from rl_bench import RlBench, RlNode, replay, rl_session

from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import InfrastructureError, StepFailed
from harness.fabric.topology import topology_of
from harness.model.bench import Bench, EmulatedUnit, Switch, Tor
from harness.model.scenario import Fabric, Rl
from harness.model.training.phase import Phase
from harness.run.rl.loop import rl
from harness.run.session import Session
from harness.seeds import seeded
from harness.tasks import beside
from harness.virtual import run_virtually
from harness.wire.messages import Failure, Message
from harness.wire.training import (
    OpenTraining,
    PhaseHappened,
    PlanStep,
    StepPlan,
    TrainingHappened,
    TrainingOpen,
    TrainStep,
    WatchTraining,
)

RUNS = 200
WEIGHTS_BYTES = 50_000_000
PHASES = 2


@pytest.mark.parametrize("first", range(0, RUNS, 20))
def test_whatever_breaks_nobody_is_stranded_for_long_and_the_session_tells_the_truth(
    first: int,
) -> None:
    for seed in range(first, first + 20):
        run_virtually(fabric_random.run(seed))


# -- under the loop --------------------------------------------------------------------------------


class Trainer(RlNode):
    """A node whose training sends: gradients along dp in two phases, and weights."""

    async def open_training(self, message: OpenTraining) -> Message:
        opened: Any = await super().open_training(message)
        return TrainingOpen(pids=opened.pids, facts={}, parameters=1, weights_bytes=WEIGHTS_BYTES)

    async def plan(self, message: PlanStep) -> Message:
        phases = [
            Phase(
                name="gradients", op="all_reduce", axis="dp", groups=((0, 1),),
                bytes=30_000_000, times=1, gap_ns=300 * NS_PER_MS,
            )
            for _ in range(PHASES)
        ]  # fmt: skip
        return StepPlan(phases=tuple(phases))

    async def step(self, message: TrainStep) -> Message:
        async with beside(self.phases(message.version)):
            return await super().step(message)

    async def phases(self, version: int) -> None:
        """Tell of each phase, when it has ended."""
        for index in range(PHASES):
            await self.bench.clock.sleep_ns(self.train_ns // (PHASES + 1))
            phase = PhaseHappened(
                version=version, index=index, name="gradients", op="all_reduce", axis="dp",
                bytes=1, begin_ns=self.now_ns() - NS_PER_MS, end_ns=self.now_ns(), rank=0,
            )  # fmt: skip
            self.told.append(phase)

    async def watch_training(self, message: WatchTraining) -> Message:
        over_ns = self.bench.clock.now_ns() + message.wait_ns
        while len(self.told) <= message.after and self.bench.clock.now_ns() < over_ns:
            await self.bench.clock.sleep_ns(20 * NS_PER_MS)
        phases = tuple(self.told[message.after :])
        return TrainingHappened(upto=len(self.told), phases=phases, dead={})


class LoopBench(RlBench):
    """Two nodes that train and two that generate, each under a ToR of its own in a `World`."""

    def __init__(self, planes: int) -> None:
        super().__init__(nodes=2, gpus=2, trainers=2)
        tor_of = {name: f"tor{i}" for i, name in enumerate(self.spec.nodes)}
        ports = {tor: i + 1 for i, tor in enumerate(tor_of.values())}
        self.spec = Bench(
            name="fake",
            world="emulated",
            nodes={
                name: msgspec.structs.replace(node, tor=tor_of[name])
                for name, node in self.spec.nodes.items()
            },
            tors={tor: Tor(uplinks=planes, driver="netlink") for tor in ports},
            switches={
                f"agg{k}": Switch(
                    driver="polatis-scpi", url="", ports="1-16", emulate=EmulatedUnit(ports=8)
                )
                for k in range(planes)
            },
            cables={
                f"{tor}:u{k + 1}": f"agg{k}:{port}"
                for tor, port in ports.items()
                for k in range(planes)
            },
        )
        self.topology = topology_of(self.spec)
        self.world = World(self.topology)
        self.nodes = {name: Trainer(self, name, n.ahead_ns) for name, n in self.nodes.items()}
        for node in self.nodes.values():
            node.files, node.stepped, node.told = {}, [], []
        self.clocks |= self.world.clocks
        self.hellos, self.switches = self.world.hellos, self.world.switches
        self.steer, self.electrical = self.world.steer, self.world.electrical

    async def ask(self, agent: str, body: Any, reply: type[Any], timeout_ns: int) -> Any:
        there = self.world if agent in self.topology.tors else super()
        return await there.ask(agent, body, reply, timeout_ns)


def loop(
    folder: Path,
    step: Rl,
    beside_it: Callable[[LoopBench], Coroutine[Any, Any, None]] | None = None,
    stranded_ms: float = 0.0,
    planes: int = 2,
) -> Any:
    """Run the loop over its fabrics; afterwards all is electrical, and all circuits are down."""

    async def main() -> Any:
        bench = LoopBench(planes)
        session = rl_session(bench, folder, step, replay(step.steps))
        session.scenario = msgspec.structs.replace(session.scenario, fabric=Fabric())
        if beside_it is None:
            await whole(session, step)
        else:
            async with beside(beside_it(bench)):
                await whole(session, step)
        world = bench.world
        world.note()
        assert not any(world.routes.values())
        assert not any(len(unit.map) for unit in world.units.values())
        assert not world.beacons
        assert not session.lit
        assert session.fabric is None
        assert world.stranded_ms() <= stranded_ms
        return bench, session.record

    return run_virtually(main())


async def whole(session: Session, step: Rl) -> None:
    async with session.closing:
        await rl(session, step, 0)


FABRICS: Any = ("electrical", "static", "rfabric", "ideal")


def test_the_loop_runs_over_each_fabric_in_turn(tmp_path: Path) -> None:
    step = Rl(steps=3, policies=("static:4xTP1",), fabrics=FABRICS, sync="pairs")
    bench, events = loop(tmp_path, step, planes=1)
    arms = [f"static:4xTP1@{fabric}" for fabric in FABRICS]
    assert [row["policy"] for row in events.of("rl")] == arms
    by_arm = {arm: [r for r in events.of("fabric_change") if r["policy"] == arm] for arm in arms}
    assert [len(by_arm[arm]) for arm in arms[:2]] == [0, 2]
    assert {row["kind"] for row in by_arm[arms[2]]} >= {"train", "sync"}
    assert not by_arm[arms[3]]
    assert all(row["outcome"] == "changed" for row in events.of("fabric_change"))
    assert bench.world.oversubscription == [1.0, None]
    for arm in arms:
        kinds = [row["kind"] for row in events.of("fabric_traffic") if row["policy"] == arm]
        assert kinds == ["train", "gather", "sync"] * 3


def test_a_rank_that_dies_in_a_step_announces_it_again(tmp_path: Path) -> None:
    async def rank_dies(bench: LoopBench) -> None:
        while not bench.kept:
            await bench.clock.sleep_ns(NS_PER_MS)
        for node in ("t0", "t1"):
            bench.fail(node, TrainStep, Failure(error="RankDied", text="signal 9", ranks=(0,)))

    step = Rl(steps=3, policies=("static:4xTP1",), fabrics=("rfabric",))
    bench, events = loop(tmp_path, step, rank_dies)
    assert [version for version, _ in bench.nodes["t0"].stepped] == [0, 1, 2]
    assert any("opened anew" in row["text"] for row in events.of("note"))
    assert len(events.of("fabric_traffic")) == 9


def test_a_loop_that_goes_on_plans_a_fixed_fabric_once_for_all_of_a_step(tmp_path: Path) -> None:
    step = Rl(steps=4, policies=("static:4xTP1",), fabrics=("static",), sync="pairs")
    requests = replay(step.steps)
    first, second = LoopBench(1), LoopBench(1)

    async def killed() -> None:
        session = rl_session(first, tmp_path / "first", step, requests)
        async with session.closing, beside(rl(session, step, 0)) as running:
            while len(first.nodes["t0"].stepped) < 2:
                await first.clock.sleep_ns(NS_PER_MS)
            running.cancel()

    async def goes_on() -> Any:
        session = rl_session(second, tmp_path / "second", step, requests, resume=tmp_path / "first")
        await whole(session, step)
        return session.record

    run_virtually(killed())
    second.kept = first.kept
    events = run_virtually(goes_on())
    kinds = [row["kind"] for row in events.of("fabric_traffic")]
    assert kinds[:2] == ["gather", "sync"], "first it brings the weights that were kept"
    assert [row["kind"] for row in events.of("fabric_change")] == ["train", "end"]
    assert {row["kind"] for row in events.of("fabric")} == {"train"}


def test_a_plane_that_is_lost_in_a_loop_does_not_end_it(tmp_path: Path) -> None:
    async def plane_lost(bench: LoopBench) -> None:
        await bench.clock.sleep_ns(4 * NS_PER_S)
        bench.world.units["agg0"].shuttered = True
        bench.world.note()

    step = Rl(steps=3, policies=("static:4xTP1",), fabrics=("rfabric", "electrical"))
    _, events = loop(tmp_path, step, plane_lost, stranded_ms=CHANGING_MS)
    assert len(events.of("rl")) == 2
    assert events.of("fabric_part")


def test_layouts_change_while_circuits_do(tmp_path: Path) -> None:
    step = Rl(steps=3, policies=("orchestrl",), fabrics=("rfabric",), switch_s=0.1, replan_s=0.3)
    _, events = loop(tmp_path, step)
    assert len(events.of("rl")) == 1


@pytest.mark.parametrize("seed", range(12))
def test_whatever_goes_wrong_in_the_loop_the_fabric_is_left_as_it_was(
    tmp_path: Path, seed: int
) -> None:
    chance = seeded(seed, "a loop over a fabric")
    happened: list[str] = []

    async def trouble(bench: LoopBench) -> None:
        ended: Any = fabric_random.Ended(bench.world, None, happened, set())
        async with beside(fabric_random.trouble(bench.world, chance, ended)) as troubling:
            await rl_random.trouble(bench, chance, happened)
            await troubling

    fabric = chance.choice(("static", "rfabric"))
    step = Rl(steps=3, policies=("orchestrl",), fabrics=(fabric,), stall_s=3.0)
    ended = ""
    try:
        loop(tmp_path, step, trouble, stranded_ms=60_000)
    except (StepFailed, InfrastructureError) as error:
        ended = str(error)
    assert not any(text in ended for text in rl_random.HANGS)
