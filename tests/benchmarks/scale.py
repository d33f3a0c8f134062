"""One RL step of 64 to 8,192 GPUs, simulated: processor time, memory, and how they grow.

Each scale is a process of its own: `harness sim` of a generated RFabric bench, half of whose GPUs
train, with one step of the loop over circuits that follow the phases. Its time is what the process
took in all, from its start to its report.
"""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCENARIOS = ROOT / "scenarios"
SCALES = (64, 256, 1024, 2048, 8192)
LIMIT_S = 600
MARK_GPUS, MARK_S, MARK_MB = 2048, 10.0, 2000.0
POLICY = "static:*xTP2"

BENCH = """
name = "scale"
world = "simulated"
[generated]
fabric = "rfabric"
gpus = {gpus}
gpus_per_server = 8
roles = ["train", "generate"]
oversubscription = 4.0
switching_ms = 10.0
[simulation]
calibration = "{calibration}"
"""


def run() -> dict[str, Any]:
    rows = [_measured(gpus) for gpus in SCALES]
    for row in rows[1:]:
        before = rows[0]
        n, m = row["gpus"], before["gpus"]
        row["n_log_n"] = (n * math.log2(n)) / (m * math.log2(m))
        row["grown"] = row["cpu_s"] / before["cpu_s"]
    marked = next(row for row in rows if row["gpus"] == MARK_GPUS)
    return {
        "rows": rows,
        "mark_s": MARK_S,
        "mark_mb": MARK_MB,
        "held": marked["wall_s"] < MARK_S
        and marked["peak_mb"] < MARK_MB
        and all(row["grown"] <= row["n_log_n"] for row in rows[1:]),
    }


def _measured(gpus: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bench = folder / "bench.toml"
        calibration = SCENARIOS / "calibrations" / "h800.toml"
        bench.write_text(BENCH.format(gpus=gpus, calibration=calibration))
        text = (SCENARIOS / "rl-simulated.toml").read_text()
        for old, new in (
            ("steps = 3", "steps = 1"),
            ('policies = ["static:*xTP2", "orchestrl"]', f'policies = ["{POLICY}"]'),
            ('fabrics = ["electrical", "rfabric"]', 'fabrics = ["rfabric"]'),
            ('"workloads/', f'"{SCENARIOS}/workloads/'),
            ('"profiles/', f'"{SCENARIOS}/profiles/'),
        ):
            assert old in text, old
            text = text.replace(old, new)
        (folder / "scenario.toml").write_text(text)
        return {"gpus": gpus} | _timed(folder)


def _timed(folder: Path) -> dict[str, Any]:
    argv = [
        sys.executable, "-m", "harness", "sim", "scenario.toml", "--bench", "bench.toml",
        "--runs", "runs", "--quiet", "--json",
    ]  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin_s = os.times().elapsed
    done = subprocess.run(
        [*argv],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    wall_s = os.times().elapsed - begin_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    summary = json.loads(done.stdout)
    step_s = next(v["value"] for k, v in summary["metrics"].items() if k.startswith("rl.step_s["))
    return {
        "simulated_s": step_s,
        "samples": round(_metric(summary, "rl.samples_per_s[") * step_s),
        "wall_s": wall_s,
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak_mb": after.ru_maxrss / 1024,  # of the largest child so far: scales grow
    }


def _metric(summary: Any, prefix: str) -> float:
    return float(next(v["value"] for k, v in summary["metrics"].items() if k.startswith(prefix)))


def table(figures: dict[str, Any]) -> str:
    heads = f"{'GPUs':>6} {'samples':>8} {'simulated s':>12} {'wall s':>8} {'CPU s':>8} {'MB':>6} "
    heads += f"{'grown':>7} {'n log n':>8}"
    lines = [f"one RL step under {POLICY}@rfabric, a process each", heads]
    lines += [
        f"{row['gpus']:>6} {row['samples']:>8} {row['simulated_s']:>12.1f} {row['wall_s']:>8.1f} "
        f"{row['cpu_s']:>8.1f} {row['peak_mb']:>6.0f} {row.get('grown', 1):>7.1f} "
        f"{row.get('n_log_n', 1):>8.1f}"
        for row in figures["rows"]
    ]
    verdict = "held" if figures["held"] else "DID NOT HOLD"
    return "\n".join(
        [*lines, f"marks: {MARK_GPUS} GPUs in {MARK_S:g} s and {MARK_MB:g} MB; n log n: {verdict}"]
    )
