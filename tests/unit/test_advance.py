"""Jumping from event to event ends where stepping one by one ends, to the nanosecond."""

from __future__ import annotations

import random
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.model.advance import advance_until, plan_stretch
from harness.model.batching import Batching, Limits, complete_step, plan_step
from harness.model.intake import Refused, abort, import_with_kv, pause, submit
from harness.model.layout import parse_layout
from harness.model.load import load_profile
from harness.model.profile import costs_of
from harness.model.requests import Carried, Event
from harness.model.steptime import FittedCosts, StepCosts, TableCosts

PROFILE = Path(__file__).parents[2] / "scenarios" / "profiles" / "qwen2.5-14b-h800.toml"
COSTS: list[StepCosts] = [
    costs_of(load_profile(PROFILE), parse_layout("1xTP2")),
    FittedCosts(
        fixed_us=3.6,
        sequence_us=1.15,
        kv_token_ns=4.17,
        prefill_token_us=12.3,
        batch_max=4,
        kv_max_tokens=150,
        prefill_max_tokens=8,
    ),
    TableCosts(
        batches=[1, 4, 16],
        contexts_tokens=[16, 20, 33, 64],
        step_us=[[3.7, 3.8, 4.1, 5], [4, 4.4, 5.6, 7], [5.2, 6.9, 11.9, 13]],
        prefills_tokens=[4, 16],
        prefill_us=[4, 9],
    ),
]
Arrivals = list[tuple[int, Carried]]


def step_by_step(
    state: Batching, costs: StepCosts, now_ns: int, until_ns: int
) -> tuple[int, list[Event], frozenset[str]]:
    """The plain loop that jumping must equal."""
    events: list[Event] = []
    beyond: frozenset[str] = frozenset()
    while now_ns < until_ns:
        step = plan_step(state)
        if step is None:
            return until_ns, events, beyond
        load = (step.batch, step.kv_tokens, step.prefill_tokens)
        if step.batch or step.chunks:
            line = costs.line(*load, step.prefill_pairs)
            now_ns += line.step_ns(step.kv_tokens)
            beyond |= costs.beyond(*load)
        events += complete_step(state, step, now_ns)
    return now_ns, events, beyond


def jumping(
    state: Batching, costs: StepCosts, now_ns: int, until_ns: int
) -> tuple[int, list[Event], frozenset[str]]:
    done = advance_until(state, costs, now_ns, until_ns)
    return done.now_ns, done.events, done.beyond


def carried(number: int, rng: random.Random, limits: Limits) -> Carried:
    most = limits.blocks * limits.block_tokens + 1
    prompt = rng.randint(1, max(1, most // 3))
    return Carried(f"r{number}", prompt, rng.randint(1, max(1, most - prompt)), 0)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    costs=st.sampled_from(COSTS),
    requests=st.integers(1, 14),
    sequences=st.integers(1, 6),
    blocks=st.integers(3, 40),
    block_tokens=st.sampled_from([1, 4, 16]),
)
def test_jumping_equals_stepping(
    seed: int, costs: StepCosts, requests: int, sequences: int, blocks: int, block_tokens: int
) -> None:
    limits = Limits(sequences, sequences + 1 + seed % 30, blocks, block_tokens)
    outcomes = []
    for run in (step_by_step, jumping):
        rng = random.Random(seed)
        state, now_ns = Batching(limits), 0
        seen: list[object] = []
        for number in range(requests):
            submit(state, carried(number, rng, limits))
            if rng.random() < 0.5:
                for_ns = rng.randint(1, 10 ** rng.randint(3, 9))
                now_ns, events, beyond = run(state, costs, now_ns, now_ns + for_ns)
                seen += [now_ns, events, beyond]
            if state.requests and rng.random() < 0.3:
                name = rng.choice(sorted(state.requests))
                left = abort(state, name)
                seen.append(left)
                assert left is not None
                try:
                    import_with_kv(state, left)
                except Refused:
                    submit(state, left)
        while state.requests:
            for_ns = rng.randint(1, 10 ** rng.randint(4, 9))
            now_ns, events, beyond = run(state, costs, now_ns, now_ns + for_ns)
            seen += [now_ns, events, beyond]
        outcomes.append(seen)
    assert outcomes[0] == outcomes[1]


def waiting(*lengths: tuple[int, int]) -> Batching:
    state = Batching(Limits(8, 64, 1000, 16))
    for number, (prompt, response) in enumerate(lengths):
        submit(state, Carried(f"r{number}", prompt, response, 0))
    return state


def test_a_command_that_comes_waits_for_the_step_under_way_and_no_longer() -> None:
    state, costs = waiting((4, 1000)), COSTS[1]
    now_ns = advance_until(state, costs, 0, 1).now_ns
    long = plan_stretch(state, costs, now_ns)
    assert long is not None
    assert long.times == 999
    command_ns = now_ns + (long.ends_ns - now_ns) // 2
    short = plan_stretch(state, costs, now_ns, command_ns)
    assert short is not None
    one_less = costs.line(1, 5, 0, 0).steps_ns(5, 1, short.times - 1)
    assert now_ns + one_less < command_ns <= short.ends_ns


def test_an_idle_or_paused_engine_lets_time_pass() -> None:
    state = waiting()
    done = advance_until(state, COSTS[0], 5, 70)
    assert (done.now_ns, done.idle, done.steps) == (70, True, 0)
    state = waiting((4, 9))
    pause(state)
    done = advance_until(state, COSTS[0], 5)
    assert (done.now_ns, done.idle) == (5, True)


def test_it_stops_at_the_first_event_if_asked() -> None:
    state = waiting((4, 9), (4, 30))
    advance_until(state, COSTS[0], 0, 1)
    done = advance_until(state, COSTS[0], 0, first_event=True)
    assert [event.request.id for event in done.events] == ["r0"]
    assert done.decoded_tokens == 16


def test_what_is_extrapolated_is_told() -> None:
    done = advance_until(waiting((4, 200)), COSTS[1], 0)
    assert done.beyond == {"KV tokens above 150"}


def test_a_whole_step_of_requests_is_a_few_events() -> None:
    """The tail does not cost one turn a token: as many stretches as things happened."""
    state = waiting((40, 5000), (40, 300), (40, 7))
    stretches, now_ns, tokens = 0, 0, 0
    while (stretch := plan_stretch(state, COSTS[0], now_ns)) is not None:
        step, times, now_ns = stretch
        complete_step(state, step, now_ns, times)
        stretches += 1
        tokens += step.batch * times
    assert tokens == 5000 + 300 + 7 - 3
    assert stretches <= 6
