"""The points of a sweep: every design at every place, as far as its rules allow.

Designs vary fastest, and the last axis before the first: what is compared is made side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from harness.errors import BadFile, NothingRan
from harness.model.bench import Generated
from harness.model.load import load_scenario, load_workload
from harness.model.schema import examine
from harness.model.workload import TraceWorkload
from harness.sweeps.arm import with_arm
from harness.sweeps.bench import file_tables
from harness.sweeps.point import Point, Scalar, digest_of, our_version
from harness.sweeps.sweep import DESIGN, SEED, Rule, Sweep

Place = Mapping[str, Scalar]
"""A value of each axis."""


@dataclass(frozen=True)
class Cell:
    """A design at a place, with a point for each seed. What its design ignores is in `place`."""

    design: str
    place: Place
    points: tuple[Point, ...]


def cells_of(sweep: Sweep, path: str | Path = "sweep") -> tuple[Cell, ...]:
    """Return all cells, in order.

    Raises `BadFile` for a file that the sweep names and that is no good, or naming `path`, the
    sweep's own, for values that no bench has; and `NothingRan` where no combination is left.
    """
    files, version = files_of(sweep), our_version()
    cells = tuple(
        Cell(name, place, points)
        for place in places_of(sweep)
        for name in sweep.designs
        if (points := tuple(_points(sweep, name, place, files, version)))
    )
    if not cells:
        raise NothingRan("the rules [[only]] and [[skip]] leave no combination to make")
    if problems := list(_mistaken(sweep, cells)):
        raise BadFile(str(path), problems)
    return cells


def _mistaken(sweep: Sweep, cells: Iterable[Cell]) -> Iterator[str]:
    """Yield what no bench could have, by its type or word alone: a mistake in the sweep's file.

    What cannot be for other reasons, as GPUs that cannot be dealt, is a failure of its point.
    """
    stated, _ = file_tables(sweep.bench)
    found = dict[str, str]()
    for cell in cells:
        for problem in examine({**stated, **cell.points[0].values}, Generated)[1]:
            found.setdefault(problem, cell.design)
    return (f"designs.{design}: {problem}" for problem, design in found.items())


def points_of(cells: Iterable[Cell]) -> list[Point]:
    """Return the points of cells, each once."""
    points = {point.key: point for cell in cells for point in cell.points}
    return list(points.values())


def places_of(sweep: Sweep) -> list[Place]:
    """Return every combination of values of axes."""
    return [dict(zip(sweep.axes, values, strict=True)) for values in product(*sweep.axes.values())]


def _points(
    sweep: Sweep, name: str, place: Place, files: dict[str, str], version: str
) -> Iterator[Point]:
    design = sweep.designs[name]
    matters = {axis: value for axis, value in place.items() if axis not in design.ignores}
    for seed in sweep.seeds:
        if not _is_made(sweep, {DESIGN: name, SEED: seed, **place}):
            continue
        yield Point(
            scenario=sweep.scenario,
            bench=sweep.bench,
            calibration=sweep.calibration,
            values={**sweep.base, **matters, **design.bench},
            arm=design.arm,
            seed=seed,
            files=files,
            version=version,
            timeout_s=sweep.timeout_s,
            memory_gb=sweep.memory_gb,
        )


def _is_made(sweep: Sweep, where: Mapping[str, Scalar]) -> bool:
    wanted = not sweep.only or any(_fits(rule, where) for rule in sweep.only)
    return wanted and not any(_fits(rule, where) for rule in sweep.skip)


def _fits(rule: Rule, where: Mapping[str, Scalar]) -> bool:
    return all(where[key] in values for key, values in rule.items())


def files_of(sweep: Sweep) -> dict[str, str]:
    """Return every file that decides results, with its digest, always in the same order.

    Raises `BadFile` for one that cannot be read, or a scenario that has no such arm.
    """
    scenario = load_scenario(sweep.scenario)
    for name, design in sweep.designs.items():
        try:
            with_arm(scenario, design.arm)
        except ValueError as error:
            raise BadFile(sweep.scenario, [f"{error} (design {name!r})"]) from error
    _, simulation = file_tables(sweep.bench)
    calibration = sweep.calibration or simulation.calibration
    if not calibration:
        raise BadFile(sweep.bench, ["simulation.calibration: missing, and the sweep names none"])
    named = [sweep.scenario, sweep.bench, calibration]
    if generation := scenario.generation:
        workload = load_workload(generation.workload)
        named += [generation.workload, generation.profile]
        named += [workload.path] if isinstance(workload, TraceWorkload) else []
    if training := scenario.training:
        named.append(training.profile)
    return {path: digest_of(Path(path)) for path in named if path}
