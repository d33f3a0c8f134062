"""Training in virtual time: how long steps take, what is told of them, weights and state."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from labour_world import ask, ask_all, virtually, world
from msgspec.structs import replace

from harness.bench.simulated.porter import Porter
from harness.bench.simulated.training import Busy, NotOpen, Training
from harness.bench.simulated.world import World
from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import UsageError
from harness.model.degrees import parse_degrees
from harness.model.load import load_profile
from harness.model.shape import ModelShape
from harness.model.training.axes import place_of
from harness.model.training.schedule import Where
from harness.model.training.step import step_of
from harness.model.training.trainer import TrainerSpec, flops_per_s
from harness.rlsim.collectives import gloo, time_ns
from harness.wire.messages import Failure
from harness.wire.training import (
    CloseTraining,
    KeepTrainer,
    OpenTraining,
    PhaseHappened,
    PlanStep,
    PublishWeights,
    Sample,
    Trained,
    TrainingHappened,
    TrainStep,
    WatchTraining,
)
from harness.wire.weights import ExpectWeights, OpenPorter, SendWeights

PROFILES = Path(__file__).parents[2] / "scenarios" / "profiles"
SMALL = ModelShape(
    layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, vocab=1000, intermediate=128,
    experts=4, experts_per_token=2, expert_intermediate=64,
)  # fmt: skip
PROFILE = replace(load_profile(PROFILES / "qwen2.5-14b-h800.toml"), shape=SMALL)
TOKENS = (900, 700, 650, 300, 1200, 80, 640, 333)
FIGURES: dict[str, dict[str, float]] = {
    "training": {"compute_share": 1.25, "phase_us": 70, "step_fixed_s": 0.003},
    "collectives": {"step_us": 30, "copy_ns_per_kb": 400},
    "sync": {"gather_fixed_s": 0.1, "gather_gb_per_s": 0.5},
}


def spec(layout: str, **changes: Any) -> TrainerSpec:
    asked = TrainerSpec(
        mode="paced", degrees=parse_degrees(layout), profile=PROFILE, bytes_scale=1.0,
        micro_batch_tokens=1000, flops_share=1e-5,
    )  # fmt: skip
    return replace(asked, **changes)


def train_step(version: int = 0, tokens: Sequence[int] = TOKENS) -> TrainStep:
    samples = (Sample(f"{i}", "g", 10, n - 10, 0.0, 0.0, 0, 0) for i, n in enumerate(tokens))
    return TrainStep(version=version, samples=tuple(samples))


class Pod:
    """Nodes that train, each with as many ranks, opened in a world of simulated labours."""

    def __init__(self, asked: TrainerSpec, of: World) -> None:
        self.spec, self.world = asked, of
        self.nodes = [Training(of, name) for name in of.bench.nodes]
        self.each = asked.degrees.ranks // len(self.nodes)

    def opening(self, node: int, attempt: int = 0) -> OpenTraining:
        return OpenTraining(
            spec=self.spec,
            ranks=tuple(range(node * self.each, (node + 1) * self.each)),
            world_size=self.spec.degrees.ranks,
            store="10.0.0.1:29500", address="10.0.0.1", interface="eth0",
            attempt=attempt, timeout_ns=10 * NS_PER_S,
        )  # fmt: skip

    async def open(self, attempt: int = 0) -> list[Any]:
        openings = (ask(n, self.opening(i, attempt)) for i, n in enumerate(self.nodes))
        return list(await asyncio.gather(*openings))

    async def step(self, version: int = 0, tokens: Sequence[int] = TOKENS) -> list[Trained]:
        return await ask_all(self.nodes, train_step(version, tokens))

    async def told(self, node: int = 0, after: int = 0) -> TrainingHappened:
        happened: TrainingHappened = await ask(
            self.nodes[node], WatchTraining(after=after, wait_ns=0)
        )
        return happened

    @property
    def now_ns(self) -> int:
        return self.world.clock.now_ns()


def one_step(asked: TrainerSpec, of: World) -> tuple[Pod, int, list[Trained], list[Any]]:
    """Open, take a step; return how long it took, the answers, and what each node told."""

    async def test() -> tuple[Pod, int, list[Trained], list[Any]]:
        pod = Pod(asked, of)
        await pod.open()
        begin_ns = pod.now_ns
        trained = await pod.step()
        took_ns = pod.now_ns - begin_ns
        told = [(await pod.told(node)).phases for node in range(len(pod.nodes))]
        return pod, took_ns, trained, told

    return virtually(test())


def where(rank: int, asked: TrainerSpec) -> Where:
    place = place_of(rank, asked.degrees)
    return place.pp, place.dp


def reckoned_ns(pod: Pod) -> float:
    """The time of a step, phase by phase and one time after the other, in the plan's order."""
    figures, plan = pod.world.figures, step_of(pod.spec, PROFILE, TOKENS).schedule
    joined = gloo(figures.collectives, nics=1, nic_gb_per_s=1.0)
    per_ns = flops_per_s(pod.spec, PROFILE) / 1.25 / 1e9
    free: dict[Where, float] = {}
    for phase, flops in plan.moves:
        for group in phase.groups:
            squads = [where(rank, pod.spec) for rank in group]
            places = [(f"n{rank // pod.each}", rank % pod.each) for rank in group]
            one_way = phase.op == "send_recv"
            alone_ns = time_ns(phase.op, phase.bytes, places, joined, one_way=one_way)
            for turn in range(phase.times):
                found_ns = 0 if turn else 70_000
                begun = [free.get(s, 3e6) + found_ns for s in squads]
                gaps = [flops[s] / phase.times / per_ns for s in squads]
                ready = map(sum, zip(begun, gaps, strict=True))
                free |= dict.fromkeys(squads, max(ready) + alone_ns)
    ends = [free.get(s, 3e6) + flops / per_ns for s, flops in plan.after.items()]
    return max([*free.values(), *ends])


