"""Real vLLM on CPU, switched between TP 1 and TP 2 under load: are its tokens the same ones?

One `harness run` as a user makes it: a tiny random model on one node with two emulated GPUs. First
requests run in peace; then the same ones while layouts are switched by `rebuild` and requests move,
and again by `restart`. Tokens are greedy, so every response must be the same in all three. Marks:
10 switches with no token lost or doubled, responses identical; a blackout of `rebuild` at most 1/4
of one of `restart`; the residual within 2 % of the total.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks.switches import off_ms, residual_pct, spread, told
from tests.emulated.lab import Lab, lab

SCENARIOS = Path(__file__).parents[2] / "scenarios"
LIMIT_S = 3600.0
BENCH = """
name = "one"
world = "emulated"
launcher = "namespaces"
max_wait_s = 120.0
[nodes.g0]
tor = "tor0"
pod = "generate"
emulated_gpus = 2
[tors.tor0]
uplinks = 0
"""
SCENARIO = f"""
question = "Are tokens the same when layouts change meanwhile?"
bench = "bench.toml"
timeout_s = {LIMIT_S}
[generation]
engine = "vllm"
layout = "2xTP1"
workload = "{SCENARIOS}/workloads/short.toml"
sequences_max = 16
kv_max_tokens = 8192
"""
STEP = f"""
[[steps]]
do = "generate"
requests_max = 16
timeout_s = {LIMIT_S}
stall_s = 60.0
"""
SWITCHING = """
layouts = ["1xTP2", "2xTP1"]
rest_s = 1.0
count = {switches}
strategy = "{strategy}"
migrations = {moves}
"""
ARMS = (("none", 0, 0), ("rebuild", 10, 20), ("restart", 4, 0))
"""Strategy, switches and migrations of each step."""

COUNTS = """{strategy}: {switched} switches, {carried} requests carried, {moved} moved
  {generated} requests, {tokens} tokens: {lost} lost, {doubled} doubled; all {responses:.12}"""


def run() -> dict[str, Any]:
    """Return a row of each arm, and whether the marks are held."""
    with tempfile.TemporaryDirectory() as folder, lab(Path(folder)) as made:
        steps = (
            STEP + (SWITCHING.format(strategy=arm, switches=count, moves=moves) if count else "")
            for arm, count, moves in ARMS
        )
        (made.folder / "bench.toml").write_text(BENCH)
        (made.folder / "scenario.toml").write_text(SCENARIO + "".join(steps))
        code, out = made.run(LIMIT_S)
        if code:
            raise RuntimeError(out)
        rows = [_row(made, *arm) for arm in enumerate(ARMS)]
    peace, rebuild, restart = rows
    ratio = rebuild["blackout_ms"]["p50"] / restart["blackout_ms"]["p50"]
    marks = {
        "all switched": all(row["switched"] == row["asked"] for row in rows),
        "0 lost, 0 doubled": not any(row["lost"] or row["doubled"] for row in rows),
        "responses identical": {row["responses"] for row in rows} == {peace["responses"]},
        "blackout of rebuild <= 1/4 of restart's": ratio <= 1 / 4,
        "residual <= 2 %": all(row["residual_pct"]["mean"] <= 2 for row in (rebuild, restart)),
    }
    return {"rows": rows, "ratio": ratio, "marks": marks, "load": os.getloadavg()[0]}


def _row(made: Lab, step: int, arm: tuple[str, int, int]) -> dict[str, Any]:
    """Read what came of an arm from the journal."""
    switches = [row for row in made.events("parallelism") if row["step"] == step]
    moves = [row for row in made.events("migration") if row["step"] == step]
    (generated,) = (row for row in made.events("generated") if row["step"] == step)
    names = switches[0]["stages"] if switches else ()
    return {
        "strategy": arm[0],
        "asked": arm[1],
        "switched": sum(row["outcome"] == "switched" for row in switches),
        "carried": sum(row["carried"] for row in switches),
        "moved": sum(row["outcome"] == "moved" for row in moves),
        "generated": generated["requests"],
        "tokens": generated["tokens"],
        "lost": generated["lost"],
        "doubled": generated["doubled"],
        "responses": generated["responses_digest"],
        "blackout_ms": spread(row["blackout_ms"] for row in switches),
        "total_ms": spread(row["total_ms"] for row in switches),
        "residual_pct": spread(residual_pct(row) for row in switches),
        "off_ms": max((abs(off_ms(row)) for row in switches), default=0.0),
        "stages_ms": {name: spread(row["stages"][name] for row in switches) for name in names},
    }


def table(figures: dict[str, Any]) -> str:
    lines = []
    for row in figures["rows"]:
        lines.append(COUNTS.format(**row))
        if row["switched"]:
            known = {stage: ms for stage, ms in row["stages_ms"].items() if ms["n"]}
            lines += [
                f"  blackout ms {told(row['blackout_ms'])}   total ms {told(row['total_ms'])}",
                f"  residual % {told(row['residual_pct'])}   stages off by {row['off_ms']:.2g} ms",
                "  means: " + ", ".join(f"{stage} {ms['mean']:.0f}" for stage, ms in known.items()),
            ]
    lines.append(f"rebuild's blackout is {figures['ratio']:.3f} of restart's")
    for mark, held in figures["marks"].items():
        lines.append(f"mark: {mark}: {'held' if held else 'MISSED'}")
    return "\n".join([*lines, f"load {figures['load']:.1f}"])
