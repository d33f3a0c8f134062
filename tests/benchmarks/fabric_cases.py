"""The RL loop over every fabric, in cases that communicate much and little: what circuits gain.

Each case is the shipped scenario `rfabric-phases.toml` with other degrees, bytes or speeds, on the
shipped two-tier bench; its arms are interleaved, repeat by repeat. A ratio is of a repeat's mean
times; told are the geometric mean over repeats and its 95 % confidence interval.

Marks: a weight sync over its circuits takes at most 1 / 2.5 of the 4:1 electrical path's time, and
reaches 85 % of an ideal fabric's rate; training is 1.3 times as fast as electrical where it is
bound by communication, and in no case are steps more than 2 % slower than over circuits that never
change; where generation is what bounds a step, a sync is seen for at most 5 % of it.

``python -m tests.benchmarks.fabric_cases [--case NAME]... [--repeats N]``; a repeat of all cases
takes about six minutes. Needs root.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from harness.record.intervals import ratio_half_width
from harness.record.rl_samples import visible_pct

SCENARIO = Path(__file__).parents[2] / "scenarios" / "rfabric-phases.toml"
REPEATS = 5
ELECTRICAL, STATIC, RFABRIC, IDEAL = "electrical", "static", "rfabric", "ideal"
LIMIT_S = 3600.0
SYNC_GAIN, SYNC_OF_IDEAL, TRAIN_GAIN, LOSS_MOST, SEEN_MOST_PCT = 2.5, 0.85, 1.3, 0.02, 5.0

Changes = tuple[tuple[str, str], ...]
"""Lines of the scenario, and what takes their place."""

BYTES = "bytes_scale = 0.001\n\n# -- how"
CASES: dict[str, Changes] = {
    "communication": (),
    "computation": ((BYTES, BYTES.replace("0.001", "0.00005")),),
    "tensor": (('layout = "DP4"  ', 'layout = "DP2TP2"'),),
    "pipeline": (('layout = "DP4"  ', 'layout = "DP2PP2"'),),
    "generation": (
        ("prompts_per_step = 8\n", "prompts_per_step = 64\n"),
        ("speed = 20.0 ", "speed = 10.0 "),
        (BYTES, BYTES.replace("0.001", "0.0001")),
    ),
}
"""What bounds a step in it, or along which degrees its bytes go."""


def run(cases: Sequence[str] = tuple(CASES), repeats: int = REPEATS) -> dict[str, Any]:
    """Run every case; figures by case."""
    return {case: _case(CASES[case], repeats) for case in cases}


def _case(changes: Changes, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        events = _events(_changed(changes, repeats), Path(folder))
    times = _times(events)
    arms = {arm: times[arm] for arm in (ELECTRICAL, STATIC, RFABRIC, IDEAL)}
    figures: dict[str, Any] = {
        "mean_s": {arm: {what: fmean(v) for what, v in of.items()} for arm, of in arms.items()}
    }
    for over in (ELECTRICAL, STATIC, IDEAL):
        figures[f"over_{over}"] = {
            what: _ratio(arms[over][what], arms[RFABRIC][what])
            for what in arms[RFABRIC]
            if what != "seen_pct"
        }
    return figures


def _changed(changes: Changes, repeats: int) -> str:
    text = SCENARIO.read_text(encoding="utf-8")
    bench = SCENARIO.parent
    for old, new in (*changes, ("repeats = 1 ", f"repeats = {repeats} ")):
        assert old in text or old == new, old
        text = text.replace(old, new)
    for key in ("bench", "workload", "profile"):
        text = text.replace(f'{key} = "', f'{key} = "{bench}/')
    return text.replace("timeout_s = 3600.0", f"timeout_s = {LIMIT_S}")


def _events(scenario: str, folder: Path) -> list[Mapping[str, Any]]:
    file = folder / "case.toml"
    file.write_text(scenario, encoding="utf-8")
    argv = [sys.executable, "-m", "harness", "run", str(file), "--runs", str(folder / "runs")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    (journal,) = (folder / "runs").glob("2*/journal.jsonl")
    rows = (msgspec.json.decode(line) for line in journal.read_bytes().splitlines())
    return [row for row in rows if row["doc"] == "event"]


def _times(events: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Return, by fabric and quantity, the mean of each repeat, in s; the first step warms up."""
    by_repeat: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    steps: dict[tuple[str, int], list[Mapping[str, Any]]] = defaultdict(list)
    syncs: dict[tuple[str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        data = event["data"]
        if event["stream"] in ("rl_step", "sync"):
            arm = data["policy"].rpartition("@")[2]
            rows = steps if event["stream"] == "rl_step" else syncs
            rows[arm, data["step"]].append(data)
    for (arm, number), rows in steps.items():
        for row in rows[1:]:
            by_repeat[arm, "step"][number].append(row["step_s"])
            by_repeat[arm, "train"][number].append(row["train_s"])
        for row in syncs[arm, number][1:]:
            by_repeat[arm, "sync"][number].append(row["wire_s"])
        by_repeat[arm, "seen_pct"][number] = [visible_pct(*two) for two in pairwise(rows)]
    found: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for (arm, what), repeats in by_repeat.items():
        found[arm][what] = [fmean(values) for _, values in sorted(repeats.items())]
    return found


def _ratio(upper: Sequence[float], lower: Sequence[float]) -> tuple[float, float | None]:
    ratios = [a / b for a, b in zip(upper, lower, strict=True)]
    return math.exp(fmean(map(math.log, ratios))), ratio_half_width(ratios)


def table(figures: Mapping[str, Any]) -> str:
    """Return one block a case, and the marks."""
    lines = []
    for case, of in figures.items():
        lines += [
            "",
            f"{case}: mean s",
            f"  {'':12}{'train':>9}{'sync':>9}{'step':>9}{'seen %':>9}",
        ]
        for arm, found in of["mean_s"].items():
            values = (found["train"], found["sync"], found["step"], found["seen_pct"])
            lines.append(f"  {arm:12}" + "".join(f"{value:9.3f}" for value in values))
        for over in (ELECTRICAL, STATIC, IDEAL):
            told = (f"{what} {_pm(value)}" for what, value in of[f"over_{over}"].items())
            lines.append(f"  rfabric, as fast as {over}: " + ", ".join(told))
    return "\n".join([*lines, "", *_marks(figures)])


def _pm(value: tuple[float, float | None]) -> str:
    ratio, width = value
    return f"{ratio:.3f}" + (f" ±{width:.3f}" if width is not None else "")


def _marks(figures: Mapping[str, Any]) -> list[str]:
    first = figures.get("communication")
    told = []
    if first:
        told += [
            _mark("sync over electrical", first["over_electrical"]["sync"][0], SYNC_GAIN),
            _mark("sync, share of ideal", first["over_ideal"]["sync"][0], SYNC_OF_IDEAL),
            _mark("training over electrical", first["over_electrical"]["train"][0], TRAIN_GAIN),
        ]
    for case, of in figures.items():
        for over in (STATIC, ELECTRICAL):
            value = of[f"over_{over}"]["step"][0]
            told.append(_mark(f"{case}: step, over {over}", value, 1 - LOSS_MOST))
    if "generation" in figures:
        seen = figures["generation"]["mean_s"][RFABRIC]["seen_pct"]
        told.append(f"{'held  ' if seen <= SEEN_MOST_PCT else 'MISSED'} sync seen: {seen:.1f} %")
    return told


def _mark(what: str, value: float, least: float) -> str:
    return f"{'held  ' if value >= least else 'MISSED'} {what}: {value:.3f}, at least {least:g}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.fabric_cases")
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    given = parser.parse_args()
    figures = run(given.case or tuple(CASES), given.repeats)
    sys.stdout.write(table(figures) + "\n")


if __name__ == "__main__":
    main()
