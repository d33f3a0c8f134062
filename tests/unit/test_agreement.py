"""How far a simulated run is off a measured one."""

from typing import Any

import pytest

from harness.model.documents import Event
from harness.record.agreement import Agreement, agreement


def syncs(*seconds: float, policy: str = "orchestrl@rfabric") -> list[Event]:
    """Events of weight syncs that took so long."""
    rows: list[dict[str, Any]] = [
        {
            "step": 0, "policy": policy, "version": i + 1, "path": "pairs", "sources": 1,
            "receivers": 1, "attempt": 0, "bytes": 10**9, "buckets": 1, "gather_s": 0.0,
            "rpc_s": 0.0, "wire_s": took, "load_s": 0.0, "total_s": took, "outcome": "synced",
            "error": "",
        }
        for i, took in enumerate(seconds)
    ]  # fmt: skip
    return [Event(stream="sync", seq=i, t_ns=i, data=row) for i, row in enumerate(rows, 1)]


def wire(found: Agreement) -> Any:
    return next(row for row in found.rows if row.metric.startswith("sync.wire_ms["))


def test_a_difference_is_told_with_the_spread_of_what_was_measured() -> None:
    row = wire(agreement(syncs(1.03), syncs(0.99, 1.01, 1.00)))
    assert row.difference_pct == pytest.approx(3.0)
    assert row.plus_minus_pct == pytest.approx(2.48, abs=0.01)  # t(2) x 10 ms / sqrt(3)
    assert row.kind == "communication"
    assert row.verdict == "within"
    assert row.n == 3


@pytest.mark.parametrize(
    ("simulated", "measured", "verdict"),
    [
        ((1.0,), (1.0,), "within"),
        ((1.2,), (1.0,), "beyond"),
        ((1.2,), (1.0, 1.001, 0.999), "beyond"),
        ((1.06,), (1.0, 1.05, 0.95), "undecided"),  # 5.7 % +- 12 %
        ((1.2,), (1.0, 1.3, 0.7), "undecided"),
    ],
)
def test_a_limit_inside_the_interval_decides_nothing(
    simulated: tuple[float, ...], measured: tuple[float, ...], verdict: str
) -> None:
    assert wire(agreement(syncs(*simulated), syncs(*measured))).verdict == verdict


def test_what_only_one_run_has_is_named_and_not_judged() -> None:
    found = agreement(syncs(1.0, policy="a@rfabric"), syncs(1.0, policy="b@rfabric"))
    assert not found.rows
    assert any("policy=a@rfabric" in name for name in found.only_simulated)
    assert any("policy=b@rfabric" in name for name in found.only_measured)
    assert found.worst_pct("communication") is None


def test_worst_and_mean_of_a_kind() -> None:
    found = agreement(syncs(0.9), syncs(1.0))
    assert found.worst_pct("communication") == pytest.approx(10.0)
    assert found.mean_pct("communication") == pytest.approx(10.0)
    assert found.worst_pct("switching") is None
