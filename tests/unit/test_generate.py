"""The generate step on the fake bench: switches and moves under load, rows, and how it ends."""

from __future__ import annotations

import random
from typing import Any

import pytest
from generation_bench import FakeBench, requests, session_of

from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import StepFailed, UsageError
from harness.model.layout import parse_layout
from harness.model.replay import digest_of, replay_of
from harness.model.scenario import Generate
from harness.model.streams import STREAMS
from harness.run.generation.asked import GenerationAsked
from harness.run.generation.generate import generate
from harness.run.session import Session
from harness.tasks import beside
from harness.virtual import run_virtually
from harness.wire.generation import (
    Admission,
    Build,
    CloseGeneration,
    EngineSpec,
    OpenGeneration,
    Prepare,
    Submit,
    TearDown,
    Withdraw,
)
from harness.wire.messages import Failure


def asked(replayed: Any, **spec: Any) -> GenerationAsked:
    return GenerationAsked(
        spec=EngineSpec(**({"engine": "paced", "sequences_max": 16} | spec)),
        layout=parse_layout("4xTP1"),
        replay=replay_of(replayed),
        gpus_of={"n0": 2, "n1": 2},
    )


def ran(
    *steps: Generate, bench: FakeBench | None = None, replayed: Any = None, **spec: Any
) -> Session:
    """The session after these steps; every row has the fields that its stream declares."""
    bench = bench or FakeBench()
    session = session_of(bench)
    session.generation_asked = asked(
        requests(24, response=200) if replayed is None else replayed, **spec
    )

    async def main() -> None:
        async with session.closing:
            for number, step in enumerate(steps):
                await generate(session, step, number)

    try:
        run_virtually(main())
    finally:
        for stream, row in session.record:  # type: ignore[attr-defined]
            assert row.keys() == STREAMS[stream].keys(), stream
    return session


def rows(session: Any, stream: str) -> Any:
    return session.record.of(stream)


def step(**more: Any) -> Generate:
    return Generate(**({"stage_timeout_s": 5.0, "rest_s": 0.5} | more))


def test_every_request_ends_once_with_all_of_its_tokens() -> None:
    session = ran(step())
    (row,) = rows(session, "generated")
    assert (row["requests"], row["finished"], row["refused"]) == (24, 24, 0)
    assert (row["tokens"], row["lost"], row["doubled"]) == (24 * 200, 0, 0)
    assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["took_s"])
    assert row["layout"] == "4xTP1"
    assert row["digest"] == digest_of(requests(24, response=200))
    assert rows(session, "parallelism") == rows(session, "migration") == []


def test_switches_happen_under_load_and_each_has_its_row() -> None:
    session = ran(step(layouts=("2xTP2", "4xTP1"), count=5, in_flight_max=8))
    (row,) = rows(session, "generated")
    assert row["requests"] > 24  # repeated, as long as switches were to come
    assert (row["lost"], row["doubled"], row["layout"]) == (0, 0, "2xTP2")
    made = rows(session, "parallelism")
    assert [(r["index"], r["layout_to"], r["outcome"]) for r in made] == [
        (i, ("2xTP2", "4xTP1")[i % 2], "switched") for i in range(5)
    ]
    for r in made:
        told = sum(ms for ms in r["stages"].values() if ms is not None)
        assert told + r["residual_ms"] == pytest.approx(r["total_ms"])
        assert r["carried"] == 8
        assert 0 < r["during_tokens_per_s"] < r["before_tokens_per_s"]
        assert r["after_tokens_per_s"] > r["during_tokens_per_s"]


def test_layouts_without_a_count_are_gone_through_once() -> None:
    made = rows(ran(step(layouts=("2xTP2", "4xTP1"))), "parallelism")
    assert [r["layout_to"] for r in made] == ["2xTP2", "4xTP1"]


def test_migrations_move_requests_with_and_without_their_kv() -> None:
    for by in ("kv", "recompute"):
        moved = ran(step(migrations=40, migrate_every_ms=10.0, migrate_by=by), replayed=None)
        made = rows(moved, "migration")
        assert len(made) == 40
        (row,) = rows(moved, "generated")
        assert (row["lost"], row["doubled"]) == (0, 0)
        done = [r for r in made if r["outcome"] == "moved"]
        assert len(done) > 30
        assert {r["by"] for r in done} == {by}
        assert all((r["sent_bytes"] > 0) == (by == "kv") for r in done)
        assert any(r["cached_tokens"] for r in done) == (by == "kv")
        assert all(r["source"] != r["target"] for r in made)


