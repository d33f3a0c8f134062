"""Which samples the RL loop gives, for the metrics of `harness.model.metrics`. Pure.

Policies are compared seed by seed: a gain is a ratio of samples/s of two runs that were given the
same requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from harness.clock import NS_PER_MS, NS_PER_S
from harness.model.documents import Event
from harness.model.policies import BEST_STATIC, ORACLE
from harness.record.fabric_samples import fabric_samples
from harness.record.intervals import shares
from harness.record.loops import Loop, loops_of, places_of

Sampled = tuple[str, dict[str, object], list[float | None]]
"""Base and labels of a metric, and its samples."""
Places = Mapping[int, tuple[int, int]]
"""By a step's number in the run, its place in the scenario and its repeat."""
BySeed = Mapping[int, float]
"""Samples/s of one policy, by the seed of its workload."""

OF_A_LOOP = (
    "samples_per_s",
    "switches_taken",
    "switches_refused",
    "switches_wasted",
    "moves",
    "generation_bubble_pct",
    "training_bubble_pct",
    "dropped",
    "staleness_max",
)
"""Fields of `rl` that are metrics under their own name."""
OF_A_STEP = ("step_s", "batch_s", "train_s", "mixed", "reward")
"""The same, of `rl_step`."""


def rl_samples(events: Sequence[Event]) -> Iterator[Sampled]:
    """Yield all samples of a journal's loops: of each policy, of one over others, of training."""
    loops = loops_of(events)
    for loop in loops:
        labels: dict[str, object] = {"step": loop.step, "policy": loop.policy}
        for base, values in (*_loop(loop), *_steps(loop), *_forecasts(loop), *_syncs(loop)):
            yield base, labels, values
    for step in sorted({loop.step for loop in loops}):
        speeds = _speeds(loop for loop in loops if loop.step == step)
        for base, labels, values in (*_gains(speeds), *_shares(speeds)):
            yield base, {"step": step, **labels}, values
    yield from fabric_samples(loops)
    yield from _phases(events)


Unlabelled = tuple[str, list[float | None]]


def _loop(loop: Loop) -> Iterator[Unlabelled]:
    for row in loop.of("rl"):
        yield from ((f"rl.{name}", [row[name]]) for name in OF_A_LOOP)
        if row["took_s"]:
            yield "rl.tokens_per_s", [row["tokens"] / row["took_s"]]
    yield "planner.solve_ms", [row["solve_ms"] for row in loop.of("planned")]


def _steps(loop: Loop) -> Iterator[Unlabelled]:
    rows = loop.of("rl_step")
    for name in OF_A_STEP:
        yield f"rl.{name}", [row[name] for row in rows]
    yield (
        "rl.tail_s",
        [
            (row["batch_end_ns"] - row["tail_begin_ns"]) / NS_PER_S
            for row in rows
            if row.get("tail_begin_ns") is not None
        ],
    )
    yield "sync.visible_pct", [visible_pct(row, after) for row, after in pairwise(rows)]
    if rewards := [row["reward"] for row in rows if row["reward"] is not None]:
        yield "rl.reward_first", [rewards[0]]
        yield "rl.reward_last", [rewards[-1]]
        yield "rl.reward_rise", [rewards[-1] - rewards[0]]


def visible_pct(row: Mapping[str, Any], after: Mapping[str, Any]) -> float:
    """Return how much of a step nobody did anything but wait for its sync.

    From when the step was trained, and the samples of the one after it were complete.
    """
    begin_ns = max(row["train_end_ns"], after["batch_end_ns"])
    waited_s = max(0, row["sync_end_ns"] - begin_ns) / NS_PER_S
    return float(100 * waited_s / row["step_s"]) if row["step_s"] else 0.0


def _forecasts(loop: Loop) -> Iterator[Unlabelled]:
    rows = loop.of("forecast")
    yield "forecast.error_pct", [_off_pct(row, "total") for row in rows]
    yield "forecast.longest_error_pct", [_off_pct(row, "longest") for row in rows]
    yield "forecast.covered_pct", [row["covered_pct"] for row in rows]
    within = (
        row["total_low_tokens"] <= row["total_true_tokens"] <= row["total_high_tokens"]
        for row in rows
    )
    yield "forecast.total_covered_pct", [100.0 * one for one in within]


def _off_pct(row: Mapping[str, Any], what: str) -> float | None:
    """Return how far a forecast was off, as a share of what came; None where nothing did."""
    expected, true = row[f"{what}_tokens"], row[f"{what}_true_tokens"]
    return 100 * abs(expected - true) / true if true else None


