"""The bench of a point: its values, over the ``[generated]`` table of a bench file if it names one.

Of that file, the table ``[simulation]`` is taken too, and nothing else.
"""

from __future__ import annotations

from typing import Any

import msgspec

from harness.errors import BadFile
from harness.model.bench import Bench, Generated, Simulation
from harness.model.generated_rules import expanded, generated_problems
from harness.model.load import load_bench
from harness.model.schema import examine
from harness.sweeps.point import Point

NAME = "sweep"
WHERE = "bench of this point"


def bench_of(point: Point) -> Bench:
    """Return the whole bench of a point; its table `generated` is still there.

    Raises `BadFile` with all that is wrong with it.
    """
    stated, simulation = file_tables(point.bench)
    generated, problems = examine({**stated, **point.values}, Generated)
    if generated is None or problems:
        raise BadFile(WHERE, [f"generated.{problem}" for problem in problems])
    if point.calibration:
        simulation = Simulation(calibration=point.calibration)
    bench = Bench(name=NAME, world="simulated", generated=generated, simulation=simulation)
    if problems := list(generated_problems(bench)):
        raise BadFile(WHERE, problems)
    return expanded(bench)


def file_tables(path: str) -> tuple[dict[str, Any], Simulation]:
    """Return what a bench file says in ``[generated]``, and its ``[simulation]``; "": nothing.

    Raises `BadFile` for one that is no good, or has no such table.
    """
    if not path:
        return {}, Simulation()
    bench = load_bench(path)
    if bench.generated is None:
        raise BadFile(path, ["generated: missing; a sweep changes the numbers of this table"])
    stated = msgspec.to_builtins(bench.generated)
    there = {key: list(value) if isinstance(value, tuple) else value
             for key, value in stated.items() if value is not None}  # fmt: skip
    return there, bench.simulation
