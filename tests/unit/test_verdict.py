"""Checks: unknown is never a pass, and the worst verdict is the run's."""

from __future__ import annotations

import math

import pytest

from harness.errors import ExitCode
from harness.model.documents import CheckResult, Metric
from harness.model.metrics import matching, metric_problem, parse_metric, quantities
from harness.model.scenario import Check
from harness.record.verdict import broken_promises, ending, evaluate, merge


def metric(value: float, plus_minus: float | None = None, **other: float) -> Metric:
    spread = dict.fromkeys(("min", "p50", "p95", "p99", "max"), value) | other
    return Metric(value=value, unit="ms", n=3, plus_minus=plus_minus, **spread)


DARK = "reconfigure.dark_ms"
BUS = "collective.all_reduce.busbw_gb_per_s"
METRICS = {
    DARK: metric(25.0, 1.0, p99=30.0),
    f"{DARK}[step=1]": metric(24.0, 1.0),
    f"{DARK}[step=3]": metric(26.0, 1.0),
    f"{BUS}[path=electrical,size=1024,ranks=4]": metric(2.0),
    f"{BUS}[path=electrical,size=1048576,ranks=4]": metric(1.0),
    f"{BUS}[path=ring,size=1024,ranks=4]": metric(3.0),
    f"{BUS}[path=ring,size=1048576,ranks=4]": metric(4.0),
    "reconfigure.cost_ms": metric(math.nan),
}


@pytest.mark.parametrize(
    ("check", "verdict", "found"),
    [
        (Check(metric=DARK, at_most=27.0), "passed", 25.0),
        (Check(metric=DARK, at_most=20.0), "failed", 25.0),
        (Check(metric=DARK, at_least=20.0, at_most=27.0), "passed", 25.0),
        (Check(metric=DARK, at_least=20.0, at_most=21.0), "failed", 25.0),
        (Check(metric=DARK, stat="p99", at_most=27.0), "failed", 30.0),
        (Check(metric=DARK, at_most=25.5), "unknown", 25.0),  # the limit lies inside the bound
        (Check(metric=f"{DARK}[step=3]", at_least=25.0), "passed", 26.0),
        (Check(metric=f"{DARK}[step=9]", at_most=99.0), "unknown", None),
        (Check(metric="reconfigure.link_ms", at_most=99.0), "unknown", None),
        (Check(metric="reconfigure.cost_ms", at_most=99.0), "unknown", None),
        (Check(metric=f"{BUS}[path=ring]", at_least=3.0), "passed", 3.0),
        (Check(metric=f"{BUS}[path=ring]", at_least=3.5), "failed", 3.0),
        (Check(metric=f"{BUS}[path=ring]", at_most=3.5), "failed", 4.0),
    ],
)
def test_a_check_is_judged_on_every_metric_it_names(
    check: Check, verdict: str, found: float | None
) -> None:
    result = evaluate(check, METRICS)
    assert (result.verdict, result.found) == (verdict, found)


@pytest.mark.parametrize(
    ("upper", "lower", "limit", "verdict", "found"),
    [
        ("[path=ring,size=1MiB]", "[path=electrical,size=1MiB]", 3.0, "passed", 4.0),
        ("[path=ring]", "[path=electrical]", 1.5, "passed", 1.5),  # size by size
        ("[path=ring]", "[path=electrical]", 3.0, "failed", 1.5),
        ("[path=ring]", "[path=electrical,size=1MiB]", 1.0, "unknown", None),  # no partner
        ("[path=ring]", "[path=star]", 1.0, "unknown", None),
        ("[path=star]", "[path=electrical]", 1.0, "unknown", None),
    ],
)
def test_ratios_pair_rows_that_differ_only_where_the_check_says(
    upper: str, lower: str, limit: float, verdict: str, found: float | None
) -> None:
    check = Check(metric=BUS + upper, ratio_to=BUS + lower, at_least=limit)
    result = evaluate(check, METRICS)
    assert (result.verdict, result.found) == (verdict, found)
    assert result.text == f"{BUS}{upper} / {lower} >= {limit:g}"


def test_bounds_of_a_ratio_add_up() -> None:
    check = Check(metric=f"{DARK}[step=3]", ratio_to=f"{DARK}[step=1]", at_least=1.05)
    result = evaluate(check, METRICS)
    assert result.verdict == "unknown"
    assert result.plus_minus == pytest.approx(26 / 24 * (1 / 26 + 1 / 24))


def test_verdicts_merge_worst_first() -> None:
    assert merge(["passed", "unknown", "failed"]) == "failed"
    assert merge(["passed", "unknown"]) == "unknown"
    assert merge([]) == "unknown"


PASSED = CheckResult(text="a <= 1", verdict="passed", found=0.5)
FAILED = CheckResult(text="b <= 1", verdict="failed", found=2.0)
UNKNOWN = CheckResult(text="c <= 1", verdict="unknown")


@pytest.mark.parametrize(
    ("results", "broken", "error", "status", "code"),
    [
        ([PASSED], [], ExitCode.PASSED, "passed", ExitCode.PASSED),
        ([PASSED, UNKNOWN], [], ExitCode.PASSED, "inconclusive", ExitCode.PASSED),
        ([PASSED, UNKNOWN, FAILED], [], ExitCode.PASSED, "failed", ExitCode.FAILED),
        ([], [], ExitCode.PASSED, "inconclusive", ExitCode.PASSED),
        ([PASSED], ["2 wrong elements"], ExitCode.PASSED, "failed", ExitCode.FAILED),
        ([PASSED], [], ExitCode.INFRASTRUCTURE, "infrastructure", ExitCode.INFRASTRUCTURE),
        ([FAILED], [], ExitCode.RESTORE_FAILED, "infrastructure", ExitCode.RESTORE_FAILED),
        ([FAILED], [], ExitCode.INTERRUPTED, "interrupted", ExitCode.INTERRUPTED),
        ([], [], ExitCode.NOTHING_RAN, "inconclusive", ExitCode.NOTHING_RAN),
        ([], [], ExitCode.BUG, "bug", ExitCode.BUG),
        ([PASSED], [], ExitCode.FAILED, "failed", ExitCode.FAILED),
    ],
)
def test_how_a_run_ends(
    results: list[CheckResult], broken: list[str], error: ExitCode, status: str, code: ExitCode
) -> None:
    end = ending(results, broken, error, "why" if error else "")
    assert (end.status, end.exit_code) == (status, code)
    assert bool(end.reason) == (status != "passed")


@pytest.mark.parametrize("name", ["collective.wrong", "generate.lost", "generate.doubled"])
def test_what_must_never_be_is_told_with_its_count(name: str) -> None:
    assert broken_promises({name: metric(0.0)}) == []
    (told,) = broken_promises({name: metric(3.0), "generate.tokens": metric(9.0)})
    assert told.startswith("3 ")


def test_names_of_metrics() -> None:
    assert parse_metric(f"{BUS}[path=ring,size=4MiB]") == (
        BUS,
        {"path": "ring", "size": str(4 * 2**20)},
    )
    assert matching(DARK, METRICS) == [DARK]  # the total, not its parts
    assert len(matching(BUS, METRICS)) == 4
    assert all(metric_problem(base) is None for base in quantities())
    assert "no metric 'reconfigure.dark'" in (metric_problem("reconfigure.dark") or "")
