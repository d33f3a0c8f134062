"""Real vLLM on this machine's CPU: ranks that change layout under requests, and lose nothing.

Its processes import vLLM once, for all of these tests; each builds what it needs.
"""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from agents.generation.orders import Seated, Start
from harness.wire.generation import (
    Admission,
    EngineSpec,
    MeasureSteps,
    StepTimes,
    UpdateWeights,
    WeightsUpdated,
)
from harness.wire.messages import Failure
from tests.emulated.vllm_ranks import Ledger, Ranks, vllm_ranks

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed: `bash .ci/setup vllm` adds its CPU build",
    ),
    pytest.mark.timeout(600),
]

BLOCK = 128
"""Tokens of a KV block, on CPU: what a prefix cache has is a multiple of it."""
SPEC = EngineSpec(
    engine="vllm", sequences_max=8, length_max_tokens=2048, kv_max_tokens=16_384, seed=7
)


@pytest.fixture(scope="module")
def resident(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two rank processes; whatever a test leaves built goes with them."""
    with vllm_ranks(2, tmp_path_factory.mktemp("logs"), SPEC) as ranks:
        yield ranks


@pytest.fixture
def ranks(resident: Ranks) -> Iterator[Ranks]:
    """The same, with nothing built before and after."""
    yield resident
    resident.leave()


def requests(count: int, response_tokens: int, prompt_tokens: int = 60) -> Ledger:
    """Requests with random prompts, each longer than the one before."""
    chance = random.Random(count)
    prompts = {
        f"r{i}": tuple(chance.randrange(3, 512) for _ in range(prompt_tokens + 30 * i))
        for i in range(count)
    }
    return Ledger(prompts, response_tokens)


def run(ranks: Ranks, ledger: Ledger) -> None:
    while ranks.step(16, ledger):
        pass


def test_requests_go_on_with_the_same_tokens_over_changes_of_layout(ranks: Ranks) -> None:
    reference, moved = requests(10, 90), requests(10, 90)
    (seated,) = ranks.build(1)
    assert isinstance(seated, Seated), seated
    assert [span.stage for span in seated.spans] == ["groups", "weights", "kv_cache"]
    assert (seated.capacity.blocks, seated.capacity.block_tokens) == (128, BLOCK)
    assert not ranks.submit(reference)
    run(ranks, reference)
    assert ranks.stats is not None
    assert ranks.stats.generated_tokens == 10 * 90
    assert all(len(set(tokens)) > 10 for tokens in reference.tokens.values())
    ranks.leave()

    for tp in (1, 2):
        built = ranks.build(tp)
        assert [one.capacity.weights_bytes > 0 for one in built] == [True] * tp
        assert not ranks.submit(moved)
        ranks.step(30, moved)
        left = ranks.withdraw(moved)
        assert {(one.id, one.produced_tokens) for one in left} == {
            (work.carried.id, work.carried.produced_tokens) for work in moved.works()
        }
        ranks.leave()
    ranks.build(1)
    ranks.submit(moved)
    run(ranks, moved)
    assert moved.tokens == reference.tokens


def test_nothing_grows_over_rebuilds_or_would_stay_after_a_kill(ranks: Ranks) -> None:
    seen = []
    for _ in range(3):
        ranks.build(2)
        ledger = requests(2, 4)
        ranks.submit(ledger)
        run(ranks, ledger)
        assert not [name for rank in ranks.ranks for name in named_memory(rank.process.pid)]
        ranks.leave()
        seen.append([held(rank.process.pid) for rank in ranks.ranks])
    assert seen[-1] == seen[0]


def named_memory(pid: int) -> list[str]:
    """Shared memory of a process that would stay if it were killed now."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in maps if "/dev/shm/" in line and not line.endswith("(deleted)")]


def held(pid: int) -> tuple[int, int]:
    """Open files, and threads."""
    process = Path(f"/proc/{pid}")
    return len(list((process / "fd").iterdir())), len(list((process / "task").iterdir()))


def test_withdrawing_what_has_just_finished_leaves_it_finished(ranks: Ranks) -> None:
    ranks.build(1)
    short, long = requests(2, 5), requests(1, 40)
    long.prompts = {"long": long.prompts["r0"]}
    ranks.submit(short)
    ranks.submit(long)
    both = Ledger({**short.prompts, **long.prompts}, 40)
    ranks.step(5, both)
    left = ranks.withdraw(both, "r0", "r1", "long", "unheard-of")
    assert [(one.id, one.produced_tokens) for one in left] == [("long", 5)]
    ends = {output.id: output.ended for output in both.outputs if output.ended}
    assert ends == {"r0": "finished", "r1": "finished", "long": "aborted"}
    assert not ranks.withdraw(both)
    assert ranks.stats is not None
    assert (ranks.stats.running, ranks.stats.waiting) == (0, 0)


def test_what_the_model_cannot_take_is_refused_and_the_rest_runs(ranks: Ranks) -> None:
    ranks.build(1)
    good, long, bare = requests(1, 3), requests(1, 3), requests(1, 3)
    long.prompts, long.response_tokens = {"long": (5,) * 2000}, 49
    bare.prompts = {"bare": ()}
    works = [*good.works(), *long.works(), *bare.works()]
    refused = ranks.submit(good, works)
    assert refused["long"] == "long grows to 2049 tokens; this model takes 2048"
    assert "a prompt of at least one" in refused["bare"]
    assert refused.keys() == {"long", "bare"}
    assert ranks.submit(good) == {"r0": "r0 is here already"}
    run(ranks, good)
    assert len(good.tokens["r0"]) == 3


@pytest.mark.parametrize("degrees", [{"pp": 2}, {"ep": 2}, {"dp": 2}])
def test_layouts_that_vllm_fails_with_on_a_cpu_are_refused(
    ranks: Ranks, degrees: dict[str, int]
) -> None:
    answers = ranks.build(1, **degrees)
    for answer in answers:
        assert isinstance(answer, Failure)
        assert "without GPUs vLLM splits a model by TP only" in answer.text


def test_while_admission_is_closed_only_what_runs_goes_on(ranks: Ranks) -> None:
    ranks.build(1)
    first, late = requests(1, 6), requests(2, 6)
    late.prompts = {"late": late.prompts["r1"]}
    ranks.submit(first)
    ranks.step(1, first)
    ranks.order(Admission(instances=("g0",), open=False))
    ranks.submit(late)
    run(ranks, first)
    assert len(first.tokens["r0"]) == 6
    assert ranks.stats is not None
    assert (ranks.stats.running, ranks.stats.waiting) == (0, 1)
    ranks.order(Admission(instances=("g0",), open=True))
    run(ranks, late)
    assert len(late.tokens["late"]) == 6


def test_new_weights_give_the_tokens_of_an_engine_built_with_them(ranks: Ranks) -> None:
    ranks.build(2)
    old, again, new = (requests(2, 20, 3 * BLOCK) for _ in range(3))
    for ledger in (old, again):
        ranks.submit(ledger)
        run(ranks, ledger)
    assert again.tokens == old.tokens
    assert again.outputs[0].cached_tokens == 2 * BLOCK  # its last block has to give a token

    ranks.submit(new, [new.work("r0")])
    ranks.step(8, new)
    updated, _ = ranks.order(UpdateWeights(instances=("g0",), version=3))
    assert isinstance(updated, WeightsUpdated)
    assert updated.moved_bytes > 0
    run(ranks, new)
    assert new.tokens["r0"][:8] == old.tokens["r0"][:8]
    assert new.tokens["r0"][8:] != old.tokens["r0"][8:]
    assert {output.version for output in new.outputs} == {0, 3}
    ranks.submit(new, [new.work("r1")])
    run(ranks, new)
    cached = [output.cached_tokens for output in new.outputs if output.id == "r1"]
    assert max(cached) == 0, "KV of the old weights was used"

    (missing, _) = ranks.order(UpdateWeights(instances=("g0",), version=4, source="/nowhere"))
    assert isinstance(missing, Failure)
    assert "/nowhere: No such file" in missing.text
    ranks.leave()

    ranks.build(1, version=3)
    launched = requests(2, 20, 3 * BLOCK)
    ranks.submit(launched, [launched.work("r1")])
    run(ranks, launched)
    assert launched.tokens["r1"] == new.tokens["r1"]


def test_steps_are_timed_and_leave_nothing(ranks: Ranks) -> None:
    ranks.build(1)
    decode = MeasureSteps(instance="g0", batch=4, context_tokens=300, prefill_tokens=0, steps=5)
    prefill = MeasureSteps(instance="g0", batch=0, context_tokens=0, prefill_tokens=512, steps=3)
    crowd = MeasureSteps(instance="g0", batch=9, context_tokens=300, prefill_tokens=0, steps=5)
    for order, steps in ((decode, 5), (prefill, 3)):
        (timed,) = ranks.order(order)
        assert isinstance(timed, StepTimes)
        assert len(timed.times_ns) == steps
        assert min(timed.times_ns) > 0
    (refused,) = ranks.order(crowd)
    assert isinstance(refused, Failure)
    assert "more than the 8 in a step" in refused.text
    ledger = requests(1, 2)
    ranks.submit(ledger)
    run(ranks, ledger)
    assert ranks.stats is not None
    assert ranks.stats.generated_tokens == 2


def test_a_kv_connector_brings_what_another_instance_had_computed(
    ranks: Ranks, tmp_path: Path
) -> None:
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    plain = EngineSpec(engine="vllm", sequences_max=4, length_max_tokens=1024)
    joined = structs.replace(plain, options={"kv_transfer_config": json.dumps(connector)})
    moved, reference = requests(1, 12, 2 * BLOCK + 40), requests(1, 12, 2 * BLOCK + 40)
    giver, taker = both = ranks.ranks
    try:
        for rank, steps in ((giver, 6), (taker, 6)):
            ranks.ranks = [rank]
            ranks.order(Start(spec=joined), [rank])
            ranks.build(1)
            ranks.submit(moved)
            ranks.step(steps, moved)
            ranks.withdraw(moved)
            ranks.leave()
        ranks.order(Start(spec=plain), [taker])
        ranks.build(1)
        ranks.submit(reference)
        run(ranks, reference)
        ranks.leave()
    finally:
        ranks.ranks = both
        ranks.order(Start(spec=SPEC), both)
    first, *others = (output for output in moved.outputs if output.cached_tokens)
    assert (first.start, first.cached_tokens, others) == (6, 2 * BLOCK, [])
    assert moved.tokens == reference.tokens


def test_a_model_or_an_option_that_is_not_there_is_named(ranks: Ranks, tmp_path: Path) -> None:
    one, _ = ranks.ranks
    (answer,) = ranks.order([Start(spec=EngineSpec(engine="vllm", model=str(tmp_path)))], [one])
    assert isinstance(answer, Failure)
    assert answer.text == f"{tmp_path}: no config.json there; a model directory has one"
    for options, word in (
        ({"block_sise": 32}, "block_sise: this version of vLLM has none of that name"),
        ({"seed": 1}, "seed: leave it out"),
        ({"gpu_memory_utilization": 7.0}, "gpu_memory_utilization"),
    ):
        (answer,) = ranks.order([Start(spec=EngineSpec(engine="vllm", options=options))], [one])
        (answer,) = ranks.build(1)
        assert isinstance(answer, Failure)
        assert word in answer.text
        assert answer.error == "UsageError"
    ranks.order([Start(spec=SPEC)], [one])
    assert isinstance(ranks.build(1)[0], Seated)
