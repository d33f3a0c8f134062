"""What a run is asked: its files loaded, checked against each other, and laid out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from harness.errors import BadFile, UsageError
from harness.fabric.links import Plan
from harness.fabric.topology import Topology, topology_of
from harness.model.bench import Bench
from harness.model.filling import filled
from harness.model.load import (
    check_together,
    load_bench,
    load_calibration,
    load_generation,
    load_profile,
    load_scenario,
    with_engine,
)
from harness.model.scenario import Engine, Scenario
from harness.model.simulation import Calibration
from harness.run.generation.asked import GenerationAsked, asked_of
from harness.run.plan import plan_all
from harness.run.rl.asked import TrainingAsked, training_asked


@dataclass(frozen=True)
class Asked:
    """A scenario and a bench, loaded, checked against each other, and laid out.

    `scenario_path` is None where no file asks, but the command line; `bench_path` where a bench is
    of no file, but one of a sweep.
    """

    scenario_path: Path | None
    bench_path: Path | None
    scenario: Scenario
    bench: Bench
    topology: Topology
    plans: Mapping[str, Plan]
    generation: GenerationAsked | None = None
    training: TrainingAsked | None = None
    resume: Path | None = None
    """The checkpoint folder of an earlier run, from which loops go on."""
    figures: Calibration | None = None
    """What a simulated bench takes its times from."""


@dataclass(frozen=True)
class Simulation:
    """That a scenario is to be simulated; `calibration`: by this file, not the bench file's."""

    calibration: Path | None = None


def load(
    scenario_path: Path,
    bench_path: Path | None,
    engine: Engine | None = None,
    simulation: Simulation | None = None,
) -> Asked:
    """Load all files; raises `BadFile` or `UsageError` with all that is wrong. Opens nothing.

    `engine` generates instead of the one that the scenario names. With `simulation` the bench is
    taken into the simulated world, as it is by itself where its file says so.
    """
    scenario = load_scenario(scenario_path)
    if engine is not None:
        scenario = with_engine(scenario, engine, scenario_path)
    if bench_path is None:
        if not scenario.bench:
            raise UsageError(f"{scenario_path}: names no bench; say which with --bench FILE")
        bench_path = scenario_path.parent / scenario.bench
    bench = load_bench(bench_path)
    if simulation is not None:
        bench = _into_simulation(bench, bench_path)
    return lay_out(scenario, bench, scenario_path, bench_path, simulation)


def lay_out(
    scenario: Scenario,
    bench: Bench,
    scenario_path: Path,
    bench_path: Path | None = None,
    simulation: Simulation | None = None,
    *,
    draw: int = 0,
) -> Asked:
    """Check a scenario and a bench against each other; paths say where each is from.

    Each `draw` has requests of its own. Raises as `load` does, for the files that these name.
    """
    named = bench_path or Path(bench.name)
    figures = _figures(bench, named, simulation) if bench.world == "simulated" else None
    try:
        scenario, files = filled(scenario, bench), None
    except UsageError as error:
        raise BadFile(str(scenario_path), [str(error)]) from error
    if scenario.generation is not None:
        here = bench.launcher != "manual"
        files = load_generation(scenario.generation, nodes_are_here=here, bench=bench, draw=draw)
    check_together(scenario, bench, scenario_path, files)
    topology = topology_of(bench)
    plans = plan_all(topology, scenario)
    generation = asked_of(scenario, bench, files)
    profile = scenario.training.profile if scenario.training else ""
    trained = load_profile(profile) if profile else None
    training = training_asked(scenario, bench, trained, generation)
    asked = Asked(scenario_path, bench_path, scenario, bench, topology, plans)
    return replace(asked, generation=generation, training=training, figures=figures)


def _into_simulation(bench: Bench, path: Path) -> Bench:
    """Return the bench as the simulator takes it; raises `UsageError` for a live one."""
    if bench.world == "live":
        raise UsageError(
            f'{path}: world = "live" is not simulated: what is there would be guessed at. Copy the '
            'file, write world = "simulated", and name a calibration that was made of its runs '
            "(harness calibrate run RUN)"
        )
    return msgspec.structs.replace(bench, world="simulated", launcher="manual")


def _figures(bench: Bench, path: Path, simulation: Simulation | None) -> Calibration:
    """Return what the simulation takes its times from; raises `UsageError` where nothing says."""
    named = bench.simulation.calibration
    found = simulation.calibration if simulation else None
    if found is None and not named:
        raise UsageError(
            f"{path}: a simulation takes its times from a calibration, and none is named: write "
            '[simulation] with calibration = "FILE" here, or say --calibration FILE; '
            "`harness calibrate run RUN --out FILE` makes one of runs"
        )
    return load_calibration(found or Path(named))
