"""What a run would do, in words: every step, circuit and device command; nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from drivers.base import EMPTY, Delta, Matching
from drivers.catalog import preview
from harness.clock import NS_PER_MS
from harness.fabric.circuits import Plan, plan_shape
from harness.fabric.topology import Topology
from harness.model.bench import Bench
from harness.model.scenario import Collectives, Reconfigure, Scenario, Shift

SERIAL_BITS_PER_BYTE = 10


def plan_all(topology: Topology, scenario: Scenario) -> dict[str, Plan]:
    """Plan every shape of the scenario; raises `UsageError` naming the first that cannot be."""
    return {name: plan_shape(topology, name, shape) for name, shape in scenario.shapes.items()}
