"""Pacing on a virtual clock: steps end when the profile says, and every token is told once."""

from __future__ import annotations

import random
from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from agents.generation.pace import REPORT_NS, Pace
from harness.clock import NS_PER_MS, NS_PER_S
from harness.model import intake
from harness.model.batching import Batching, Limits, complete_step, plan_step
from harness.model.requests import Carried
from harness.model.steptime import FittedCosts
from harness.wire.generation import Output

COSTS = FittedCosts(
    fixed_us=9_000,
    sequence_us=500,
    kv_token_ns=900,
    prefill_token_us=70,
    batch_max=32,
    kv_max_tokens=10_000,
    prefill_max_tokens=64,
)


class Bench:
    """A paced engine on a clock of its own, that wakes `late_ns` late from every wait."""

    def __init__(self, limits: Limits, late_ns: int = 0) -> None:
        self.now_ns, self.late_ns = 7 * NS_PER_S, late_ns
        self.told: list[Output] = []
        self.command_ns = 0
        self.state = Batching(limits)
        self.pace = Pace(
            "i0",
            self.state,
            COSTS,
            self.told.append,
            now_ns=lambda: self.now_ns,
            sleep_until_ns=self.sleep_until,
        )

    def sleep_until(self, until_ns: int) -> None:
        if until_ns > self.now_ns:
            self.now_ns = until_ns + self.late_ns

    def wait(self, until_ns: int) -> bool:
        if self.command_ns <= max(self.now_ns, until_ns):
            self.now_ns = max(self.now_ns, self.command_ns)
            return True
        self.sleep_until(until_ns)
        return False

    def run_for(self, duration_ns: int) -> None:
        self.command_ns = self.now_ns + duration_ns
        self.pace.run(self.wait)

    def submit(self, request: Carried) -> None:
        intake.submit(self.state, request)
        self.pace.opened(request)

    def withdraw(self, name: str) -> Carried | None:
        self.pace.report()
        if left := intake.export(self.state, name):
            self.pace.ended(left, "exported")
        return left


def ends_by_hand(state: Batching, from_ns: int) -> dict[str, list[int]]:
    """The end of the step that gives each token, stepping one by one."""
    ends: dict[str, list[int]] = defaultdict(list)
    while step := plan_step(state):
        if step.batch or step.chunks:
            line = COSTS.line(step.batch, step.kv_tokens, step.prefill_tokens, step.prefill_pairs)
            from_ns += line.step_ns(step.kv_tokens)
        before = {r.id: intake.view(state, r.id) for r in list(state.running)}
        decoded = [n for n, r in before.items() if r and state.requests[n].status == "decoding"]
        lasts = [chunk.id for chunk in step.chunks if chunk.last]
        complete_step(state, step, from_ns)
        for name in [n for n in decoded if n not in step.preempted] + lasts:
            ends[name].append(from_ns)
    return ends


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), blocks=st.integers(4, 60), late_us=st.integers(0, 9_000))
def test_stamps_are_those_of_stepping_one_by_one_however_late_we_wake(
    seed: int, blocks: int, late_us: int
) -> None:
    limits = Limits(6, 24, blocks, 4)
    bench, twin = Bench(limits, late_us * 1000), Batching(limits)
    rng = random.Random(seed)
    for number in range(rng.randint(1, 9)):
        prompt = rng.randint(1, blocks * 2)
        request = Carried(f"r{number}", prompt, rng.randint(1, blocks * 2), 0)
        bench.submit(request)
        intake.submit(twin, request)
    expected = ends_by_hand(twin, bench.now_ns)
    bench.run_for(3_000 * NS_PER_S)
    assert not bench.state.requests
    seen: dict[str, int] = defaultdict(int)
    for output in bench.told:
        assert output.start == seen[output.id]
        seen[output.id] += output.count
        assert output.first_ns == expected[output.id][output.start]
        assert output.last_ns == expected[output.id][seen[output.id] - 1]
    assert seen == {name: len(ends) for name, ends in expected.items()}
    assert bench.pace.stats().generated_tokens == sum(seen.values())
    assert [o.id for o in bench.told if o.ended == "finished"] == sorted(
        seen, key=[o.id for o in bench.told if o.ended].index
    )


def test_a_command_acts_at_the_first_step_end_after_it_and_loses_no_token() -> None:
    bench = Bench(Limits(8, 64, 1000, 16))
    bench.submit(Carried("a", 10, 500, 0))
    bench.run_for(105 * NS_PER_MS)
    asked_ns = bench.command_ns
    left = bench.withdraw("a")
    assert left is not None
    assert 0 <= bench.now_ns - asked_ns <= 10 * NS_PER_MS
    assert sum(output.count for output in bench.told) == left.produced_tokens > 0
    assert bench.told[-1].ended == "exported"
    assert bench.told[-1].last_ns == bench.now_ns


def test_an_idle_engine_begins_anew_when_work_comes() -> None:
    bench = Bench(Limits(8, 64, 1000, 16))
    bench.run_for(40 * NS_PER_S)
    bench.submit(Carried("a", 10, 1, 0))
    began_ns = bench.now_ns
    bench.run_for(5 * NS_PER_S)
    assert bench.told[0].first_ns == began_ns + COSTS.line(0, 0, 10, 55).step_ns(0)


def test_lateness_does_not_add_up_but_is_told() -> None:
    bench, late = Bench(Limits(8, 64, 1000, 16)), Bench(Limits(8, 64, 1000, 16), NS_PER_MS)
    for one in (bench, late):
        one.submit(Carried("a", 10, 400, 0))
        one.run_for(60 * NS_PER_S)
    assert late.told[-1].last_ns == bench.told[-1].last_ns
    assert bench.pace.stats().late_ns == 0
    assert late.pace.stats().late_ns >= 60 * NS_PER_MS


def test_a_device_that_stood_does_not_catch_up() -> None:
    bench = Bench(Limits(8, 64, 1000, 16))
    bench.submit(Carried("a", 10, 500, 0))
    bench.run_for(100 * NS_PER_MS)
    bench.now_ns += 5 * NS_PER_S
    before = bench.pace.stats().generated_tokens
    bench.run_for(100 * NS_PER_MS)
    assert bench.pace.stats().generated_tokens - before <= 12


def test_outputs_of_a_batch_are_told_by_interval() -> None:
    bench = Bench(Limits(64, 2048, 10_000, 16))
    for number in range(32):
        bench.submit(Carried(f"r{number}", 20, 400, 0))
    bench.run_for(2 * NS_PER_S)
    reports = 2 * NS_PER_S // REPORT_NS
    assert bench.pace.stats().generated_tokens > 32 * 70
    assert len(bench.told) <= 32 * (reports + 1)
