"""``harness calibrate generation`` as a user runs it, by the paced engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.model.layout import Layout
from harness.model.load import load_profile
from harness.model.profile import costs_of
from harness.model.steptime import step_ns
from tests.emulated.lab import LIMIT_S, Lab, lab

pytestmark = [pytest.mark.emulated, pytest.mark.root, pytest.mark.timeout(240)]

REPOSITORY = Path(__file__).parents[2]
PROFILE = REPOSITORY / "scenarios/profiles/qwen2.5-14b-h800.toml"
COMMAND = (
    "calibrate", "generation", "--bench", str(REPOSITORY / "scenarios/benches/generation-2.toml"),
    "--engine", "paced", "--profile", str(PROFILE), "--out", "profile.toml",
)  # fmt: skip
SMALL = ("--batch", "1,16", "--context", "128,1024", "--prefill", "256", "--steps", "9")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Lab]:
    with lab(tmp_path) as made:
        yield made


def test_the_paced_engine_is_measured_to_be_as_its_profile_says(bench: Lab) -> None:
    code, out = bench.harness(*COMMAND, *SMALL, "--runs", str(bench.runs))
    assert code == 0, out
    found, known = load_profile(bench.folder / "profile.toml"), load_profile(PROFILE)
    assert [table.tp for table in found.tables] == [1, 2]
    for table in found.tables:
        costs = costs_of(known, Layout(tp=table.tp))
        for batch, row in zip(table.batch, table.step_us, strict=True):
            for context, us in zip(table.context_tokens, row, strict=True):
                expected_us = step_ns(costs, batch, batch * context) / 1000
                assert us == pytest.approx(expected_us, rel=0.5), (table.tp, batch, context)
    summary = json.loads((bench.run_folder / "run.json").read_text())
    assert summary["status"] == "passed"
    assert len(bench.events("calibration")) == 2 * 5
    code, out = bench.harness(*COMMAND, "--runs", str(bench.runs))
    assert code == 2
    assert out.strip() == "harness: profile.toml: exists; --force writes over it"


def test_ctrl_c_ends_in_order_and_writes_no_profile(bench: Lab) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "harness", *COMMAND, "--steps", "500", "--runs", str(bench.runs)],
        cwd=bench.folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    bench.processes.append(process)
    bench.await_event(process, "calibration")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 4, out
    assert not (bench.folder / "profile.toml").exists()
    assert json.loads((bench.run_folder / "run.json").read_text())["status"] == "interrupted"
