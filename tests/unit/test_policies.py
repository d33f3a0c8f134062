"""Policies: their names, what they begin with, how requests are assigned and ordered."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from harness.errors import UsageError
from harness.model.layout import Layout, parse_mix
from harness.scheduling.compute import Compute, Costs
from harness.scheduling.policies import (
    NAMED,
    assign,
    decide,
    foresee,
    order,
    parse_policy,
    rebalance,
    smallest,
)
from harness.scheduling.view import Instance, Requests, Settings, View


def compute(*tps: int) -> Compute:
    costs = Costs(np.linspace(0, 0.08, 9), np.zeros(9), 0.0, 0.0, 10_000)
    return Compute(lambda _: costs, lambda _: tuple(Layout(1, tp) for tp in tps), 8)


def view(requests: int, instances: int = 3) -> View:
    zeros = np.zeros(requests, dtype=np.int64)
    rows = Requests(
        ids=tuple(f"r{row}" for row in range(requests)),
        group=zeros,
        produced=zeros,
        context=zeros + 10,
        at=zeros - 1,
        running=zeros.astype(bool),
        batch=zeros,
    )
    engines = tuple(
        Instance(f"n:{k}", "n", Layout(), True, 8, 10_000, 0, 0, 0) for k in range(instances)
    )
    return View(0.0, engines, rows, (), {"n": 8}, cap_tokens=100)


def test_every_name_is_a_policy_and_says_what_it_does() -> None:
    assert set(NAMED) == {"best_static", "reactive", "proactive", "orchestrl", "oracle"}
    does = {name: (p.plans, p.balances, p.knows) for name, p in NAMED.items()}
    assert does == {
        "best_static": (False, False, False),
        "reactive": (False, True, False),
        "proactive": (True, False, False),
        "orchestrl": (True, True, False),
        "oracle": (True, True, True),
    }
    assert {policy.routing for policy in NAMED.values()} == {"least_loaded"}


@pytest.mark.parametrize(
    ("text", "mix", "routing"),
    [
        ("static:8xTP1", "8xTP1", "assigned"),
        ("static:8xTP1/least_loaded", "8xTP1", "least_loaded"),
        ("static:4xTP1+1xTP4", "4xTP1+1xTP4", "assigned"),
    ],
)
def test_a_static_policy_holds_on_to_its_layout(text: str, mix: str, routing: str) -> None:
    policy = parse_policy(text)
    assert (policy.name, policy.first, policy.routing) == (text, parse_mix(mix), routing)
    assert (policy.plans, policy.balances, policy.knows) == (False, False, False)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("orchestral", "did you mean 'orchestrl'"),
        ("static:8TP1", "not a layout"),
        ("static:8xTP1/least", "least_loaded"),
    ],
)
def test_another_name_is_refused_with_what_would_be_right(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_policy(text)


def test_by_default_a_user_takes_the_smallest_that_fits() -> None:
    assert str(smallest(compute(4, 2, 8), {"a": 8, "b": 8})) == "8xTP2"
    assert str(smallest(compute(1), {"a": 3, "b": 1})) == "4xTP1"
    with pytest.raises(UsageError, match="no layout fits the GPUs of a"):
        smallest(compute(), {"a": 8})


def test_requests_are_assigned_in_turn() -> None:
    found = assign(view(7), [f"r{row}" for row in range(7)])
    assert list(found.values()) == ["n:0", "n:1", "n:2", "n:0", "n:1", "n:2", "n:0"]


def test_only_who_knows_sends_the_longest_first() -> None:
    seen = view(4)
    assert order(seen) == ("r0", "r1", "r2", "r3")
    known = replace(seen, truth=np.array([5, 90, 5, 7]))
    assert order(known) == ("r1", "r3", "r0", "r2")


def test_only_who_knows_is_certain() -> None:
    seen = view(4)
    known = replace(seen, truth=np.array([5, 90, 5, 7]))
    assert foresee(known).expected.tolist() == [5, 90, 5, 7]
    assert len(set(foresee(seen).expected.round(6))) == 1  # nothing tells them apart


def test_a_policy_without_a_loop_does_not_look() -> None:
    seen = view(4)
    plan = decide(parse_policy("static:8xTP1"), seen, compute(1), Settings(), must=True)
    assert plan.wanted is None
    assert "does not plan" in plan.reason
    args = compute(1), Settings(), lambda *_: 0.0
    assert rebalance(parse_policy("proactive"), seen, *args) == ()


def test_a_policy_that_plans_says_what_to_begin_with() -> None:
    seen = view(4, instances=0)
    plan = decide(parse_policy("orchestrl"), seen, compute(1, 2), Settings(), must=True)
    assert plan.wanted is not None
    assert plan.wanted.gpus <= 8
