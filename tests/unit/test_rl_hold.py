"""What must not slip out of the loop's hands: late answers, lost pools, errors, old notes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from generation_bench import Events, FakeBench
from rl_bench import RlBench, replay, rl_session
from test_rl_loop import STATIC, used, with_fault
from test_switch import fleet_on, requests, switches_of

from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import InfrastructureError, StepFailed
from harness.model.layout import parse_layout
from harness.model.replay import ReplayRequest, Turn
from harness.model.scenario import Rl
from harness.run.generation.ledger import Ledger
from harness.run.generation.resumption import Resumption
from harness.run.generation.stages import NOTES_KEPT, Pace
from harness.run.rl.checkpoint import read_checkpoint
from harness.run.rl.loop import rl
from harness.run.rl.rollouts import Rollouts
from harness.tasks import beside
from harness.virtual import run_virtually
from harness.wire.generation import Build, Output, Prepare, Submit, UpdateWeights
from harness.wire.messages import Failure, Message
from harness.wire.training import KeepTrainer, PublishWeights, TrainStep

DIED = Failure(error="RankDied", text="rank 0 was killed by signal 9", ranks=(0,))
BROKEN = Failure(error="Broken", text="out of memory")


async def asked(bench: FakeBench, kind: type[Message]) -> None:
    """Wait until a message of a kind was sent."""
    while not any(isinstance(body, kind) for _, body in bench.asked):
        await bench.clock.sleep_ns(NS_PER_MS)


# -- answers that come when nobody has the request any more --------------------------------------


def test_a_send_that_fails_when_its_samples_are_long_used_takes_nothing_back(
    tmp_path: Path,
) -> None:
    async def hangs(bench: RlBench) -> None:
        bench.trainer.train_ns = 20 * NS_PER_S
        bench.hang("n0", Submit)

    step = Rl(steps=5, policies=("static:4xTP1/least_loaded",), stall_s=3.0)
    bench, events = with_fault(tmp_path, step, hangs, requests=replay(5, 4, 2))
    assert len(events.of("given_up")) == 1
    ends_ns = [row["sync_end_ns"] for row in events.of("rl_step")]
    assert ends_ns[0] < 60 * NS_PER_S < 70 * NS_PER_S < ends_ns[-1]  # the send expired meanwhile
    assert len(used(bench)) == len(set(used(bench))) == 40


def test_whoever_waits_for_requests_that_are_used_waits_no_longer() -> None:
    ledger = Ledger()
    ledger.add([ReplayRequest(id="a", step=0, prompt=0, sample=0, turns=(Turn(5, 2),))], 0)
    ledger.send("a", "n0:0")
    waiting = Resumption(ledger, {}, ids=["a"], ran=["a"], since_ns=5)
    told = Output(
        instance="n0:0", id="a", start=0, count=2, first_ns=6, last_ns=7, ids=(),
        ended="finished", version=0, cached_tokens=0,
    )  # fmt: skip
    ledger.apply(told, 6, 7)
    ledger.forget(["a"])
    assert waiting.sent()
    assert waiting.steady()
    assert waiting.complete()


# -- pools that are gone ---------------------------------------------------------------------------


@pytest.mark.parametrize("moment", [TrainStep, UpdateWeights])
def test_a_loop_whose_nodes_are_all_lost_ends_at_once(tmp_path: Path, moment: Any) -> None:
    async def lost(bench: RlBench) -> None:
        await asked(bench, moment)
        for name in ("n0", "n1"):
            bench.lose(name)

    bench = RlBench(2, 2)

    async def main() -> None:
        step = Rl(steps=4, policies=STATIC)
        session = rl_session(bench, tmp_path, step, replay(4, 4, 2, lambda step, index: 500))
        with pytest.raises(StepFailed, match="no beat for 3 s"):
            async with session.closing, beside(lost(bench)):
                await rl(session, step, 0)
        assert bench.clock.now_ns() < 60 * NS_PER_S

    run_virtually(main())


def test_a_loop_goes_on_without_a_node_that_is_lost(tmp_path: Path) -> None:
    async def lost(bench: RlBench) -> None:
        await asked(bench, TrainStep)
        bench.lose("n1")

    bench, events = with_fault(tmp_path, Rl(steps=4, policies=STATIC), lost, nodes=2)
    assert len(used(bench)) == len(set(used(bench))) > 0
    assert [row["receivers"] for row in events.of("sync")][-1] == 1


def test_when_no_node_can_be_built_on_any_more_whoever_waits_is_told() -> None:
    async def main() -> None:
        bench = FakeBench(1)
        async with fleet_on(bench, "2xTP1") as fleet:
            fleet.add(requests(8, response=2000))
            bench.fail("n0", Build, BROKEN, BROKEN)
            made = await switches_of(fleet).make(parse_layout("1xTP2"))
            assert made.outcome == "lost"
            assert fleet.usable == {}
            await fleet.until(lambda: False, 1000 * NS_PER_S)

    with pytest.raises(StepFailed, match=r"no instance is left to generate: n0: .*out of memory"):
        run_virtually(main())


def test_an_instance_that_dies_while_it_is_refused_is_sent_requests_when_that_is_over() -> None:
    async def main() -> None:
        bench = FakeBench(1)
        async with fleet_on(bench, "2xTP1") as fleet:
            async with fleet.changing:
                fleet.refuse(["n0:0"])
                bench.die("n0:0")
                await fleet.until(lambda: bool(fleet.places["n0:0"].dead), 5 * NS_PER_S)
                fleet.accept(["n0:0"])  # such as after a switch that was refused
                assert not fleet.places["n0:0"].accepting

            def back() -> bool:
                place = fleet.places.get("n0:0")
                return place is not None and place.accepting

            assert await fleet.until(back, 60 * NS_PER_S)

    run_virtually(main())


# -- trainers, and errors beside -------------------------------------------------------------------


@pytest.mark.parametrize("moment", [KeepTrainer, PublishWeights])
def test_a_rank_that_dies_after_its_step_costs_no_sample(tmp_path: Path, moment: Any) -> None:
    async def dies(bench: RlBench) -> None:
        while len(bench.trainer.stepped) < 2:
            await bench.clock.sleep_ns(NS_PER_MS)
        bench.fail("t0", moment, DIED)

    bench, events = with_fault(tmp_path, Rl(steps=4, policies=STATIC), dies, requests=replay(4))
    by_version = dict(bench.trainer.stepped)
    assert sorted(by_version) == [0, 1, 2, 3]
    assert all(by_version[version] == ids for version, ids in bench.trainer.stepped)
    assert len({id_ for ids in by_version.values() for id_ in ids}) == 32
    assert [row["outcome"] for row in events.of("sync")] == ["synced"] * 4


def test_what_a_checkpoint_names_is_whole_while_the_next_policy_keeps_its_first(
    tmp_path: Path,
) -> None:
    bench = RlBench()
    step = Rl(steps=1, policies=("static:4xTP1", "static:2xTP2"))

    async def killed() -> None:
        session = rl_session(bench, tmp_path, step, replay(1))
        async with session.closing, beside(rl(session, step, 0)):
            while sum(isinstance(body, KeepTrainer) for _, body in bench.asked) < 2:
                await bench.clock.sleep_ns(NS_PER_MS)
            await bench.clock.sleep_ns(NS_PER_MS)

    run_virtually(killed())
    left = read_checkpoint(tmp_path)
    assert (left.checkpoint.policy, left.checkpoint.version) == (0, 1)
    assert bench.kept[str(left.trainer)] == 1


def test_what_cannot_be_recorded_beside_the_loop_ends_it(tmp_path: Path) -> None:
    class Full(Events):
        def event(self, stream: str, data: Mapping[str, object]) -> None:
            if stream == "pool":
                raise InfrastructureError("no space is left for the journal")
            super().event(stream, data)

    async def main() -> None:
        step = Rl(steps=2, policies=STATIC)
        session = rl_session(RlBench(), tmp_path, step, replay())
        session.record = Full()
        async with session.closing:
            await rl(session, step, 0)

    with pytest.raises(InfrastructureError, match="no space is left"):
        run_virtually(main())


# -- what is kept, and for how long ---------------------------------------------------------------


def test_notes_of_speed_do_not_grow_without_end() -> None:
    pace = Pace()
    for i in range(5 * NOTES_KEPT):
        pace.note(i * NS_PER_MS, 3 * i)
    assert len(pace._notes) < 2 * NOTES_KEPT
    end_ns = (5 * NOTES_KEPT - 1) * NS_PER_MS
    assert pace.per_s(end_ns - NS_PER_S, end_ns) == pytest.approx(3000)


def group_of(*ids: str) -> list[ReplayRequest]:
    turns = (Turn(1, 1),)
    return [ReplayRequest(id=id_, step=0, prompt=0, sample=0, turns=turns) for id_ in ids]


def ready_first(over_age: Any) -> Rollouts:
    """Two groups asked for in each of two batches; of the first, `a` began and has not ended."""
    account = Rollouts(bound=1, per_step=2, order="first_ready", over_age=over_age)
    account.ask([group_of("a"), group_of("b")])
    account.ask([group_of("c"), group_of("d")])
    for id_ in ("b", "c", "d"):
        account.ended(id_, 0 if id_ == "b" else 1)
    account.begun("a", 0)
    return account


def test_what_is_due_is_waited_for_or_gone_without() -> None:
    waits, drops = ready_first("wait"), ready_first("drop")
    assert waits.ready(1) is None
    chosen = drops.ready(1)
    assert chosen is not None
    assert [group.ids for group in chosen] == [("b",), ("c",)]
    assert [group.ids for group in drops.late(1)] == [("a",)]
    waits.ended("a", 0)
    chosen = waits.ready(1)
    assert chosen is not None
    assert [group.ids for group in chosen] == [("a",), ("b",)]


def test_what_is_due_trains_even_if_it_ended_last() -> None:
    drops = ready_first("drop")
    drops.ended("a", 0)
    chosen = drops.ready(1)
    assert chosen is not None
    assert [group.ids for group in chosen] == [("a",), ("b",)]


def test_a_switch_is_not_prepared_on_nodes_where_nothing_can_be_built() -> None:
    async def main() -> None:
        bench = FakeBench(2)
        async with fleet_on(bench) as fleet:
            switches = switches_of(fleet)
            bench.fail("n1", Build, BROKEN, BROKEN)
            assert (await switches.make(parse_layout("2xTP2"))).outcome == "lost"
            bench.asked.clear()
            await switches.make(parse_layout("1xTP2"))
            assert {node for node, body in bench.asked if isinstance(body, Prepare)} <= {"n0"}

    run_virtually(main())
