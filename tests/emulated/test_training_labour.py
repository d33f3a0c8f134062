"""Ranks of two nodes train together: real processes, real collectives, on loopback."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from zlib import crc32

import pytest
from training_pod import DENSE, EXPERTS, LIMIT_NS, Pod, pod, run, samples, spec

from agents import weights_file
from agents.training.contents import words
from agents.training.exchange import Exchange, WrongResult
from harness.clock import NS_PER_S
from harness.memory import sweep
from harness.model.shape import ModelShape
from harness.model.training.shards import layer_words
from harness.processes import start_ticks
from harness.wire.messages import Done, Failure
from harness.wire.training import (
    CloseTraining,
    KeepTrainer,
    PhaseHappened,
    PlanStep,
    PublishWeights,
    StepPlan,
    Trained,
    TrainingOpen,
    TrainStep,
    WatchTraining,
    WeightsPublished,
)

pytestmark = pytest.mark.emulated

TOKENS = (900, 2000, 300, 1200, 1700, 800, 64, 1500, 600, 400, 1000, 90)
SLOW = 1e-6
"""Speed at which a first phase comes long before a step could end."""


async def planned(p: Pod) -> StepPlan:
    plans = await p.all(PlanStep(tokens=TOKENS), StepPlan)
    assert plans[0] == plans[1]
    return plans[0]


def as_announced(plan: StepPlan, told: list[PhaseHappened], rank: int, version: int) -> None:
    """Each phase of the rank's groups began and ended once, in order, with the size announced."""
    own = [i for i, phase in enumerate(plan.phases) if any(rank in g for g in phase.groups)]
    assert [event.index for event in told] == [index for index in own for _ in range(2)]
    last_ns = 0
    for index, begin, end in zip(own, told[::2], told[1::2], strict=True):
        phase = plan.phases[index]
        for event in (begin, end):
            assert (event.name, event.op, event.axis) == (phase.name, phase.op, phase.axis)
            assert (event.bytes, event.rank, event.version) == (phase.bytes, rank, version)
        assert begin.end_ns == 0
        assert last_ns <= begin.begin_ns == end.begin_ns < end.end_ns
        last_ns = end.end_ns


@pytest.mark.parametrize(
    ("degrees", "shape", "axes"),
    [("DP2TP2", DENSE, {"dp", "tp"}), ("DP2PP2EP2", EXPERTS, {"dp", "pp", "ep"})],
    ids=["dense", "experts"],
)
def test_a_step_communicates_what_was_announced(
    tmp_path: Path, degrees: str, shape: ModelShape, axes: set[str]
) -> None:
    async def test() -> None:
        async with pod(tmp_path) as p:
            opened = await p.open(spec(degrees, shape))
            assert [set(answer.pids) for answer in opened] == [{0, 1}, {2, 3}]
            assert opened[0].facts["backend"] == "gloo"
            assert axes <= set(opened[0].facts)
            assert opened[0].parameters == shape.parameters
            plan = await planned(p)
            assert {phase.axis for phase in plan.phases} == axes
            for version in range(2):
                trained = await p.step(version, *TOKENS)
                assert {answer.version for answer in trained} == {version}
                # with PP, each node has all shards of the samples, else one of the two
                assert sum(a.tokens for a in trained) == sum(TOKENS) * (2 if "PP" in degrees else 1)
                assert {a.micro_batches for a in trained} == {3}
                assert [bool(a.figures) for a in trained] == [True, False]
                for node, lowest in zip(p.nodes, (0, 2), strict=True):
                    node.told.clear()
                    await node.watch(0)
                    as_announced(plan, node.told, lowest, version)
            assert [node.notes for node in p.nodes] == [[], []]
            assert (await p.all(CloseTraining(), Done))[0].t_ns
            assert p.nodes[0].living() == []

    run(test())


