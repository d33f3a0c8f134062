"""An arm of an rl step, as its results are called: ``POLICY@FABRIC``. Pure."""

from __future__ import annotations

from typing import Any, get_args

import msgspec

from harness.model.policies import parse_policy_name
from harness.model.scenario import Rl, Scenario
from harness.model.schema import did_you_mean

FABRICS: tuple[str, ...] = get_args(
    get_args({field.name: field.type for field in msgspec.structs.fields(Rl)}["fabrics"])[0]
)


def split_arm(arm: str) -> tuple[str, str]:
    """Return an arm's policy and fabric, "" where it names none.

    Raises `ValueError`, saying what would be right.
    """
    policy, at, fabric = arm.partition("@")
    if policy:
        parse_policy_name(policy.replace("*x", "1x"))  # as many instances as fit
    elif at:
        raise ValueError(f"{arm!r}: expected POLICY@FABRIC, such as orchestrl@rfabric")
    if at and fabric not in FABRICS:
        raise ValueError(f"no fabric {fabric!r}{did_you_mean(fabric, FABRICS)}")
    return policy, fabric


def with_arm(scenario: Scenario, arm: str) -> Scenario:
    """Return the scenario with this arm alone in its rl step ("": as it is), and without checks.

    Raises `ValueError` where it has not exactly one rl step.
    """
    scenario = msgspec.structs.replace(scenario, checks=())
    if not arm:
        return scenario
    loops = [step for step in scenario.steps if isinstance(step, Rl)]
    if len(loops) != 1:
        raise ValueError(f"has {len(loops)} rl steps; an arm is one of its only one")
    policy, fabric = split_arm(arm)
    fabrics: Any = (fabric,) if fabric else ()
    alone = msgspec.structs.replace(loops[0], policies=(policy,), fabrics=fabrics)
    steps = tuple(alone if step is loops[0] else step for step in scenario.steps)
    return msgspec.structs.replace(scenario, steps=steps)
