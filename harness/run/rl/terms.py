"""Whether a loop can go on from another's checkpoint: on the same terms, with steps to make. Pure.

What makes a sample, and what its age is measured by, must be as it was; how long things may take,
how many steps there are, and how layouts are looked for may be other.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from harness.model.fabric_rules import arms_of
from harness.model.scenario import Rl, Scenario

OF_TRAINING = ("mode", "layout", "model")
OF_STEP = ("policies", "fabrics", "prompts_per_step", "staleness_max")


def terms_of(scenario: Scenario, number: int) -> dict[str, str]:
    """Return what must stay, as key and JSON text, for the step with `number` through repeats."""
    index = number % len(scenario.steps)
    step, training = scenario.steps[index], scenario.training
    kinds = [type(step).__struct_config__.tag for step in scenario.steps]
    found: dict[str, object] = {"seed": scenario.seed, "steps[].do": kinds}
    if training is not None:
        found |= {f"training.{key}": getattr(training, key) for key in OF_TRAINING}
    if isinstance(step, Rl):
        found |= {f"steps[{index}].{key}": getattr(step, key) for key in OF_STEP}
    return {key: msgspec.json.encode(value).decode() for key, value in found.items()}


def against(
    terms: Mapping[str, str], scenario: Scenario, number: int, policy: int, version: int
) -> str:
    """Return why `scenario` cannot go on from a checkpoint with these `terms`; "" when it can.

    It was left at `version` under the policy of that index in the step with `number`.
    """
    if not scenario.steps:
        return "the scenario has no steps"
    here = terms_of(scenario, number)
    keys = [*terms, *(key for key in here if key not in terms)]
    wrong = [
        f"{key} was {terms.get(key, 'not there')}, and here it is {here.get(key, 'not there')}"
        for key in keys
        if terms.get(key) != here.get(key)
    ]
    if wrong:
        return f"the scenario is another: {'; '.join(wrong)}"
    if _ended(scenario, number, policy, version):
        return f"it has made all of its {version} steps; ask for more, to go on"
    return ""


def _ended(scenario: Scenario, number: int, policy: int, version: int) -> bool:
    """Tell whether no step of this loop is left, nor one of those that would follow it."""
    steps = scenario.steps * scenario.repeats
    if number >= len(steps):
        return True
    step = steps[number]
    assert isinstance(step, Rl)  # its terms are those of one
    last = policy == len(arms_of(step)) - 1 and number == len(steps) - 1
    return last and version >= step.steps
