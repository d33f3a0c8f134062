"""How a point is made: the scenario with one arm, on the bench of the point, in virtual time."""

from __future__ import annotations

from pathlib import Path

from harness import entry
from harness.errors import ExitCode, StepFailed
from harness.model.documents import RunSummary
from harness.sweeps.arm import with_arm
from harness.sweeps.bench import bench_of
from harness.sweeps.point import Measured, Point, Step, Value


def measure(point: Point) -> Measured:
    """Simulate a point. Raises `BadFile` where its bench is refused, `StepFailed` where it failed.

    Every metric of the run is kept: what a sweep shows of them may change later.
    """
    summary = entry.simulate(
        Path(point.scenario),
        bench_of(point),
        seed=point.seed,
        overrides=lambda scenario: with_arm(scenario, point.arm),
    )
    if summary.exit_code != ExitCode.PASSED:  # inconclusive, having no checks, is good enough
        raise StepFailed(f"{summary.status}: {summary.reason or 'no reason is given'}")
    metrics = {
        name: Value(value=one.value, unit=one.unit, n=one.n, plus_minus=one.plus_minus)
        for name, one in summary.metrics.items()
    }
    return Measured(metrics=metrics, notes=summary.notes, steps=steps_of(summary))


def steps_of(summary: RunSummary) -> tuple[Step, ...]:
    """Return when the parts of each step were under way; none where no loop was run."""
    if not summary.loops:
        return ()
    return tuple(
        Step(
            begin_s=step.begin_s,
            batch_end_s=step.batch_end_s,
            train_begin_s=step.train_begin_s,
            train_end_s=step.train_end_s,
            sync_end_s=step.sync_end_s,
        )
        for step in summary.loops[0].steps
    )
