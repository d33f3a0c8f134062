"""What a trace is replayed on: a bench, its circuits, and what times are taken from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from harness.errors import UsageError
from harness.fabric.circuits import plan_shape
from harness.fabric.links import Link
from harness.fabric.topology import Topology, topology_of
from harness.model.bench import Bench, Role
from harness.model.load import load_bench, load_calibration
from harness.model.scenario import Shape
from harness.model.simulation import Calibration
from harness.rlsim.tables import Table

Circuits = Literal["dark", "ring", "pairs"]


@dataclass(frozen=True)
class Ground:
    """What a trace is replayed on. `lit`: the circuits, which stay; `speeds`: by node."""

    bench: Bench
    topology: Topology
    figures: Calibration
    pod: Role | None = None
    circuits: Circuits = "dark"
    lit: frozenset[Link] = frozenset()
    speeds: Mapping[str, float] = field(default_factory=dict)
    tables: Sequence[Table] = ()

    def speed(self, node: str) -> float:
        """Return how fast a node computes: as was said, else by the bench, else as the trace."""
        return self.speeds.get(node, self.bench.nodes[node].speed)


def ground_of(
    bench_path: Path,
    calibration: Path | None = None,
    *,
    pod: Role | None = None,
    circuits: Circuits = "dark",
    speeds: Mapping[str, float] | None = None,
    tables: Sequence[Table] = (),
) -> Ground:
    """Load a bench and its calibration, or another one.

    Raises `BadFile`; `UsageError` for a live bench, without a calibration, for a node that is not
    there, and for circuits that the bench has no ports for.
    """
    bench = load_bench(bench_path)
    if bench.world == "live":
        raise UsageError(
            f'{bench_path}: world = "live": a trace is not replayed on hardware; copy the file'
            ' and write world = "simulated"'
        )
    bench = msgspec.structs.replace(bench, world="simulated", launcher="manual")
    named = calibration or (bench.simulation.calibration and Path(bench.simulation.calibration))
    if not named:
        raise UsageError(
            f"{bench_path}: names no calibration, from which times are taken: write [simulation]"
            ' with calibration = "FILE" there, or say --calibration FILE'
        )
    topology = topology_of(bench)
    for node, speed in (speeds or {}).items():
        topology.nics_at(node)  # raises where there is no such node
        if not speed > 0:
            raise UsageError(f"--speed {node}={speed:g}: expected more than 0")
    lit = plan_shape(topology, circuits, Shape(template=circuits)).links
    if circuits != "dark" and not lit:
        raise UsageError(f"{bench_path}: --circuits {circuits}: no two ToRs can be joined by any")
    figures = load_calibration(named)
    return Ground(bench, topology, figures, pod, circuits, lit, speeds or {}, tables)
