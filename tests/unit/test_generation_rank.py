"""What a rank tells and when, how answers are merged, and what a node's memory holds."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from agents.events import Events, Forgotten
from agents.generation.answers import merged
from agents.generation.base import Wait
from agents.generation.crew import GRANT_NS, next_grant
from agents.generation.memory import cpu_room, gpu_room, paced_room, place_problems
from agents.generation.orders import Stepped
from agents.generation.outbox import BATCH_NS, Outbox
from agents.generation.rank import Rank
from harness.model.layout import parse_layout
from harness.model.load import load_profile
from harness.model.placement import Instance, place
from harness.model.requests import Carried
from harness.wire.generation import (
    EngineSpec,
    Output,
    Span,
    Submitted,
    WeightsUpdated,
    Withdrawn,
    joined,
)

PROFILE = load_profile(
    Path(__file__).parents[2] / "scenarios" / "profiles" / "qwen2.5-14b-h800.toml"
)
SPEC = EngineSpec(engine="paced", profile=PROFILE)
DAY_NS = 10**15


def output(name: str, start: int, count: int = 1, **more: Any) -> Output:
    return Output(
        instance="i", id=name, start=start, count=count, first_ns=start, last_ns=start, **more
    )


def instances(text: str, gpus: int) -> tuple[Instance, ...]:
    return place(parse_layout(text), {"n": gpus})["n"]


# -- the outbox ---------------------------------------------------------------------------------


def test_first_tokens_and_ends_leave_at_once_others_in_batches() -> None:
    outbox = Outbox()
    assert outbox.due_ns() is None
    outbox.add(output("a", 0))
    assert outbox.due_ns() == 0
    outbox.take(DAY_NS)
    outbox.add(output("a", 1))
    assert outbox.due_ns() == DAY_NS + BATCH_NS
    outbox.add(output("b", 7))
    assert outbox.due_ns() == 0, "a first token here, though not of its response"
    outbox.take(DAY_NS)
    outbox.add(output("a", 2))
    outbox.add(output("a", 3, 0, ended="aborted"))
    assert outbox.due_ns() == 0
    outbox.take(DAY_NS)
    outbox.add(output("a", 3))
    assert outbox.due_ns() == 0, "it was submitted again"


def test_tokens_that_follow_each_other_leave_as_one() -> None:
    outbox = Outbox()
    outbox.add(output("a", 0, ids=(5,), cached_tokens=4))
    outbox.add(output("b", 0, ids=(9,)))
    outbox.add(output("a", 1, ids=(6,)))
    outbox.add(output("a", 2, ids=(7,), ended="finished"))
    whole = msgspec.structs.replace(
        output("a", 0, 3, ids=(5, 6, 7), cached_tokens=4, ended="finished"), last_ns=2
    )
    assert outbox.take(0) == (whole, output("b", 0, ids=(9,)))
    assert outbox.take(0) == ()


@pytest.mark.parametrize(
    "then",
    [
        output("a", 1, version=1),
        output("a", 5),
        output("a", 1, cached_tokens=3),
    ],
    ids=["other weights", "a gap", "submitted again"],
)
def test_tokens_that_differ_leave_apart_and_in_order(then: Output) -> None:
    outbox = Outbox()
    outbox.add(output("a", 0))
    outbox.add(then)
    assert outbox.take(0) == (output("a", 0), then)


def test_an_end_without_tokens_does_not_make_the_last_token_later() -> None:
    outbox = Outbox()
    outbox.add(output("a", 5))
    outbox.add(msgspec.structs.replace(output("a", 6, 0, ended="aborted"), last_ns=DAY_NS))
    (left,) = outbox.take(0)
    assert (left.count, left.last_ns, left.ended) == (1, 5, "aborted")


def test_nothing_follows_an_end() -> None:
    outbox = Outbox()
    outbox.add(output("a", 0, ended="aborted"))
    outbox.add(output("a", 1))
    assert [out.start for out in outbox.take(0)] == [0, 1]
    outbox.add(output("a", 2))
    outbox.clear()
    assert outbox.due_ns() is None


# -- answers ------------------------------------------------------------------------------------


def test_a_stage_lasts_from_the_first_rank_to_the_last() -> None:
    spans = [
        Span(stage="weights", begin_ns=5, end_ns=9),
        Span(stage="groups", begin_ns=1, end_ns=5),
        Span(stage="groups", begin_ns=2, end_ns=6),
        Span(stage="weights", begin_ns=6, end_ns=8),
    ]
    assert joined(spans) == (
        Span(stage="groups", begin_ns=1, end_ns=6),
        Span(stage="weights", begin_ns=5, end_ns=9),
    )


def test_the_leader_answers_with_the_bytes_of_all() -> None:
    left = (Carried(id="a", prompt_tokens=1, response_tokens=2, arrived_ns=0),)
    leader = Withdrawn(upto=0, left=left, sent_bytes={"a": 1, "b": 2}, spans=())
    other = Withdrawn(upto=0, left=(), sent_bytes={"a": 4}, spans=())
    assert merged([leader, other]) == msgspec.structs.replace(leader, sent_bytes={"a": 5, "b": 2})
    updated = [WeightsUpdated(spans=(), moved_bytes=number) for number in (1, 2)]
    assert merged(updated).moved_bytes == 3
    refused = [Submitted(refused={"a": "full"}), Submitted(refused={})]
    assert merged(refused) == refused[0]
    stepped = [Stepped(steps=2, elapsed_ns=number, more=True) for number in (5, 6)]
    assert merged(stepped) == stepped[0]


# -- a rank's main thread ------------------------------------------------------------------------


def test_orders_that_wait_are_done_before_the_engine_steps_again(monkeypatch) -> None:
    class Over(BaseException):
        pass

    def run(_wait: Wait) -> None:
        done.append("steps")
        raise Over

    done: list[Any] = []
    engine = SimpleNamespace(lockstep=False, run=run)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        rank = Rank(ours, {})
        monkeypatch.setattr(rank, "_verbs", SimpleNamespace(leads=True, engine=engine))
        monkeypatch.setattr(rank, "_do", done.append)
        monkeypatch.setattr(rank, "_orders", deque(["first", "second"]))
        with pytest.raises(Over):
            rank.work()
    assert done == ["first", "second", "steps"]


# -- grants of steps ------------------------------------------------------------------------------


def test_a_grant_lasts_about_as_long_as_an_order_may_wait() -> None:
    def after(steps: int, step_ns: int, *, more: bool = True) -> int:
        return next_grant(Stepped(steps=steps, elapsed_ns=steps * step_ns, more=more))

    assert [after(steps, GRANT_NS // 1000) for steps in (1, 2, 32, 64)] == [2, 4, 64, 64]
    assert after(8, GRANT_NS // 4) == 4
    assert after(8, GRANT_NS * 5) == 1
    assert after(64, 1, more=False) == 1, "idle steps say nothing of those to come"


# -- events -------------------------------------------------------------------------------------


def test_events_are_numbered_kept_and_forgotten() -> None:
    async def test() -> None:
        events = Events()
        events.add([output("a", number) for number in range(3)])
        assert await events.after(0, 0) == (3, tuple(output("a", number) for number in range(3)))
        assert await events.after(2, 0) == (3, (output("a", 2),))
        assert await events.after(3, 0) == (3, ())
        events.add([output("a", 3)])
        assert await events.after(3, 0) == (4, (output("a", 3),))
        for number in (2, 5):
            with pytest.raises(Forgotten, match=f"events after {number} are asked for"):
                await events.after(number, 0)

    asyncio.run(test())


def test_who_watches_is_woken_by_events_by_news_and_by_the_next() -> None:
    async def test() -> None:
        events = Events()
        for stir in (events.stir, lambda: events.add([output("a", 0)])):
            watch = asyncio.create_task(events.after(0, DAY_NS))
            assert await asyncio.wait({watch}, timeout=0) == (set(), {watch})
            stir()
            assert (await watch)[0] == events.last
        events.stir()
        assert await events.after(1, DAY_NS) == (1, ()), "news that came between two watches"
        older = asyncio.create_task(events.after(1, DAY_NS))
        await asyncio.wait({older}, timeout=0)
        newer = asyncio.create_task(events.after(1, DAY_NS))
        assert await older == (1, ())
        assert not newer.done()
        newer.cancel()

    asyncio.run(test())


# -- memory -------------------------------------------------------------------------------------


def test_the_ledger_adds_up_and_what_sleeps_stays_taken() -> None:
    room = paced_room(PROFILE, SPEC, 4, {1: 10_000_000})
    rows = room.ledger(instances("2xTP2", 4))
    assert [row.gpu for row in rows] == [0, 1, 2, 3]
    for row in rows:
        parts = row.weights_bytes + row.workspace_bytes + row.asleep_bytes + row.kv_bytes
        assert parts == row.total_bytes
    assert rows[1].asleep_bytes == 10_000_000_000, "in bytes of the model, of which a share is held"
    assert room.problems(instances("2xTP2", 4)) == []
    full = paced_room(PROFILE, SPEC, 4, {1: 60_000_000})
    (reason,) = full.problems(instances("2xTP2", 4))
    assert reason.startswith("GPU 1: engines asleep keep 60.0 GB, which leaves no room for KV")


def test_a_limit_on_kv_limits_its_row() -> None:
    spec = msgspec.structs.replace(SPEC, kv_max_tokens=1000)
    (row, _) = paced_room(PROFILE, spec, 2, {}).ledger(instances("1xTP2", 2))
    assert row.kv_bytes == 1000 * PROFILE.shape.kv_bytes_per_token // 2


def test_instances_must_have_gpus_of_their_own() -> None:
    wrong = (
        Instance(name="a", gpus=(0, 1), tp=2),
        Instance(name="b", gpus=(1,)),
        Instance(name="c", gpus=(4,)),
        Instance(name="d", gpus=(2, 3)),
    )
    assert place_problems(wrong, 4) == [
        "GPU 1 is wanted by a and by b",
        "c: there is no GPU 4, of 4 on this node",
        "d: 1xTP1 takes 1 GPUs, not the 2 that it names",
    ]


def test_without_gpus_vllm_splits_by_tp_alone() -> None:
    spec = EngineSpec(engine="vllm", options={"gpu_memory_utilization": 0.5})
    odd = (Instance(name="a", gpus=(0, 1), pp=2),)
    (reason,) = cpu_room(PROFILE.shape, spec, 2, 10**12).problems(odd)
    assert reason.startswith("1xTP1PP2: without GPUs vLLM splits a model by TP only")
    room = gpu_room(PROFILE.shape, spec, 2, {}, 100_000_000_000)
    assert room.problems(odd) == []
    assert {row.workspace_bytes for row in room.ledger(odd)} == {50_000_000_000}
    assert {row.basis for row in room.ledger(odd)} == {"measured"}
