"""Where a switch's time went: the table sums to the wall time, whatever the nodes report."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.model.streams import SWITCH_STAGES
from harness.run.generation.stages import Pace, Silence, blackout_ms, table
from harness.wire.generation import Span

MS = 1_000_000


def span(stage: str, begin_ms: int, end_ms: int) -> Span:
    return Span(stage=stage, begin_ns=begin_ms * MS, end_ns=end_ms * MS)


def test_stages_one_after_the_other_and_the_rest_is_the_residual() -> None:
    spans = [span("prepare", 0, 2), span("teardown", 3, 5), span("weights", 5, 15)]
    found = table(spans, 0, 20 * MS)
    told = {name: ms for name, ms in found.stages.items() if ms is not None}
    assert told == {"prepare": 2, "teardown": 2, "weights": 10}
    assert (found.residual_ms, found.total_ms) == (6, 20)


def test_a_moment_belongs_to_the_stage_that_the_slower_node_is_still_in() -> None:
    fast = [span("groups", 0, 4), span("weights", 4, 6), span("kv_cache", 6, 7)]
    slow = [span("groups", 0, 10), span("weights", 10, 13)]
    found = table(fast + slow, 0, 13 * MS)
    assert (found.stages["groups"], found.stages["weights"]) == (10, 3)
    assert found.stages["kv_cache"] == 0  # it was done, and nobody waited for it
    assert found.residual_ms == 0


def test_stamps_outside_the_switch_are_cut_off_and_unknown_work_is_not_counted() -> None:
    found = table([span("prepare", -1, 3), span("steady", 8, 12), span("kv_send", 4, 5)], 0, 9 * MS)
    assert (found.stages["prepare"], found.stages["steady"]) == (3, 1)
    assert found.residual_ms == 5


@given(
    st.lists(
        st.tuples(st.sampled_from(SWITCH_STAGES), st.integers(-50, 250), st.integers(0, 120)),
        max_size=30,
    ),
    st.integers(0, 100),
    st.integers(0, 150),
)
def test_the_table_sums_to_the_wall_time(
    works: list[tuple[str, int, int]], begin: int, lasted: int
) -> None:
    spans = [span(stage, at, at + length) for stage, at, length in works]
    found = table(spans, begin * MS, (begin + lasted) * MS)
    told = [ms for ms in found.stages.values() if ms is not None]
    assert all(ms >= 0 for ms in told)
    assert found.residual_ms >= 0
    assert sum(told) + found.residual_ms == pytest.approx(found.total_ms)
    assert found.total_ms == lasted


def test_blackout_is_the_longest_silence_of_instances_that_spoke_before_and_after() -> None:
    assert blackout_ms([Silence(2 * MS, 5 * MS), Silence(3 * MS, 10 * MS)]) == 7
    assert blackout_ms([Silence(0, 5 * MS), Silence(2 * MS, 0)]) is None
    assert blackout_ms([Silence(5 * MS, 4 * MS)]) == 0


def test_speed_over_a_window_is_cut_to_what_was_seen() -> None:
    pace = Pace()
    for second, tokens in ((1, 0), (2, 100), (4, 500)):
        pace.note(second * 1000 * MS, tokens)
    assert pace.per_s(1000 * MS, 4000 * MS) == pytest.approx(500 / 3)
    assert pace.per_s(1500 * MS, 3000 * MS) == pytest.approx((300 - 50) / 1.5)
    assert pace.per_s(0, 2000 * MS) == pytest.approx(100)
    assert pace.per_s(4000 * MS, 9000 * MS) is None
    assert Pace().per_s(0, 1) is None
