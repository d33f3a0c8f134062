"""How long it takes to decide about circuits: one decision, the course of a step, a correction.

Steps have 200 communications and six candidate plans. `alike`: they send in 12 patterns, as a
step of training does; `apart`: in 200. Mark: a course under 5 ms with 8 ToRs and patterns alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import cycle
from statistics import median
from typing import Any

import numpy as np

from harness.fabric.correction import corrected
from harness.fabric.course import course
from harness.fabric.decision import Settings, decide
from harness.fabric.demand import Comm, Demand
from harness.fabric.links import DARK, Plan
from harness.fabric.topology import Topology
from harness.fabric.windows import Window
from tests.unit.fabric_bench import MS, bench, plan

SIZES = {4: 2, 8: 4, 16: 8, 64: 16}
"""ToRs -> planes."""
COMMS, ALIKE, ROUNDS, MOST_MS = 200, 12, 15, 5.0


def run() -> dict[str, Any]:
    rows = [row(tors, planes) for tors, planes in SIZES.items()]
    held = rows[1]["course_alike_ms"] < MOST_MS
    return {"rows": rows, "held": held}


def row(tors: int, planes: int) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    topology = bench(tors, planes=planes, switching_ms=[25.0] * planes)
    plans = [rotated(topology, planes, turn) for turn in range(1, 6)]
    demands = [drawn(topology, rng) for _ in range(COMMS)]
    settings = Settings(steer_ns=4 * MS)

    def of_step(patterns: int) -> Callable[[], object]:
        gaps_ns = rng.choice([0.0, 10 * MS, 40 * MS], COMMS)
        comms = [
            Comm("", ("dp", "tp", "pp", "ep")[i % 4], demands[i % patterns], gaps_ns[i])
            for i in range(COMMS)
        ]
        turns = cycle(plans)
        return lambda: course(
            topology, DARK.links, comms, lambda *_: next(turns), settings=settings
        )

    before, after = demands[:2]
    totals = after.sent_bytes.sum(1), after.sent_bytes.sum(0)
    return {
        "tors": tors,
        "planes": planes,
        "course_alike_ms": timed(of_step(ALIKE)),
        "course_apart_ms": timed(of_step(COMMS)),
        "decide_ms": timed(
            lambda: decide(
                topology, plans[0].links, before, plans[1:], Window(10 * MS), settings=settings
            )
        ),
        "corrected_ms": timed(lambda: corrected(before, *totals)),
    }


def rotated(topology: Topology, planes: int, turn: int) -> Plan:
    """On every plane ToRs are joined with those `turn` further on, as far as they are free."""
    names = list(topology.tors)
    edges = []
    for plane in range(planes):
        left = set(names)
        for i, a in enumerate(names):
            b = names[(i + turn + plane) % len(names)]
            if a != b and {a, b} <= left:
                left -= {a, b}
                edges.append((a, b, plane))
    return plan(topology, *edges)


def drawn(topology: Topology, rng: np.random.Generator) -> Demand:
    n = len(topology.tors)
    return Demand("", tuple(topology.tors), rng.random((n, n)) * (rng.random((n, n)) < 0.5) * 1e7)


def timed(work: Callable[[], object]) -> float:
    """Median of some rounds, ms of CPU: what it takes on a core of its own."""
    took_ms = []
    for _ in range(ROUNDS):
        begin_ns = time.process_time_ns()
        work()
        took_ms.append((time.process_time_ns() - begin_ns) / MS)
    return round(median(took_ms), 3)


def table(figures: dict[str, Any]) -> str:
    lines = [
        f"{row['tors']} ToRs, {row['planes']} planes: course {row['course_alike_ms']:.2f} ms"
        f" (patterns alike), {row['course_apart_ms']:.2f} ms (apart); decision"
        f" {row['decide_ms']:.2f} ms; correction {row['corrected_ms']:.2f} ms"
        for row in figures["rows"]
    ]
    told = "held" if figures["held"] else "MISSED"
    lines.append(f"mark: course of 200 communications under {MOST_MS:g} ms with 8 ToRs: {told}")
    return "\n".join(lines)
