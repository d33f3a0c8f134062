"""The cost model agrees with the engine's life cycle, request by request."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.model.advance import advance_until
from harness.model.batching import Batching, Limits
from harness.model.intake import submit
from harness.model.layout import Layout
from harness.model.load import load_profile
from harness.model.profile import costs_of
from harness.model.requests import Carried
from harness.model.steptime import step_ns
from harness.scheduling.compute import Compute
from harness.scheduling.pooled import Open, cuts_of, shares, work_s

PROFILES = Path(__file__).parents[2] / "scenarios" / "profiles"
PROFILE = load_profile(PROFILES / "qwen2.5-14b-h800.toml")
COMPUTE = Compute.of(PROFILE, sequences_max=256)
TP1, TP2, TP4, TP8 = (Layout(1, tp=tp) for tp in (1, 2, 4, 8))


def drawn(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    remaining = np.minimum(np.ceil(rng.lognormal(6.2, 0.9, count)), 20_000)
    return remaining, rng.integers(100, 600, count).astype(float)


def engine_s(layout: Layout, remaining: np.ndarray, context: np.ndarray, compute: Compute) -> float:
    """How long the life cycle itself takes from empty, s."""
    blocks = compute.kv_capacity_tokens(layout) // 16
    state = Batching(Limits(compute.sequences_max, 2048, blocks))
    for row, (length, prompt) in enumerate(zip(remaining, context, strict=True)):
        submit(state, Carried(f"r{row}", int(prompt), int(length), 0))
    return advance_until(state, costs_of(PROFILE, layout), 0).now_ns / 1e9


def test_a_step_takes_what_the_profile_says() -> None:
    costs = costs_of(PROFILE, TP4)
    for batch, kv_tokens in [(1, 100), (7, 9_000), (256, 200_000)]:
        told = float(COMPUTE.step_s(TP4, batch, kv_tokens))
        assert told == pytest.approx(step_ns(costs, batch, kv_tokens) / 1e9, rel=1e-3)


def test_speed_divides_times() -> None:
    fast = Compute.of(PROFILE, sequences_max=256, speed=10.0)
    assert float(fast.step_s(TP1, 8, 4000)) == pytest.approx(
        float(COMPUTE.step_s(TP1, 8, 4000)) / 10
    )


def test_a_long_prompt_takes_more_than_its_share() -> None:
    one, ten = (float(COMPUTE.prefill_s(TP1, tokens)) for tokens in (1_000.0, 10_000.0))
    assert ten > 10 * one


@pytest.mark.parametrize("layout", [TP1, TP4])
@pytest.mark.parametrize("count", [1, 8, 60, 250])
def test_makespan_is_the_engines_where_all_fit(layout: Layout, count: int) -> None:
    remaining, context = drawn(count, count)
    told = COMPUTE.makespan_s(layout, remaining, context, context)
    assert told == pytest.approx(engine_s(layout, remaining, context, COMPUTE), rel=0.01)


@pytest.mark.parametrize(("count", "seats"), [(300, 256), (600, 256), (600, 64)])
def test_makespan_is_near_the_engines_where_seats_are_short(count: int, seats: int) -> None:
    compute = Compute.of(PROFILE, sequences_max=seats)
    remaining, context = drawn(count, count)
    told = compute.makespan_s(TP1, remaining, context, context)
    assert told == pytest.approx(engine_s(TP1, remaining, context, compute), rel=0.05)


@pytest.mark.parametrize(
    ("layout", "kv_max_tokens"), [(TP4, 60_000), (TP4, 30_000), (TP2, 90_000), (TP1, 120_000)]
)
def test_makespan_is_the_engines_where_kv_is_short(layout: Layout, kv_max_tokens: int) -> None:
    compute = Compute.of(PROFILE, sequences_max=256, kv_max_tokens=kv_max_tokens)
    for seed in range(3):
        remaining, context = drawn(seed, 300)
        told = compute.makespan_s(layout, remaining, context, context)
        assert told == pytest.approx(engine_s(layout, remaining, context, compute), rel=0.03)


def test_a_request_beyond_the_kv_never_ends() -> None:
    compute = Compute.of(PROFILE, sequences_max=256, kv_max_tokens=1_000)
    assert compute.makespan_s(TP1, np.array([900.0]), np.array([200.0])) == np.inf


def test_nothing_takes_no_time() -> None:
    assert COMPUTE.makespan_s(TP1, np.zeros(0), np.zeros(0)) == 0.0


def test_what_is_left_later_is_what_the_engine_has_left() -> None:
    remaining, context = drawn(5, 40)
    drain = COMPUTE.drain(TP2, remaining, context)
    half_s = drain.lasts_s / 2
    left = drain.left(half_s)
    rest_s = COMPUTE.makespan_s(TP2, left[left > 0], (context + remaining - left)[left > 0])
    assert half_s + rest_s == pytest.approx(drain.lasts_s, rel=0.01)


def test_layouts_divide_the_node_and_hold_the_model() -> None:
    assert COMPUTE.layouts(8) == (TP1, TP2, TP4, TP8)
    assert COMPUTE.layouts(4) == (TP1, TP2, TP4)
    moe = load_profile(PROFILES / "qwen3-235b-a22b-h800.toml")
    found = Compute.of(moe, sequences_max=256).layouts(8)
    assert {layout.gpus_per_instance for layout in found} == {8}
    assert Layout(1, tp=8) in found
    assert any(layout.ep > 1 for layout in found)


def test_a_layout_never_measured_is_as_good_per_gpu_as_the_best() -> None:
    compute = Compute.measured([TP1, TP2], {TP1: 100.0}, sequences_max=8, kv_capacity_tokens=10_000)
    assert compute.layouts(2) == (TP1, TP2)
    assert float(compute.step_s(TP1, 4, 0)) == pytest.approx(4 / 100)
    assert float(compute.step_s(TP2, 4, 0)) == pytest.approx(4 / 200)


@pytest.mark.parametrize("count", [5, 200, 3000])
def test_shares_take_as_long_as_the_instance_with_the_longest_requests(count: int) -> None:
    remaining, context = drawn(count, count)
    work = Open(remaining, remaining, context, context, np.ones(count), np.zeros(count))
    given = shares(work, cuts_of(count))
    dealt = np.argsort(-remaining)[::16]
    exact = COMPUTE.makespan_s(TP1, remaining[dealt], context[dealt])
    told = work_s(COMPUTE.costs(TP1), 256, given, [16])[0]
    assert told[len(given.cuts)] == pytest.approx(exact, rel=0.01)  # all are the rest
    assert told[len(given.cuts) - 1] == pytest.approx(exact, rel=0.01)  # all are the first


def test_shares_that_wait_take_as_long_as_in_any_order() -> None:
    remaining, context = drawn(9, 8_000)
    work = Open(remaining, remaining, context, context, np.ones(8_000), np.zeros(8_000))
    told = work_s(COMPUTE.costs(TP8), 256, shares(work, np.zeros(1, np.int64)), [8])[0, 1]
    rng = np.random.default_rng(0)
    exact = []
    for _ in range(8):
        dealt = rng.permutation(np.argsort(-remaining)[::8])
        exact.append(COMPUTE.makespan_s(TP8, remaining[dealt], context[dealt]))
    assert told == pytest.approx(float(np.mean(exact)), rel=0.1)
