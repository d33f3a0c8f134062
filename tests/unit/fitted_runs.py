"""Runs whose figures are known: simulated by a calibration, and told as if they were measured."""

from __future__ import annotations

from pathlib import Path

from harness import entry
from harness.model.load import load_calibration
from harness.model.simulation import Calibration
from harness.record.store import RunFolder
from harness.run.asked import Simulation

SCENARIOS = Path(__file__).parents[2] / "scenarios"
HERE = Path(__file__).parent / "fitted"
TRUE_TEXT = """
name = "true"
date = "2026-11-30"
runs = ["made up"]
one_machine = true

[network]
link_share = { value = 0.93 }
electrical_share = { value = 0.88 }
latency_us = { value = 40.0 }
burst_kb = { value = 60.0 }

[control]
message_us = { value = 700.0 }
steer_us = { value = 450.0 }
read_ms = { value = 30.0 }
switch_ms = { value = 1.5 }
light_ms = { value = 2.0 }
serial_ms = { value = 25.0 }
ssh_ms = { value = 6.0 }
hand_ms = { value = 0.8 }

[collectives]
backend = "gloo"
step_us = { value = 150.0 }
copy_ns_per_kb = { value = 0.0 }

[generation]
processes_s = { value = 3.0 }
teardown_s = { value = 0.004 }
groups_s = { value = 0.012 }
weights_fixed_s = { value = 0.003 }
weights_gb_per_s = { value = 0.2 }
kv_cache_s = { value = 0.002 }
kv_fixed_s = { value = 0.001 }
kv_gb_per_s = { value = 0.02 }
step_share = { value = 1.05 }

[training]
compute_share = { value = 1.1 }
phase_us = { value = 900.0 }
step_fixed_s = { value = 0.03 }

[sync]
gather_fixed_s = { value = 0.02 }
gather_gb_per_s = { value = 0.4 }
carry_fixed_s = { value = 0.015 }
carry_gb_per_s = { value = 0.08 }
bucket_us = { value = 0.0 }
load_fixed_s = { value = 0.01 }
load_gb_per_s = { value = 0.25 }
"""
QUICK = SCENARIOS / "quickstart.toml"
SWITCHES = HERE / "switches.toml"
LOOP = HERE / "loop.toml"


def true_calibration(folder: Path) -> Calibration:
    """Write the known figures into a folder, and return them."""
    path = folder / "true.toml"
    path.write_text(TRUE_TEXT)
    return load_calibration(path)


def measured(folder: Path, scenario: Path, *, world: str = "emulated") -> RunFolder:
    """Simulate a scenario by the known figures; its journal says that it was measured."""
    true_calibration(folder)
    summary = entry.run_scenario(
        scenario, None, folder, simulation=Simulation(folder / "true.toml")
    )
    assert summary.exit_code == 0, summary.reason
    run = RunFolder((folder / "latest").resolve())
    journal = run.journal.read_bytes()
    told = journal.replace(b'"world":"simulated"', f'"world":"{world}"'.encode(), 1)
    run.journal.write_bytes(told)
    return run
