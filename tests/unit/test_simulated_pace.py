"""Jumping to what is due gives what pacing gives, step by step; and a whole step is generated."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from generation_bench import FakeBench, requests, session_of
from generation_world import SPEC, Told, run, world_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pace import COSTS
from test_pace import Bench as Paced

from harness.bench.simulated.generation import Generation
from harness.bench.simulated.pace import Pace
from harness.clock import NS_PER_S
from harness.model import intake
from harness.model.advance import FOREVER_NS
from harness.model.batching import Batching, Limits
from harness.model.layout import parse_layout
from harness.model.placement import Instance
from harness.model.replay import replay_of
from harness.model.requests import Carried
from harness.model.scenario import Generate
from harness.rlsim.engine import Engine
from harness.run.generation.asked import GenerationAsked
from harness.run.generation.generate import generate
from harness.run.session import Session
from harness.virtual import run_virtually
from harness.wire.generation import Admission, Output, Submit, Submitted, Withdraw, Withdrawn, Work
from harness.wire.messages import Done, Message

Order = tuple[int, str, Any]
"""When, what, and which request."""


@dataclass
class Jumping:
    """A simulated pace beside the real one, given the same orders; watched every `look_ns`."""

    limits: Limits
    look_ns: int
    told: list[Output] = field(default_factory=list)
    now_ns: int = 7 * NS_PER_S

    def __post_init__(self) -> None:
        engine = Engine(Instance(name="i0", gpus=(0,)), Batching(self.limits), COSTS, self.now_ns)
        self.pace = Pace(engine, lambda output, _urgent: self.told.append(output))
        self.state = engine.state

    def until(self, then_ns: int) -> None:
        while self.look_ns and self.now_ns + self.look_ns < then_ns:
            self.now_ns += self.look_ns
            self.pace.report(self.now_ns)
        self.now_ns = max(self.now_ns, then_ns)

    def order(self, what: str, request: Any) -> None:
        acts_ns = self.pace.begin_order(self.now_ns)
        self.until(acts_ns)
        self.pace.stand()
        if what == "submit":
            intake.submit(self.state, request)
            self.pace.opened(request)
        elif what == "withdraw" and (left := intake.export(self.state, request)):
            self.pace.ended(left, "exported")
        elif what == "drop":
            self.pace.report(acts_ns)
            intake.drop_kv(self.state)
        self.pace.end_order(acts_ns)

    def rest(self) -> None:
        while (due_ns := self.pace.elapse(self.now_ns)) < FOREVER_NS:
            self.until(due_ns)


def orders_of(seed: int, limits: Limits) -> list[Order]:
    rng, now_ns = random.Random(seed), 7 * NS_PER_S
    made: list[Order] = []
    for number in range(rng.randint(1, 12)):
        now_ns += rng.randint(0, 10 ** rng.randint(3, 10))
        most = limits.blocks * limits.block_tokens
        prompt = rng.randint(1, max(1, most // 2))
        request = Carried(f"r{number}", prompt, rng.randint(1, max(1, most - prompt)), 0)
        made.append((now_ns, "submit", request))
        if rng.random() < 0.4:
            now_ns += rng.randint(0, 10 ** rng.randint(3, 9))
            made.append((now_ns, "withdraw", f"r{rng.randint(0, number)}"))
        if rng.random() < 0.1:
            now_ns += rng.randint(0, 10 ** rng.randint(3, 9))
            made.append((now_ns, "drop", None))
    return made


def paced(limits: Limits, orders: Iterable[Order]) -> Paced:
    """The real pace, in the time of its test."""
    bench = Paced(limits)
    for at_ns, what, request in orders:
        bench.run_for(max(0, at_ns - bench.now_ns))
        if what == "submit":
            bench.submit(request)
        elif what == "withdraw":
            bench.withdraw(request)
        else:
            bench.pace.report()
            intake.drop_kv(bench.state)
    while bench.state.requests:
        bench.run_for(10 * NS_PER_S)
    return bench


def ends(outputs: Iterable[Output]) -> dict[str, tuple[Any, ...]]:
    """Of each request, its tokens, when the first and the last of them came, how it ended."""
    found: dict[str, tuple[Any, ...]] = {}
    for output in outputs:
        first_ns, tokens = found.get(output.id, (output.first_ns, 0))[:2]
        assert output.start == tokens, "nothing is told twice, or left out"
        found[output.id] = first_ns, tokens + output.count, output.last_ns, output.ended
    return found


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    blocks=st.integers(4, 60),
    look_us=st.sampled_from([0, 700, 33_000, 1_000_000]),
)
def test_it_is_the_real_pace_however_often_it_is_watched(
    seed: int, blocks: int, look_us: int
) -> None:
    limits = Limits(6, 24, blocks, 4)
    orders = orders_of(seed, limits)
    real, jumping = paced(limits, orders), Jumping(limits, look_us * 1000)
    for at_ns, what, request in orders:
        jumping.until(at_ns)
        jumping.order(what, request)
    jumping.rest()
    assert not jumping.state.requests
    assert ends(jumping.told) == ends(real.told)
    stood = jumping.pace.stats(jumping.now_ns), real.pace.stats()
    one, other = (msgspec.structs.replace(stats, t_ns=0) for stats in stood)
    assert one == other


# -- whole nodes -----------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_token_is_lost_by_moves_switches_and_closed_doors(seed: int) -> None:
    rng = random.Random(seed)
    lengths = {f"r{i}": rng.randint(1, 900) for i in range(24)}
    spec = msgspec.structs.replace(SPEC, kv_max_tokens=2048, sequences_max=6)

    async def test(n: Told) -> None:
        await n.open(spec)
        layouts = [n.layout("2xTP1"), n.layout("1xTP2")]
        up = layouts[0]
        await n.build(up)
        works = [Work(carried=Carried(name, 50, length, 0)) for name, length in lengths.items()]
        while True:
            for work in works:
                body = Submit(instance=rng.choice(up).name, works=(work,))
                assert (await n.ask(body, Submitted)).refused == {}
            await n.clock.sleep_ns(rng.randint(1, 3 * NS_PER_S))
            await n.watch(rng.choice([0, NS_PER_S]))
            if sum(bool(output.ended == "finished") for output in n.outputs) == len(lengths):
                return
            name = rng.choice(up).name
            if rng.random() < 0.3:
                await n.ask(Admission(instances=(name,), open=rng.random() < 0.7), Done)
            switches = rng.random() < 0.4
            gone = tuple(one.name for one in up) if switches else (name,)
            left = await n.ask(Withdraw(instances=gone), Withdrawn)
            works = [Work(carried=request) for request in left.left]
            if switches:
                await n.tear_down(up)
                up = layouts[up is layouts[0]]
                await n.build(up)

    nodes: list[Told] = []

    async def kept(n: Told) -> None:
        nodes.append(n)
        await test(n)

    run(kept)
    for name, length in lengths.items():
        assert nodes[0].positions(name) == list(range(length))


# -- a whole step ----------------------------------------------------------------------------------


class Answering:
    """A simulated node in the place of a fake one."""

    lost = ""

    def __init__(self, world: Any, name: str) -> None:
        self.name, self.gone = name, asyncio.Event()
        self._verbs = Generation(world, name).verbs()

    async def answer(self, body: Message) -> Message:
        return await self._verbs[type(body)](body)


def generated(step: Generate, pool: Any = ()) -> Session:
    """The session after a step on two simulated nodes of two GPUs."""
    bench: Any = FakeBench()
    bench.clocks = {name: msgspec.structs.replace(fit, offset_ns=0)
                    for name, fit in bench.clocks.items()}  # fmt: skip
    session = session_of(bench)
    session.generation_asked = GenerationAsked(
        spec=msgspec.structs.replace(SPEC, sequences_max=16),
        layout=parse_layout("4xTP1"),
        replay=replay_of(requests(32, prompt=300, response=800)),
        gpus_of={"n0": 2, "n1": 2},
        pool=pool,
    )

    async def main() -> None:
        world = world_of(2)
        bench.nodes = {name: Answering(world, name) for name in bench.nodes}
        bench.topology, bench.clock = world.topology, world.clock
        async with session.closing:
            await generate(session, step, 0)

    run_virtually(main())
    return session


def rows(session: Any, stream: str) -> Any:
    return session.record.of(stream)


@pytest.mark.parametrize("strategy", ["restart", "rebuild", "pool"])
@pytest.mark.parametrize("left", ["abort", "drain", "migrate"])
def test_a_step_is_generated_while_layouts_are_switched(strategy: Any, left: Any) -> None:
    pool = (parse_layout("4xTP1"), parse_layout("2xTP2")) if strategy == "pool" else ()
    step = Generate(
        layouts=("2xTP2", "4xTP1"), strategy=strategy, requests=left, order="rolling",
        rest_s=1.0, stage_timeout_s=60.0, in_flight_max=24,
    )  # fmt: skip
    session = generated(step, pool=pool)
    (row,) = rows(session, "generated")
    assert (row["lost"], row["doubled"], row["refused"]) == (0, 0, 0)
    assert row["tokens"] == row["requests"] * 800
    made = rows(session, "parallelism")
    assert [(r["layout_to"], r["outcome"], r["error"]) for r in made] == [
        ("2xTP2", "switched", ""), ("4xTP1", "switched", ""),
    ]  # fmt: skip
    for stages in (r["stages"] for r in made):
        assert stages["teardown"] >= 250
        assert (stages["groups"] is None) == (strategy == "pool")
        assert (stages["processes"] is None) == (strategy != "restart")


def test_requests_are_moved_with_their_kv_and_the_same_is_the_same_again() -> None:
    step = Generate(migrations=20, migrate_every_ms=20.0, migrate_by="kv", stage_timeout_s=60.0)
    first, again = generated(step), generated(step)
    moved = [r for r in rows(first, "migration") if r["outcome"] == "moved"]
    assert len(moved) > 15
    assert all(r["sent_bytes"] and r["cached_tokens"] and r["by"] == "kv" for r in moved)
    (row,) = rows(first, "generated")
    assert (row["lost"], row["doubled"], row["tokens"]) == (0, 0, row["requests"] * 800)
    assert first.record == again.record
