"""A loop goes on from a checkpoint of its own kind, as long as something is left to do."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from harness.model.scenario import Generate, Rl, Scenario, Training
from harness.run.rl.terms import against, terms_of

STEP = Rl(steps=4, policies=("static:4xTP1", "orchestrl"), staleness_max=2)
SCENARIO = Scenario(question="?", steps=(Generate(), STEP), training=Training(layout="DP2"))


def changed(**keys: Any) -> Scenario:
    step = msgspec.structs.replace(STEP, **keys)
    return msgspec.structs.replace(SCENARIO, steps=(Generate(), step))


def why_not(scenario: Scenario, *, number: int = 1, policy: int = 0, version: int = 2) -> str:
    return against(terms_of(SCENARIO, number), scenario, number, policy, version)


def test_the_same_scenario_goes_on() -> None:
    assert why_not(SCENARIO) == ""


@pytest.mark.parametrize(
    "keys",
    [
        {"steps": 9},
        {"sync_timeout_s": 9.0, "train_timeout_s": 9.0},
        {"replan_s": 0.5, "balance_ms": 10.0, "strategy": "restart"},
        {"order": "first_ready", "over_age": "drop", "across_sync": "finish", "bucket": "1MiB"},
    ],
)
def test_how_long_and_how_often_may_be_other(keys: dict[str, Any]) -> None:
    assert why_not(changed(**keys)) == ""


@pytest.mark.parametrize(
    ("scenario", "said"),
    [
        (
            changed(policies=("orchestrl",)),
            'steps[1].policies was ["static:4xTP1","orchestrl"], and here it is ["orchestrl"]',
        ),
        (changed(staleness_max=0), "steps[1].staleness_max was 2, and here it is 0"),
        (changed(prompts_per_step=8), "steps[1].prompts_per_step was 0, and here it is 8"),
        (
            msgspec.structs.replace(SCENARIO, training=Training(layout="TP2")),
            'training.layout was "DP2", and here it is "TP2"',
        ),
        (
            msgspec.structs.replace(SCENARIO, training=None),
            'training.mode was "paced", and here it is not there',
        ),
        (msgspec.structs.replace(SCENARIO, seed=7), "seed was 0, and here it is 7"),
        (
            msgspec.structs.replace(SCENARIO, steps=(STEP,)),
            'steps[].do was ["generate","rl"], and here it is ["rl"]',
        ),
        (msgspec.structs.replace(SCENARIO, steps=()), "the scenario has no steps"),
    ],
)
def test_another_scenario_is_refused_by_key(scenario: Scenario, said: str) -> None:
    assert said in why_not(scenario)


def test_a_run_that_came_to_its_end_is_told_so() -> None:
    assert why_not(SCENARIO, policy=0, version=4) == ""  # the next policy is left
    assert why_not(SCENARIO, policy=1, version=3) == ""
    assert "made all of its 4 steps" in why_not(SCENARIO, policy=1, version=4)
    assert why_not(changed(steps=5), policy=1, version=4) == ""
    twice = msgspec.structs.replace(SCENARIO, repeats=2)
    assert why_not(twice, policy=1, version=4) == ""
    assert "made all" in why_not(twice, number=3, policy=1, version=4)
    assert "made all" in why_not(SCENARIO, number=3, policy=0, version=1)  # a repeat less now
