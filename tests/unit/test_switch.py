"""Switches of layouts on the fake bench: nothing is lost, and what fails is undone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from generation_bench import FakeBench, requests, session_of

from harness.clock import NS_PER_MS, NS_PER_S
from harness.model.layout import parse_layout
from harness.model.placement import place
from harness.model.scenario import Generate
from harness.run.generation.fleet import Fleet
from harness.run.generation.migrate import AT_ONCE, Migrations
from harness.run.generation.switch import Made, Switches
from harness.scheduling.migration import Costs, estimates_of
from harness.scheduling.waves import names
from harness.virtual import run_virtually
from harness.wire.generation import (
    Admission,
    Build,
    EngineSpec,
    Prepare,
    TearDown,
    Withdraw,
)
from harness.wire.messages import Failure

BROKEN = Failure(error="Broken", text="out of memory")
S = NS_PER_S


@asynccontextmanager
async def fleet_on(bench: FakeBench, layout: str = "4xTP1") -> AsyncIterator[Fleet]:
    gpus = dict.fromkeys(bench.nodes, 2)
    spec = EngineSpec(engine="vllm" if bench.vocab else "paced", sequences_max=16)
    opened = Fleet.opened(session_of(bench), spec, gpus, stall_ns=20 * S, timeout_ns=10 * S)
    async with opened as fleet:
        placed = place(parse_layout(layout), gpus)
        await fleet.build(placed, "rebuild", 10 * S)
        fleet.layout = parse_layout(layout)
        fleet.accept(names(placed))
        yield fleet


async def under_load(
    act: Callable[[FakeBench, Fleet], Awaitable[Made]],
    *,
    count: int = 24,
    response: int = 400,
    layout: str = "4xTP1",
    vocab: int = 50,
    bench: FakeBench | None = None,
) -> tuple[Made, Fleet]:
    """Act on a fleet that generates; in the end every token is there, once."""
    bench = bench or FakeBench(vocab=vocab)
    async with fleet_on(bench, layout) as fleet:
        fleet.add(requests(count, response=response))
        await fleet.until(lambda: fleet.ledger.tokens > count * 20, 60 * S)
        made = await act(bench, fleet)
        assert not fleet.changing.locked()
        assert await fleet.until(lambda: not fleet.ledger.open, 600 * S)
        assert fleet.ledger.finished == count
        assert fleet.ledger.tokens == count * response
        assert fleet.ledger.lost_tokens == fleet.ledger.doubled_tokens == 0
        return made, fleet


def step(**more: Any) -> Generate:
    return Generate(**({"stage_timeout_s": 5.0} | more))


def migrations_of(fleet: Fleet, **more: Any) -> Migrations:
    costs = Costs(estimates_of(None, 1.0, 1.0))
    return Migrations(fleet, step(**more), 0, costs, random.Random(1))


def switches_of(fleet: Fleet, **more: Any) -> Switches:
    return Switches(fleet, step(**more), migrations_of(fleet, **more))


def switching(target: str = "2xTP2", **more: Any) -> Callable[[FakeBench, Fleet], Awaitable[Made]]:
    async def act(_: FakeBench, fleet: Fleet) -> Made:
        migrations = migrations_of(fleet, **more)
        async with migrations.watched():
            return await Switches(fleet, step(**more), migrations).make(parse_layout(target))

    return act


def rows(fleet: Fleet, stream: str) -> Any:
    record: Any = fleet.session.record
    return record.of(stream)


def sums_up(made: Made) -> None:
    told = [ms for ms in made.accounts.stages.values() if ms is not None]
    assert sum(told) + made.accounts.residual_ms == pytest.approx(made.accounts.total_ms)
    assert made.accounts.total_ms == pytest.approx((made.end_ns - made.begin_ns) / NS_PER_MS)
    assert made.accounts.residual_ms >= 0


def up(fleet: Fleet) -> list[str]:
    return sorted(name for name, at in fleet.places.items() if at.accepting and not at.dead)


TP1 = ["n0:0", "n0:1", "n1:0", "n1:1"]
TP2 = ["n0:0-1", "n1:0-1"]


@pytest.mark.parametrize("order", ["at_once", "rolling"])
@pytest.mark.parametrize("leave", ["abort", "drain"])
def test_a_switch_under_load_keeps_every_token_and_accounts_for_its_time(
    order: str, leave: str
) -> None:
    made, fleet = run_virtually(under_load(switching(order=order, requests=leave)))
    assert (made.outcome, made.error) == ("switched", "")
    assert (made.layout_from, made.layout_to, made.nodes) == ("4xTP1", "2xTP2", ("n0", "n1"))
    assert up(fleet) == TP2
    assert str(fleet.layout) == "2xTP2"
    stages = made.accounts.stages
    assert stages["processes"] is None
    assert (stages["drain"] is None) == (leave == "abort")
    builds = 1 if order == "at_once" else 2
    assert stages["weights"] == pytest.approx(builds * 200 / 3, abs=1)
    if leave == "abort":
        assert made.carried == 24
        assert made.recomputed_tokens >= 24 * 120
        assert (stages["first_token"] or 0) + (stages["steady"] or 0) > 0
    sums_up(made)
    assert made.accounts.residual_ms < 0.1 * made.accounts.total_ms


@pytest.mark.parametrize("leave", ["abort", "drain"])
def test_blackout_is_from_the_last_token_to_the_first_whoever_gives_it(leave: str) -> None:
    async def act(bench: FakeBench, fleet: Fleet) -> Made:
        made = await switching(requests=leave)(bench, fleet)
        await fleet.until(lambda: all(at.stats for at in fleet.places.values()), S)
        return made

    made, _ = run_virtually(under_load(act, count=80))
    blackout_ms = made.blackout_ms()
    assert blackout_ms is not None
    assert 250 <= blackout_ms <= made.accounts.total_ms + 40


def test_rolling_never_stops_generating() -> None:
    async def act(_: FakeBench, fleet: Fleet) -> Made:
        switch = asyncio.create_task(switching(order="rolling")(_, fleet))
        clock, longest, last = fleet.session.bench.clock, 0, fleet.session.bench.clock.now_ns()
        while not switch.done():
            before = fleet.ledger.tokens
            await fleet.until(lambda before=before: fleet.ledger.tokens > before, S)
            longest, last = max(longest, clock.now_ns() - last), clock.now_ns()
        assert longest < 100 * NS_PER_MS  # a rebuild takes 250
        return await switch

    assert run_virtually(under_load(act))[0].outcome == "switched"


@pytest.mark.parametrize("leave", ["abort", "drain", "migrate"])
def test_a_rolling_switch_lasts_until_all_is_built_though_nobody_waited_for_it(leave: str) -> None:
    made, fleet = run_virtually(
        under_load(switching(order="rolling", requests=leave), count=4, response=300)
    )
    assert made.outcome == "switched"
    assert up(fleet) == TP2
    assert made.accounts.stages["weights"] == pytest.approx(2 * 200 / 3, abs=1)
    assert made.accounts.total_ms > 2 * 250
    sums_up(made)


# -- requests that move meanwhile ------------------------------------------------------------------


MIGRATE = {"order": "rolling", "requests": "migrate"}


def test_requests_move_with_their_kv_to_nodes_that_go_on() -> None:
    made, fleet = run_virtually(under_load(switching(**MIGRATE), count=8))
    assert made.outcome == "switched"
    assert (made.blackout_ms() or 0) >= 250  # of engines: what went on elsewhere does not end it
    moves = rows(fleet, "migration")
    assert len(moves) == 4 + 8  # from the first node to the second, and all of them back
    assert {(row["outcome"], row["by"]) for row in moves} == {("moved", "kv")}
    assert {(row["source"][:2], row["target"]) for row in moves} == {
        ("n0", "n1:0"), ("n0", "n1:1"), ("n1", "n0:0-1")
    }  # fmt: skip
    assert all(row["total_ms"] and row["cached_tokens"] for row in moves)
    assert (made.carried, made.recomputed_tokens) == (8, 0)
    assert made.accounts.stages["migrate"]
    sums_up(made)


def test_what_is_computed_anew_though_it_moved_is_counted() -> None:
    made, fleet = run_virtually(under_load(switching(**MIGRATE, migrate_by="recompute"), count=8))
    moves = rows(fleet, "migration")
    assert {(row["outcome"], row["by"]) for row in moves} == {("moved", "recompute")}
    known = sum(row["context_tokens"] for row in moves)  # when it was begun to move them
    assert known - len(moves) <= made.recomputed_tokens <= known + 20 * len(moves)


def test_what_finds_no_seat_leaves_with_its_output() -> None:
    made, fleet = run_virtually(under_load(switching(**MIGRATE), count=40))
    assert made.outcome == "switched"
    moves = rows(fleet, "migration")
    first = [row for row in moves if row["source"].startswith("n0")]
    assert len(first) == 2 * 16 - 20  # the other node's seats
    assert {row["by"] for row in moves} == {"kv"}
    assert made.carried == 40
    assert made.recomputed_tokens >= (20 - len(first)) * 120


class Counting(FakeBench):
    """Knows how many withdrawals of single requests were under way at once."""

    now = most = 0

    async def ask(self, agent: str, body: Any, reply: type[Any], timeout_ns: int) -> Any:
        alone = isinstance(body, Withdraw) and len(body.ids) == 1
        self.now += alone
        self.most = max(self.most, self.now)
        try:
            return await super().ask(agent, body, reply, timeout_ns)
        finally:
            self.now -= alone


def test_several_move_at_once_but_only_so_many() -> None:
    bench = Counting(vocab=50)
    run_virtually(under_load(switching(**MIGRATE), count=40, bench=bench))
    assert bench.most == AT_ONCE


def test_a_move_that_fails_leaves_the_request_where_it_can_go_on() -> None:
    async def act(bench: FakeBench, fleet: Fleet) -> Made:
        bench.fail("n0", Withdraw, BROKEN)
        bench.refusing["n1:0"] = "KV is full"
        return await switching(**MIGRATE)(bench, fleet)

    made, fleet = run_virtually(under_load(act, count=8))
    assert made.outcome == "switched"
    told = [(row["outcome"], row["error"]) for row in rows(fleet, "migration")]
    assert told.count(("failed", "n0: withdraw failed: Broken: out of memory")) == 1
    assert ("elsewhere", "KV is full") in told
    assert made.carried == 8
    assert made.recomputed_tokens


def test_interrupted_while_requests_move_the_fleet_is_closed_with_nothing_left_behind() -> None:
    bench = FakeBench()

    async def main() -> None:
        async with fleet_on(bench) as fleet:
            fleet.add(requests(24, response=400))
            await fleet.until(lambda: fleet.ledger.tokens > 500, 60 * S)
            switch = asyncio.ensure_future(switching(**MIGRATE)(bench, fleet))
            while not any(at.moving for at in fleet.places.values()):
                await bench.clock.sleep_ns(NS_PER_MS // 100)
            switch.cancel()
            with pytest.raises(asyncio.CancelledError):
                await switch
            assert not any(at.moving or at.leaving for at in fleet.places.values())
            assert not fleet.ledger.held

    run_virtually(main())
    assert not any(node.engines for node in bench.nodes.values())


@pytest.mark.parametrize("name", ["n0:0", "n1:0"])
def test_an_engine_that_dies_while_requests_move_loses_nothing(name: str) -> None:
    async def act(bench: FakeBench, fleet: Fleet) -> Made:
        switch = asyncio.ensure_future(switching(**MIGRATE)(bench, fleet))
        while not any(at.moving for at in fleet.places.values()):
            await bench.clock.sleep_ns(NS_PER_MS // 100)
        bench.die(name)
        return await switch

    made, fleet = run_virtually(under_load(act, count=24))
    assert made.outcome in {"switched", "rolled_back"}
    assert {row["outcome"] for row in rows(fleet, "migration")} > {"moved"}


def test_there_and_back_again_twenty_times() -> None:
    async def act(_: FakeBench, fleet: Fleet) -> Made:
        switches = switches_of(fleet)
        for target in ["2xTP2", "4xTP1"] * 10:
            made = await switches.make(parse_layout(target))
            assert made.outcome == "switched"
            sums_up(made)
        return made

    fleet = run_virtually(under_load(act, response=3000, vocab=0))[1]
    assert up(fleet) == TP1


# -- refused: nothing has changed ---------------------------------------------------------------


def refused_by(made: Made, fleet: Fleet, reason: str) -> None:
    assert made.outcome == "refused"
    assert reason in made.error
    assert up(fleet) == TP1
    assert str(fleet.layout) == "4xTP1"
    assert made.carried == 0


@pytest.mark.parametrize(
    ("target", "reason"),
    [("4xTP1", "4xTP1 is up already"), ("1xTP4", "none across nodes"), ("3xTP2", "does not fit")],
)
def test_a_layout_that_is_up_or_cannot_be_is_refused(target: str, reason: str) -> None:
    made, fleet = run_virtually(under_load(switching(target)))
    refused_by(made, fleet, reason)


@pytest.mark.parametrize("error", ["Infeasible", "Busy"])
def test_a_node_that_cannot_or_is_busy_with_weights_refuses_before_anything_changes(
    error: str,
) -> None:
    async def act(bench: FakeBench, fleet: Fleet) -> Made:
        bench.fail("n1", Prepare, Failure(error=error, text="an update of weights is under way"))
        made = await switching()(bench, fleet)
        changed = {type(body) for _, body in bench.asked} & {TearDown, Withdraw, Admission}
        assert not changed
        return made

    made, fleet = run_virtually(under_load(act))
    refused_by(made, fleet, f"n1: prepare_layout failed: {error}")


def test_a_second_switch_is_refused_while_one_is_under_way() -> None:
    async def act(_: FakeBench, fleet: Fleet) -> Made:
        switches = switches_of(fleet)
        first = asyncio.create_task(switches.make(parse_layout("2xTP2")))
        await fleet.session.bench.clock.sleep_ns(0)
        second = await switches.make(parse_layout("1xTP2"))
        assert (second.outcome, second.error) == ("refused", "the switch to 2xTP2 is under way")
        return await first

    assert run_virtually(under_load(act))[0].outcome == "switched"


# -- undone ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        (Admission, "stop_admitting"),
        (Withdraw, "withdraw"),
        (TearDown, "teardown"),
        (Build, "build"),
    ],
)
@pytest.mark.parametrize("order", ["at_once", "rolling"])
@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_what_fails_is_undone_with_all_requests_alive(
    kind: Any, stage: str, order: str, how: str
) -> None:
    async def act(bench: FakeBench, fleet: Fleet) -> Made:
        if how == "fails":
            bench.fail("n1", kind, BROKEN)
        else:
            bench.hang("n1", kind)
        return await switching(order=order)(bench, fleet)

    made, fleet = run_virtually(under_load(act))
    assert made.outcome == "rolled_back"
    assert made.error.startswith(f"{stage}: n1: ")
    assert ("out of memory" if how == "fails" else "not done in 5 s") in made.error
    assert up(fleet) == TP1
    assert str(fleet.layout) == "4xTP1"
    sums_up(made)


def test_an_engine_that_dies_before_its_first_token_is_undone() -> None:
    async def act(bench: FakeBench, fleet: Fleet) -> Made:
        switch = asyncio.create_task(switching()(bench, fleet))
        await fleet.until(lambda: bool(fleet.ledger.at("n1:0-1")), 5 * S)
        bench.die("n1:0-1")
        return await switch

    made, fleet = run_virtually(under_load(act))
    assert made.outcome == "rolled_back"
    assert "n1:0-1: rank 0 was killed by signal 9" in made.error
    assert up(fleet) == TP1


def test_an_engine_that_gives_no_first_token_is_past_its_deadline() -> None:
    async def act(bench: FakeBench, fleet: Fleet) -> Made:
        switch = asyncio.create_task(switching()(bench, fleet))
        for name in TP2:
            while name not in bench.nodes[name[:2]].engines:
                await bench.clock.sleep_ns(NS_PER_MS // 100)
            bench.stall(name)
        return await switch

    made, fleet = run_virtually(under_load(act))
    assert made.outcome == "rolled_back"
    assert "5 s" in made.error
    assert up(fleet) == TP1


def test_an_engine_that_dies_while_it_is_left_is_built_anew() -> None:
    async def act(bench: FakeBench, fleet: Fleet) -> Made:
        bench.die("n0:1")
        return await switching()(bench, fleet)

    made, fleet = run_virtually(under_load(act))
    assert made.outcome in {"switched", "rolled_back"}
    assert up(fleet) == (TP2 if made.outcome == "switched" else TP1)


def test_a_dead_instance_is_replaced_by_a_switch() -> None:
    async def act(bench: FakeBench, fleet: Fleet) -> Made:
        async with fleet.changing:  # before it is started again
            bench.die("n0:1")
            await fleet.until(lambda: bool(fleet.places["n0:1"].dead), 5 * S)
            switch = asyncio.create_task(switching()(bench, fleet))
            await fleet.session.bench.clock.sleep_ns(0)
        return await switch

    made, fleet = run_virtually(under_load(act))
    assert made.outcome == "switched"
    assert up(fleet) == TP2


def test_a_switch_lasts_until_its_last_node_is_done_also_where_nothing_ran() -> None:
    async def act(bench: FakeBench, fleet: Fleet) -> Made:
        async with fleet.changing:
            for name in ("n1:0", "n1:1"):
                bench.die(name)
            await fleet.until(lambda: all(fleet.places[n].dead for n in ("n1:0", "n1:1")), 5 * S)
            switch = asyncio.create_task(switching(order="rolling")(bench, fleet))
            await fleet.session.bench.clock.sleep_ns(0)
        return await switch

    made, _ = run_virtually(under_load(act))
    assert made.outcome == "switched"
    sums_up(made)


def test_a_node_on_which_undoing_fails_is_out_and_its_requests_go_to_the_others() -> None:
    async def act(bench: FakeBench, fleet: Fleet) -> Made:
        bench.fail("n1", Build, BROKEN, Failure(error="Broken", text="still no memory"))
        made = await switching()(bench, fleet)
        again = await switching()(bench, fleet)
        assert again.outcome == "switched"  # by another step, which may try that node anew
        return made

    made = run_virtually(under_load(act))[0]
    assert made.outcome == "lost"
    assert "build: n1: " in made.error
    assert "n1 is out: n1: build_engines failed: Broken: still no memory" in made.error


def test_a_node_that_does_not_even_end_its_engines_is_out_too() -> None:
    async def act(bench: FakeBench, fleet: Fleet) -> Made:
        bench.fail("n1", Admission, BROKEN, BROKEN)
        bench.fail("n1", TearDown, BROKEN)
        return await switching()(bench, fleet)

    made, fleet = run_virtually(under_load(act))
    assert made.outcome == "lost"
    assert up(fleet) == ["n0:0", "n0:1"]
    notes = [row["text"] for row in rows(fleet, "note")]
    assert "n1: its engines were not ended: n1: tear_down failed: Broken: out of memory" in notes


def test_a_node_that_is_out_is_not_asked_again() -> None:
    async def act(bench: FakeBench, fleet: Fleet) -> Made:
        bench.fail("n1", Build, BROKEN, BROKEN)
        switches = switches_of(fleet)
        assert (await switches.make(parse_layout("2xTP2"))).outcome == "lost"
        assert up(fleet) == ["n0:0", "n0:1"]
        assert "n0 has 2" in (await switches.make(parse_layout("2xTP2"))).error
        return await switches.make(parse_layout("1xTP2"))

    made, fleet = run_virtually(under_load(act))
    assert made.outcome == "switched"
    assert up(fleet) == ["n0:0-1"]


def test_a_node_that_is_lost_in_the_middle_is_out() -> None:
    async def act(bench: FakeBench, fleet: Fleet) -> Made:
        switch = asyncio.create_task(switching()(bench, fleet))
        await fleet.until(lambda: not fleet.places, 5 * S)
        bench.lose("n1")
        return await switch

    made, fleet = run_virtually(under_load(act))
    assert made.outcome == "lost"
    assert up(fleet) == ["n0:0", "n0:1"]


def test_interrupted_in_the_middle_the_fleet_is_closed() -> None:
    bench = FakeBench()

    async def main() -> None:
        async with fleet_on(bench) as fleet:
            fleet.add(requests(8))
            switch = asyncio.create_task(switching()(bench, fleet))
            await fleet.until(lambda: not fleet.places, 5 * S)
            switch.cancel()
            await switch

    with pytest.raises(asyncio.CancelledError):
        run_virtually(main())
    assert not any(node.engines for node in bench.nodes.values())
