"""One run of the loop, drawn from a seed: sizes, policy, staleness, and what goes wrong meanwhile.

`python -m tests.benchmarks loop --seed N` replays one and prints what happened.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from generation_bench import Events
from rl_bench import RlBench, replay, rl_session

from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import InfrastructureError, StepFailed, UsageError
from harness.model.scenario import Rl
from harness.run.rl.checkpoint import read_checkpoint
from harness.run.rl.loop import rl
from harness.seeds import seeded
from harness.tasks import beside
from harness.wire.generation import Build, UpdateWeights, Watch, Withdraw
from harness.wire.messages import Failure, Message
from harness.wire.training import KeepTrainer, PublishWeights, TrainStep
from harness.wire.weights import ForgetWeights, SendWeights

POLICIES = (
    "orchestrl", "proactive", "reactive", "oracle", "static:4xTP1", "static:2xTP2/least_loaded",
    "static:2xTP1+1xTP2",
)  # fmt: skip
FAILING: dict[str, tuple[str, type[Message], Failure]] = {
    "sync": ("t0", SendWeights, Failure(error="ChildLost", text="n0:1 took 1 of 3 buckets")),
    "load": ("", UpdateWeights, Failure(error="Torn", text="checksum of layer.0 is wrong")),
    "migration": ("", Withdraw, Failure(error="Busy", text="not now")),
    "build": ("", Build, Failure(error="Broken", text="out of memory")),
    "forget": ("", ForgetWeights, Failure(error="PorterSilent", text="it is stuck")),
    **{
        name: ("t0", kind, Failure(error="RankDied", text="rank 0: signal 9", ranks=(0,)))
        for name, kind in (
            ("rank", TrainStep), ("rank keeps", KeepTrainer), ("rank publishes", PublishWeights),
        )
    },
}  # fmt: skip
"""Which node ("": one that generates) answers what by which failure."""
FAULTS = (*FAILING, "die", "die", "stall", "slow", "lose", "late", "late", "nothing")
KILLED_IN = (TrainStep, KeepTrainer, PublishWeights, SendWeights, UpdateWeights, ForgetWeights)
HANGS = ("are not complete", "tokens were lost", "can run nowhere")
"""What no fault here may end in."""


class Drawn(NamedTuple):
    """What a seed asks for. `vocab`: engines make token ids; `kill`: the coordinator is, there."""

    step: Rl
    requests: Any
    nodes: int
    vocab: int
    train_ns: int
    kill: tuple[type[Message], int, int] | None
    """After so many messages of a kind, so many ns later."""


def drawn(chance: random.Random) -> Drawn:
    """A step, its requests, and what they run on."""
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
        sync=chance.choice(("chain", "tree", "pairs")),
        replan_s=chance.choice((0.3, 2.0)),
        switch_s=chance.choice((0.1, 2.0)),
        balance_ms=chance.choice((50.0, 250.0)),
        stall_s=3.0,
        batches=chance.choice(("overlap", "overlap", "one_at_a_time")),
        checkpoint=chance.random() < 0.9,
    )
    kill = chance.choice(KILLED_IN), chance.randint(1, 5), chance.choice((0, 10**6, 3 * 10**8))
    return Drawn(
        step,
        replay(steps, prompts, samples, lambda k, i: lengths[k][i]),
        chance.randint(1, 2),
        chance.choice((0, 50)),
        chance.choice((2 * NS_PER_S, 50 * NS_PER_MS)),
        kill if step.checkpoint and chance.random() < 0.4 else None,
    )


async def trouble(bench: RlBench, chance: random.Random, happened: list[str]) -> None:
    """Let something go wrong, now and then."""
    for _ in range(chance.randint(0, 5)):
        await bench.clock.sleep_ns(chance.randint(0, 4_000_000_000))
        fault = chance.choice(FAULTS)
        node = bench.nodes[f"n{chance.randrange(len(bench.spec.nodes) - bench.trainers)}"]
        alive = [name for name in node.engines if name not in node.dead]
        happened.append(f"{bench.clock.now_ns() / 1e9:.2f} s: {fault} at {node.name}")
        if fault in {"die", "stall"} and alive and len(happened) < 3:
            (bench.die if fault == "die" else bench.stall)(chance.choice(alive))
        elif fault == "lose" and chance.random() < 0.3:
            bench.lose(chance.choice(tuple(bench.nodes)))
        elif fault == "slow":
            bench.trainer.train_ns *= 5
        elif fault == "late":  # what a node has to tell is heard a second after
            bench.lose_answer(node.name, Watch)
        elif fault in FAILING:
            where, kind, failure = FAILING[fault]
            bench.fail(where or node.name, kind, failure)


async def run(seed: int, folder: Path) -> tuple[Events, RlBench, str, list[str]]:
    """Run a seed; returns what was recorded, the bench, how it ended, and what went wrong."""
    chance = seeded(seed, "a run of the loop")
    asked = drawn(chance)
    happened, record = list[str](), Events()
    bench, ended = await _life(asked, chance, happened, record, folder / "first")
    trained = {} if ended == KILLED else _by_version(bench.trainer.stepped)
    if ended == KILLED:
        try:
            left = read_checkpoint(folder / "first").checkpoint
        except UsageError:
            left = None  # it had made no step
        happened.append(f"killed; goes on from {left and (left.policy, left.version)}")
        if left is not None:
            before = [s for s in bench.trainer.stepped if s[0] < left.trained_version]
            trained = _by_version(before)
            _forget_redone(record, asked.step.policies[left.policy :], left.version)
        else:
            record[:] = [row for row in record if row[0] not in {"rl_step", "rl"}]
        again = asked._replace(kill=None)
        resume = folder / "first" if left else None
        kept = bench.kept
        bench, ended = await _life(again, chance, happened, record, folder / "2", resume, kept)
        trained |= _by_version(bench.trainer.stepped)
    check(asked, trained, record, ended)
    return record, bench, ended, happened


KILLED = "killed"


async def _life(
    asked: Drawn,
    chance: random.Random,
    happened: list[str],
    record: Events,
    folder: Path,
    resume: Path | None = None,
    kept: dict[str, int] | None = None,
) -> tuple[RlBench, str]:
    """Run the loop once, to its end or until it is killed."""
    trainers = 2 if asked.step.sync == "pairs" else 1
    bench = RlBench(asked.nodes, 4 // asked.nodes, vocab=asked.vocab, trainers=trainers)
    bench.kept = kept or {}
    for index in range(trainers):
        bench.nodes[f"t{index}"].train_ns = asked.train_ns
    session = rl_session(bench, folder, asked.step, asked.requests, resume=resume)
    session.record = record
    try:
        async with beside(trouble(bench, chance, happened)), session.closing:
            async with beside(rl(session, asked.step, 0)) as running:
                if asked.kill is not None and await _comes(bench, running, asked.kill):
                    return bench, KILLED
                await running
            assert session.fleet is not None
            assert not session.fleet.ledger.entries
            assert not session.fleet.queued
    except (StepFailed, InfrastructureError) as error:
        return bench, str(error)
    return bench, ""


async def _comes(bench: RlBench, running: Any, kill: tuple[type[Message], int, int]) -> bool:
    """Wait for the moment to kill; whether it came before the end."""
    kind, count, later_ns = kill
    while not running.done():
        if sum(isinstance(body, kind) for _, body in bench.asked) >= count:
            await bench.clock.sleep_ns(later_ns)
            return not running.done()
        await bench.clock.sleep_ns(10**6)
    return False


def _by_version(stepped: Sequence[tuple[int, tuple[str, ...]]]) -> dict[int, tuple[str, ...]]:
    """What trained each version; a step that was made again must have used the same samples."""
    found: dict[int, tuple[str, ...]] = {}
    for version, ids in stepped:
        assert found.setdefault(version, ids) == ids, f"step {version} was made of others again"
    return found


def _forget_redone(record: Events, policies: Sequence[str], version: int) -> None:
    """Leave out rows of steps that are made again: those of the first policy from a version on."""
    redone = {(policies[0], k) for k in range(version, 100)}
    redone |= {(policy, k) for policy in policies[1:] for k in range(100)}
    record[:] = [
        (stream, row)
        for stream, row in record
        if stream not in {"rl_step", "rl"}
        or (stream == "rl_step" and (row["policy"], row["index"]) not in redone)
        or (stream == "rl" and row["policy"] not in policies)
    ]


def check(asked: Drawn, trained: dict[int, tuple[str, ...]], events: Events, ended: str) -> None:
    """Nothing lost, nothing used twice, nothing over the bound; and it ended well, or said why."""
    step, requests = asked.step, asked.requests.requests
    assert not any(text in ended for text in HANGS), ended
    for index, policy in enumerate(step.policies):
        rows = [row for row in events.of("rl_step") if row["policy"] == policy]
        assert all(len(row["staleness"]) <= step.staleness_max + 1 for row in rows)
        assert [row["index"] for row in rows] == list(range(len(rows)))
        assert all(row["batch_s"] >= 0 and row["step_s"] >= 0 for row in rows)
        if not ended:
            assert len(rows) == step.steps
            assert sum(row["samples"] for row in rows) == len(requests)
            assert sum(row["tokens"] for row in rows) == sum(r.response_tokens for r in requests)
            used = [ids for ids in trained.values() if ids[0].split(".")[1] == str(index)]
            names = [id_.split(".", 3)[2] + id_.partition("/")[2] for ids in used for id_ in ids]
            assert len(names) == len(set(names)) == len(requests)


def text_of(seed: int, events: Events, ended: str, happened: list[str]) -> str:
    """Tell a run: what was asked, what went wrong, what came of it."""
    chance = seeded(seed, "a run of the loop")
    asked = drawn(chance)
    lines = [f"seed {seed}: {len(asked.requests.requests)} requests, {asked.nodes} nodes"]
    lines += [str(asked.step), f"vocabulary {asked.vocab}, killed {asked.kill}", *happened]
    shown = ("rl_step", "rl", "planned", "sync", "parallelism", "given_up", "note")
    lines += [
        f"{stream}: {msgspec.json.encode(row).decode()}"
        for stream, row in events
        if stream in shown
    ]
    return "\n".join([*lines, f"ended: {ended or 'well'}"])