def test_weights_are_published_whole_and_kept_for_two_versions(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod(tmp_path) as p:
            (opened, _) = await p.open(spec("DP2TP2"))
            paths = []
            for version in range(4):
                published = await p.all(PublishWeights(version=version), WeightsPublished)
                assert (published[1].path, published[1].bytes) == ("", 0)
                paths.append(Path(published[0].path))
                data = paths[-1].read_bytes()
                assert (len(data), crc32(data)) == (published[0].bytes, published[0].checksum)
                assert opened.weights_bytes < len(data) < opened.weights_bytes + 4096
                assert [span.stage for span in published[0].spans] == ["gather", "write"]
                holds_version(paths[-1], version)
                if version < 3:
                    await p.step(version, *TOKENS)
            stale = await p.nodes[0].ask(PublishWeights(version=1), Failure)
            assert "weights of version 1 cannot be published: here is 3" in stale.text
            assert [path.exists() for path in paths] == [False, False, True, True]
            assert paths[-1].parent.stat().st_mode & 0o777 == 0o700
            await p.all(CloseTraining(), Done)
            assert not paths[-1].parent.exists()

    run(test())


@pytest.mark.parametrize("degrees", ["DP2TP2", "TP2PP2"])
def test_both_nodes_write_the_same_file(tmp_path: Path, degrees: str) -> None:
    async def test() -> None:
        async with pod(tmp_path) as p:
            await p.open(spec(degrees))
            both = await p.all(PublishWeights(version=0, writers=(0, 2)), WeightsPublished)
            paths = [Path(published.path) for published in both]
            assert paths[0].parent != paths[1].parent
            for published, path in zip(both, paths, strict=True):
                assert published.checksum == crc32(path.read_bytes()) == both[0].checksum
                assert published.bytes == both[0].bytes
                holds_version(path, 0)
            other = await p.all(PublishWeights(version=0, writers=(2,)), WeightsPublished)
            assert [published.path for published in other] == ["", str(paths[1])]
            wrong = await p.nodes[0].ask(PublishWeights(version=0, writers=(0, 1)), Failure)
            assert "ranks (0, 1) are not one a node of 4" in wrong.text
            await p.all(CloseTraining(), Done)
            assert not any(path.parent.exists() for path in paths)

    run(test())


def holds_version(path: Path, version: int) -> None:
    """A receiver can tell: the contents follow from the seed and the version."""
    layers = layer_words(DENSE, 1e-1)
    found = dict(weights_file.tensors(path))
    assert list(found) == [f"layer.{n}" for n in range(DENSE.layers)]
    for n, places in enumerate(layers):
        assert bytes(found[f"layer.{n}"]) == words(11, version, places).tobytes()


def test_a_step_is_taken_once_however_often_it_is_asked_for(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod(tmp_path) as p:
            await p.open(spec("DP2TP2"))
            first, again = await asyncio.gather(p.step(0, *TOKENS), p.step(0, *TOKENS))
            assert first == again == await p.step(0, *TOKENS)
            happened = await p.nodes[0].watch(0)
            assert {phase.version for phase in happened.phases} == {0}
            assert len(happened.phases) == 2 * len((await planned(p)).phases)
            ahead = TrainStep(version=7, samples=samples(*TOKENS))
            for failure in await p.all(ahead, Failure):
                assert "weights of version 7 cannot be stepped from: here is 1" in failure.text
            await p.step(1, *TOKENS)  # what was refused has changed nothing

    run(test())


def cut_short(folder: Path) -> set[str]:
    """Leave of every file what a full disk would have; return the folders that are there."""
    for file in folder.glob("kept-*/*"):
        file.write_bytes(file.read_bytes()[:100])
    return {path.name for path in folder.glob("kept-*")}


async def first_phase(p: Pod, node: int) -> None:
    while not p.nodes[node].told:
        await p.nodes[node].watch()


@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_that_dies_mid_step_ends_all_and_training_goes_on_anew(
    tmp_path: Path, victim: int
) -> None:
    async def test() -> None:
        async with pod(tmp_path) as p:
            await p.open(spec("DP2TP2"))
            await p.step(0, *TOKENS)
            await p.all(lambda n: KeepTrainer(path=str(tmp_path / f"kept-{n}")), Done)
            await p.all(CloseTraining(), Done)
            await p.open(spec("DP2TP2", speed=SLOW), attempt=1)
            asked = TrainStep(version=1, samples=samples(*TOKENS))
            step = asyncio.create_task(p.all(asked, Failure))
            home, other = (0, 1) if victim < 2 else (1, 0)
            await first_phase(p, home)
            os.kill(p.nodes[home].pids[victim], signal.SIGKILL)
            begin_ns = time.monotonic_ns()
            failures = await step
            assert time.monotonic_ns() - begin_ns < LIMIT_NS // 2, "long before the deadline"
            assert {failure.error for failure in failures} == {"RankDied"}
            assert failures[home].ranks == (victim,)
            assert f"rank {victim} (pid" in failures[home].text
            assert "killed by SIGKILL" in failures[home].text
            assert "its group broke" in failures[other].text
            assert victim not in failures[other].ranks
            happened = await p.nodes[home].watch(0)
            assert "killed by SIGKILL" in happened.dead[victim]
            assert any(note.ranks == (victim,) for note in p.nodes[home].notes)
            for node in p.nodes:
                failure = await node.ask(PlanStep(tokens=TOKENS), Failure)
                assert failure.error == "RankDied"
            await p.open(spec("DP2TP2"), attempt=2)  # without being closed before
            await p.all(lambda n: KeepTrainer(path=str(tmp_path / f"kept-{n}"), load=True), Done)
            published = await p.all(PublishWeights(version=1), WeightsPublished)
            holds_version(Path(published[0].path), 1)
            await p.step(1, *TOKENS)
            kept = (str(tmp_path / f"kept-{n}") for n in range(2))
            later = [KeepTrainer(path=f"{path}-later", instead_of=path) for path in kept]
            await p.all(lambda n: later[n], Done)
            assert cut_short(tmp_path) == {"kept-0-later", "kept-1-later"}
            cut = [KeepTrainer(path=message.path, load=True) for message in later]
            for n, failure in enumerate(await p.all(lambda n: cut[n], Failure)):
                assert f"what {cut[n].path} holds cannot be read" in failure.text

    run(test())


def test_a_rank_that_stands_still_is_named_and_all_are_killed(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod(tmp_path) as p:
            await p.open(spec("DP2TP2"))
            os.kill(p.nodes[1].pids[3], signal.SIGSTOP)
            asked = TrainStep(version=0, samples=samples(*TOKENS))
            failures = await p.all(asked, Failure, 3 * NS_PER_S)
            assert failures[1].error == "OrderExpired"
            assert "rank 3 does not answer" in failures[1].text
            assert "rank 2 is in train_step" in failures[1].text
            assert all(failure.ranks for failure in failures)
            await p.all(CloseTraining(), Done)

    run(test())


def test_an_idle_rank_that_dies_is_told_at_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod(tmp_path) as p:
            await p.open(spec("DP2TP2"))
            watch = asyncio.create_task(p.nodes[0].watch(LIMIT_NS // 2))
            await asyncio.sleep(0)
            os.kill(p.nodes[0].pids[0], signal.SIGKILL)
            dead = (await watch).dead
            assert "killed by SIGKILL" in dead[0]
            assert dead[1].startswith("rank 1 was ended: rank 0 (pid")
            assert [note.ranks for note in p.nodes[0].notes] == [(0,)]
            failure = await p.nodes[0].ask(PlanStep(tokens=TOKENS), Failure)
            assert failure.error == "RankDied"
            assert failure.ranks == (0,)
            await p.all(CloseTraining(), Done)

    run(test())


def test_a_missing_node_is_noticed_and_nothing_is_left(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod(tmp_path) as p:
            which = spec("DP2TP2")
            failure = await p.nodes[0].ask(p.opening(which)(0), Failure, 8 * NS_PER_S)
            assert failure.error in ("OrderExpired", "RankDied", "RankFailed"), failure
            not_open = await p.nodes[0].ask(PlanStep(tokens=TOKENS), Failure)
            assert not_open.error == "NotOpen"
            await p.open(which, attempt=1)  # at the same store
            await p.step(0, *TOKENS)
            busy = await p.nodes[0].ask(p.opening(which, 2)(0), Failure)
            assert busy.error == "Busy"
            nothing = KeepTrainer(path=str(tmp_path / "nowhere"), load=True)
            for refused in await p.all(nothing, Failure):
                assert refused.error == "UsageError"
                assert f"no training state was kept at {tmp_path / 'nowhere'}" in refused.text
            await p.step(1, *TOKENS)
            gone = await p.nodes[0].ask(WatchTraining(after=10**6, wait_ns=0), Failure)
            assert gone.error == "Forgotten"

    run(test())


def test_closing_while_ranks_still_meet_leaves_none(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod(tmp_path) as p:
            node = p.nodes[0]
            opening = asyncio.create_task(node.ask(p.opening(spec("DP2TP2"))(0), Failure))
            while (crew := node.labour._open) is None or len(crew._seats) < 2:  # noqa: ASYNC110 - from outside
                await asyncio.sleep(0.005)
            node.pids = {rank: seat.child.pid for rank, seat in crew._seats.items()}
            await node.ask(CloseTraining(), Done)
            assert (await opening).error == "RankDied"
            assert node.living() == []

    run(test())


AGENT = """
import asyncio, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from training_pod import Node, Pod, spec
from harness.wire.training import PublishWeights, TrainingOpen, WeightsPublished

async def main():
    node = Node(Path(sys.argv[2]) / "logs")
    opened = await node.ask(Pod([node, node]).opening(spec("DP1"))(1), TrainingOpen)
    published = await node.ask(PublishWeights(version=0), WeightsPublished)
    print(opened.pids[0], published.path, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_ranks_die_with_their_agent_and_the_next_one_deletes_its_files(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    argv = [sys.executable, "-c", AGENT, here, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        pid, path = agent.stdout.readline().split()
        agent.kill()
    due_ns = time.monotonic_ns() + LIMIT_NS
    while start_ticks(int(pid)) is not None:
        assert time.monotonic_ns() < due_ns
        time.sleep(0.005)
    assert Path(path).exists()
    sweep()
    assert not Path(path).parent.exists()


def test_what_cannot_be_split_so_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod(tmp_path) as p:
            for failure in await p.all(p.opening(spec("TP6")), Failure):
                assert "TP 6 does not divide the 8 heads" in failure.text

    run(test())


def test_a_wrong_result_is_noticed() -> None:
    exchange = Exchange(0, "cpu", {(0, 1): None})
    exchange.reserve(64, 64)
    exchange._start = lambda *_: None  # type: ignore[method-assign]  # nothing comes
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        with pytest.raises(WrongResult, match=op):
            exchange.run(op, (0, 1), 128, (0, 1))
    with pytest.raises(WrongResult, match="send_recv"):
        exchange.run("send_recv", (1, 0), 128, (0, 1))


def test_a_single_rank_trains_alone(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod(tmp_path) as p:
            node, which = p.nodes[0], spec("DP1")
            asked = p.opening(which)(1)  # the share of the second node: rank 0
            assert set((await node.ask(asked, TrainingOpen)).pids) == {0}
            assert (await node.ask(PlanStep(tokens=TOKENS), StepPlan)).phases == ()
            trained = await node.ask(TrainStep(version=0, samples=samples(*TOKENS)), Trained)
            assert trained.tokens == sum(TOKENS)
            published = await node.ask(PublishWeights(version=1), WeightsPublished)
            holds_version(Path(published.path), 1)

    run(test())