def test_the_same_seed_moves_the_same_requests() -> None:
    runs = [rows(ran(step(migrations=10)), "migration") for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_later_step_begins_in_the_layout_that_is_up_and_the_fleet_is_opened_once() -> None:
    bench = FakeBench()
    session = ran(step(layouts=("2xTP2",)), step(), bench=bench)
    first, second = rows(session, "generated")
    assert (first["layout"], second["layout"]) == ("2xTP2", "2xTP2")
    assert second["tokens"] == 24 * 200  # its own, not those of the step before
    kinds = [type(body) for _, body in bench.asked]
    assert kinds.count(OpenGeneration) == kinds.count(CloseGeneration) == 2  # one per node
    assert kinds.count(Build) == 4


def test_a_switch_that_is_undone_is_told_and_the_step_goes_on() -> None:
    bench = FakeBench()
    session = session_of(bench)
    session.generation_asked = asked(requests(24, response=200))

    async def main() -> None:
        async with session.closing:
            await generate(session, step(), 0)
            bench.fail("n1", Build, Failure(error="Broken", text="out of memory"))
            await generate(session, step(layouts=("2xTP2",), count=2), 1)

    run_virtually(main())
    made = rows(session, "parallelism")
    assert [r["outcome"] for r in made] == ["rolled_back", "switched"]
    assert "out of memory" in made[0]["error"]
    assert [r["lost"] + r["doubled"] for r in rows(session, "generated")] == [0, 0]


def test_when_no_instance_is_left_the_step_fails_and_says_why() -> None:
    bench = FakeBench()
    session = session_of(bench)
    session.generation_asked = asked(requests(24, response=200))
    broken = Failure(error="Broken", text="out of memory")

    async def main() -> None:
        async with session.closing:
            await generate(session, step(), 0)
            for node in bench.nodes:
                bench.fail(node, Build, broken, broken)
            await generate(session, step(layouts=("2xTP2",)), 1)

    with pytest.raises(StepFailed, match=r"no instance is left to generate: .*out of memory"):
        run_virtually(main())
    assert [r["outcome"] for r in rows(session, "parallelism")] == ["lost"]
    assert len(rows(session, "generated")) == 2


def test_when_all_nodes_are_lost_within_a_switch_the_step_fails_at_once() -> None:
    bench = FakeBench()
    session = session_of(bench)
    session.generation_asked = asked(requests(24, response=2000))

    async def lose_all() -> None:
        while not any(isinstance(body, TearDown) for _, body in bench.asked):
            await bench.clock.sleep_ns(NS_PER_MS)
        for node in bench.nodes:
            bench.lose(node)

    async def main() -> None:
        with pytest.raises(StepFailed, match="no instance is left to generate"):
            async with session.closing, beside(lose_all()):
                await generate(session, step(layouts=("2xTP2",), timeout_s=300.0), 0)
        assert bench.clock.now_ns() < 30 * NS_PER_S

    run_virtually(main())


def test_moves_end_when_there_is_nowhere_to_move_to_any_more() -> None:
    bench = FakeBench()
    broken = Failure(error="Broken", text="out of memory")
    session = session_of(bench)
    session.generation_asked = asked(requests(24, response=100))
    everything = step(migrations=10**6, migrate_every_ms=0.0, timeout_s=60.0)

    async def die() -> None:
        await bench.clock.sleep_ns(NS_PER_S)
        for name in ("n0:0", "n0:1", "n1:0"):
            bench.fail(name[:2], Build, broken)
            bench.die(name)

    async def main() -> None:
        async with session.closing, beside(die()):
            await generate(session, everything, 0)

    run_virtually(main())
    assert any("only one instance is left" in note["text"] for note in rows(session, "note"))


def test_requests_that_no_engine_can_hold_are_refused_and_told() -> None:
    mixed = [*requests(4, response=50), *requests(8, prompt=40000)[6:]]
    session = ran(step(), replayed=mixed)
    (row,) = rows(session, "generated")
    assert (row["finished"], row["refused"], row["lost"]) == (4, 2, 0)
    told = [note["text"] for note in rows(session, "note")]
    assert sum("can run nowhere" in text for text in told) == 1, "not a warning for each"
    assert any(text.startswith("2 of 6 requests were refused; ") for text in told)
    with pytest.raises(StepFailed, match="3 of 3 requests were refused"):
        ran(step(layouts=("2xTP2",)), replayed=requests(3, prompt=40000))


def test_a_step_past_its_time_fails_with_what_is_left() -> None:
    with pytest.raises(StepFailed, match=r"24 requests have not ended within .* 0\.1 s"):
        ran(step(timeout_s=0.1))


def test_a_workload_without_that_step_is_refused() -> None:
    with pytest.raises(UsageError, match="no requests of step 7"):
        ran(step(workload_step=7))


def test_a_move_whose_source_does_not_answer_leaves_the_request_where_it_can_go_on() -> None:
    bench = FakeBench()
    bench.fail("n0", Withdraw, Failure(error="Broken", text="no such thing"))
    session = ran(step(migrations=20), bench=bench)
    outcomes = [r["outcome"] for r in rows(session, "migration")]
    assert outcomes.count("failed") == 1
    assert rows(session, "generated")[0]["finished"] >= 24


class Forgetful(dict[str, dict[str, int]]):
    """Transfers that never arrive, though they were sent."""

    def setdefault(self, *_: Any) -> dict[str, int]:
        return {}


def test_kv_that_does_not_arrive_is_computed_anew_and_told() -> None:
    bench = FakeBench()
    bench.transfers = Forgetful()
    made = rows(ran(step(migrations=10, migrate_by="kv"), bench=bench), "migration")
    moved = [row for row in made if row["outcome"] == "moved"]
    assert moved
    for row in moved:
        assert row["by"] == "recompute"
        assert row["sent_bytes"] > 0
        assert "did not arrive" in row["error"]


def test_a_target_that_dies_or_refuses_leaves_the_request_to_others() -> None:
    bench = FakeBench()
    bench.refusing["n1:1"] = "KV is full"
    session = ran(step(migrations=30), bench=bench, replayed=requests(24, response=400))
    elsewhere = [r for r in rows(session, "migration") if r["outcome"] == "elsewhere"]
    assert elsewhere
    assert all(r["target"] == "n1:1" and r["error"] == "KV is full" for r in elsewhere)
    assert rows(session, "generated")[0]["lost"] == 0


async def mishaps(bench: FakeBench, chance: random.Random, count: int) -> None:
    """Let things go wrong anywhere, at any time."""
    kinds = [Prepare, Admission, Withdraw, TearDown, Build, Submit]
    for _ in range(count):
        await bench.clock.sleep_ns(chance.randrange(1, 800) * NS_PER_MS)
        name = chance.choice(list(bench.nodes))
        living = [e for e in bench.nodes[name].engines if e not in bench.nodes[name].dead]
        what = chance.choice(["fail", "hang", "lose", "die", "stall"])
        if what == "fail":
            bench.fail(name, chance.choice(kinds), Failure(error="Broken", text="it broke"))
        elif what == "hang":
            bench.hang(name, chance.choice(kinds))
        elif what == "lose":
            bench.lose_answer(name, chance.choice(kinds))
        elif living:
            (bench.die if what == "die" else bench.stall)(chance.choice(living))


@pytest.mark.parametrize("leave", ["abort", "drain", "migrate"])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_goes_wrong_no_token_is_lost_or_doubled(seed: int, leave: Any) -> None:
    chance = random.Random(seed)
    bench = FakeBench(vocab=50)
    session = session_of(bench)
    session.generation_asked = asked(requests(16, response=100), engine="vllm")
    busy = step(
        layouts=("2xTP2", "4xTP1"),
        count=6,
        order="rolling" if leave == "migrate" else chance.choice(["at_once", "rolling"]),
        requests=leave,
        rest_s=0.2,
        migrations=40,
        migrate_every_ms=20.0,
        stall_s=2.0,
        stage_timeout_s=3.0,
    )

    async def main() -> None:
        async with session.closing, beside(mishaps(bench, chance, 6)):
            await generate(session, busy, 0)

    run_virtually(main())
    (row,) = rows(session, "generated")
    assert row["finished"] == row["requests"] >= 16
    assert (row["lost"], row["doubled"]) == (0, 0)
    assert len(rows(session, "parallelism")) == 6
