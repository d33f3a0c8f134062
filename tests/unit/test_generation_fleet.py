"""Every request finishes exactly once, whatever happens to the instances that it was in."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from generation_bench import FakeBench, requests, session_of
from virtual_time import run_virtually

from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import StepFailed
from harness.model.layout import parse_layout
from harness.model.placement import place
from harness.model.prompts import Prompts
from harness.model.replay import ReplayRequest, Turn
from harness.run.generation.fleet import Fleet
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
    assert ledger.tokens == sum(entry.request.response_tokens for entry in done)
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
