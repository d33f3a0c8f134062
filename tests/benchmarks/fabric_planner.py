"""Circuits on uplinks and trunks: how long planning takes, and how near it comes to the optimum.

Time: median of `ROUNDS` plans of one demand, on CPU (real time on a machine of one's own), from the
dark and from a plan of the same demand before each pair's bytes changed by up to 10 %. Topologies
are at hand; sorting out which uplinks are whole counts. Optimum: random small fabrics against the
exact MILP of `tests.unit.two_tier_milp`.

Marks: the fabrics with 256 ToR ports and the reference under 100 ms; within 10 % of the optimum.
"""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from harness.fabric.planner import Plan, plan_demand
from harness.fabric.prediction import BYTES_PER_NS_OF_A_MBIT, capacity
from harness.fabric.topology import Topology, topology_of
from harness.model.generated import REFERENCE, Numbers, bench_of
from tests.unit.two_tier_milp import Floats, optimum, random_demand, random_fabric

ROUNDS, SEEDS = 7, range(200)
MOST_MS, MOST_GAP = 100.0, 1.1
FLAT = Numbers(
    roles=("train",),
    tors_per_pod=8,
    nodes_per_tor=32,
    uplinks_per_tor=32,
    aggregation_planes=32,
)
FABRICS = {
    "8 ToRs x 32 uplinks": FLAT,
    "reference, 2 x 8 ToRs x 32": REFERENCE,
    "128 ToRs x 64 uplinks": replace(FLAT, tors_per_pod=128, nodes_per_tor=2, uplinks_per_tor=64),
    "250 ToRs x 32 uplinks": replace(FLAT, tors_per_pod=250, nodes_per_tor=2),
}
MARKED = ("8 ToRs x 32 uplinks", "reference, 2 x 8 ToRs x 32")
"""The others have planes of 256 and of 250 ports: 8,192 and 8,000 uplinks in all."""


def demands(n: int) -> dict[str, Floats]:
    rng = np.random.default_rng(0)
    return {
        "uniform": np.full((n, n), 1e9),
        "skewed": rng.lognormal(20, 1.5, (n, n)),
        "ring": np.roll(np.eye(n), 1, 1) * 1e9,
    }


def timed(topology: Topology, demand: Floats, plan: Plan | None = None) -> tuple[float, Plan]:
    """Milliseconds of CPU, and the plan; with `plan`, from what it lit."""
    lit = frozenset() if plan is None else plan.links
    taken, found = [], None
    for _ in range(ROUNDS):
        began = time.process_time()
        found = plan_demand(topology, demand, lit=lit)
        taken.append((time.process_time() - began) * 1e3)
    assert found is not None
    return median(taken), found


def times() -> list[dict[str, Any]]:
    rows = []
    for fabric, numbers in FABRICS.items():
        topology = topology_of(bench_of(numbers))
        for name, demand in demands(len(topology.tors)).items():
            fresh_ms, plan = timed(topology, demand)
            changed = demand * np.random.default_rng(1).uniform(0.9, 1.1, demand.shape)
            again_ms, again = timed(topology, changed, plan)
            row = {"fabric": fabric, "demand": name, "links": len(plan.links)}
            row |= {"unserved": len(plan.unserved), "fresh_ms": round(fresh_ms, 1)}
            row |= {"again_ms": round(again_ms, 1), "stay": len(plan.links & again.links)}
            rows.append(row)
    return rows


def gaps(*, two_tier: bool) -> list[float]:
    """Finish over that of the exact optimum, the worst first."""
    found = []
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        topology = random_fabric(rng, two_tier=two_tier)
        demand = random_demand(rng, len(topology.tors))
        finish = float(capacity(topology, plan_demand(topology, demand).links).finish_ns(demand))
        finish *= topology.rates.link_mbit_per_s * BYTES_PER_NS_OF_A_MBIT
        best = optimum(topology, demand)
        found.append(finish / best if best else 1.0)
    return sorted(found, reverse=True)


def run() -> dict[str, Any]:
    rows = times()
    distances = {}
    for tiers, two_tier in (("one tier", False), ("two tiers", True)):
        found = gaps(two_tier=two_tier)
        optimal = sum(gap < 1.001 for gap in found)
        distances[tiers] = {"n": len(found), "worst": round(found[0], 4), "optimal": optimal}
    slowest = max(
        row[key] for row in rows if row["fabric"] in MARKED for key in ("fresh_ms", "again_ms")
    )
    near = max(row["worst"] for row in distances.values())
    return {"times": rows, "distances": distances, "held": slowest < MOST_MS and near <= MOST_GAP}


def table(figures: dict[str, Any]) -> str:
    heads = f"{'fabric':27} {'demand':8} {'links':>5} {'unserved':>8}"
    lines = [f"{heads} {'from dark':>10} {'again':>10} {'stay':>5}"]
    lines += [
        f"{row['fabric']:27} {row['demand']:8} {row['links']:5} {row['unserved']:8} "
        f"{row['fresh_ms']:7.1f} ms {row['again_ms']:7.1f} ms {row['stay']:5}"
        for row in figures["times"]
    ]
    lines += [
        f"{tiers}: {row['optimal']} of {row['n']} random fabrics at the optimum, "
        f"the worst at {row['worst']:.3f} of it"
        for tiers, row in figures["distances"].items()
    ]
    told = "held" if figures["held"] else "MISSED"
    lines.append(
        f"marks: {' and '.join(MARKED)} under {MOST_MS:g} ms, "
        f"within {MOST_GAP - 1:.0%} of the optimum: {told}"
    )
    return "\n".join(lines)