# -- how long a step takes -------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(["DP1", "DP4", "PP2", "PP4", "DP4EP2", "DP4EP4"]))
def test_a_step_takes_what_its_phases_take_one_time_after_the_other(layout: str) -> None:
    asked = spec(layout)
    pod, took_ns, _, _ = one_step(asked, world(asked.degrees.ranks, **FIGURES))
    assert took_ns == pytest.approx(reckoned_ns(pod), rel=1e-6)


def test_stages_work_at_the_same_time_while_the_pipeline_fills_and_drains() -> None:
    headless = replace(PROFILE, shape=replace(SMALL, vocab=1))

    def took_ns(layout: str) -> int:
        async def test() -> int:
            pod = Pod(spec(layout, profile=headless), fast(layout))
            await pod.open()
            await pod.step(tokens=(1000,) * 8)
            return pod.now_ns

        return virtually(test())

    assert took_ns("PP4") / took_ns("DP1") == pytest.approx((8 + 4 - 1) / (4 * 8), rel=0.02)


def test_ranks_of_one_node_wait_for_each_other_and_not_for_the_network() -> None:
    asked = spec("TP4")
    pod, took_ns, _, _ = one_step(asked, world(1, **FIGURES))
    assert took_ns == pytest.approx(reckoned_ns(pod), rel=1e-6)
    assert pod.world.network.carried == []  # type: ignore[attr-defined]  # it is `Wires`


@pytest.mark.parametrize("layout", ["DP4", "DP2PP2", "DP2TP2", "DP4EP2", "PP4"])
def test_a_rank_computes_or_communicates_and_nothing_else(layout: str) -> None:
    figures = {**FIGURES, "training": {**FIGURES["training"], "phase_us": 0}}
    _, took_ns, answers, _ = one_step(spec(layout), world(4, **figures))
    for trained in answers:
        compute, communicate = trained.spans
        assert (compute.stage, communicate.stage) == ("compute", "communicate")
        busy_ns = (compute.end_ns - compute.begin_ns) + (communicate.end_ns - communicate.begin_ns)
        assert busy_ns == communicate.end_ns - compute.begin_ns - 3 * NS_PER_MS
        assert communicate.end_ns - compute.begin_ns <= took_ns


def test_every_sample_is_counted_once_among_the_shards() -> None:
    _, _, answers, _ = one_step(spec("DP4"), world(4))
    assert sum(trained.tokens for trained in answers) == sum(TOKENS)
    assert [bool(trained.figures) for trained in answers] == [True, False, False, False]
    dealt = step_of(spec("DP4"), PROFILE, TOKENS).dealt
    assert {trained.micro_batches for trained in answers} == {len(dealt[0])}
    _, _, halves, _ = one_step(spec("DP2TP2"), world(4))
    assert [h.tokens for h in halves] == [halves[0].tokens] * 2 + [halves[2].tokens] * 2
    assert halves[0].tokens + halves[2].tokens == sum(TOKENS)


