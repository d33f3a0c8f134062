"""Every request finishes exactly once, whatever happens to the instances that it was in."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from generation_bench import FakeBench, requests, session_of

from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import AgentLost, StepFailed
from harness.model.layout import parse_layout
from harness.model.placement import place
from harness.model.prompts import Prompts
from harness.model.replay import ReplayRequest, Turn
from harness.model.steptime import FittedCosts
from harness.run.generation.fleet import Fleet
from harness.virtual import run_virtually
from harness.wire.asks import CommandFailed
from harness.wire.generation import Build, EngineSpec, KvTarget, Submit, TearDown, Withdraw
from harness.wire.messages import Failure

T = 60 * NS_PER_S
LONG = 600 * NS_PER_S
PACED = EngineSpec(engine="paced", sequences_max=16, step_max_tokens=512)
VOCAB = 300
IDS = EngineSpec(engine="vllm", sequences_max=16, step_max_tokens=512, seed=7)


@asynccontextmanager
async def up(
    bench: FakeBench, layout: str = "4xTP1", spec: EngineSpec = PACED, gpus: int = 2
) -> AsyncIterator[Fleet]:
    """A fleet with a layout that accepts requests."""
    gpus_of = dict.fromkeys(bench.nodes, gpus)
    session = session_of(bench)
    async with Fleet.opened(session, spec, gpus_of, stall_ns=5 * NS_PER_S, timeout_ns=T) as fleet:
        await fleet.build(place(parse_layout(layout), gpus_of), "rebuild", T)
        fleet.accept(fleet.places)
        yield fleet


def rows(fleet: Fleet, stream: str) -> list[Any]:
    record: Any = fleet.session.record
    return list(record.of(stream))


async def finished(fleet: Fleet) -> None:
    """Wait until nothing is open, and see that every token was delivered once."""
    ledger = fleet.ledger
    assert await fleet.until(lambda: not ledger.open, LONG), ledger
    assert (ledger.lost_tokens, ledger.doubled_tokens) == (0, 0)
    done = [entry for entry in ledger.entries.values() if entry.state == "finished"]
    assert len(done) == ledger.finished
    refused = [entry for entry in ledger.entries.values() if entry.state == "refused"]
    delivered = sum(entry.request.response_tokens for entry in done)
    for entry in refused:
        turns_before = entry.request.turns[: entry.turn]
        delivered += sum(turn.response_tokens for turn in turns_before) + entry.produced_tokens
    assert (ledger.tokens, ledger.refused) == (delivered, len(refused))
    assert not any(ledger.at(name) for name in fleet.places)
    assert not fleet.queued


async def some_tokens(fleet: Fleet, tokens: int = 1) -> None:
    assert await fleet.until(lambda: fleet.ledger.tokens >= tokens, T)


def test_requests_are_spread_over_all_instances_and_finish() -> None:
    async def main() -> None:
        bench = FakeBench()
        async with up(bench) as fleet:
            fleet.add(requests(40))
            await some_tokens(fleet)
            assert all(fleet.ledger.at(name) for name in fleet.places)
            await finished(fleet)
            assert fleet.ledger.finished == 40
            assert [row["layout"] for row in rows(fleet, "engine")] == ["TP1"] * 4
            assert sum(row["generated_tokens"] for row in rows(fleet, "progress")) > 0
        assert not any(node.engines for node in bench.nodes.values())

    run_virtually(main())


def test_a_queue_stays_here_when_seats_are_taken() -> None:
    async def main() -> None:
        async with up(FakeBench(1), "1xTP1") as fleet:
            fleet.add(requests(100))
            await some_tokens(fleet)
            assert 16 <= len(fleet.ledger.at("n0:0")) <= 16 + 2 * 4
            assert fleet.queued >= 70
            await finished(fleet)

    run_virtually(main())


def test_nothing_is_sent_while_somebody_decides_where_it_goes() -> None:
    async def main() -> None:
        bench = FakeBench()
        async with up(bench) as fleet:
            with fleet.waiting():
                fleet.add(requests(4))
                await bench.clock.sleep_ns(NS_PER_S)
                assert fleet.queued == 4
            await finished(fleet)

    run_virtually(main())


def test_a_reader_is_told_once_where_step_times_are_extrapolated() -> None:
    async def main() -> None:
        bench = FakeBench(1)
        async with up(bench, "1xTP1") as fleet:
            engine = bench.nodes["n0"].engines["n0:0"]
            engine.costs = FittedCosts(
                fixed_us=4000, sequence_us=100, kv_token_ns=100, prefill_token_us=2,
                batch_max=4, kv_max_tokens=10**6, prefill_max_tokens=8192,
            )  # fmt: skip
            fleet.add(requests(20))
            await finished(fleet)
            told = [row["text"] for row in rows(fleet, "note")]
            assert told == ["step times go beyond what the profile knows: batch above 4"]

    run_virtually(main())


def test_turns_of_a_trajectory_carry_the_whole_context_and_go_where_it_was() -> None:
    turns = (Turn(40, 30), Turn(7, 20), Turn(5, 10))
    many = [
        ReplayRequest(id=f"0-{i}-0", step=0, prompt=i, sample=0, turns=turns) for i in range(12)
    ]

    async def main() -> None:
        bench = FakeBench(vocab=VOCAB)
        async with up(bench, spec=IDS) as fleet:
            fleet.add(many)
            await finished(fleet)
            entry = fleet.ledger.entries["0-3-0"]
            assert (entry.context_tokens, len(entry.prompt)) == (40 + 30 + 7 + 20 + 5, 102)
            assert tuple(entry.prompt[:40]) == Prompts(VOCAB, 7).added(many[3], 0)
        sent = [body for _, body in bench.asked if isinstance(body, Submit)]
        homes: dict[str, set[str]] = {}
        for body in sent:
            for work in body.works:
                homes.setdefault(work.carried.id, set()).add(body.instance)
        assert all(len(of) == 1 for of in homes.values())

    run_virtually(main())


@pytest.mark.parametrize("verb", ["abort", "export"])
def test_what_is_withdrawn_continues_elsewhere_with_the_tokens_it_had(verb: Any) -> None:
    async def main() -> None:
        async with up(FakeBench(vocab=VOCAB), spec=IDS) as fleet:
            fleet.add(requests(30, response=400))
            await some_tokens(fleet, 1000)
            left = await fleet.withdraw(["n0:0", "n1:0"], verb=verb, timeout_ns=T)
            entries = fleet.ledger.entries
            assert left.ids
            for id_ in left.ids:
                assert entries[id_].state == "held"
                assert entries[id_].produced_tokens == left.carried[id_].produced_tokens
            assert {span.stage for spans in left.spans.values() for span in spans} == {"withdraw"}
            fleet.requeue(left.ids)
            await finished(fleet)
            assert not {entries[id_].home for id_ in left.ids} & {"n0:0", "n1:0"}

    run_virtually(main())


def test_abort_races_with_the_finish() -> None:
    async def main() -> None:
        async with up(FakeBench(1), "2xTP1") as fleet:
            fleet.add(requests(2, response=50))
            await some_tokens(fleet)
            clock = fleet.session.bench.clock
            while fleet.ledger.open:
                ids = fleet.ledger.at("n0:0")
                if ids:
                    left = await fleet.withdraw(["n0:0"], ids=ids, timeout_ns=T)
                    fleet.requeue(left.ids)
                await clock.sleep_ns(NS_PER_MS)
            await finished(fleet)

    run_virtually(main())


def test_what_an_engine_ends_unasked_goes_on_while_another_is_being_withdrawn() -> None:
    async def main() -> None:
        bench = FakeBench()
        async with up(bench) as fleet:
            fleet.add(requests(8, response=400))
            await some_tokens(fleet, 200)
            one, other = fleet.ledger.at("n0:0")
            bench.lose_answer("n0", Withdraw)
            slow = asyncio.create_task(fleet.withdraw(["n0:0"], ids=[other], timeout_ns=T))
            await bench.clock.sleep_ns(0)
            unasked = Withdraw(instances=("n0:0",), ids=(one,))
            async with bench.engine("n0:0").free:
                bench.engine("n0:0").withdraw(one, unasked, {})
            fleet.requeue((await slow).ids)
            await finished(fleet)

    run_virtually(main())


def test_one_request_is_withdrawn_whatever_else_is_on_its_way() -> None:
    async def main() -> None:
        bench = FakeBench()
        async with up(bench) as fleet:
            fleet.add(requests(4, response=400))
            await some_tokens(fleet, 40)
            (id_,) = fleet.ledger.at("n0:0")
            bench.lose_answer("n0", Submit)
            bench.lose_answer("n0", Submit)
            fleet.add(requests(16, response=400)[4:])
            await fleet.until(lambda: bool(fleet.places["n0:0"].arriving), T)
            left = await fleet.withdraw(["n0:0"], ids=[id_], timeout_ns=NS_PER_S // 2)
            assert left.ids == (id_,)
            fleet.requeue(left.ids)
            await finished(fleet)

    run_virtually(main())


def test_kv_sent_ahead_is_continued_from() -> None:
    async def main() -> None:
        async with up(FakeBench()) as fleet:
            fleet.add(requests(8, response=2000))
            await some_tokens(fleet, 200)
            target = fleet.places["n1:1"]
            (id_, *_) = fleet.ledger.at("n0:0")
            to = KvTarget(transfer="t1", instance=target.instance, peers=target.kv_peers)
            left = await fleet.withdraw(["n0:0"], ids=[id_], verb="export", to=to, timeout_ns=T)
            assert left.ids == (id_,)
            assert left.sent_bytes[id_] > 0
            kv_tokens = left.carried[id_].kv_tokens
            work = fleet.ledger.work_of(id_, kv_tokens=kv_tokens, kv_transfer="t1")
            answer = await fleet.submit_to("n1:1", [work], T)
            assert answer.with_kv == (id_,)
            entry = fleet.ledger.entries[id_]
            assert await fleet.until(lambda: entry.resumed_ns > 0, T)
            assert entry.cached_tokens == kv_tokens
            await finished(fleet)

    run_virtually(main())


def test_kv_that_is_full_only_takes_longer() -> None:
    small = EngineSpec(
        engine="paced", sequences_max=16, step_max_tokens=512, kv_max_tokens=16 * 100
    )

    async def main() -> None:
        async with up(FakeBench(1), "2xTP1", small) as fleet:
            fleet.add(requests(40, prompt=200, response=600))
            await finished(fleet)
            told = sum(row["preemptions"] for row in rows(fleet, "progress"))
            assert fleet.preemptions == told > 0
            await fleet.tear_down(["n0:0", "n0:1"], "rebuild", T)
            assert fleet.preemptions == told, "also of those that are gone"

    run_virtually(main())


def test_a_request_longer_than_any_instance_is_refused_with_the_reason() -> None:
    spec = EngineSpec(engine="paced", sequences_max=16, step_max_tokens=512, kv_max_tokens=1600)

    async def main() -> None:
        async with up(FakeBench(), spec=spec) as fleet:
            fleet.add([*requests(3), *requests(5, prompt=1000, response=602)[4:], *requests(9)[6:]])
            await finished(fleet)
            assert (fleet.ledger.refused, fleet.ledger.finished) == (1, 6)
            assert fleet.ledger.entries["0-4-0"].reason == (
                "1602 tokens with its response; n0:0, which holds the longest requests, takes 1601"
            )
            assert "0-4-0 can run nowhere: 1602 tokens" in rows(fleet, "note")[-1]["text"]

    run_virtually(main())


def test_what_one_instance_refuses_goes_to_another_and_what_all_refuse_ends() -> None:
    async def main() -> None:
        bench = FakeBench()
        bench.refusing = {"n0:0": "not mine"}
        async with up(bench) as fleet:
            fleet.add(requests(20))
            await finished(fleet)
            assert fleet.ledger.finished == 20
            bench.refusing = dict.fromkeys(fleet.places, "no adapter")
            fleet.add(requests(21)[20:])
            await finished(fleet)
            assert "n1:1: no adapter" in fleet.ledger.entries["0-20-0"].reason

    run_virtually(main())


# -- faults ---------------------------------------------------------------------------------


def test_a_dead_instance_is_started_anew_and_its_requests_continue() -> None:
    async def main() -> None:
        bench = FakeBench(vocab=VOCAB)
        async with up(bench, spec=IDS) as fleet:
            fleet.add(requests(40, response=800))
            await some_tokens(fleet, 2000)
            first, there = fleet.places["n0:1"], len(fleet.ledger.at("n0:1"))
            bench.die("n0:1", "rank 0 was killed by signal 9")
            assert await fleet.until(lambda: bool(rows(fleet, "given_up")), T)
            (row,) = rows(fleet, "given_up")
            assert row["instance"] == "n0:1"
            assert row["reason"] == "rank 0 was killed by signal 9"
            assert there <= row["requests"] <= there + 4
            fleet.add(requests(80, response=800)[40:])
            await finished(fleet)
            assert fleet.places["n0:1"] is not first
            assert any(entry.home == "n0:1" for entry in fleet.ledger.entries.values())

    run_virtually(main())


def test_an_instance_that_stalls_is_given_up_after_the_stated_time() -> None:
    async def main() -> None:
        bench = FakeBench(1)
        async with up(bench, "2xTP1") as fleet:
            clock = fleet.session.bench.clock
            fleet.add(requests(10, response=5000))
            await some_tokens(fleet)
            bench.stall("n0:0")
            began_ns = clock.now_ns()
            assert await fleet.until(lambda: bool(rows(fleet, "given_up")), T)
            assert 5 * NS_PER_S <= clock.now_ns() - began_ns <= 6 * NS_PER_S
            assert "no token for 5 s" in rows(fleet, "given_up")[0]["reason"]
            await finished(fleet)
            assert not fleet.places["n0:0"].dead

    run_virtually(main())


def test_an_instance_that_dies_again_and_again_stays_out() -> None:
    async def main() -> None:
        bench = FakeBench(1)
        async with up(bench, "2xTP1") as fleet:
            fleet.add(requests(40, response=3000))
            for times in (1, 2, 3):
                at = fleet.places["n0:0"]
                assert await fleet.until(lambda at=at: at.stats and at.stats.running, T)
                bench.die("n0:0")
                assert await fleet.until(lambda n=times: len(rows(fleet, "given_up")) == n, T)
                if times < 3:
                    assert await fleet.until(
                        lambda at=at: fleet.places.get("n0:0", at) is not at, T
                    )
            await finished(fleet)
            assert set(fleet.places) == {"n0:1"}
            assert rows(fleet, "note")[-1]["text"] == (
                "n0:0 stays out: it was started again 2 times"
            )

    run_virtually(main())


def test_a_lost_node_is_out_and_its_requests_go_to_the_others() -> None:
    async def main() -> None:
        bench = FakeBench(3)
        async with up(bench, "6xTP1") as fleet:
            fleet.add(requests(60, response=1000))
            await some_tokens(fleet, 500)
            bench.lose("n1")
            await finished(fleet)
            assert set(fleet.lost) == {"n1"}
            assert {row["instance"] for row in rows(fleet, "given_up")} == {"n1:0", "n1:1"}
            assert await fleet.tear_down(["n1:0", "n0:0"], "rebuild", T) != {}
            assert set(fleet.places) == {"n0:1", "n1:1", "n2:0", "n2:1"}

    run_virtually(main())


def test_when_no_instance_is_left_whoever_waits_is_told_why() -> None:
    async def main() -> None:
        bench = FakeBench(1)
        async with up(bench, "1xTP2") as fleet:
            fleet.add(requests(5, response=1000))
            await some_tokens(fleet)
            bench.lose("n0", "no beat for 3 s")
            await fleet.until(lambda: not fleet.ledger.open, T)

    with pytest.raises(StepFailed, match="no instance is left to generate: n0:0-1: n0: no beat"):
        run_virtually(main())


def test_an_instance_that_cannot_be_started_again_is_the_last_cause_told() -> None:
    async def main() -> None:
        bench = FakeBench(1)
        async with up(bench, "1xTP1") as fleet:
            fleet.add(requests(5, response=1000))
            await some_tokens(fleet)
            bench.fail("n0", Build, Failure(error="OutOfMemory", text="no room on GPU 0"))
            bench.die("n0:0", "rank 0 exited")
            await fleet.until(lambda: not fleet.ledger.open, T)

    with pytest.raises(StepFailed, match=r"rank 0 exited; not started again: .*no room on GPU 0"):
        run_virtually(main())


def test_whoever_changes_the_layout_is_not_disturbed_by_a_restart() -> None:
    async def main() -> None:
        bench = FakeBench(1)
        async with up(bench, "2xTP1") as fleet:
            fleet.add(requests(10, response=1000))
            await some_tokens(fleet)
            async with fleet.changing:
                bench.die("n0:1")
                assert await fleet.until(lambda: bool(fleet.places["n0:1"].dead), T)
                left = await fleet.withdraw(list(fleet.places), timeout_ns=T)
                await fleet.tear_down(["n0:0"], "rebuild", T)
                await fleet.tear_down(["n0:1"], "rebuild", T, force=True)
                await fleet.build(place(parse_layout("1xTP2"), {"n0": 2}), "rebuild", T)
                fleet.accept(["n0:0-1"])
                fleet.requeue(left.ids)
            await finished(fleet)
            assert set(fleet.places) == {"n0:0-1"}
        assert len([body for _, body in bench.asked if isinstance(body, TearDown)]) == 2

    run_virtually(main())


def test_a_build_that_fails_on_one_node_leaves_the_others_registered() -> None:
    async def main() -> None:
        bench = FakeBench()
        async with Fleet.opened(
            session_of(bench), PACED, {"n0": 2, "n1": 2}, stall_ns=T, timeout_ns=T
        ) as fleet:
            bench.fail("n0", Build, Failure(error="Broken", text="no port"))
            placed = place(parse_layout("2xTP2"), fleet.gpus_of)
            with pytest.raises(CommandFailed, match="n0: build_engines failed: Broken: no port"):
                await fleet.build(placed, "rebuild", T)
            assert set(fleet.places) == {"n1:0-1"}

    run_virtually(main())


def test_an_answer_that_is_lost_delays_but_doubles_nothing() -> None:
    async def main() -> None:
        bench = FakeBench(vocab=VOCAB)
        async with up(bench, spec=IDS) as fleet:
            for node in bench.nodes:
                for kind in (Submit, Withdraw, Submit):
                    bench.lose_answer(node, kind)
            fleet.add(requests(30, response=300))
            await some_tokens(fleet, 100)
            left = await fleet.withdraw(list(fleet.places), timeout_ns=T)
            fleet.accept(fleet.places)
            fleet.requeue(left.ids)
            await finished(fleet)

    run_virtually(main())


async def _meddle(fleet: Fleet, bench: FakeBench, draw: random.Random) -> None:
    """Do one thing that may go wrong at any time."""
    names = [name for name, at in fleet.places.items() if not at.dead]
    if not names:
        return
    name = draw.choice(names)
    what = draw.choice(["withdraw", "some", "die", "stall", "refuse", "reshape", "lose_answer"])
    if what == "die" and len(names) > 1:
        bench.die(name)
    elif what == "stall" and len(names) > 1:
        bench.stall(name)
    elif what == "refuse":
        bench.refusing = {name: "not now"}
    elif what == "lose_answer":
        bench.lose_answer(fleet.places[name].node, draw.choice([Submit, Withdraw]))
    elif what in ("withdraw", "some"):
        ids = fleet.ledger.at(name)[::2] if what == "some" else ()
        if ids or what == "withdraw":
            await _withdraw(fleet, name, ids)
    elif what == "reshape" and len(names) > 1:
        async with fleet.changing:
            at = fleet.places.get(name)
            if at and not at.dead:
                await fleet.tear_down([name], "rebuild", T, force=True)
                await fleet.build({at.node: (at.instance,)}, "rebuild", T)
                fleet.accept([name])


async def _withdraw(fleet: Fleet, name: str, ids: tuple[str, ...]) -> None:
    with suppress(AgentLost, StepFailed):  # it hangs, or has just died
        await fleet.withdraw([name], ids=ids, timeout_ns=2 * NS_PER_S)
    fleet.requeue(fleet.ledger.held)
    if name in fleet.places:
        fleet.accept([name])


@pytest.mark.parametrize("seed", range(25))
def test_everything_finishes_exactly_once_whatever_happens(seed: int) -> None:
    async def main() -> None:
        draw = random.Random(seed)
        bench = FakeBench(vocab=VOCAB if seed % 2 else 0)
        spec = IDS if seed % 2 else PACED
        async with up(bench, spec=spec) as fleet:
            choices = [(Turn(50, 400),), (Turn(30, 100), Turn(10, 200))]
            fleet.add(
                ReplayRequest(id=f"0-{i}-0", step=0, prompt=i, sample=0, turns=draw.choice(choices))
                for i in range(60)
            )
            for turn in range(12):
                if turn == seed:  # in some of the histories, a node is lost
                    bench.lose("n1")
                await fleet.session.bench.clock.sleep_ns(draw.randrange(400) * NS_PER_MS)
                if fleet.ledger.open:
                    await _meddle(fleet, bench, draw)
            bench.refusing = {}
            # one that was built anew while it was to get no requests stays as it was
            await fleet.until(lambda: not fleet._keeper.starting, LONG)
            fleet.accept(name for name, at in fleet.places.items() if not at.dead)
            await finished(fleet)
            assert fleet.ledger.finished + fleet.ledger.refused == 60

    run_virtually(main())
