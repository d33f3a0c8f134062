"""Every policy on the same requests, in virtual time: samples/s, gains, and who is bound by what.

Generation only, batch after batch (`harness.rlsim.pool`): the paced engine's life cycle at the
profile's step times, the same forecast, planner and balancer as on a bench. Nothing here is
measured on a GPU. A gain is the geometric mean over seeds of paired ratios of times, with its 95 %
confidence interval. ``oracle`` knows all lengths. ``informed`` is ``orchestrl`` with the memory of
32 other batches of the same law: it knows what can be known of lengths before they are seen, and no
more. What it gains is the part of the oracle's gain that a forecast can give with this planner.

``python -m tests.benchmarks.policies [--case NAME]... [--policy NAME]... [--seeds N] [--jobs N]``
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import msgspec
import numpy as np

from harness.model.lengths import generate
from harness.model.load import load_profile, load_workload
from harness.model.replay import ReplayRequest
from harness.model.workload import GeneratedWorkload
from harness.record.intervals import ratio_half_width
from harness.rlsim.fleet import Hardware
from harness.rlsim.pool import Result, simulate
from harness.rlsim.search import best_static, uniform
from harness.scheduling.compute import Compute
from harness.scheduling.policies import parse_policy, smallest
from harness.scheduling.view import Finished, Settings

SCENARIOS = Path(__file__).parents[2] / "scenarios"
SWITCH_S = 4.5
"""4.52 s are published for a switch of TP."""
SEEDS = 5
BEST, OURS, KNOWS, LEARNED = "best_static", "orchestrl", "oracle", "informed"
DYNAMIC = ("reactive", "proactive", OURS, LEARNED, KNOWS)
REMEMBERED, ELSEWHERE = 32, 10_000
"""Batches that ``informed`` remembers, and by how much their seeds differ from all others."""
GAIN_DEFAULT, SHARE_OF_ORACLE, LOSS_MOST, GAIN_BEST = 1.42, 0.9, 0.02, 1.42


@dataclass(frozen=True)
class Case:
    """A workload on some hardware. `change` replaces keys of the workload file."""

    workload: str
    change: tuple[tuple[str, Any], ...] = ()
    profile: str = "qwen2.5-14b-h800"
    nodes: int = 1
    kv_max_tokens: int = 0
    sequences_max: int = 256
    mix: str = "4xTP1+1xTP4"
    replan_s: float = 2.0
    """The fast loop looks twice as often; on a bench more often still."""


LARGE = (("prompts", 64), ("samples", 8), ("steps", 4))
SHIPPED = {
    "heavy-tail": Case("heavy-tail", LARGE),
    "cap-saturated": Case("cap-saturated", (("prompts", 64), ("steps", 4)), replan_s=10.0),
    "tight-runaways": Case("tight-runaways", (("steps", 6),)),
    "multi-turn": Case("multi-turn"),
    "short": Case("short"),
}
"""The workloads as they are shipped, but heavy-tail and cap-saturated with 512 requests a step."""
OPEN = {
    "drift-up": Case("heavy-tail", (*LARGE, ("steps", 6), ("growth_per_step", 0.4))),
    "drift-down": Case(
        "cap-saturated", (*LARGE, ("steps", 6), ("growth_per_step", -0.4)), replan_s=10.0
    ),
    "memory": Case("cap-saturated", LARGE, kv_max_tokens=160_000, replan_s=10.0),
    "32b": Case("heavy-tail", LARGE, profile="qwen2.5-32b-h800", mix="4xTP1+1xTP4"),
    "large-runaways": Case("large-runaways"),
    "235b": Case("heavy-tail", LARGE, profile="qwen3-235b-a22b-h800", nodes=2, mix=""),
    "32-gpus": Case("heavy-tail", (*LARGE, ("prompts", 256)), nodes=4, mix="16xTP1+4xTP4"),
}
"""Where more than that may be in reach."""
CASES = SHIPPED | OPEN


@cache
def _hardware(name: str) -> tuple[Hardware, Compute]:
    case = CASES[name]
    hardware = Hardware(
        profile=load_profile(SCENARIOS / f"profiles/{case.profile}.toml"),
        gpus_of={f"g{number}": 8 for number in range(case.nodes)},
        sequences_max=case.sequences_max,
        kv_max_tokens=case.kv_max_tokens,
    )
    return hardware, hardware.compute()


def _batches(name: str, seed: int) -> tuple[list[Sequence[ReplayRequest]], int, int]:
    """Return a case's batches with another seed, and the most tokens and turns of a trajectory."""
    case = CASES[name]
    workload = load_workload(SCENARIOS / f"workloads/{case.workload}.toml")
    assert isinstance(workload, GeneratedWorkload)
    changed = msgspec.structs.replace(workload, **dict(case.change), seed=workload.seed + seed)
    replay = generate(changed)
    turns = len(changed.turn_weights)
    batches: list[Sequence[ReplayRequest]] = [replay.step(step) for step in range(changed.steps)]
    return batches, changed.cap_tokens * turns, turns