def test_a_slow_node_holds_up_all_and_works_while_they_wait() -> None:
    even, slow = world(4, **FIGURES), world(4, **FIGURES)
    nodes = {**slow.bench.nodes, "n2": replace(slow.bench.nodes["n2"], speed=0.5)}
    slow.bench = replace(slow.bench, nodes=nodes)
    _, _, before, _ = one_step(spec("DP4"), even)
    _, _, after, _ = one_step(spec("DP4"), slow)
    for node, (one, other) in enumerate(zip(before, after, strict=True)):
        assert took(other, 0) == pytest.approx(took(one, 0) * (2 if node == 2 else 1), rel=1e-5)
        assert (took(other, 1) > took(one, 1)) == (node != 2)


def took(trained: Trained, span: int) -> int:
    return trained.spans[span].end_ns - trained.spans[span].begin_ns


def fast(layout: str) -> World:
    """A node for each rank of a layout, on a network that takes no time."""
    made = world(parse_degrees(layout).ranks)
    made.network.gb_per_s = 1e9  # type: ignore[attr-defined]  # it is `Wires`
    return made


# -- what is told ----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["DP2PP2", "DP2TP2", "DP4EP2"])
def test_each_node_tells_its_own_phases_in_order(layout: str) -> None:
    pod, _, _, told = one_step(spec(layout), world(4, **FIGURES))
    plan = step_of(pod.spec, PROFILE, TOKENS).schedule.moves
    for node, phases in enumerate(told):
        mine = [i for i, (p, _) in enumerate(plan) if any(node in group for group in p.groups)]
        assert [p.index for p in phases if p.end_ns] == mine
        assert [p.index for p in phases if not p.end_ns] == mine
        assert {p.rank for p in phases} == {node}
        ends = [p for p in phases if p.end_ns]
        assert all(a.end_ns <= b.begin_ns for a, b in pairwise(ends))
        assert all(p.begin_ns < p.end_ns and p.name == plan[p.index][0].name for p in ends)


def test_a_phase_is_told_when_it_ends_and_not_before() -> None:
    async def test() -> None:
        pod = Pod(spec("TP4"), world(1, **FIGURES))
        await pod.open()
        step = asyncio.create_task(pod.step())
        upto, seen = 0, list[PhaseHappened]()
        while not step.done():
            watch = WatchTraining(after=upto, wait_ns=50 * NS_PER_MS)
            began_ns = pod.now_ns
            happened: TrainingHappened = await ask(pod.nodes[0], watch)
            upto, seen = happened.upto, [*seen, *happened.phases]
            assert all(max(p.begin_ns, p.end_ns) <= pod.now_ns for p in happened.phases)
            ends_ns = [p.end_ns for p in happened.phases if p.end_ns]
            assert pod.now_ns in (began_ns, began_ns + 50 * NS_PER_MS, *ends_ns[-1:])
        plan = await ask(pod.nodes[0], PlanStep(tokens=TOKENS))
        assert len(seen) == 2 * len(plan.phases)

    virtually(test())


def test_the_same_step_is_told_to_the_same_nanosecond() -> None:
    one, other = (one_step(spec("DP2PP2"), world(4, **FIGURES))[1:] for _ in range(2))
    assert one == other


# -- weights and state -----------------------------------------------------------------------------


def test_weights_are_gathered_where_writers_are_and_the_last_two_stay() -> None:
    async def test() -> None:
        pod = Pod(spec("DP4"), world(4, **FIGURES))
        opened = await pod.open()
        size = opened[0].weights_bytes
        paths = []
        for version in range(3):
            if version:
                await pod.step(version - 1)
            begin_ns = pod.now_ns
            body = PublishWeights(version=version, writers=(0, 2))
            answers = await ask_all(pod.nodes, body)
            # a writer takes in three quarters at 1 GB/s, and writes all at half of that
            wanted_ns = 1e8 + 0.75 * size + 2 * size
            assert pod.now_ns - begin_ns == pytest.approx(wanted_ns, rel=1e-3)
            assert [bool(a.path) for a in answers] == [True, False, True, False]
            assert answers[0].bytes == answers[2].bytes == size
            assert answers[0].checksum == answers[2].checksum
            assert [span.stage for span in answers[0].spans] == ["write"]
            assert [span.stage for span in answers[1].spans] == ["gather"]
            there = pod.world.shared["weights", "n2", answers[2].path]
            assert there == (version, size, answers[2].checksum)
            paths.append(answers[2].path)
        kept = [path in (k[2] for k in pod.world.shared if k[0] == "weights") for path in paths]
        assert kept == [False, True, True]
        await ask_all(pod.nodes, CloseTraining())
        assert not [key for key in pod.world.shared if key[0] == "weights"]

    virtually(test())


