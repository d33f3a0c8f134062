"""The scenarios, benches, workloads and profiles of the house are good, and fit each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import BadFile
from harness.model.filling import filled
from harness.model.layout import infeasible, parse_layout
from harness.model.load import (
    load_bench,
    load_profile,
    load_scenario,
    load_workload,
    requests_of,
)
from harness.model.profile import costs_of, gpu_of
from harness.model.scenario import Engine
from harness.model.steptime import step_ns
from harness.run.asked import load

SCENARIOS = Path(__file__).parents[2] / "scenarios"
BENCHES = sorted((SCENARIOS / "benches").glob("*.toml"))
PROFILES = sorted((SCENARIOS / "profiles").glob("*.toml"))
WORKLOADS = sorted((SCENARIOS / "workloads").glob("*.toml"))


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_scenario_can_be_asked_of_its_own_bench(path: Path) -> None:
    scenario, asked = load_scenario(path), load(path, None)
    assert asked.scenario == filled(scenario, asked.bench)
    first_line = path.read_text().splitlines()[0]
    assert first_line == f'question = "{scenario.question}"', "a scenario opens with its question"


@pytest.mark.parametrize("path", BENCHES, ids=lambda path: path.stem)
def test_every_bench_can_be_asked_something(path: Path) -> None:
    bench = load_bench(path)
    problems = []
    for scenario in sorted(SCENARIOS.glob("*.toml")):
        try:
            assert load(scenario, path).bench == bench
        except BadFile as error:
            problems.append(str(error))
        else:
            return
    pytest.fail("\n".join(problems))


@pytest.mark.parametrize("engine", ["paced", "vllm"])
def test_either_engine_can_switch_layouts(engine: Engine) -> None:
    for bench in (None, SCENARIOS / "benches/lab.toml"):
        asked = load(SCENARIOS / "parallelism-switch.toml", bench, engine).generation
        assert asked
        assert asked.spec.engine == engine
        assert (asked.spec.profile is None) == (engine == "vllm")


@pytest.mark.parametrize("path", WORKLOADS, ids=lambda path: path.stem)
def test_every_workload_opens_with_its_question_and_gives_requests(path: Path) -> None:
    text = path.read_text()
    workload = load_workload(path)
    assert text.splitlines()[0] == f'question = "{workload.question}"'
    assert "# Source: " in text, "a workload says where its statistics come from"
    replay = requests_of(workload)
    assert replay.requests
    assert replay.digest == requests_of(workload).digest


def test_the_published_archetypes_are_all_there() -> None:
    assert {"heavy-tail", "cap-saturated", "tight-runaways", "multi-turn"} <= {
        path.stem for path in WORKLOADS
    }


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_every_profile_says_what_it_is_and_times_a_layout_that_fits(path: Path) -> None:
    profile = load_profile(path)
    first_line = path.read_text().splitlines()[0]
    assert first_line == (
        f"# How fast {profile.model} generates on {profile.gpu.name}-class GPUs: a latency profile,"
        " derived from public figures."
    )
    assert path.stem == f"{profile.model}-{profile.gpu.name}".lower()
    layout = parse_layout("1xTP8")
    assert infeasible(layout, profile.shape, gpu_of(profile), 8, 8) == []
    assert 1e6 < step_ns(costs_of(profile, layout), 1, 1000) < 1e8


def test_the_named_models_have_profiles() -> None:
    assert {path.stem for path in PROFILES} >= {
        "qwen2.5-14b-h800",
        "qwen2.5-32b-h800",
        "qwen3-235b-a22b-h800",
    }
