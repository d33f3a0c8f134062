"""What must hold for circuits that follow the work: in the scenario, and on a bench. Pure.

Each rule yields problems as ``key.path: what is wrong and what would be right``. No rule raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from harness.model.bench import Bench
from harness.model.generation_rules import each_once
from harness.model.scenario import Fabric, Rl, Scenario
from harness.model.schema import did_you_mean

MS_MAX = 10_000.0
CIRCUITS = ("static", "rfabric")
"""Fabrics that need an optical switch."""


class Arm(NamedTuple):
    """One run of an rl step's loop: a policy, and over which fabric; "" leaves circuits alone."""

    policy: str
    fabric: Literal["", "electrical", "static", "rfabric", "ideal"] = ""

    def __str__(self) -> str:
        return f"{self.policy}@{self.fabric}" if self.fabric else self.policy


def arms_of(step: Rl) -> tuple[Arm, ...]:
    """Return a step's arms: each policy over each of its fabrics, in the order they run."""
    return tuple(
        Arm(policy, fabric) for policy in step.policies for fabric in step.fabrics or ("",)
    )


def fabric_problems(scenario: Scenario) -> Iterator[str]:
    """Yield all problems of the table ``[fabric]``."""
    fabric: Fabric = scenario.fabric
    if not 0 <= fabric.gain_min_pct < 100:
        yield "fabric.gain_min_pct: expected 0 or more, and less than 100"
    for key in ("rest_ms", "settle_ms"):
        if not 0 <= getattr(fabric, key) <= MS_MAX:
            yield f"fabric.{key}: expected 0 to {MS_MAX:g}"
    if fabric.static and fabric.static not in scenario.shapes:
        near_by = did_you_mean(fabric.static, scenario.shapes)
        yield f"fabric.static: no shape {fabric.static!r}{near_by}"
    used = {fabric for step in scenario.steps if isinstance(step, Rl) for fabric in step.fabrics}
    if fabric != Fabric() and not used:
        yield (
            'fabric: no step makes use of it; give an rl step fabrics = ["electrical", "rfabric"]'
        )
    elif fabric.static and "static" not in used:
        yield 'fabric.static: no step runs over "static"; list it in fabrics, or leave this out'


def fabrics_problems(where: str, step: Rl) -> Iterator[str]:
    """Yield the problems of one step's ``fabrics``."""
    yield from each_once(f"{where}.fabrics", step.fabrics)


def fabrics_on(where: str, step: Rl, bench: Bench) -> Iterator[str]:
    """Yield why a bench cannot give a step its fabrics."""
    needing = [fabric for fabric in step.fabrics if fabric in CIRCUITS]
    if needing and not bench.cables:
        yield (
            f"{where}.fabrics: {needing[0]!r} needs optical switches, and bench {bench.name!r} has "
            'none that is cabled; keep "electrical" and "ideal"'
        )
    if bench.links.electrical == "none" and (without := set(step.fabrics) - set(CIRCUITS)):
        yield (
            f"{where}.fabrics: {min(without)!r} uses no circuit, and bench {bench.name!r} has no "
            'electrical path; keep "static" and "rfabric"'
        )
    unsteered = [tor for tor, stated in bench.tors.items() if stated.driver == "none"]
    if needing and bench.cables and bench.world == "emulated" and unsteered:
        yield (
            f"{where}.fabrics: {needing[0]!r} needs steered ToRs, for an emulated one uses no "
            f'circuit by itself; give {", ".join(unsteered)} driver = "netlink" or "linux-ssh"'
        )
    if "ideal" in step.fabrics and bench.world == "live":
        yield (
            f'{where}.fabrics: "ideal" is a network that a live bench cannot become, as emulated '
            "and simulated ones can; leave it out"
        )
