"""Fluid network: equal to SimGrid, and how much faster; on 1,024 hosts of a fat-tree (k = 16).

Both get the same flows over the same links, side by side: SimGrid as plain max-min
(`simgrid_case`), by Debian's python3-simgrid; without it only our own figures are told. Its time is
that from the moment on at which all flows have begun; ours is `Flows`: begin all, tell each end.
Warm: compiled. Cold: a new process's first flows, with and without what was compiled before.

Marks: each flow's end within 1e-6 on 100 random networks; >= 10x faster on steps of collectives of
8,192 flows, >= 2x on as many random ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import rustworkx as rx

from harness.clock import NS_PER_S
from harness.model.advance import FOREVER_NS
from harness.rlsim.flows import Flows
from harness.rlsim.fluid import finish_ns
from harness.rlsim.kernels import Floats

SYSTEM_PYTHON = "/usr/bin/python3"
SCRIPT = Path(__file__).with_name("simgrid_case.py")
PORTS = 16
"""Of a switch of the fat-tree: 1,024 hosts."""
HALF, HOSTS = PORTS // 2, PORTS**3 // 4
LINK_BYTES_PER_S = 50e9
STRIDES = 8
"""Flows of each host: 8,192 in all."""
RANDOM = range(100)
REPEATS = 3
OFF_MOST, FASTER_COLLECTIVE, FASTER_RANDOM = 1e-6, 10, 2

Case = dict[str, list[Any]]
"""`capacities` in bytes per s, `paths`, `sizes` in bytes."""

COLD = (
    "import time; begin = time.perf_counter()\n"
    "from harness.rlsim.flows import Flows\n"
    "imported = time.perf_counter(); flows = Flows([1e9] * 2); flows.add(0, [[0, 1]] * 2, 1e6)\n"
    "flows.advance(flows.next_ns()); print(imported - begin, time.perf_counter() - imported)"
)


# -- networks and flows ---------------------------------------------------------------------------


def fat_tree_path(source: int, target: int, core: int) -> list[int]:
    """Return the links from host to host; `core` chooses among the ways that are equally long."""
    edges = source // HALF, target // HALF
    pods = edges[0] // HALF, edges[1] // HALF
    aggregation, trunk = core % HALF, core // HALF % HALF
    path = [source]
    if edges[0] != edges[1]:
        path.append(2 * HOSTS + edges[0] * HALF + aggregation)
        if pods[0] != pods[1]:
            up, down = ((pod * HALF + aggregation) * HALF + trunk for pod in pods)
            path += [4 * HOSTS + up, 5 * HOSTS + down]
        path.append(3 * HOSTS + edges[1] * HALF + aggregation)
    return [*path, HOSTS + target]


def collective(strides: list[int], sizes: list[int], seed: int | None = None) -> Case:
    """Each host sends to those so many further, at once, by the target's way or, seeded, by any."""
    rng = np.random.default_rng(seed)
    case: Case = {"capacities": [LINK_BYTES_PER_S] * (6 * HOSTS), "paths": [], "sizes": []}
    for by, size in zip(strides, sizes, strict=True):
        for source in range(HOSTS):
            target = (source + by) % HOSTS
            core = target if seed is None else int(rng.integers(HALF**2))
            case["paths"].append(fat_tree_path(source, target, core))
            case["sizes"].append(size)
    return case


def scattered(seed: int) -> Case:
    """Return as many flows from anybody to anybody, of any size."""
    rng = np.random.default_rng(seed)
    case: Case = {"capacities": [LINK_BYTES_PER_S] * (6 * HOSTS), "paths": [], "sizes": []}
    while len(case["paths"]) < HOSTS * STRIDES:
        source, target = rng.choice(HOSTS, 2, replace=False).tolist()
        case["paths"].append(fat_tree_path(source, target, int(rng.integers(HALF**2))))
        case["sizes"].append(int(rng.integers(1, 1000)) * 10**6)
    return case


