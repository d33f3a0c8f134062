"""What a run is asked: its files loaded, checked against each other, and laid out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UsageError
from harness.fabric.links import Plan
from harness.fabric.topology import Topology, topology_of
from harness.model.bench import Bench
from harness.model.load import (
    check_together,
    load_bench,
    load_generation,
    load_profile,
    load_scenario,
    with_engine,
)
from harness.model.scenario import Engine, Scenario
from harness.run.generation.asked import GenerationAsked, asked_of
from harness.run.plan import plan_all
from harness.run.rl.asked import TrainingAsked, training_asked


@dataclass(frozen=True)
class Asked:
    """A scenario and a bench, loaded, checked against each other, and laid out.

    `scenario_path` is None where no file asks, but the command line.
    """

    scenario_path: Path | None
    bench_path: Path
    scenario: Scenario
    bench: Bench
    topology: Topology
    plans: Mapping[str, Plan]
    generation: GenerationAsked | None = None
    training: TrainingAsked | None = None
    resume: Path | None = None
    """The checkpoint folder of an earlier run, from which loops go on."""


def load(scenario_path: Path, bench_path: Path | None, engine: Engine | None = None) -> Asked:
    """Load all files; raises `BadFile` or `UsageError` with all that is wrong. Opens nothing.

    `engine` generates instead of the one that the scenario names.
    """
    scenario = load_scenario(scenario_path)
    if engine is not None:
        scenario = with_engine(scenario, engine, scenario_path)
    if bench_path is None:
        if not scenario.bench:
            raise UsageError(f"{scenario_path}: names no bench; say which with --bench FILE")
        bench_path = scenario_path.parent / scenario.bench
    bench = load_bench(bench_path)
    files = None
    if scenario.generation is not None:
        files = load_generation(scenario.generation, nodes_are_here=bench.launcher != "manual")
    check_together(scenario, bench, scenario_path, files)
    topology = topology_of(bench)
    plans = plan_all(topology, scenario)
    generation = asked_of(scenario, bench, files)
    profile = scenario.training.profile if scenario.training else ""
    trained = load_profile(profile) if profile else None
    training = training_asked(scenario, bench, trained, generation)
    return Asked(scenario_path, bench_path, scenario, bench, topology, plans, generation, training)
