"""One run of the loop, drawn from a seed: sizes, policy, staleness, and what goes wrong meanwhile.

`python -m tests.benchmarks loop --seed N` replays one and prints what happened.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from generation_bench import Events
from rl_bench import RlBench, replay, rl_session

from harness.errors import InfrastructureError, StepFailed
from harness.model.replay import ReplayRequest
from harness.model.scenario import Rl
from harness.run.rl.loop import rl
from harness.seeds import seeded
from harness.tasks import beside
from harness.wire.generation import UpdateWeights, Withdraw
from harness.wire.messages import Failure
from harness.wire.training import TrainStep
from harness.wire.weights import SendWeights

POLICIES = (
    "orchestrl", "proactive", "reactive", "oracle", "static:4xTP1", "static:2xTP2/least_loaded",
    "static:2xTP1+1xTP2",
)  # fmt: skip
FAULTS = ("die", "stall", "sync", "load", "migration", "slow", "rank", "nothing")


def drawn(chance: random.Random) -> tuple[Rl, Any, int]:
    """A step, its requests, and how many nodes generate."""
    steps, prompts, samples = chance.randint(1, 5), chance.randint(1, 6), chance.randint(1, 4)
    longest = chance.choice((20, 200, 2000))
    lengths = [[chance.randint(1, longest) for _ in range(prompts * samples)] for _ in range(steps)]
    over_age = chance.choice(("wait", "drop"))
    step = Rl(
        steps=steps,
        policies=tuple(chance.sample(POLICIES, chance.randint(1, 2))),
        staleness_max=chance.randint(0, 3),
        order="first_ready" if over_age == "drop" else chance.choice(("in_order", "first_ready")),
        over_age=over_age,  # type: ignore[arg-type]
        across_sync=chance.choice(("continue", "recompute", "finish")),
        sync=chance.choice(("chain", "tree")),
        replan_s=chance.choice((0.3, 2.0)),
        switch_s=chance.choice((0.1, 2.0)),
        balance_ms=chance.choice((50.0, 250.0)),
        stall_s=3.0,
    )
    return step, replay(steps, prompts, samples, lambda k, i: lengths[k][i]), chance.randint(1, 2)


async def trouble(bench: RlBench, chance: random.Random, happened: list[str]) -> None:
    """Let something go wrong, now and then."""
    for _ in range(chance.randint(0, 5)):
        await bench.clock.sleep_ns(chance.randint(0, 4_000_000_000))
        fault = chance.choice(FAULTS)
        node = bench.nodes[f"n{chance.randrange(len(bench.nodes) - 1)}"]
        alive = [name for name in node.engines if name not in node.dead]
        happened.append(f"{bench.clock.now_ns() / 1e9:.2f} s: {fault} at {node.name}")
        if fault in {"die", "stall"} and alive and len(happened) < 3:
            (bench.die if fault == "die" else bench.stall)(chance.choice(alive))
        elif fault == "sync":
            failure = Failure(error="ChildLost", text="n0:1 took 1 of 3 buckets")
            bench.fail("t0", SendWeights, failure)
        elif fault == "load":
            failure = Failure(error="Torn", text="checksum of layer.0 is wrong")
            bench.fail(node.name, UpdateWeights, failure)
        elif fault == "migration":
            bench.fail(node.name, Withdraw, Failure(error="Busy", text="not now"))
        elif fault == "slow":
            bench.trainer.train_ns *= 5
        elif fault == "rank":
            failure = Failure(error="RankDied", text="rank 0 was killed by signal 9", ranks=(0,))
            bench.fail("t0", TrainStep, failure)


async def run(seed: int, folder: Path) -> tuple[Events, RlBench, str, list[str]]:
    """Run a seed; returns what was recorded, the bench, how it ended, and what went wrong."""
    chance = seeded(seed, "a run of the loop")
    step, requests, nodes = drawn(chance)
    bench, happened = RlBench(nodes, 4 // nodes), list[str]()
    session = rl_session(bench, folder, step, requests, layout="4xTP1")
    ended = ""
    try:
        async with beside(trouble(bench, chance, happened)), session.closing:
            await rl(session, step, 0)
    except (StepFailed, InfrastructureError) as error:
        ended = str(error)
    record: Any = session.record
    check(step, requests.requests, bench, record, ended)
    return record, bench, ended, happened


def check(
    step: Rl, requests: tuple[ReplayRequest, ...], bench: RlBench, events: Events, ended: str
) -> None:
    """Nothing lost, nothing used twice, nothing over the bound; and it ended well, or said why."""
    asked = {(r.step, r.prompt, r.sample): r.response_tokens for r in requests}
    for policy in step.policies:
        rows = [row for row in events.of("rl_step") if row["policy"] == policy]
        assert all(len(row["staleness"]) <= step.staleness_max + 1 for row in rows)
        assert [row["index"] for row in rows] == list(range(len(rows)))
        summary = [row for row in events.of("rl") if row["policy"] == policy]
        if not ended:
            assert len(rows) == step.steps
            assert summary[0]["samples"] == len(requests)
            assert summary[0]["tokens"] == sum(asked.values())
    used = Counter(id_ for _, ids in bench.trainer.stepped for id_ in ids)
    per_loop = Counter((id_.split(".")[1], id_) for id_ in used)
    assert all(n == 1 for n in per_loop.values())
    retried = sum("RankDied" in str(row["text"]) for row in events.of("note"))
    assert all(n <= 1 + retried for n in used.values())


def text_of(seed: int, events: Events, ended: str, happened: list[str]) -> str:
    """Tell a run: what was asked, what went wrong, what came of it."""
    chance = seeded(seed, "a run of the loop")
    step, requests, nodes = drawn(chance)
    lines = [f"seed {seed}: {len(requests.requests)} requests, {nodes} nodes", str(step), *happened]
    shown = ("rl_step", "rl", "planned", "sync", "parallelism", "given_up", "note")
    lines += [
        f"{stream}: {msgspec.json.encode(row).decode()}"
        for stream, row in events
        if stream in shown
    ]
    return "\n".join([*lines, f"ended: {ended or 'well'}"])