def random_case(seed: int) -> Case:
    """Return a random connected network, and flows over its shortest paths."""
    rng = np.random.default_rng(seed)
    nodes = int(rng.integers(3, 25))
    graph = rx.PyDiGraph()
    graph.add_nodes_from(range(nodes))
    pairs = [(node, int(rng.integers(node))) for node in range(1, nodes)]
    pairs += rng.integers(nodes, size=(int(rng.integers(nodes)), 2)).tolist()
    both = sorted({pair for a, b in pairs if a != b for pair in ((a, b), (b, a))})
    number = {pair: link for link, pair in enumerate(both)}
    graph.add_edges_from([(a, b, 1.0) for a, b in both])
    case: Case = {"capacities": (rng.uniform(1, 50, len(both)) * 1e9).tolist(), "paths": []}
    many = int(rng.integers(1, 60))
    for _ in range(many):
        source, target = rng.choice(nodes, 2, replace=False).tolist()
        stops = rx.dijkstra_shortest_paths(graph, source, target)[target]
        case["paths"].append([number[hop] for hop in pairwise(stops)])
    alike = rng.random() < 0.3
    case["sizes"] = [10**9] * many if alike else rng.integers(10**6, 10**9, many).tolist()
    return case


# -- both side by side ----------------------------------------------------------------------------


