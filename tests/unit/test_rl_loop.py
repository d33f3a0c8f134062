"""The loop on a bench in virtual time: what trains, how old it is, and what it survives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import rl_random
from rl_bench import RlBench, replay, rl_session

from harness.clock import NS_PER_MS
from harness.errors import StepFailed, UsageError
from harness.model.layout import parse_mix
from harness.model.load import load_profile
from harness.model.placement import place
from harness.model.scenario import Rl
from harness.run.rl.loop import rl
from harness.run.rl.pilot import PLANNING_SHARE
from harness.scheduling.view import Plan, View
from harness.tasks import beside
from harness.virtual import VirtualLoop, run_virtually
from harness.wire.generation import Build, TearDown, UpdateWeights
from harness.wire.messages import Failure
from harness.wire.training import TrainStep
from harness.wire.weights import SendWeights


def loop(tmp_path: Path, step: Rl, bench: RlBench | None = None, **more: Any) -> Any:
    """Run one step; return its bench and its events."""

    async def main() -> Any:
        there = bench or RlBench()
        session = rl_session(there, tmp_path, step, more.pop("requests", replay()), **more)
        async with session.closing:
            await rl(session, step, 0)
        return there, session.record

    return run_virtually(main())


STATIC = ("static:4xTP1",)


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_every_sample_trains_once_and_none_is_over_the_bound(tmp_path: Path, bound: int) -> None:
    bench, events = loop(tmp_path, Rl(steps=5, policies=STATIC, staleness_max=bound))
    stepped = bench.trainer.stepped
    assert [version for version, _ in stepped] == [0, 1, 2, 3, 4]
    used = [id_ for _, ids in stepped for id_ in ids]
    assert len(used) == len(set(used)) == 5 * 8
    rows = events.of("rl_step")
    assert all(len(row["staleness"]) <= bound + 1 for row in rows)
    assert events.of("rl")[0]["staleness_max"] <= bound
    assert all(row["outcome"] == "synced" for row in events.of("sync"))


PROFILE = load_profile("scenarios/profiles/qwen2.5-14b-h800.toml")


def tail(step: int, index: int) -> int:
    return 3000 if index == step else 30 + 7 * index % 100


@pytest.mark.parametrize(
    "policy", ["orchestrl", "proactive", "reactive", "oracle", "best_static", "static:2xTP1+1xTP2"]
)
def test_every_policy_gets_all_samples_trained(tmp_path: Path, policy: str) -> None:
    step = Rl(steps=4, policies=(policy,), switch_s=0.5)
    requests = replay(4, 8, 4, tail)
    bench, events = loop(tmp_path, step, requests=requests, profile=PROFILE)
    assert [len(ids) for _, ids in bench.trainer.stepped] == [32] * 4
    [row] = events.of("rl")
    assert row["samples"] == 128
    assert row["tokens"] == sum(r.response_tokens for r in requests.requests)


# -- what must end well ----------------------------------------------------------------------------


def with_fault(
    tmp_path: Path, step: Rl, fault: Callable[[RlBench], Coroutine[Any, Any, None]], **more: Any
) -> tuple[RlBench, Any]:
    """Run one step while a coroutine lets something go wrong."""

    async def main() -> Any:
        nodes = more.pop("nodes", 1)
        bench = RlBench(nodes, 4 // nodes)
        session = rl_session(bench, tmp_path, step, more.pop("requests", replay()), **more)
        async with session.closing, beside(fault(bench)):
            await rl(session, step, 0)
        return bench, session.record

    return run_virtually(main())


def used(bench: RlBench) -> list[str]:
    return [id_ for _, ids in bench.trainer.stepped for id_ in ids]


def test_a_trainer_rank_that_dies_is_opened_anew_and_the_step_made_once(tmp_path: Path) -> None:
    async def rank_dies(bench: RlBench) -> None:
        while not bench.kept:  # the first step is made and kept
            await bench.clock.sleep_ns(NS_PER_MS)
        failure = Failure(error="RankDied", text="rank 0 was killed by signal 9", ranks=(0,))
        bench.fail("t0", TrainStep, failure)

    bench, events = with_fault(tmp_path, Rl(steps=3, policies=STATIC), rank_dies)
    assert [version for version, _ in bench.trainer.stepped] == [0, 1, 2]
    assert len(used(bench)) == len(set(used(bench))) == 24
    opened = [row["text"] for row in events.of("note") if "opened anew" in row["text"]]
    assert len(opened) == 1
    assert "signal 9" in opened[0]


def test_a_trainer_that_dies_again_and_again_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    async def rank_dies(bench: RlBench) -> None:
        failure = Failure(error="RankDied", text="rank 0 was killed by signal 9", ranks=(0,))
        bench.fail("t0", TrainStep, *[failure] * 5)

    with pytest.raises(StepFailed, match="rank 0 was killed by signal 9"):
        with_fault(tmp_path, Rl(steps=3, policies=STATIC), rank_dies)


def test_an_instance_that_dies_in_a_sync_comes_back_with_the_new_weights(tmp_path: Path) -> None:
    async def dies(bench: RlBench) -> None:
        while not any(isinstance(body, UpdateWeights) for _, body in bench.asked):
            await bench.clock.sleep_ns(NS_PER_MS)
        bench.die("n0:1")

    requests = replay(4, 6, 4, lambda step, index: 400)
    bench, events = with_fault(tmp_path, Rl(steps=4, policies=STATIC), dies, requests=requests)
    assert [row["outcome"] for row in events.of("sync")] == ["synced"] * 4
    assert events.of("given_up")[0]["instance"] == "n0:1"
    built = [body for _, body in bench.asked if isinstance(body, Build)]
    assert [i.name for i in built[1].instances] == ["n0:1"]
    assert built[1].version >= 1
    assert built[1].source
    assert len(used(bench)) == len(set(used(bench))) == 4 * 24


def test_an_engine_that_cannot_load_the_weights_serves_no_more_until_it_has(tmp_path: Path) -> None:
    async def fails(bench: RlBench) -> None:
        bench.fail("n1", UpdateWeights, Failure(error="Torn", text="checksum of layer.0"))

    requests = replay(3, 6, 4, lambda step, index: 400)
    step = Rl(steps=3, policies=("static:4xTP1/least_loaded",))
    bench, events = with_fault(tmp_path, step, fails, requests=requests, nodes=2)
    assert {row["instance"] for row in events.of("given_up")} == {"n1:0", "n1:1"}
    assert "checksum of layer.0" in events.of("given_up")[0]["reason"]
    assert len(used(bench)) == 72


def test_a_sync_that_fails_is_made_again_whole(tmp_path: Path) -> None:
    step = Rl(steps=3, policies=STATIC, sync_faults=("", "fail"))
    _, events = loop(tmp_path, step)
    rows = [(row["version"], row["attempt"], row["outcome"]) for row in events.of("sync")]
    assert rows == [(1, 0, "synced"), (2, 0, "failed"), (2, 1, "synced"), (3, 0, "synced")]
    assert "127.0.0.1:1" in events.of("sync")[1]["error"] or events.of("sync")[1]["error"]


def test_a_sync_that_keeps_failing_ends_the_run_naming_the_receiver(tmp_path: Path) -> None:
    async def fails(bench: RlBench) -> None:
        failure = Failure(error="ChildLost", text="10.0.0.7:4444 took 1 of 3 buckets")
        bench.fail("t0", SendWeights, *[failure] * 3)

    with pytest.raises(StepFailed, match=r"weights 1 .* 10\.0\.0\.7:4444 took 1 of 3 buckets"):
        with_fault(tmp_path, Rl(steps=3, policies=STATIC), fails)


def test_weights_wait_for_running_requests_where_these_are_to_end_first(tmp_path: Path) -> None:
    requests = replay(4, 4, 2, lambda step, index: 100 + 200 * (index % 3))
    step = Rl(steps=4, policies=STATIC, across_sync="finish", staleness_max=2)
    _, events = loop(tmp_path, step, requests=requests)
    assert all(row["mixed"] == 0 for row in events.of("rl_step"))


def test_running_requests_may_go_on_under_new_weights(tmp_path: Path) -> None:
    requests = replay(4, 4, 2, lambda step, index: 2500 if index == 7 else 50)
    step = Rl(steps=4, policies=STATIC, staleness_max=2)
    _, events = loop(tmp_path, step, requests=requests)
    assert any(row["mixed"] for row in events.of("rl_step"))


def test_samples_that_all_end_at_once_train_at_once(tmp_path: Path) -> None:
    requests = replay(3, 4, 4, lambda step, index: 64)
    bench, _ = loop(tmp_path, Rl(steps=3, policies=("orchestrl",)), requests=requests)
    assert len(used(bench)) == 48


def test_a_sample_that_never_ends_is_named_when_time_is_up(tmp_path: Path) -> None:
    requests = replay(2, 2, 2, lambda step, index: 10**8 if (step, index) == (1, 3) else 20)
    with pytest.raises(StepFailed, match=r"can run nowhere|1 are open, the first 0\.0\.1\.0/1-1"):
        loop(tmp_path, Rl(steps=2, policies=STATIC), requests=requests)


def test_what_would_get_too_old_is_generated_anew_where_so_asked(tmp_path: Path) -> None:
    requests = replay(6, 3, 2, lambda step, index: 9000 if index == 0 else 20)
    step = Rl(steps=6, policies=STATIC, staleness_max=1, order="first_ready", over_age="drop")
    bench, events = loop(tmp_path, step, requests=requests)
    row = events.of("rl")[0]
    assert row["dropped"] > 0
    assert row["staleness_max"] <= 1
    assert len(used(bench)) == len(set(used(bench))) == 36


def test_a_killed_coordinator_is_followed_by_one_that_goes_on(tmp_path: Path) -> None:
    step = Rl(steps=5, policies=STATIC, staleness_max=2)
    requests = replay(5, 4, 2, lambda step, index: 100 + 50 * index)
    first = RlBench()

    async def killed() -> None:
        session = rl_session(first, tmp_path / "first", step, requests)
        async with session.closing, beside(rl(session, step, 0)) as running:
            while len(first.kept) < 2 or len(first.trainer.stepped) < 2:
                await first.clock.sleep_ns(NS_PER_MS)
            await first.clock.sleep_ns(1000 * NS_PER_MS)
            running.cancel()

    run_virtually(killed())
    second = RlBench()
    second.kept = first.kept

    async def goes_on() -> Any:
        session = rl_session(second, tmp_path / "second", step, requests, resume=tmp_path / "first")
        async with session.closing:
            await rl(session, step, 0)
        return session.record

    events = run_virtually(goes_on())
    versions = [version for version, _ in second.trainer.stepped]
    assert versions == list(range(versions[0], 5))
    assert versions[0] >= 1
    before = [ids for version, ids in first.trainer.stepped if version < versions[0]]
    trained = [id_ for ids in before for id_ in ids] + used(second)
    assert len(trained) == len(set(trained)) == 40
    assert events.of("rl")[0]["staleness_max"] <= 2


def test_of_the_trainers_state_only_what_a_checkpoint_may_name_is_kept(tmp_path: Path) -> None:
    bench, _ = loop(tmp_path, Rl(steps=5, policies=STATIC))
    assert sorted(bench.kept.values()) == [4, 5]


def test_what_an_earlier_plan_assigned_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after = {"4xTP1": "2xTP1+1xTP2", "2xTP1+1xTP2": "1xTP4"}

    def plans(view: View, *_: object) -> Plan:
        if str(view.layout) not in after or len(view.requests) < 4:
            return Plan(None, "stays", 1.0)
        mix = parse_mix(after[str(view.layout)])
        names = [i.name for i in place(mix, view.gpus_of)["n0"]] if len(mix) > 1 else []
        assignment = dict.fromkeys(view.requests.ids, names[0]) if names else {}
        return Plan(mix, "as told", 2.0, assignment=assignment)

    monkeypatch.setattr("harness.run.rl.pilot.plan", plans)
    requests = replay(2, 6, 4, lambda step, index: 500 + 100 * (index % 7))
    step = Rl(steps=2, policies=("proactive",), replan_s=0.3, switch_s=0.1)
    _, events = loop(tmp_path, step, requests=requests)
    rows = [(row["layout_to"], row["outcome"]) for row in events.of("parallelism")]
    assert rows == [("2xTP1+1xTP2", "switched"), ("1xTP4", "switched")]


def test_plans_that_take_long_are_made_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned_s = []

    def plans(*_: object) -> Plan:
        now = asyncio.get_running_loop()
        assert isinstance(now, VirtualLoop)
        planned_s.append(now.time())
        now.busy(400 * NS_PER_MS)
        return Plan(None, "stays", 1.0)

    monkeypatch.setattr("harness.run.rl.pilot.plan", plans)
    requests = replay(1, 6, 4, lambda step, index: 3000)
    loop(tmp_path, Rl(steps=1, policies=("proactive",), replan_s=0.3), requests=requests)
    looks_s = planned_s[2:]  # as the batch begins it is looked at whenever that was
    assert len(looks_s) > 2
    assert all(later - one >= 0.4 / PLANNING_SHARE for one, later in pairwise(looks_s))


def test_a_layout_that_fails_once_between_policies_is_brought_up_again(tmp_path: Path) -> None:
    async def busy(bench: RlBench) -> None:
        while not bench.trainer.stepped:
            await bench.clock.sleep_ns(NS_PER_MS)
        bench.fail("n0", TearDown, Failure(error="Busy", text="not now"))

    step = Rl(steps=2, policies=("static:4xTP1", "static:2xTP2"))
    _, events = with_fault(tmp_path, step, busy)
    assert [row["policy"] for row in events.of("rl")] == list(step.policies)
    outcomes = [row["outcome"] for row in events.of("parallelism")]
    assert outcomes == ["rolled_back", "switched"]


def test_a_checkpoint_of_other_requests_is_refused(tmp_path: Path) -> None:
    loop(tmp_path / "first", Rl(steps=2, policies=STATIC))
    with pytest.raises(UsageError, match="its requests were others"):
        loop(
            tmp_path / "second",
            Rl(steps=3, policies=STATIC),
            requests=replay(3, 4, 2, lambda step, index: 5),
            resume=tmp_path / "first",
        )


# -- drawn from seeds ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [*range(20), 36, 41, 169])
def test_whatever_goes_wrong_no_sample_is_lost_used_twice_or_too_old(
    tmp_path: Path, seed: int
) -> None:
    """`python -m tests.benchmarks loop` runs 300; with ``.loop --seed N`` it replays one."""
    run_virtually(rl_random.run(seed, tmp_path))
