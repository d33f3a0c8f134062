"""Verdicts: checks against metrics, and the way a run ended. Pure.

A check is passed, failed or unknown; unknown (no such metric, no ratio, or a limit inside the
timing bound) is never a pass. Merged worst first: failed, then unknown, then passed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.errors import ExitCode
from harness.model.documents import CheckResult, Metric, Status
from harness.model.metrics import matching, metric_name, parse_metric
from harness.model.scenario import Check

Verdict = Literal["passed", "failed", "unknown"]

WORST_FIRST: tuple[Verdict, ...] = ("failed", "unknown", "passed")

STATUS_OF: Mapping[ExitCode, Status] = {
    ExitCode.FAILED: "failed",
    ExitCode.USAGE: "infrastructure",
    ExitCode.INFRASTRUCTURE: "infrastructure",
    ExitCode.INTERRUPTED: "interrupted",
    ExitCode.RESTORE_FAILED: "infrastructure",
    ExitCode.INCONCLUSIVE: "inconclusive",
    ExitCode.NOTHING_RAN: "inconclusive",
    ExitCode.BUG: "bug",
}
"""Status of a run that something ended; one that went through is judged by its checks."""


NEVER = {
    "collective.wrong": "wrong elements",
    "generate.lost": "tokens lost",
    "generate.doubled": "tokens delivered twice",
}
"""Metrics that must be 0 in every run, whatever its checks say."""


@dataclass(frozen=True)
class Ending:
    """How a run ended: what its stop document says."""

    status: Status
    exit_code: ExitCode
    reason: str


def ending(
    results: Iterable[CheckResult],
    broken: Sequence[str] = (),
    error: ExitCode = ExitCode.PASSED,
    reason: str = "",
) -> Ending:
    """Decide how a run ended.

    `error` and `reason` say what ended it (`PASSED`: it went through all its steps), `broken` what
    must never be (`broken_promises`). Inconclusive runs exit with 0; ``--strict`` makes that 6.
    """
    if error is not ExitCode.PASSED:
        return Ending(STATUS_OF[error], error, reason)
    if broken:
        return Ending("failed", ExitCode.FAILED, ", ".join(broken))
    results = list(results)
    for verdict, status in (("failed", "failed"), ("unknown", "inconclusive")):
        if texts := [result.text for result in results if result.verdict == verdict]:
            code = ExitCode.FAILED if verdict == "failed" else ExitCode.PASSED
            many = "check" if len(texts) == 1 else "checks"
            text = f"{len(texts)} {many} {verdict}: {'; '.join(texts)}"
            return Ending("failed" if status == "failed" else "inconclusive", code, text)
    if not results:
        return Ending("inconclusive", ExitCode.PASSED, "the scenario states no checks")
    return Ending("passed", ExitCode.PASSED, "")


def broken_promises(metrics: Mapping[str, Metric]) -> list[str]:
    """Return what must never be and was: ``3 tokens lost``."""
    return [
        f"{metrics[name].value:.0f} {text}"
        for name, text in NEVER.items()
        if name in metrics and metrics[name].value
    ]


def merge(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst; of nothing, nothing is known."""
    return min(verdicts, key=WORST_FIRST.index, default="unknown")


def evaluate(check: Check, metrics: Mapping[str, Metric]) -> CheckResult:
    """Judge one check; where its name stands for several metrics, all of them must hold."""
    found = _ratios(check, metrics) if check.ratio_to else _values(check, metrics)
    judged = [(_judge(check, value, bound), value, bound) for value, bound in found]
    verdict = merge(one for one, _, _ in judged)
    known = [(v, b) for one, v, b in judged if one == verdict and not math.isnan(v)]
    worst = min if check.at_least is not None else max
    value, bound = worst(known, default=(None, 0.0))
    return CheckResult(text=describe(check), verdict=verdict, found=value, plus_minus=bound or None)


def describe(check: Check) -> str:
    """Return a check in one line: ``reconfigure.dark_ms p99 <= 40``.

    A ratio of one metric at two labels names it once: ``link_ms[step=1] / [step=3] >= 2``.
    """
    stat = "" if check.stat == "value" else f" {check.stat}"
    subject = f"{check.metric}{stat}"
    if check.ratio_to:
        base, bracket, labels = check.ratio_to.partition("[")
        same = base == check.metric.partition("[")[0] and bracket
        subject += f" / {bracket + labels if same else check.ratio_to}{stat}"
    limits = [
        f"{sign} {limit:g}"
        for sign, limit in ((">=", check.at_least), ("<=", check.at_most))
        if limit is not None
    ]
    return f"{subject} {' and '.join(limits)}"


def _judge(check: Check, value: float, bound: float) -> Verdict:
    """Judge one value that is right within `bound`; a limit inside the bound decides nothing."""
    if math.isnan(value) or not math.isfinite(bound):
        return "unknown"
    sides: list[Verdict] = []
    for limit, sign in ((check.at_least, 1), (check.at_most, -1)):
        if limit is None:
            continue
        margin = (value - limit) * sign
        sides.append("unknown" if abs(margin) < bound else _side(margin))
    return merge(sides)


def _side(margin: float) -> Verdict:
    return "passed" if margin >= 0 else "failed"


def _values(check: Check, metrics: Mapping[str, Metric]) -> list[tuple[float, float]]:
    """Return (value, timing bound) of every metric that the check names."""
    return [
        (float(getattr(metrics[name], check.stat)), metrics[name].plus_minus or 0.0)
        for name in matching(check.metric, metrics)
    ]


def _ratios(check: Check, metrics: Mapping[str, Metric]) -> list[tuple[float, float]]:
    """Pair each metric with the one that differs only in the labels that the check sets apart.

    One without exactly one partner gives NaN: not known. Bounds add up relatively.
    """
    own, other = (parse_metric(text)[1] for text in (check.metric, check.ratio_to))
    partners: dict[str, list[Metric]] = {}
    for name in matching(check.ratio_to, metrics):
        partners.setdefault(_rest(name, other), []).append(metrics[name])
    ratios = []
    for name in matching(check.metric, metrics):
        fits = partners.get(_rest(name, own), [])
        ratios.append(_ratio(metrics[name], fits[0], check.stat) if len(fits) == 1 else UNKNOWN)
    return ratios


UNKNOWN = (math.nan, 0.0)


def _ratio(upper: Metric, lower: Metric, stat: str) -> tuple[float, float]:
    over, under = float(getattr(upper, stat)), float(getattr(lower, stat))
    if not under or not over:
        return UNKNOWN
    relative = (upper.plus_minus or 0.0) / abs(over) + (lower.plus_minus or 0.0) / abs(under)
    return over / under, abs(over / under) * relative


def _rest(name: str, set_apart: Mapping[str, str]) -> str:
    """Return the labels of a metric that a check leaves open."""
    _, labels = parse_metric(name)
    return metric_name("", {k: v for k, v in labels.items() if k not in set_apart})