@cache
def _remembered(name: str, seed: int) -> tuple[Finished, ...]:
    """Return other batches of a case's law, as history; the steps of a law that drifts in turn."""
    found: list[Finished] = []
    while len(found) < REMEMBERED:
        batches, _, _ = _batches(name, ELSEWHERE + REMEMBERED * seed + len(found))
        found += [_finished(batch) for batch in batches]
    last = found[:REMEMBERED]
    return tuple(replace(each, batch=at - REMEMBERED) for at, each in enumerate(last))


def _finished(batch: Sequence[ReplayRequest]) -> Finished:
    """Return a batch as it is remembered once it has ended."""
    rows = []
    for request in batch:
        contexts = list(
            accumulate(turn.prompt_tokens + turn.response_tokens for turn in request.turns)
        )
        again = sum(
            before + turn.prompt_tokens
            for before, turn in zip(contexts, request.turns[1:], strict=False)
        )
        rows.append((request.prompt, request.response_tokens, again))
    group, length, recomputed = np.array(rows, np.int64).T
    return Finished(0, group, length, recomputed)


def policies_of(name: str) -> list[str]:
    """Return the policies of a case's table: first what a user takes by default."""
    hardware, compute = _hardware(name)
    default = smallest(compute, hardware.gpus_of)
    layouts = compute.layouts(8)
    static = [default, *(mix for mix in uniform(layouts, hardware.gpus_of) if mix != default)]
    mix = [f"static:{CASES[name].mix}"] if CASES[name].mix else []
    return [*(f"static:{each}" for each in static), *mix, BEST, *DYNAMIC]


def play(name: str, policy: str, seed: int) -> dict[str, Any]:
    """Run one policy on one seed of a case."""
    began = time.perf_counter()
    hardware, compute = _hardware(name)
    batches, cap_tokens, turns_max = _batches(name, seed)
    chosen = parse_policy(OURS if policy == LEARNED else policy)
    if policy == BEST:
        chosen = best_static(batches, hardware, cap_tokens=cap_tokens, compute=compute)
    done = simulate(
        batches,
        chosen,
        hardware,
        Settings(switch_s=SWITCH_S),
        cap_tokens=cap_tokens,
        turns_max=turns_max,
        before=_remembered(name, seed) if policy == LEARNED else (),
        compute=compute,
        replan_s=CASES[name].replan_s,
        balance_s=CASES[name].replan_s / 2,
    )
    samples = sum(map(len, batches))
    tokens = sum(request.response_tokens for batch in batches for request in batch)
    if done.tokens != tokens:
        raise AssertionError(f"{name}, {policy}, seed {seed}: {done.tokens} of {tokens} tokens")
    return _row(done, samples) | {"cpu_s": round(time.perf_counter() - began, 2)}


def _row(done: Result, samples: int) -> dict[str, Any]:
    return {
        "total_s": done.total_s,
        "samples_per_s": samples / done.total_s,
        "switches": done.switches,
        "moves": len(done.moved),
        "preemptions": done.preemptions,
        "layouts": [str(layout) for _, layout in done.layouts],
    }


def gain(over: Sequence[float], took: Sequence[float]) -> tuple[float, float]:
    """Return the geometric mean of paired ratios, and half of its 95 % interval."""
    ratios = [there / here for there, here in zip(over, took, strict=True)]
    return geometric_mean(ratios), ratio_half_width(ratios) or math.nan


