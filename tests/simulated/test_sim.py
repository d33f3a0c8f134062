"""`harness sim` as a user calls it: the same journal each time, and an end that is always said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import entry
from harness.errors import BadFile, UsageError
from harness.model.documents import RunSummary
from harness.model.load import load_bench
from harness.run.asked import Simulation

ROOT = Path(__file__).parents[2]
SCENARIOS = ROOT / "scenarios"
CALIBRATION = SCENARIOS / "calibrations" / "h800.toml"

BENCH = f"""
name = "small"
world = "simulated"
[generated]
fabric = "rfabric"
gpus = 32
gpus_per_server = 8
[simulation]
calibration = "{CALIBRATION}"
"""

SCENARIO = f"""
question = "Is it the same each time?"
bench = "bench.toml"
seed = SEED
timeout_s = TIMEOUT_S
[generation]
layout = "*xTP2"
workload = "workload.toml"
profile = "{SCENARIOS / "profiles" / "qwen2.5-14b-h800.toml"}"
bytes_scale = 1.0
[training]
layout = "DP*TP8"
bytes_scale = 1.0
[[steps]]
do = "rl"
steps = 2
policies = ["orchestrl"]
fabrics = ["rfabric"]
sync = "pairs"
balance_ms = 1000.0
[[checks]]
metric = "sync.failed"
at_most = 0.0
"""

WORKLOAD = """
question = "Some responses, of which a few are long."
kind = "generator"
seed = SEED
steps = 2
prompts = 4
samples = 4
cap_tokens = 1024
[prompt_tokens]
p50 = 170
[response_tokens]
p50 = 200
p90 = 900
"""


def asked(folder: Path, *, seed: int = 1, timeout_s: float = 3600.0, bench: str = BENCH) -> Path:
    """Write the files; return the scenario's."""
    folder.mkdir(parents=True, exist_ok=True)
    text = SCENARIO.replace("SEED", str(seed)).replace("TIMEOUT_S", str(timeout_s))
    (folder / "scenario.toml").write_text(text)
    (folder / "workload.toml").write_text(WORKLOAD.replace("SEED", str(seed)))
    (folder / "bench.toml").write_text(bench)
    return folder / "scenario.toml"


def simulated(scenario: Path, runs: Path, calibration: Path | None = None) -> RunSummary:
    return entry.run_scenario(scenario, None, runs, simulation=Simulation(calibration))


def journal(runs: Path) -> bytes:
    return (runs / "latest" / "journal.jsonl").read_bytes()


@pytest.mark.parametrize("seed", range(20))
def test_the_same_files_and_seed_give_the_same_journal(tmp_path: Path, seed: int) -> None:
    scenario = asked(tmp_path, seed=seed)
    for runs in ("a", "b"):
        summary = simulated(scenario, tmp_path / runs)
        assert summary.status == "passed", summary.reason
    assert journal(tmp_path / "a") == journal(tmp_path / "b")
    assert b'"stream":"rl_step"' in journal(tmp_path / "a")


def test_it_is_the_same_in_another_process_whose_hashes_are_others(tmp_path: Path) -> None:
    scenario = asked(tmp_path)
    for runs in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-m", "harness", "sim", scenario, "--runs", tmp_path / runs],
            env=os.environ | {"PYTHONHASHSEED": runs, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "simulated bench: agents, switches and network are models" in done.stdout
    assert journal(tmp_path / "1") == journal(tmp_path / "2")


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    for seed in (1, 2):
        simulated(asked(tmp_path / str(seed), seed=seed), tmp_path / f"runs{seed}")
    assert journal(tmp_path / "runs1") != journal(tmp_path / "runs2")


def test_a_scenario_that_does_not_end_says_who_is_waited_for(tmp_path: Path) -> None:
    summary = simulated(asked(tmp_path, timeout_s=3.0), tmp_path / "runs")
    assert summary.status in ("failed", "infrastructure")
    assert "timeout_s" in summary.reason
    assert summary.stopped is not None


def test_an_emulated_bench_can_be_simulated_as_it_is(tmp_path: Path) -> None:
    summary = entry.run_scenario(
        SCENARIOS / "quickstart.toml", None, tmp_path, simulation=Simulation(CALIBRATION)
    )
    assert summary.world == "simulated"
    assert summary.counts["reconfigure"] > 0
    assert set(summary.restored.values()) <= {"restored", "unchanged"}


def test_a_live_bench_is_not_simulated(tmp_path: Path) -> None:
    live = """
name = "real"
world = "live"
listen = "127.0.0.1:5555"
launcher = "local"
[nodes.a]
tor = "t"
host = "a"
interface = "eth1"
address = "10.0.0.1"
[tors.t]
"""
    with pytest.raises(UsageError, match='world = "live" is not simulated'):
        simulated(asked(tmp_path, bench=live), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_without_a_calibration_it_says_how_to_get_one(tmp_path: Path) -> None:
    text = (SCENARIOS / "benches" / "two-tier.toml").read_text()
    bench, table, _ = text.partition("[simulation]")
    assert table, "it names one, and stands at the file's end"
    (tmp_path / "emulated.toml").write_text(bench)
    scenario = asked(tmp_path)
    with pytest.raises(UsageError, match=r"none is named: write\s+\[simulation\]"):
        entry.run_scenario(
            scenario, tmp_path / "emulated.toml", tmp_path / "runs", simulation=Simulation()
        )


def test_a_calibration_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"nowhere\.toml"):
        simulated(asked(tmp_path), tmp_path / "runs", tmp_path / "nowhere.toml")


def test_what_lies_beyond_the_calibration_is_told_first(tmp_path: Path) -> None:
    path = tmp_path / "narrow.toml"
    text = CALIBRATION.read_text()
    path.write_text(
        text.replace("date = ", "fitted = { nodes = { low = 1, high = 2 } }\ndate = ", 1)
    )
    summary = simulated(asked(tmp_path), tmp_path / "runs", path)
    assert any("extrapolated" in note and "nodes 4" in note for note in summary.notes)


def test_seeds_of_a_sweep_draw_requests_of_their_own(tmp_path: Path) -> None:
    scenario = asked(tmp_path)
    bench = load_bench(tmp_path / "bench.toml")
    tokens = {
        seed: sum(
            metric.value
            for name, metric in entry.simulate(scenario, bench, seed=seed).metrics.items()
            if name.startswith("rl.tokens_per_s[")
        )
        for seed in (1, 2, 1)
    }
    assert tokens[1] != tokens[2]
