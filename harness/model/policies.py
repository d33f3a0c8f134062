"""Names of policies, as a scenario writes them: ``orchestrl``, ``static:4xTP1+1xTP4``. Pure.

What each of them decides is in `harness.scheduling.policies`.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from harness.model.layout import Mix, parse_mix
from harness.model.schema import did_you_mean

BEST_STATIC = "best_static"
ORACLE = "oracle"
POLICIES = ("orchestrl", "proactive", "reactive", ORACLE, BEST_STATIC)
"""Those that choose a layout by themselves; ``static:LAYOUT`` is given its own."""
STATIC = "static"
ASSIGNED: Final = "assigned"
LEAST_LOADED: Final = "least_loaded"


class PolicyName(NamedTuple):
    """A name taken apart; `mix` and `routing` are those that ``static`` holds on to."""

    name: str
    mix: Mix | None = None
    routing: Literal["assigned", "least_loaded"] = ASSIGNED


def parse_policy_name(text: str) -> PolicyName:
    """Read one of `POLICIES`, or ``static:LAYOUT``, with ``/least_loaded`` behind it or not.

    Raises `ValueError`, saying what would be right.
    """
    if text in POLICIES:
        return PolicyName(text)
    name, _, held = text.partition(":")
    if name != STATIC:
        raise ValueError(f"no policy {text!r}{did_you_mean(text, (*POLICIES, 'static:LAYOUT'))}")
    layout, slash, routing = held.partition("/")
    if slash and routing not in (ASSIGNED, LEAST_LOADED):
        raise ValueError(f'{text!r}: behind a layout stands "/{LEAST_LOADED}", or nothing')
    mix = parse_mix(layout)
    return PolicyName(STATIC, mix, LEAST_LOADED if routing == LEAST_LOADED else ASSIGNED)
