"""The pool in virtual time: nothing is lost, whatever a policy does; and its times are right."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from harness.errors import UsageError
from harness.model.layout import Layout, parse_mix
from harness.model.load import load_profile
from harness.model.profile import Profile, costs_of
from harness.model.replay import ReplayRequest, Turn
from harness.model.steptime import step_ns
from harness.rlsim.fleet import Hardware
from harness.rlsim.pool import Result, simulate
from harness.rlsim.search import best_static, two_types, uniform
from harness.scheduling.policies import Policy, parse_policy
from harness.scheduling.view import Settings
from harness.seeds import seeded

Batches = list[list[ReplayRequest]]


@cache
def profile() -> Profile:
    return load_profile(Path(__file__).parents[2] / "scenarios/profiles/qwen2.5-14b-h800.toml")


def batches(*sizes: int, seed: int = 1, turns: int = 1, most: int = 3000) -> Batches:
    chance = seeded(seed, "lengths of a test")
    found: Batches = []
    for step, size in enumerate(sizes):
        found.append([])
        for sample in range(size):
            many = tuple(
                Turn(chance.randint(20, 200), min(most, 1 + int(chance.lognormvariate(5, 1))))
                for _ in range(chance.randint(1, turns))
            )
            name = f"{step}-{sample // 4}-{sample % 4}"
            found[-1].append(ReplayRequest(name, step, sample // 4, sample % 4, many))
    return found


FROM_THE_SMALLEST = Policy("from 8xTP1", first=parse_mix("8xTP1"), plans=True)
MIXED = Policy("mixed", first=parse_mix("4xTP1+1xTP4"), routing="assigned", balances=True)


def run(
    policy: str | Policy,
    given: Batches,
    gpus: int = 8,
    *,
    switch_s: float = 1.0,
    kv_max_tokens: int = 0,
    sequences_max: int = 256,
) -> Result:
    hardware = Hardware(
        profile=profile(),
        gpus_of={"g0": gpus},
        kv_max_tokens=kv_max_tokens,
        sequences_max=sequences_max,
    )
    return simulate(
        given,
        parse_policy(policy) if isinstance(policy, str) else policy,
        hardware,
        Settings(switch_s=switch_s, rest_s=0.5, move_rest_s=0.5),
        cap_tokens=3000,
        replan_s=0.5,
        balance_s=0.25,
    )


def tokens(given: Batches) -> int:
    return sum(request.response_tokens for batch in given for request in batch)


def test_one_request_takes_its_prefill_and_its_steps() -> None:
    one = ReplayRequest("0-0-0", 0, 0, 0, (Turn(100, 50),))
    costs = costs_of(profile(), Layout(1, 2))
    lasts_ns = step_ns(costs, 0, 0, 100, 100 * 101 // 2)
    lasts_ns += sum(step_ns(costs, 1, 100 + n) for n in range(1, 50))
    result = run("static:1xTP2", [[one]])
    assert result.batch_s == pytest.approx((lasts_ns / 1e9,), abs=1e-9)
    assert result.tokens == 50
    assert result.switches == 0


@pytest.mark.parametrize(
    "policy",
    [
        "static:8xTP1", "static:8xTP1/least_loaded", "static:4xTP1+1xTP4", "reactive",
        "proactive", "orchestrl", "oracle",
    ],
)  # fmt: skip
def test_every_token_is_produced_once_under_every_policy(policy: str) -> None:
    given = batches(40, 20, turns=2)
    result = run(policy, given)
    assert result.tokens == tokens(given)
    assert len(result.batch_s) == 2
    assert min(result.batch_s) > 0


def test_no_token_is_lost_where_kv_runs_out() -> None:
    given = batches(80)
    result = run("static:2xTP1", given, kv_max_tokens=6000)
    assert result.preemptions > 0
    assert result.tokens == tokens(given)
    assert result.total_s > run("static:2xTP1", given).total_s


@pytest.mark.parametrize("seed", range(6))
def test_no_token_is_lost_by_switches_and_moves_under_pressure(seed: int) -> None:
    given = batches(24, 12, seed=seed, turns=3)
    result = run("orchestrl", given, kv_max_tokens=9000, sequences_max=8, switch_s=0.05)
    assert result.tokens == tokens(given)


def test_switches_and_moves_do_happen() -> None:
    given = batches(80, 20, seed=3)
    switched = run(FROM_THE_SMALLEST, given, switch_s=0.1)
    assert switched.switches > 0
    assert switched.tokens == tokens(given)
    assert [look.switched for look in switched.looks].count(True) == switched.switches
    moved = run(MIXED, given)
    assert moved.moved
    assert moved.tokens == tokens(given)
    still = run(replace(MIXED, balances=False), given)
    assert moved.total_s < still.total_s


def test_the_same_run_gives_the_same_result() -> None:
    given = batches(30, 10)
    assert run("orchestrl", given) == run("orchestrl", given)


def test_a_batch_begins_when_the_one_before_has_ended() -> None:
    given = batches(40, 30)
    both = run("static:4xTP2", given)
    alone = [run("static:4xTP2", [batch]).total_s for batch in given]
    assert both.batch_s == pytest.approx(alone, rel=0.01)


def test_a_switch_costs_what_it_is_said_to_cost() -> None:
    result = run(FROM_THE_SMALLEST, batches(80, seed=3), switch_s=0.3)
    switched = [look.at_s for look in result.looks if look.switched]
    up = [at_s for at_s, _ in result.layouts[1:]]
    assert switched
    assert up == pytest.approx([at_s + 0.3 for at_s in switched], abs=0.1)


def test_knowing_the_lengths_is_no_loss() -> None:
    given = batches(100, 60, seed=5)
    assert run("oracle", given).total_s <= run("orchestrl", given).total_s * 1.02


def test_a_request_that_fits_nowhere_is_told() -> None:
    long = [[ReplayRequest("0-0-0", 0, 0, 0, (Turn(2000, 2000),))]]
    with pytest.raises(UsageError, match=r"0-0-0 can run nowhere.*4000 tokens"):
        run("static:2xTP1", long, kv_max_tokens=3000)
    with pytest.raises(UsageError, match="best_static: its layout must be searched for"):
        run("best_static", batches(4))


def test_the_best_static_layout_is_the_best_of_all() -> None:
    given = batches(100)
    hardware = Hardware(profile=profile(), gpus_of={"g0": 4})
    layouts = hardware.compute().layouts(4)
    mixes = [*uniform(layouts, {"g0": 4}), *two_types(layouts, {"g0": 4})]
    assert {str(mix) for mix in mixes} == {"4xTP1", "2xTP2", "1xTP4", "2xTP1+1xTP2"}
    best = best_static(given, hardware, cap_tokens=3000)
    took = {
        (mix, routing): run(f"static:{mix}{end}", given, gpus=4).total_s
        for mix in mixes
        for routing, end in (("assigned", ""), ("least_loaded", "/least_loaded"))
    }
    assert took[best.first, best.routing] == min(took.values())
