"""How long the fast loop takes to decide, of 16,384 requests: 64 instances < 1 ms, 1,024 < 30 ms.

The forecast is made before: the slow loop needs it too. Pools of several kinds, each decided on
many times: even, one overloaded instance, a mix of layouts, requests without a seat; also the
largest number of moves that one look may make. p50 and p99 over all.
"""

from __future__ import annotations

import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from harness.model.layout import Layout
from harness.model.load import load_profile
from harness.scheduling.balancer import balance
from harness.scheduling.compute import Compute
from harness.scheduling.forecast import Forecast
from harness.scheduling.view import Instance, Requests, Settings, View

PROFILE = Path(__file__).parents[2] / "scenarios/profiles/qwen2.5-14b-h800.toml"
REQUESTS, SEATS = 16384, 320
ROUNDS = 200
MARKS_MS = {64: 1.0, 1024: 30.0}
"""By instances."""


def _pool(
    kind: str, count: int, compute: Compute, chance: np.random.Generator
) -> tuple[View, Forecast]:
    tp = [4 if kind == "mixed" and k % 4 == 0 else 1 for k in range(count)]
    shares = np.ones(count)
    if kind == "overloaded":
        shares[7] = 2.0
    at = np.sort(chance.choice(count, REQUESTS, p=shares / shares.sum()))
    produced = chance.integers(1, 4000, REQUESTS)
    context = produced + 200
    place = np.arange(REQUESTS) - np.searchsorted(at, at)
    running = place < (128 if kind == "waiting" else SEATS)
    instances = tuple(
        Instance(
            name=f"g{k // 8}:{k % 8}",
            node=f"g{k // 8}",
            layout=Layout(1, tp[k]),
            accepting=True,
            sequences_max=128 if kind == "waiting" else SEATS,
            kv_capacity_tokens=compute.kv_capacity_tokens(Layout(1, tp[k])) * 20,
            kv_used_tokens=int(context[(at == k) & running].sum()),
            running=int(np.sum((at == k) & running)),
            waiting=int(np.sum((at == k) & ~running)),
        )
        for k in range(count)
    )
    requests = Requests(
        ids=tuple(f"r{k}" for k in range(REQUESTS)),
        group=np.arange(REQUESTS) // 8,
        produced=produced,
        context=context,
        at=at,
        running=running,
        batch=np.zeros(REQUESTS, dtype=np.int64),
    )
    nodes = {f"g{k}": 8 for k in range(count // 8)}
    view = View(100.0, instances, requests, (), nodes, cap_tokens=20480)
    return view, Forecast.certain(chance.lognormal(6, 1, REQUESTS).astype(np.int64) + 1)


def run() -> dict[str, Any]:
    compute = Compute.of(load_profile(PROFILE), sequences_max=SEATS)
    settings = Settings(moves_per_s_max=2.0)
    rows = []
    for count, kind in product(MARKS_MS, ("even", "overloaded", "mixed", "waiting")):
        view, forecast = _pool(kind, count, compute, np.random.default_rng(1))
        took_ms, moves = [], 0
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            moves = len(balance(view, forecast, compute, settings, lambda *_: 0.05))
            took_ms.append((time.perf_counter() - begin) * 1e3)
        p50, p99 = np.percentile(took_ms[5:], (50, 99))
        told = {"p50_ms": round(p50, 3), "p99_ms": round(p99, 3), "moves": moves}
        rows.append({"instances": count, "kind": kind, **told})
    held = all(row["p50_ms"] < MARKS_MS[row["instances"]] for row in rows)
    return {"requests": REQUESTS, "rows": rows, "held": held}


def table(figures: dict[str, Any]) -> str:
    lines = [
        f"{row['instances']:5} instances, {row['kind']:10} p50 {row['p50_ms']:.3f} ms  "
        f"p99 {row['p99_ms']:.3f} ms  {row['moves']} moves"
        for row in figures["rows"]
    ]
    told = "held" if figures["held"] else "MISSED"
    lines.append(f"{figures['requests']} requests; marks: p50 by instances {MARKS_MS}: {told}")
    return "\n".join(lines)
