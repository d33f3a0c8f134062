"""A calibration of a node that answers as told: what is written, left out, and cleaned up."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from harness.errors import AgentLost, StepFailed, UsageError
from harness.model.calibration import Grid
from harness.model.layout import Layout, kv_capacity_tokens, parse_layout
from harness.model.load import load_profile
from harness.model.placement import Instance
from harness.model.profile import costs_of, gpu_of
from harness.model.profile_text import profile_text
from harness.model.shape import ModelShape
from harness.model.steptime import FittedCosts, step_ns
from harness.run.generation.calibrate import Calibrated, CalibrationAsked, calibrate
from harness.virtual import VirtualClock
from harness.wire.asks import CommandFailed
from harness.wire.generation import (
    Build,
    Built,
    Capacity,
    CloseGeneration,
    EngineSpec,
    GenerationOpen,
    MeasureSteps,
    Memory,
    OpenGeneration,
    Prepare,
    Prepared,
    StepTimes,
    TearDown,
    Torn,
)
from harness.wire.messages import Done, Failure, Hello, Message

PROFILES = Path(__file__).parents[2] / "scenarios" / "profiles"
GRID = Grid((1, 4, 16), (128, 1024), (64, 512))
SHAPE = ModelShape(2, 64, 4, 2, 32, 512, 128)
TP1, TP2 = Layout(tp=1), Layout(tp=2)


def costs(tp: int) -> FittedCosts:
    return FittedCosts(
        fixed_us=4000 / tp, sequence_us=100 / tp, kv_token_ns=100 / tp, prefill_token_us=2 / tp,
        batch_max=256, kv_max_tokens=10**6, prefill_max_tokens=8192,
    )  # fmt: skip


class Node:
    """One agent. `failing` says, by kind of message, how it fails."""

    def __init__(self, *, blocks: int = 10_000, shape: ModelShape | None = SHAPE) -> None:
        self.blocks, self.shape = blocks, shape
        self.up: dict[str, Instance] = {}
        self.asked: list[Message] = []
        self.failing: dict[type, Failure | BaseException] = {}
        self.impossible: Mapping[int, str] = {}

    async def answer(self, body: Any) -> Message:
        self.asked.append(body)
        problem = self.failing.get(type(body))
        if isinstance(problem, BaseException):
            raise problem
        return problem or self.done(body)

    def done(self, body: Any) -> Message:
        match body:
            case OpenGeneration():
                facts = {"engine": "vllm", "version": "0.32.0", "device": "cpu"}
                return GenerationOpen(pids={0: 1}, facts=facts, shape=self.shape)
            case Prepare(instances=(instance,)):
                if reason := self.impossible.get(instance.tp):
                    return Failure(error="Infeasible", text=reason)
                row = Memory(
                    gpu=0, total_bytes=10**9, weights_bytes=10**6, workspace_bytes=0,
                    asleep_bytes=0, kv_bytes=10**6, basis="measured",
                )  # fmt: skip
                return Prepared(memory=(row,))
            case Build(instances=(instance,)):
                assert not self.up, "one instance at a time"
                self.up[instance.name] = instance
                capacity = Capacity(
                    sequences_max=64, step_max_tokens=2048, blocks=self.blocks, block_tokens=16,
                    length_max_tokens=4096, vocab=512, weights_bytes=10**6,
                )  # fmt: skip
                return Built(spans=(), capacities={instance.name: capacity}, kv_peers={})
            case MeasureSteps():
                return StepTimes(times_ns=tuple(self.times_ns(body)))
            case TearDown(instances=names):
                for name in names:
                    del self.up[name]
                return Torn(spans=())
            case CloseGeneration():
                self.up.clear()
                return Done(t_ns=0)
        raise AssertionError(body)

    def times_ns(self, body: MeasureSteps) -> Sequence[int]:
        its, batch = costs(self.up[body.instance].tp), body.batch
        assert not batch or body.context_tokens > 1, "a prompt of one token, and one produced"
        if not batch:
            return [step_ns(its, 0, 0, body.prefill_tokens)] * body.steps
        contexts = range(body.context_tokens, body.context_tokens + body.steps)
        return [step_ns(its, batch, batch * context) for context in contexts]


class FakeBench:
    def __init__(self, node: Node) -> None:
        self.node, self.clock = node, VirtualClock()
        self.topology = SimpleNamespace(nodes={"g0": SimpleNamespace(address="10.0.0.1")})
        self.hellos = {
            "g0": Hello(version=(1, 0), host="box", pid=1, gpus=2, interfaces=(), facts={})
        }

    async def ask(self, agent: str, body: Message, reply: type, timeout_ns: int) -> Any:
        answer = await self.node.answer(body)
        if isinstance(answer, Failure):
            raise CommandFailed("it", {agent: answer})
        assert isinstance(answer, reply)
        return answer


def run(node: Node, **changes: Any) -> tuple[Calibrated, list[tuple[str, Mapping[str, Any]]]]:
    events: list[tuple[str, Mapping[str, Any]]] = []
    record = SimpleNamespace(event=lambda stream, data: events.append((stream, data)))
    asked = CalibrationAsked(
        **{
            "spec": EngineSpec(engine="vllm"), "node": "g0", "gpus": 0, "layouts": (),
            "grid": GRID, "steps": 11, "timeout_ns": 10**9, "origin": "a command, bench rack",
        } | changes
    )  # fmt: skip
    session: Any = SimpleNamespace(bench=FakeBench(node), record=record)
    return asyncio.run(calibrate(session, asked)), events


def test_the_profile_is_as_fast_as_the_node_and_can_be_read_back(tmp_path: Path) -> None:
    found, _ = run(Node())
    (tmp_path / "profile.toml").write_text(profile_text(found.profile))
    profile = load_profile(tmp_path / "profile.toml")
    assert profile == found.profile
    for layout in (TP1, TP2):
        table = costs_of(profile, layout)
        assert table.basis == "table"
        for batch, context in ((1, 128), (4, 128), (8, 500), (16, 1024)):
            expected_ns = step_ns(costs(layout.tp), batch, batch * context)
            assert step_ns(table, batch, batch * context) == pytest.approx(expected_ns, rel=0.001)


def test_its_source_says_what_was_measured_where_and_how() -> None:
    found, _ = run(Node())
    what = found.profile.sources["measured"].what
    for part in ("a command, bench rack", "vllm 0.32.0 on cpu", "g0 (box)", "medians of 11 steps"):
        assert part in what
    assert found.profile.gpu.bandwidth_gb_per_s is None
    assert found.profile.gpu.memory_gb.value == 1.0


def test_kv_has_as_much_room_in_the_profile_as_it_had_on_the_node() -> None:
    """What the engine does not use for weights and KV is no room for the paced one either."""
    found, _ = run(Node(blocks=3_000), layouts=(TP1,))
    room = kv_capacity_tokens(TP1, found.profile.shape, gpu_of(found.profile))
    assert room == pytest.approx(3_000 * 16, abs=1)


def test_every_step_of_every_point_is_recorded() -> None:
    _, events = run(Node(), layouts=(TP1,))
    rows = [data for stream, data in events if stream == "calibration"]
    assert [len(row["times_ns"]) for row in rows] == [11] * 6 + [5] * 2
    assert [stream for stream, _ in events].count("engine") == 1


def test_many_steps_at_a_short_context_stay_near_it() -> None:
    found, events = run(Node(), layouts=(TP1,), steps=200)
    assert all(len(data["times_ns"]) >= 100 for stream, data in events if stream == "calibration")
    expected_us = step_ns(costs(1), 16, 16 * 128) / 1000
    assert found.tables[0].step_us[2][0] == pytest.approx(expected_us, rel=0.001)


def test_the_shortest_context_is_measured_as_short_as_it_can_be() -> None:
    found, _ = run(Node(), grid=Grid((1, 4), (1, 64), (64,)))
    assert found.tables[0].context_tokens == (1, 64)


def test_many_steps_take_no_more_room_than_are_made_at_once() -> None:
    found, _ = run(Node(), grid=Grid((1,), (128, 4000), (64,)), steps=500)
    assert found.tables[0].context_tokens == (128, 4000)


def test_a_layout_whose_timing_is_refused_is_left_out_and_the_next_is_measured() -> None:
    class Refusing(Node):
        def done(self, body: Any) -> Message:
            if isinstance(body, MeasureSteps) and self.up[body.instance].tp == 1:
                return Failure(error="Refused", text="its KV is too small")
            return super().done(body)

    found, _ = run(Refusing())
    assert [table.tp for table in found.tables] == [2]
    assert found.left_out["1xTP1"] == ("its KV is too small",)


def test_a_layout_that_cannot_be_is_left_out_with_its_reason() -> None:
    node = Node()
    node.impossible = {2: "TP 2 does not divide the 1 KV heads"}
    found, events = run(node, layouts=(TP1, TP2, parse_layout("1xTP4")))
    assert [table.tp for table in found.tables] == [1]
    assert found.left_out["1xTP2"] == ("TP 2 does not divide the 1 KV heads",)
    assert "instances of 4 GPUs" in found.left_out["1xTP4"][0]
    notes = [data["text"] for stream, data in events if stream == "note"]
    assert "1xTP2: TP 2 does not divide the 1 KV heads" in notes


def test_where_no_layout_can_be_one_message_says_why() -> None:
    node = Node()
    node.impossible = {1: "no room", 2: "odd heads"}
    with pytest.raises(UsageError, match=r"no layout could be .* 1xTP1: no room; 1xTP2: odd heads"):
        run(node)


def test_points_beyond_the_kv_are_left_out_and_the_next_layout_is_still_built() -> None:
    found, _ = run(Node(blocks=80))
    assert [table.batch for table in found.tables] == [(1, 4), (1, 4)]
    assert found.tables[0].context_tokens == (128,)
    assert any("batch 16 at 1024 tokens: needs" in text for text in found.left_out["1xTP1"])


def test_a_node_where_not_one_point_fits_is_refused_and_nothing_is_left_up() -> None:
    node = Node(blocks=3)
    with pytest.raises(UsageError, match="no point fits"):
        run(node)
    torn = [body for body in node.asked if isinstance(body, TearDown)]
    assert len(torn) == 2


@pytest.mark.parametrize(
    ("kind", "problem", "error"),
    [
        (MeasureSteps, Failure(error="RankFailed", text="rank 0 died"), StepFailed),
        (Build, AgentLost("g0 is gone"), AgentLost),
        (OpenGeneration, Failure(error="BadFile", text="no such model"), StepFailed),
        (Prepare, asyncio.CancelledError(), asyncio.CancelledError),
    ],
)
def test_engines_are_closed_whatever_ends_it(
    kind: type, problem: Failure | BaseException, error: type[BaseException]
) -> None:
    node = Node()
    node.failing[kind] = problem
    with pytest.raises(error):
        run(node)
    assert isinstance(node.asked[-1], CloseGeneration)


def test_a_failure_of_the_closing_does_not_hide_what_went_wrong() -> None:
    node = Node()
    node.failing = {Build: AgentLost("g0 is gone"), CloseGeneration: AgentLost("still gone")}
    with pytest.raises(AgentLost, match="g0 is gone"):
        run(node)


def test_fewer_steps_than_asked_for_are_no_point() -> None:
    node = Node()
    node.times_ns = lambda body: [1000] * (body.steps - 1)  # type: ignore[method-assign]
    with pytest.raises(StepFailed, match="batch 1 at 128 tokens: 2 of 3 steps were made"):
        run(node)


def test_a_profile_to_start_from_keeps_what_is_not_measured() -> None:
    known = load_profile(PROFILES / "qwen2.5-14b-h800.toml")
    found, _ = run(Node(shape=known.shape), known=known, layouts=(TP2,))
    assert costs_of(found.profile, TP1).basis == "roofline"
    assert costs_of(found.profile, TP2).basis == "table"
    assert found.profile.gpu == known.gpu


def test_a_profile_of_another_model_is_refused() -> None:
    known = load_profile(PROFILES / "qwen2.5-14b-h800.toml")
    with pytest.raises(UsageError, match="--profile is of another model"):
        run(Node(), known=known)


def test_a_node_without_gpus_is_refused_with_what_to_say() -> None:
    class Bare(FakeBench):
        def __init__(self, node: Node) -> None:
            super().__init__(node)
            self.hellos["g0"] = msgspec.structs.replace(self.hellos["g0"], gpus=0)

    session: Any = SimpleNamespace(bench=Bare(Node()), record=None)
    asked = CalibrationAsked(
        spec=EngineSpec(engine="vllm"), node="g0", gpus=0, layouts=(), grid=GRID, steps=5,
        timeout_ns=1, origin="",
    )  # fmt: skip
    with pytest.raises(UsageError, match=r"g0 has no GPU; .* emulated_gpus"):
        asyncio.run(calibrate(session, asked))
