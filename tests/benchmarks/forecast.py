"""Forecast of remaining work against simpler ones, on every shipped workload; and its time.

Batches of each workload, as shipped and growing by a tenth a step, several seeds; the errors are
medians of |forecast / truth - 1| at three moments of each batch that has two or more before it.
Simpler: `last` takes the remaining lengths that the last batch had at the same progress, `history`
those of all batches (without drift), `strangers` is ours without knowing who are siblings. Of
requests: mean error of each one's expected length, in means of what remains. Levels (mean log
lengths): one step ahead, ours, the last, the mean of all, and ARIMA (1,1,0) by least squares.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from harness.model.lengths import generate
from harness.model.load import load_workload
from harness.model.workload import GeneratedWorkload
from harness.scheduling.drift import level_ahead
from harness.scheduling.forecast import forecast
from harness.scheduling.survival import learn
from harness.scheduling.view import Finished, Floats, Ints, Requests, View

WORKLOADS = Path(__file__).parents[2] / "scenarios/workloads"
STEPS, SEEDS = 7, 5
SHARES = (0.0, 0.5, 0.9)
"""Of a batch, that have ended at the moment of the forecast."""
REQUESTS, PAST, TIME_MAX_MS = 16_384, 10, 50.0


def run() -> dict[str, Any]:
    rows = {}
    for path in sorted(WORKLOADS.glob("*.toml")):
        workload = load_workload(path)
        if isinstance(workload, GeneratedWorkload):
            for growth in (0.0, 0.1):
                changed = msgspec.structs.replace(workload, growth_per_step=growth, steps=STEPS)
                rows[f"{path.stem} {growth:+.0%}"] = _errors(changed)
    times = {f"siblings {rho:g}": _time_ms(rho) for rho in (0.0, 0.3, 0.9)}
    return {"errors": rows, "time_ms": times, "held": max(times.values()) < TIME_MAX_MS}


def table(figures: dict[str, Any]) -> str:
    lines = []
    for name, row in figures["errors"].items():
        lines.append(name)
        for moment, errors in row.items():
            cells = "  ".join(f"{key} {value:6.1%}" for key, value in errors.items())
            lines.append(f"  {moment:14} {cells}")
    told = "held" if figures["held"] else "MISSED"
    times = ", ".join(f"{name} {ms:.0f} ms" for name, ms in figures["time_ms"].items())
    lines.append(f"{REQUESTS} requests, {PAST} past batches: {times}")
    lines.append(f"mark: < {TIME_MAX_MS:g} ms: {told}")
    return "\n".join(lines)


# -- errors ---------------------------------------------------------------------------------------


def _errors(workload: GeneratedWorkload) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for seed in range(SEEDS):
        batches = _batches(msgspec.structs.replace(workload, seed=seed + 1))
        for step in range(2, STEPS):
            past, now = batches[:step], batches[step]
            _note(found["level"], _levels(past, now, workload.cap_tokens))
            for share in SHARES:
                for measure, errors in _at(past, now, workload.cap_tokens, share).items():
                    _note(found[f"{measure} {share:.0%}"], errors)
    return {
        moment: {name: float(np.median(values)) for name, values in errors.items()}
        for moment, errors in sorted(found.items())
    }


def _note(into: dict[str, list[float]], errors: dict[str, float]) -> None:
    for name, error in errors.items():
        into[name].append(error)


def _batches(workload: GeneratedWorkload) -> list[Finished]:
    replay = generate(workload)
    batches = []
    for step in range(workload.steps):
        requests = replay.step(step)
        group = np.array([request.prompt + step * workload.prompts for request in requests])
        lengths = np.array([request.response_tokens for request in requests])
        batches.append(Finished(step, group, lengths))
    return batches


def _view(past: list[Finished], now: Finished, produced: Ints, cap: int) -> View:
    left = now.length > produced
    ended = Finished(now.batch, now.group[~left], now.length[~left])
    group, reached = now.group[left], produced[left]
    requests = Requests(
        ids=tuple(map(str, range(len(group)))),
        group=group,
        produced=reached,
        context=reached,
        at=np.zeros_like(group),
        running=group >= 0,
        batch=np.full_like(group, now.batch),
    )
    return View(0.0, (), requests, (*past, ended), {}, cap)


def _at(past: list[Finished], now: Finished, cap: int, share: float) -> dict[str, dict[str, float]]:
    reached = int(np.quantile(now.length, share, method="inverted_cdf")) if share else 0
    truth = now.length[now.length > reached] - reached
    if not len(truth):
        return {}
    view = _view(past, now, np.full_like(now.length, reached), cap)
    rows = view.requests
    alone = replace(view, requests=replace(rows, group=np.arange(len(rows)) + 10**9))
    ours, strangers = forecast(view), forecast(alone)
    before = {"last": past[-1].length, "history": np.concatenate([b.length for b in past])}
    simple = {name: _remaining(lengths, reached) for name, lengths in before.items()}
    totals = {name: len(truth) * float(left.mean()) for name, left in simple.items()}
    longest = {name: float(left.max()) for name, left in simple.items()}
    totals |= {"ours": ours.total.mid, "strangers": strangers.total.mid}
    longest |= {"ours": ours.longest.mid, "strangers": strangers.longest.mid}
    each = {"ours": ours.expected, "strangers": strangers.expected}
    each |= {name: np.full(len(truth), left.mean()) for name, left in simple.items()}
    return {
        "total": {name: abs(value / truth.sum() - 1) for name, value in totals.items()},
        "longest": {name: abs(value / truth.max() - 1) for name, value in longest.items()},
        "requests": {
            name: float(np.abs(value - truth).mean() / truth.mean()) for name, value in each.items()
        },
    }


def _remaining(lengths: Ints, reached: int) -> Ints:
    left = lengths[lengths > reached] - reached
    return left if len(left) else np.ones(1, np.int64)


def _levels(past: list[Finished], now: Finished, cap: int) -> dict[str, float]:
    law = learn([*past, now], cap)
    *levels, truth = law.levels
    guesses = {
        "ours": level_ahead(levels, law.variances[:-1]).mean,
        "last": levels[-1],
        "mean": float(np.mean(levels)),
        "arima": _arima(np.array(levels)),
    }
    return {name: abs(guess - truth) for name, guess in guesses.items()}


def _arima(levels: Floats) -> float:
    """Return the forecast of ARIMA (1,1,0) with a constant, conditional least squares."""
    steps = np.diff(levels)
    if len(steps) < 3 or not np.ptp(steps[:-1]):
        return float(levels[-1] + steps.mean())
    slope, constant = np.polyfit(steps[:-1], steps[1:], 1)
    return float(levels[-1] + constant + np.clip(slope, -0.99, 0.99) * steps[-1])


# -- time -----------------------------------------------------------------------------------------


def _time_ms(correlation: float) -> float:
    """Return the least of several CPU times, ms, at the start of a batch of log-normal lengths."""
    chance = np.random.default_rng(0)
    batches = []
    for batch in range(PAST + 1):
        group = np.repeat(np.arange(REQUESTS // 8), 8)
        shared = chance.standard_normal(REQUESTS // 8)[group]
        scores = np.sqrt(correlation) * shared
        scores += np.sqrt(1 - correlation) * chance.standard_normal(REQUESTS)
        lengths = np.clip(np.exp(6 + 0.9 * scores), 1, 20_480).astype(np.int64)
        batches.append(Finished(batch, group + batch * REQUESTS, lengths))
    *past, now = batches
    view = _view(past, now, np.zeros(REQUESTS, np.int64), 20_480)
    times = []
    for _ in range(7):
        start = time.process_time_ns()
        forecast(view)
        times.append(time.process_time_ns() - start)
    return min(times) / 1e6
