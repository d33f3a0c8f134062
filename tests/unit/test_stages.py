"""Every nanosecond between intent and steady is on exactly one account."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.clock import NS_PER_MS
from harness.run.stages import Waits, breakdown, in_order

MS = NS_PER_MS


def test_what_nobody_else_was_waited_for_is_ours() -> None:
    waits = Waits(
        drain_ns=5 * MS, device_ns=30 * MS, link_ns=1 * MS, groups_ns=4 * MS, traffic_ns=10 * MS
    )
    parts = breakdown({"intent": 100 * MS, "steady": 152 * MS}, waits)
    assert parts.cost_ms == 52
    assert parts.device_ms == 30
    assert parts.link_ms == 1
    assert parts.communicator_ms == 19
    assert parts.overhead_ms == 2


@given(st.integers(0, 10**10), st.lists(st.integers(0, 10**9), min_size=5, max_size=5))
def test_the_accounts_sum_to_the_cost(ours_ns: int, spans: list[int]) -> None:
    waits = Waits(*spans)
    steady = 7 + ours_ns + sum(spans)
    parts = breakdown({"intent": 7, "steady": steady}, waits)
    total = parts.device_ms + parts.link_ms + parts.communicator_ms + parts.overhead_ms
    assert total == pytest.approx(parts.cost_ms)
    assert parts.overhead_ms == pytest.approx(ours_ns / MS, abs=1e-6)


def test_a_reconfiguration_that_never_became_steady_has_no_breakdown() -> None:
    with pytest.raises(ValueError, match="steady"):
        breakdown({"intent": 1, "steady": None}, Waits())


def test_stamps_may_be_early_by_the_clock_bound_and_no_more() -> None:
    stamps = {"intent": 100, "quiesced": 95, "steered": None, "steady": 80}
    assert in_order(stamps, slack_ns=10) == ["steady"]
    assert in_order(stamps, slack_ns=20) == []
