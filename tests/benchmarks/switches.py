"""Layouts switched and requests moved under load, many times: is a token lost, or given twice?

One `harness run` as a user makes it: the paced engine on the emulated bench of two servers, more
requests than there are seats and KV for, so that some wait and some are preempted. Arms differ in
how engines give way, what becomes of requests, and whether all nodes change at once. What was
delivered is also summed up here, from the workload. Marks: 200 switches and 2,000 migrations with
no token lost, doubled or missing; stages and residual sum to the total.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from harness.model.load import load_workload, requests_of
from harness.record.samples import percentile
from tests.emulated.lab import Lab, lab

SCENARIOS = Path(__file__).parents[2] / "scenarios"
WORKLOAD = SCENARIOS / "workloads/short.toml"
LIMIT_S = 1800.0

SCENARIO = f"""
question = "Is a token lost in any of many switches and migrations?"
bench = "{SCENARIOS / "benches/generation-2.toml"}"
timeout_s = {LIMIT_S}
[generation]
layout = "4xTP1"
workload = "{WORKLOAD}"
profile = "{SCENARIOS / "profiles/qwen2.5-14b-h800.toml"}"
pool = ["4xTP1", "2xTP2"]
sequences_max = 24
kv_max_tokens = 4096
"""
STEP = """
[[steps]]
do = "generate"
layouts = ["2xTP2", "4xTP1"]
timeout_s = {limit_s}
rest_s = 0.2
count = {switches}
strategy = "{strategy}"
requests = "{requests}"
order = "{order}"
migrations = {moves}
migrate_by = "{by}"
migrate_every_ms = 10.0
"""
ARMS: tuple[dict[str, Any], ...] = tuple(
    dict(zip(("strategy", "requests", "order", "switches", "by", "moves"), arm, strict=True))
    for arm in (
        ("rebuild", "abort", "at_once", 100, "auto", 1500),
        ("rebuild", "abort", "rolling", 30, "kv", 450),
        ("rebuild", "drain", "at_once", 10, "recompute", 0),
        ("pool", "abort", "at_once", 40, "recompute", 450),
        ("restart", "abort", "at_once", 20, "auto", 300),
    )
)

ACTS = (
    "{strategy}, {requests}, {order}: {switched} switches, {carried} requests carried; "
    "{moved} moved, {not_moved}"
)
COUNTS = (
    "  {requests_fed} requests, {tokens} tokens: {lost} lost, {doubled} doubled, "
    "{missing_tokens} missing; {unfinished} unfinished, {preemptions} preempted"
)


def run() -> dict[str, Any]:
    """Return a row of each arm, and whether the marks are held."""
    with tempfile.TemporaryDirectory() as folder, lab(Path(folder)) as made:
        steps = (STEP.format(**arm, limit_s=LIMIT_S) for arm in ARMS)
        (made.folder / "scenario.toml").write_text(SCENARIO + "".join(steps))
        code, out = made.run(LIMIT_S)
        if code:
            raise RuntimeError(out)
        rows = [arm | _row(made, step) for step, arm in enumerate(ARMS)]
    held = all(
        row["switched"] == row["switches"]
        and row["lost"] == row["doubled"] == row["missing_tokens"] == row["unfinished"] == 0
        and row["off_ms"] < 1e-6
        for row in rows
    )
    switches, moved = (sum(row[key] for row in rows) for key in ("switched", "moved"))
    return {
        "rows": rows,
        "switches": switches,
        "migrations": moved,
        "mark": "200 switches, 2,000 migrations: no token lost, doubled or missing; stages add up",
        "held": held and switches >= 200 and moved >= 2000,
        "load": os.getloadavg()[0],
    }


def _row(made: Lab, step: int) -> dict[str, Any]:
    """Read what came of an arm from the journal."""
    switches = [row for row in made.events("parallelism") if row["step"] == step]
    moves = [row for row in made.events("migration") if row["step"] == step]
    (generated,) = (row for row in made.events("generated") if row["step"] == step)
    asked = requests_of(load_workload(WORKLOAD)).step(0)
    fed = islice(cycle(asked), generated["requests"])
    return {
        "requests_fed": generated["requests"],
        "tokens": generated["tokens"],
        "lost": generated["lost"],
        "doubled": generated["doubled"],
        "missing_tokens": sum(request.response_tokens for request in fed) - generated["tokens"],
        "unfinished": generated["requests"] - generated["finished"],
        "preemptions": generated["preemptions"],
        "switched": sum(row["outcome"] == "switched" for row in switches),
        "moved": sum(row["outcome"] == "moved" for row in moves),
        "not_moved": dict(Counter(why(row) for row in moves if row["outcome"] != "moved")),
        "carried": sum(row["carried"] for row in switches),
        "blackout_ms": spread(row["blackout_ms"] for row in switches),
        "total_ms": spread(row["total_ms"] for row in switches),
        "residual_pct": spread(residual_pct(row) for row in switches),
        "off_ms": max(abs(off_ms(row)) for row in switches),
        "migration_ms": {
            by: spread(row["total_ms"] for row in moves if row["by"] == by)
            for by in ("kv", "recompute")
        },
    }


def why(row: dict[str, Any]) -> str:
    """Return what became of a move, without names."""
    return f"{row['outcome']}: {row['error']}" if row["error"] else str(row["outcome"])


def residual_pct(row: dict[str, Any]) -> float:
    """Return the share of a switch that is in no stage."""
    return float(100 * row["residual_ms"] / row["total_ms"])


def off_ms(row: dict[str, Any]) -> float:
    """Return by how much stages and residual are not the total."""
    stages = sum(ms for ms in row["stages"].values() if ms is not None)
    return float(stages + row["residual_ms"] - row["total_ms"])


def spread(values: Iterable[float | None]) -> dict[str, float]:
    """Return what is known of some values; only their number where that is 0."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return {"n": 0}
    p50, p99 = (percentile(known, share) for share in (50, 99))
    mean = sum(known) / len(known)
    return {"n": len(known), "p50": p50, "p99": p99, "max": known[-1], "mean": mean}


def table(figures: dict[str, Any]) -> str:
    lines = []
    for row in figures["rows"]:
        lines += [
            ACTS.format(**row),
            COUNTS.format(**row),
            f"  blackout ms {told(row['blackout_ms'])}   total ms {told(row['total_ms'])}",
            f"  residual % {told(row['residual_pct'])}   stages off by {row['off_ms']:.2g} ms",
            *(f"  by {by}: ms {told(found)}" for by, found in row["migration_ms"].items()),
        ]
    lines.append(f"{figures['switches']} switches, {figures['migrations']} migrations")
    held = "held" if figures["held"] else "MISSED"
    lines.append(f"mark: {figures['mark']}: {held} (load {figures['load']:.1f})")
    return "\n".join(lines)


def told(found: dict[str, float]) -> str:
    """Write a spread in words."""
    keys = ("p50", "p99", "max", "mean") if found["n"] else ()
    return f"n {found['n']} " + " ".join(f"{key} {found[key]:.2f}" for key in keys)
