"""Engines come, change shape and go on a node; a scripted engine in real processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from generation_node import LIMIT_NS, PROFILE, layout, node, run, scripted

from agents.generation.labour import PROGRAM
from harness.clock import NS_PER_MS
from harness.model.placement import Instance
from harness.wire.generation import (
    Admission,
    Build,
    EngineSpec,
    Happened,
    KvTarget,
    MeasureSteps,
    OpenGeneration,
    Prepare,
    Prepared,
    StepTimes,
    Strategy,
    Submit,
    Submitted,
    TearDown,
    UpdateWeights,
    Watch,
    WeightsUpdated,
    Withdraw,
    Withdrawn,
    Work,
)
from harness.wire.messages import Done

pytestmark = pytest.mark.emulated

FLAVOURS = pytest.mark.parametrize("lockstep", [False, True], ids=["free", "lockstep"])


@FLAVOURS
def test_requests_run_to_their_end_in_every_shape(tmp_path: Path, lockstep: bool) -> None:
    async def test() -> None:
        async with node(tmp_path) as n:
            opened = await n.open(scripted(lockstep=lockstep), gpus=2)
            assert opened.facts["engine"] == "scripted"
            assert opened.warnings == ("nothing is computed",)
            for number, text in enumerate(("2xTP1", "1xTP2", "2xTP1")):
                instances = layout(text, 2)
                built = await n.build(instances)
                assert set(built.capacities) == {item.name for item in instances}
                assert {s.stage for s in built.spans} == {"groups", "weights", "kv_cache"}
                for item in instances:
                    assert len(built.kv_peers[item.name]) == len(item.gpus)
                    assert built.capacities[item.name].weights_bytes == 10 * len(item.gpus)
                    await n.submit(item, f"{item.name} {number}")
                await n.finished(*(f"{item.name} {number}" for item in instances))
                for item in instances:
                    assert n.positions(f"{item.name} {number}") == list(range(20))
                torn = await n.tear_down(instances)
                assert [span.stage for span in torn.spans] == ["teardown"]
            assert n.living() == set(n.pids.values()), "seats are resident"

    run(test())


@FLAVOURS
def test_what_leaves_has_told_all_of_its_output(tmp_path: Path, lockstep: bool) -> None:
    async def test() -> None:
        async with node(tmp_path) as n:
            await n.open(scripted(lockstep=lockstep), gpus=2)
            (pair,) = layout("1xTP2", 2)
            await n.build([pair], version=3)
            submitted = await n.submit(pair, "a", "b", "c", tokens=50_000)
            assert submitted.refused == {}
            assert (await n.submit(pair, "huge", tokens=200_000)).refused == {"huge": "too long"}
            while len(n.positions("a")) < 5:
                await n.watch()
            one = await n.ask(Withdraw(instances=(pair.name,), ids=("b", "unknown")), Withdrawn)
            assert [request.id for request in one.left] == ["b"]
            target = KvTarget(transfer="t", instance=pair, peers=("127.0.0.1:1", "127.0.0.1:2"))
            asked = Withdraw(instances=(pair.name,), verb="export", to=target)
            rest = await n.ask(asked, Withdrawn)
            assert rest.sent_bytes == {"a": 10, "c": 10}, "of both ranks"
            while n.upto < rest.upto:
                await n.watch(0)
            for request in (*one.left, *rest.left):
                assert n.positions(request.id) == list(range(request.produced_tokens))
            ends = {output.id: output.ended for output in n.outputs if output.ended}
            assert ends == {"a": "exported", "b": "aborted", "c": "exported"}
            assert {output.version for output in n.outputs if output.count} == {3}
            assert n.last is not None
            told = n.last.stats[pair.name]
            assert told.running == 0
            assert told.generated_tokens == sum(len(n.positions(name)) for name in "abc")

    run(test())


@FLAVOURS
def test_admission_and_weights_reach_every_rank(tmp_path: Path, lockstep: bool) -> None:
    async def test() -> None:
        async with node(tmp_path) as n:
            await n.open(scripted(lockstep=lockstep), gpus=2)
            (pair,) = layout("1xTP2", 2)
            await n.build([pair])
            await n.ask(Admission(instances=(pair.name,), open=False), Done)
            await n.submit(pair, "a")
            moved = await n.ask(UpdateWeights(instances=(pair.name,), version=2), WeightsUpdated)
            assert moved.moved_bytes == 6
            assert [span.stage for span in moved.spans] == ["weights"]
            assert n.positions("a") == []
            await n.ask(Admission(instances=(pair.name,), open=True), Done)
            await n.finished("a")
            assert {output.version for output in n.outputs} == {2}
            asked = MeasureSteps(
                instance=pair.name, batch=4, context_tokens=100, prefill_tokens=0, steps=3
            )
            assert (await n.ask(asked, StepTimes)).times_ns == (4, 4, 4)

    run(test())


@pytest.mark.parametrize("strategy", ["rebuild", "restart"])
def test_only_a_restart_ends_the_processes(tmp_path: Path, strategy: Strategy) -> None:
    closing = tmp_path / "closed"
    closing.mkdir()

    async def test() -> None:
        async with node(tmp_path) as n:
            await n.open(scripted(closed=str(closing)), gpus=2)
            (pair,) = layout("1xTP2", 2)
            await n.build([pair], strategy)
            before = n.living()
            await n.tear_down([pair], strategy)
            built = await n.build(layout("2xTP1", 2), strategy)
            stages = {span.stage for span in built.spans}
            again = strategy == "restart"
            assert ("processes" in stages) == again
            assert n.living().isdisjoint(before) == again
            assert len(n.living()) == 2
            assert [note.text for note in n.notes] == []

    run(test())
    assert len(list(closing.iterdir())) == (2 if strategy == "restart" else 0)


def test_engines_of_a_pool_change_places_asleep(tmp_path: Path) -> None:
    async def test() -> None:
        async with node(tmp_path) as n:
            ones, (pair,) = layout("2xTP1", 2), layout("1xTP2", 2)
            await n.open(scripted(), gpus=2, prebuild=[ones, (pair,)])
            everyone = n.living()
            assert len(everyone) == 6
            prepared = await n.ask(Prepare(instances=ones, strategy="pool"), Prepared)
            assert [row.asleep_bytes for row in prepared.memory] == [7000, 7000]
            for number, instances in enumerate((ones, (pair,), ones)):
                built = await n.build(instances, "pool", version=number)
                assert {span.stage for span in built.spans} == {"weights", "kv_cache"}
                await n.submit(instances[0], f"{number}")
                await n.finished(f"{number}")
                await n.tear_down(instances, "pool")
            assert n.outputs[-1].version == 2
            assert n.living() == everyone
            await n.build(ones, "rebuild")
            await n.tear_down(ones, "rebuild")
            await n.build(ones, "pool")
            assert n.living() == everyone, "the resident ones built besides, the others slept on"

    run(test())


def test_what_a_pool_has_not_is_refused_and_named(tmp_path: Path) -> None:
    async def test() -> None:
        async with node(tmp_path) as n:
            ones, (pair,) = layout("2xTP1", 2), layout("1xTP2", 2)
            await n.open(scripted(), gpus=2, prebuild=[ones])
            for asked in (Prepare, Build):
                failure = await n.fails(asked(instances=(pair,), strategy="pool"))
                assert failure.error == ("Infeasible" if asked is Prepare else "Refused")
                assert "no engine of n:0-1 as 1xTP2 sleeps here" in failure.text
                assert "there is n:0 as 1xTP1, n:1 as 1xTP1" in failure.text
            await n.build(ones, "pool")

    run(test())


def test_an_engine_that_cannot_sleep_makes_no_pool(tmp_path: Path) -> None:
    async def test() -> None:
        async with node(tmp_path) as n:
            ones = layout("2xTP1", 2)
            asked = OpenGeneration(
                spec=scripted(odd={"1": "never sleeps"}),
                gpus=2,
                address="127.0.0.1",
                prebuild=(ones,),
            )
            failure = await n.fails(asked)
            assert failure.text == "rank of GPU 1: this engine cannot sleep"
            assert not n.living()
            await n.open(scripted(odd={"1": "never sleeps"}), gpus=2)
            await n.build(ones)
            failure = await n.fails(TearDown(instances=("n:1",), strategy="pool"))
            assert "cannot sleep" in failure.text
            await n.submit(ones[1], "a")
            await n.finished("a")

    run(test())


def test_every_reason_against_a_layout_is_told_at_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with node(tmp_path) as n:
            await n.open(scripted(), gpus=2)
            odd = Instance(name="odd", gpus=(0, 1, 5), tp=3)
            failure = await n.fails(Prepare(instances=(odd,), strategy="rebuild"))
            assert failure.error == "Infeasible"
            reasons = failure.text.splitlines()
            assert "odd: there is no GPU 5, of 2 on this node" in reasons
            assert any("does not divide the 40 attention heads" in reason for reason in reasons)
            (pair,) = layout("1xTP2", 2)
            prepared = await n.ask(Prepare(instances=(pair,), strategy="rebuild"), Prepared)
            assert [row.gpu for row in prepared.memory] == [0, 1]
            for row in prepared.memory:
                parts = row.weights_bytes + row.workspace_bytes + row.kv_bytes
                assert parts == row.total_bytes
                assert row.basis == "modelled"

    run(test())


@pytest.mark.parametrize(
    ("make", "text"),
    [(lambda path: None, "no such model folder"), (lambda path: path.mkdir(), "config.json")],
    ids=["no folder", "no config"],
)
def test_a_model_that_is_not_there_is_refused_first(
    tmp_path: Path, make: Callable[[Path], None], text: str
) -> None:
    async def test() -> None:
        async with node(tmp_path) as n:
            make(tmp_path / "model")
            spec = EngineSpec(engine="vllm", model=str(tmp_path / "model"))
            failure = await n.fails(OpenGeneration(spec=spec, gpus=1, address="127.0.0.1"))
            assert failure.error == "BadFile"
            assert str(tmp_path / "model") in failure.text
            assert text in failure.text
            assert not n.living()

    run(test())


def test_one_change_of_engines_at_a_time(tmp_path: Path) -> None:
    async def test() -> None:
        async with node(tmp_path) as n:
            assert (await n.fails(Watch(after=0, wait_ns=0))).error == "NotOpen"
            await n.open(scripted(odd={"0": "updates slowly"}), gpus=1)
            assert (await n.fails(OpenGeneration(spec=scripted(), gpus=1, address=""))).error == (
                "Busy"
            )
            (one,) = layout("1xTP1", 1)
            await n.build([one])
            assert (
                "tear it down first"
                in (await n.fails(Build(instances=(one,), strategy="rebuild"))).text
            )
            updating = asyncio.create_task(n.say(UpdateWeights(instances=(one.name,), version=1)))
            await asyncio.sleep(0)
            busy = await n.fails(TearDown(instances=(one.name,), strategy="rebuild"))
            assert busy.error == "Busy"
            assert busy.text == "update_weights is under way on this node"
            await n.submit(one, "a")
            assert isinstance(await updating, WeightsUpdated)
            await n.finished("a")
            assert {output.version for output in n.outputs} == {1}
            missing = await n.fails(Submit(instance="n:7", works=()))
            assert missing.text == "no instance n:7 is up on this node; there is n:0"

    run(test())


def test_events_are_told_once_and_in_order(tmp_path: Path) -> None:
    async def test() -> None:
        async with node(tmp_path) as n:
            await n.open(scripted(), gpus=1)
            (one,) = layout("1xTP1", 1)
            await n.build([one])
            await n.watch()  # the build is news
            assert (await n.watch(NS_PER_MS)).outputs == ()
            older = asyncio.create_task(n.say(Watch(after=0, wait_ns=LIMIT_NS)))
            await asyncio.sleep(0)
            newer = asyncio.create_task(n.say(Watch(after=0, wait_ns=LIMIT_NS)))
            found = await older
            assert isinstance(found, Happened)
            assert found.outputs == ()
            await n.submit(one, "a")
            found = await newer
            assert isinstance(found, Happened)
            assert found.outputs[0].start == 0
            again = await n.watch()
            assert again.outputs[: len(found.outputs)] == found.outputs, "not forgotten yet"
            await n.finished("a")
            assert n.positions("a") == list(range(20))
            assert (await n.fails(Watch(after=0, wait_ns=0))).error == "Forgotten"
            assert (await n.fails(Watch(after=n.upto + 1, wait_ns=0))).error == "Forgotten"

    run(test())


def test_the_paced_engine_moves_kv_and_goes_through_every_strategy(tmp_path: Path) -> None:
    async def test() -> None:
        async with node(tmp_path, PROGRAM) as n:
            spec = EngineSpec(engine="paced", profile=PROFILE, bytes_scale=1e-4)
            ones, (pair,) = layout("2xTP1", 2), layout("1xTP2", 2)
            await n.open(spec, gpus=2, prebuild=[ones, (pair,)])
            strategies: tuple[Strategy, ...] = ("pool", "restart", "rebuild")
            for strategy in strategies:
                await n.build([pair], strategy)
                await n.submit(pair, strategy)
                await n.finished(strategy)
                await n.tear_down([pair], strategy)
            source, target = ones
            built = await n.build(ones)
            await n.submit(source, "moves", tokens=100)
            while len(n.positions("moves")) < 10:
                await n.watch()
            to = KvTarget(transfer="t", instance=target, peers=built.kv_peers[target.name])
            asked = Withdraw(instances=(source.name,), verb="export", to=to)
            left = await n.ask(asked, Withdrawn)
            assert left.sent_bytes["moves"] > 0
            work = Work(carried=left.left[0], kv_transfer="t")
            submitted = await n.ask(Submit(instance=target.name, works=(work,)), Submitted)
            assert submitted.with_kv == ("moves",)
            await n.finished("moves")
            assert n.positions("moves") == list(range(100))

    run(test())