def judge(name: str, policies: Sequence[str], seeds: int, jobs: int) -> dict[str, Any]:
    """Return a case's table: a row a policy."""
    asked = [(policy, seed) for policy in policies for seed in range(seeds)]
    with ProcessPoolExecutor(jobs) as workers:
        found = list(workers.map(partial(_play, name), asked))
    rows: dict[str, Any] = {}
    for at, policy in enumerate(policies):
        mine = found[at * seeds : (at + 1) * seeds]
        rows[policy] = {
            "took_s": [row["total_s"] for row in mine],
            "samples_per_s": fmean(row["samples_per_s"] for row in mine),
            "layouts": sorted({" ".join(row["layouts"]) for row in mine}, key=len)[:2],
        } | {
            key: fmean(row[key] for row in mine)
            for key in ("switches", "moves", "preemptions", "cpu_s")
        }
    for row in rows.values():
        for over in (policies[0], BEST):
            if over in rows:
                row[f"over {over}"] = gain(rows[over]["took_s"], row["took_s"])
    return {"case": name, "seeds": seeds, "rows": rows, "marks": _marks(name, policies[0], rows)}


def _play(name: str, asked: tuple[str, int]) -> dict[str, Any]:
    return play(name, *asked)


def _marks(name: str, default: str, rows: dict[str, Any]) -> dict[str, Any]:
    """Return what holds: means over seeds, whatever the intervals are."""
    if OURS not in rows or BEST not in rows:
        return {}
    best = rows[OURS][f"over {BEST}"][0]
    marks = {f"no more than {LOSS_MOST:.0%} below best static": (best, best >= 1 - LOSS_MOST)}
    if name == "heavy-tail":
        over = rows[OURS][f"over {default}"][0]
        marks[f">= {GAIN_DEFAULT}x over {default}"] = (over, over >= GAIN_DEFAULT)
    if KNOWS in rows:
        most = rows[KNOWS][f"over {BEST}"][0]
        share = (best - 1) / (most - 1) if most > 1.005 else float("nan")
        marks[f">= {SHARE_OF_ORACLE:.0%} of the oracle's gain over best static"] = (
            share,
            share >= SHARE_OF_ORACLE,
        )
    if LEARNED in rows:
        known = rows[LEARNED][f"over {BEST}"][0]
        part = (best - 1) / (known - 1) if known > 1.005 else float("nan")
        marks[f">= {SHARE_OF_ORACLE:.0%} of what {LEARNED} gains"] = (part, part >= SHARE_OF_ORACLE)
    if name in OPEN:
        marks[f">= {GAIN_BEST}x over best static"] = (best, best >= GAIN_BEST)
    return marks


def run(
    cases: Sequence[str] = tuple(CASES),
    policies: Sequence[str] = (),
    seeds: int = SEEDS,
    jobs: int = 2,
) -> dict[str, Any]:
    """Judge cases; `policies` besides the default and the best static, or all."""
    found = []
    for name in cases:
        every = policies_of(name)
        chosen = list(dict.fromkeys([every[0], BEST, *policies])) if policies else every
        found.append(judge(name, chosen, seeds, jobs))
        sys.stderr.write(_table(found[-1]) + "\n\n")
    return {"cases": found}


def _table(case: dict[str, Any]) -> str:
    rows = case["rows"]
    default = next(iter(rows))
    heads = f"{'policy':28} {'samples/s':>9}  {'over ' + default:>22} {'over best static':>18}"
    lines = [
        f"{case['case']}, {case['seeds']} seeds",
        f"  {heads} {'switches':>8} {'moves':>6} {'preempted':>9}  layouts",
    ]
    for policy, row in rows.items():
        shown = [_shown(row.get(f"over {over}")) for over in (default, BEST)]
        lines.append(
            f"  {policy:28} {row['samples_per_s']:9.3f}  {shown[0]:>22} {shown[1]:>18}"
            f" {row['switches']:8.1f} {row['moves']:6.1f} {row['preemptions']:9.1f}"
            f"  {' | '.join(row['layouts'])[:90]}"
        )
    for mark, (value, held) in case["marks"].items():
        lines.append(f"  {'held  ' if held else 'MISSED'} {mark}: {value:.3f}")
    return "\n".join(lines)


def _shown(found: tuple[float, float] | None) -> str:
    return f"{found[0]:.3f}x +-{found[1]:.3f}" if found else ""


def table(figures: dict[str, Any]) -> str:
    """Return all tables as text."""
    return "\n\n".join(_table(case) for case in figures["cases"])


def main() -> int:
    """Judge what is asked for, and print each table as soon as it is there."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.policies")
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--policy", action="append", default=[])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    run(given.case or tuple(CASES), given.policy, given.seeds, given.jobs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