def has_simgrid() -> bool:
    try:
        given = [SYSTEM_PYTHON, "-c", "import simgrid"]
        subprocess.run(given, capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def by_simgrid(cases: list[Case]) -> list[dict[str, Any]]:
    given = [SYSTEM_PYTHON, str(SCRIPT)]
    done = subprocess.run(
        given, input=json.dumps(cases), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{SCRIPT.name} ended with {done.returncode}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def by_events(case: Case) -> tuple[list[int], float, int]:
    """Return when flows end in ns, the real s that it took, and at how many moments some ended."""
    begin = time.perf_counter()
    flows, end_ns, moments = Flows(case["capacities"]), {}, 0
    flows.add(0, case["paths"], case["sizes"])
    while (now_ns := flows.next_ns()) < FOREVER_NS:
        end_ns |= dict.fromkeys(flows.advance(now_ns), now_ns)
        moments += 1
    took_s = time.perf_counter() - begin
    return [end_ns[flow] for flow in sorted(end_ns)], took_s, moments


def at_once(case: Case) -> tuple[Floats, float]:
    """Return when flows end in ns, not rounded, and the real s that it took."""
    begin = time.perf_counter()
    end_ns = finish_ns(case["paths"], case["sizes"], case["capacities"])
    return end_ns, time.perf_counter() - begin


def off(case: Case, theirs: dict[str, Any]) -> float:
    """Return by which part the flow differs that differs most."""
    return float(np.max(np.abs(at_once(case)[0] / NS_PER_S / np.array(theirs["end_s"]) - 1)))


def late_ns(case: Case, theirs: dict[str, Any]) -> Floats:
    """Return how many ns after SimGrid's each end is told: at most one, for they are whole."""
    return np.array(by_events(case)[0]) - np.array(theirs["end_s"]) * NS_PER_S


def accuracy() -> dict[str, Any]:
    cases = [random_case(seed) for seed in RANDOM]
    pairs = list(zip(cases, by_simgrid(cases), strict=True))
    return {
        "cases": len(cases),
        "flows": sum(len(case["paths"]) for case in cases),
        "off": max(off(*pair) for pair in pairs),
        "late_ns": [
            float(min(late_ns(*pair).min() for pair in pairs)),
            float(max(late_ns(*pair).max() for pair in pairs)),
        ],
    }


def speed(case: Case, repeats: int, *, beside: bool) -> dict[str, Any]:
    found = {
        "moments": by_events(case)[2],
        "flows_ms": 1e3 * float(np.median([by_events(case)[1] for _ in range(repeats)])),
        "finish_ms": 1e3 * float(np.median([at_once(case)[1] for _ in range(repeats)])),
    }
    if beside:
        theirs = by_simgrid([case] * repeats)
        found["simgrid_ms"] = 1e3 * float(np.median([one["simulate_s"] for one in theirs]))
        found["simgrid_begin_ms"] = 1e3 * float(np.median([one["begin_s"] for one in theirs]))
        found["times_faster"] = found["simgrid_ms"] / found["flows_ms"]
        found["off"] = off(case, theirs[0])
    return found


def cold() -> dict[str, float]:
    """Return what the first flows of a new process cost in s, with nothing and all compiled."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("nothing compiled", "compiled before"):
            given, env = [sys.executable, "-c", COLD], {**os.environ, "NUMBA_CACHE_DIR": folder}
            done = subprocess.run(given, env=env, capture_output=True, text=True, check=True)
            found["import_s"], found[name] = map(float, done.stdout.split())
    return found


def run() -> dict[str, Any]:
    beside, size = has_simgrid(), 10**8
    near, far = [2**i for i in range(STRIDES)], list(range(8, HOSTS, HOSTS // STRIDES))
    mixed = [size * (1 + i) for i in range(STRIDES)]
    cases = {
        "8 rings": collective(near, [size] * STRIDES),
        "all-to-all, 8 steps": collective(far, [size] * STRIDES),
        "all-to-all, 8 sizes": collective(far, mixed),
        "all-to-all, hashed ways": collective(far, [size] * STRIDES, seed=1),
    }
    figures: dict[str, Any] = {"simgrid": beside, "cold": cold()}
    figures["collective"] = {
        name: speed(case, REPEATS, beside=beside) for name, case in cases.items()
    }
    figures["random"] = speed(scattered(1), 1, beside=beside)
    if beside:
        figures["accuracy"] = accuracy()
        rows = [*figures["collective"].values(), figures["random"]]
        least = min(row["times_faster"] for row in rows[:-1])
        figures["held"] = (
            max(row["off"] for row in [*rows, figures["accuracy"]]) <= OFF_MOST
            and least >= FASTER_COLLECTIVE
            and figures["random"]["times_faster"] >= FASTER_RANDOM
        )
    figures["load"] = os.getloadavg()[0]
    return figures


def table(figures: dict[str, Any]) -> str:
    lines = [f"{'8,192 flows on 1,024 hosts':28}{'moments':>9}{'Flows':>12}{'finish_ns':>12}"]
    if figures["simgrid"]:
        lines[0] += f"{'SimGrid':>13}{'faster':>9}{'off':>9}"
    for name, row in {**figures["collective"], "random": figures["random"]}.items():
        line = f"{name:28}{row['moments']:9}{row['flows_ms']:9.1f} ms{row['finish_ms']:9.1f} ms"
        if figures["simgrid"]:
            line += f"{row['simgrid_ms']:10.1f} ms{row['times_faster']:8.1f}x{row['off']:9.0e}"
        lines.append(line)
    first = figures["cold"]
    lines.append(
        f"first flows of a process: {first['nothing compiled']:.1f} s with nothing compiled, "
        f"{first['compiled before']:.2f} s after that; imports {first['import_s']:.2f} s"
    )
    if not figures["simgrid"]:
        return "\n".join([*lines, f"SimGrid is not there ({SYSTEM_PYTHON}): not compared"])
    near = figures["accuracy"]
    lines.append(
        f"{near['cases']} random networks, {near['flows']} flows: ends off by {near['off']:.0e}"
        f" at most; told {near['late_ns'][0]:.2f} to {near['late_ns'][1]:.2f} ns later"
    )
    told = "held" if figures["held"] else "MISSED"
    lines.append(
        f"marks: within {OFF_MOST:.0e}, {FASTER_COLLECTIVE}x on collectives, {FASTER_RANDOM}x on "
        f"random flows: {told} (load {figures['load']:.1f})"
    )
    return "\n".join(lines)
