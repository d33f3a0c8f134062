"""How far simulations are off an emulated bench, on scenarios that nothing was fitted to.

Needs root, and a quiet machine for 20 minutes: whatever else runs on it is measured, too. Scenarios
``fit-*`` of `scenarios/agreement` are run and calibrated on; all others are run, simulated by that
calibration, and compared. ``python -m tests.benchmarks.agreement --runs FOLDER`` keeps the runs
there, beside the calibration; what is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from harness.record.agreement import LIMITS_PCT

SCENARIOS = Path(__file__).parents[2] / "scenarios/agreement"
FITTED = "fit-"
LIMIT_S = 600
HEADERS = ("scenario", *(f"{kind}, %" for kind in LIMITS_PCT))


def run(folder: Path | None = None) -> dict[str, Any]:
    """Measure, calibrate, predict and compare; `folder` keeps all of it."""
    if folder is None:
        with tempfile.TemporaryDirectory() as name:
            return run(Path(name))
    measured = {path.stem: _measured(path, folder) for path in sorted(SCENARIOS.glob("*.toml"))}
    fitted = [run for name, run in measured.items() if name.startswith(FITTED)]
    calibration = folder / "agreement.toml"
    options = ("--mixed", "--force", "--runs", folder, "--out", calibration)
    _harness("calibrate", "run", *(run.name for run in fitted), *options)
    compared = {
        name: _compared(SCENARIOS / f"{name}.toml", found, calibration, folder)
        for name, found in measured.items()
        if found not in fitted
    }
    rows = {name: _by_kind(rows) for name, rows in compared.items()}
    held = all(
        off["mean_pct"] <= LIMITS_PCT[kind]  # type: ignore[index]  # kinds of that very mapping
        for kinds in rows.values()
        for kind, off in kinds.items()
    )
    beyond = [row for found in compared.values() for row in found if row["verdict"] == "beyond"]
    return {"scenarios": rows, "limits_pct": dict(LIMITS_PCT), "held": held, "beyond": beyond}


def _measured(scenario: Path, folder: Path) -> Path:
    """Return the folder of a scenario's run, which is made where there is none."""
    link = folder / f"{scenario.stem}.run"
    if not link.exists():
        _harness("run", scenario, "--runs", folder)
        link.unlink(missing_ok=True)
        link.symlink_to((folder / "latest").resolve().name)
    return link.resolve()


def _compared(
    scenario: Path, measured: Path, calibration: Path, folder: Path
) -> list[dict[str, Any]]:
    """Return the rows of a comparison with a simulation."""
    runs = folder / "simulated"
    _harness("sim", scenario, "--calibration", calibration, "--runs", runs)
    told = _harness("compare", (runs / "latest").resolve(), measured, "--json", ends=(0, 1))
    found: list[dict[str, Any]] = json.loads(told)["rows"]
    return found


def _by_kind(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return by kind how many rows are compared, and how far they are off."""
    found = {}
    for kind in LIMITS_PCT:
        if off := [abs(row["difference_pct"]) for row in rows if row["kind"] == kind]:
            found[kind] = {"n": len(off), "mean_pct": fmean(off), "worst_pct": max(off)}
    return found


def _harness(*words: object, ends: Sequence[int] = (0,)) -> str:
    """Return what a command prints; raises `RuntimeError` where it ends otherwise."""
    command = [sys.executable, "-m", "harness", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode not in ends:
        raise RuntimeError(f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def table(figures: Mapping[str, Any]) -> str:
    lines = ["mean (worst) of differences, signs left out; - where nothing of a kind is compared"]
    lines += ["  ".join((f"{HEADERS[0]:16}", *(f"{header:>18}" for header in HEADERS[1:])))]
    for name, kinds in figures["scenarios"].items():
        cells = [
            f"{off['mean_pct']:.1f} ({off['worst_pct']:.1f})" if (off := kinds.get(kind)) else "-"
            for kind in figures["limits_pct"]
        ]
        lines.append("  ".join((f"{name:16}", *(f"{cell:>18}" for cell in cells))))
    limits = ", ".join(f"{kind} {limit:g} %" for kind, limit in figures["limits_pct"].items())
    lines.append(f"marks, of each mean: {limits}: {'held' if figures['held'] else 'NOT held'}")
    lines += [
        f"beyond, by its interval: {row['metric']} {row['difference_pct']:+.1f} %"
        for row in figures["beyond"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.agreement")
    parser.add_argument("--runs", type=Path, required=True, help="a folder to keep all of it in")
    sys.stdout.write(table(run(parser.parse_args().runs)) + "\n")