def _syncs(loop: Loop) -> Iterator[Unlabelled]:
    """Yield times of attempts that succeeded, and how many did not."""
    for row in loop.of("sync"):
        failed = row["outcome"] == "failed"
        yield "sync.failed", [failed]
        if failed:
            continue
        yield "sync.s", [row["total_s"]]
        for part in ("gather", "rpc", "wire", "load"):
            took_s = row[f"{part}_s"]
            yield f"sync.{part}_ms", [None if took_s is None else took_s * 1e3]
        if row["bytes"] and row["wire_s"]:
            yield "sync.gb_per_s", [row["bytes"] / row["wire_s"] / 1e9]


# -- one policy over another -------------------------------------------------------------------


def _speeds(loops: Iterable[Loop]) -> dict[str, BySeed]:
    """Return samples/s by policy and seed, policies in the order they began.

    The same seed twice is no second seed: it counts once, with its mean.
    """
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for loop in loops:
        for row in loop.of("rl"):
            if row["samples_per_s"]:
                found[loop.policy][row["workload_seed"]].append(row["samples_per_s"])
    return {
        policy: {seed: fmean(values) for seed, values in by_seed.items()}
        for policy, by_seed in found.items()
    }


def _gains(speeds: Mapping[str, BySeed]) -> Iterator[Sampled]:
    """Yield each policy's gain over the first, and over the best static one if it ran."""
    bases = dict.fromkeys([*list(speeds)[:1], *([BEST_STATIC] if BEST_STATIC in speeds else [])])
    for over in bases:
        for policy in speeds:
            if policy != over:
                values: list[float | None] = [*_ratios(speeds[policy], speeds[over])]
                yield "rl.gain", {"policy": policy, "over": over}, values


def _ratios(upper: BySeed, lower: BySeed, seeds: Iterable[int] | None = None) -> list[float]:
    """Return upper over lower for each seed that both have, or for these."""
    both = upper.keys() & lower.keys() if seeds is None else seeds
    return [upper[seed] / lower[seed] for seed in sorted(both)]


def _shares(speeds: Mapping[str, BySeed]) -> Iterator[Sampled]:
    """Yield what each policy has of the oracle's gain over the best static one."""
    if not {ORACLE, BEST_STATIC} <= speeds.keys():
        return
    best, oracle = speeds[BEST_STATIC], speeds[ORACLE]
    for policy, own in speeds.items():
        seeds = own.keys() & best.keys() & oracle.keys()
        if policy in (ORACLE, BEST_STATIC) or not seeds:
            continue
        gained, possible = (
            [ratio - 1 for ratio in _ratios(speed, best, seeds)] for speed in (own, oracle)
        )
        yield "rl.oracle_share_pct", {"policy": policy}, [100 * x for x in shares(gained, possible)]


# -- communications of a training step ---------------------------------------------------------


def _phases(events: Sequence[Event]) -> Iterator[Sampled]:
    """Yield the samples of training's communications; gaps are those of one step on one node.

    One is timed from when its last rank came: what others wait for that one is their skew.
    """
    places = places_of(events)
    latest_ns: dict[tuple[object, ...], int] = {}
    same: dict[tuple[int, int, int], list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        row = event.data
        if event.stream != "phase" or not row["end_ns"]:
            continue
        same[row["step"], row["version"], row["index"]].append(row)
        key = row["step"], row["node"], row["version"]
        if key in latest_ns:
            gap_ms = max(0, row["begin_ns"] - latest_ns[key]) / NS_PER_MS
            yield from _gap(_phase_labels(row, places), gap_ms, row["expected_gap_ms"])
        latest_ns[key] = row["end_ns"]
    for rows in same.values():
        yield from _together(_phase_labels(rows[0], places), rows)


def _phase_labels(row: Mapping[str, Any], places: Places) -> dict[str, object]:
    step, _ = places.get(row["step"], (row["step"], 0))
    return {"step": step, "axis": row["axis"], "op": row["op"]}


def _together(labels: dict[str, object], rows: Sequence[Mapping[str, Any]]) -> Iterator[Sampled]:
    """Yield the samples of one communication, which all these nodes told."""
    begins_ns, size_bytes = [row["begin_ns"] for row in rows], rows[0]["bytes"]
    took_ns = max(row["end_ns"] for row in rows) - max(begins_ns)
    yield "train.phase_ms", labels, [took_ns / NS_PER_MS]
    yield "train.skew_ms", labels, [(max(begins_ns) - min(begins_ns)) / NS_PER_MS]
    yield "train.phase_bytes", labels, [size_bytes]
    if took_ns > 0 and size_bytes:
        yield "train.phase_gb_per_s", labels, [size_bytes / took_ns]  # bytes per ns is GB/s


def _gap(labels: dict[str, object], gap_ms: float, expected_ms: float | None) -> Iterator[Sampled]:
    yield "train.gap_ms", labels, [gap_ms]
    yield "train.expected_gap_ms", labels, [expected_ms]
    if expected_ms:
        off_pct = 100 * abs(gap_ms - expected_ms) / expected_ms
        yield "train.gap_error_pct", labels, [off_pct]