@pytest.mark.parametrize("one_machine", [False, True])
def test_hosts_of_one_machine_write_one_after_the_other(one_machine: bool) -> None:
    async def test() -> None:
        of = world(4, **FIGURES)
        of.figures = replace(of.figures, one_machine=one_machine)
        pod = Pod(spec("DP4"), of)
        size = (await pod.open())[0].weights_bytes
        begin_ns = pod.now_ns
        await ask_all(pod.nodes, PublishWeights(version=0, writers=(0, 2)))
        wanted_ns = 1e8 + 0.75 * size + 2 * size * (2 if one_machine else 1)
        assert pod.now_ns - begin_ns == pytest.approx(wanted_ns, rel=1e-3)

    virtually(test())


def test_published_weights_are_what_porters_carry() -> None:
    async def test() -> None:
        of = world(2, **FIGURES)
        pod = Pod(spec("DP2"), of)
        await pod.open()
        published = (await ask_all(pod.nodes, PublishWeights(version=0)))[0]
        porters = [Porter(of, name) for name in of.bench.nodes]
        listen = [await ask(p, OpenPorter(address=p.node)) for p in porters]
        arriving = asyncio.create_task(ask(porters[1], ExpectWeights(transfer="t", version=5)))
        body = SendWeights(
            transfer="t", version=5, path=published.path, children=(listen[1].listen,),
            bucket_bytes=2**16, stall_ns=NS_PER_S,
        )  # fmt: skip
        assert (await ask(porters[0], body)).checksum == published.checksum
        arrived = await arriving
        there = of.shared["weights", "n1", arrived.path]
        assert there == (5, published.bytes, published.checksum)

    virtually(test())


def test_versions_that_are_not_here_are_refused_and_a_step_is_taken_once() -> None:
    async def test() -> None:
        pod = Pod(spec("DP2"), world(2, **FIGURES))
        await pod.open()
        first = await pod.step()
        begin_ns = pod.now_ns
        assert await pod.step() == first
        assert pod.now_ns == begin_ns
        with pytest.raises(UsageError, match="version 2 cannot be stepped from: here is 1"):
            await ask(pod.nodes[0], train_step(2))
        with pytest.raises(UsageError, match="version 0 cannot be published: here is 1"):
            await ask(pod.nodes[0], PublishWeights(version=0))
        with pytest.raises(UsageError, match="not one a node"):
            await ask(pod.nodes[0], PublishWeights(version=1, writers=(7,)))

    virtually(test())


def test_training_goes_on_from_what_was_kept() -> None:
    async def test() -> None:
        pod = Pod(spec("DP2"), world(2, **FIGURES))
        await pod.open()
        await pod.step()
        await ask_all(pod.nodes, KeepTrainer(path="kept/1"))
        await pod.step(1)
        await ask_all(pod.nodes, KeepTrainer(path="kept/2", instead_of="kept/1"))
        await ask_all(pod.nodes, CloseTraining())
        await pod.open(attempt=1)
        with pytest.raises(UsageError, match="no training state was kept at kept/1"):
            await ask(pod.nodes[0], KeepTrainer(path="kept/1", load=True))
        await ask_all(pod.nodes, KeepTrainer(path="kept/2", load=True))
        assert (await pod.step(2))[0].version == 2

    virtually(test())


# -- what goes wrong -------------------------------------------------------------------------------


def test_whoever_waits_in_a_step_that_is_closed_hears_of_it() -> None:
    async def test() -> None:
        pod = Pod(spec("DP2"), world(2, **FIGURES))
        await pod.open()
        step = asyncio.create_task(pod.step())
        await pod.world.clock.sleep_ns(20 * NS_PER_MS)
        await ask_all(pod.nodes, CloseTraining())
        assert [failure.error for failure in await step] == ["RankDied"] * 2  # type: ignore[attr-defined]  # they are
        with pytest.raises(NotOpen):
            await pod.step()
        await pod.open(attempt=1)
        assert (await pod.step())[0].version == 0

    virtually(test())


def test_openings_that_cannot_be_are_refused() -> None:
    async def test() -> None:
        pod = Pod(spec("DP2"), world(2))
        missing = await ask(pod.nodes[0], pod.opening(0))
        assert isinstance(missing, Failure)
        assert missing.error == "OrderExpired"
        assert pod.now_ns == 10 * NS_PER_S
        await pod.open()
        with pytest.raises(Busy):
            await ask(pod.nodes[0], pod.opening(0))
        with pytest.raises(UsageError, match="nothing is learned on a simulated bench"):
            await ask(pod.nodes[0], replace(pod.opening(0), spec=spec("DP2", mode="real")))
        with pytest.raises(UsageError, match="TP 3 does not divide"):
            await Pod(spec("TP3"), world(1)).open()

    virtually(test())
