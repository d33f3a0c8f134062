"""Idle windows: announced, then learnt, and wrong ones corrected soon."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.fabric.windows import RECENT, TURN, Window, Windows

SYNC = ("train", "sync")
some_ns = st.lists(st.floats(0, 1e10), min_size=1, max_size=30)


def seen(*windows_ns: float) -> Windows:
    windows = Windows()
    for window_ns in windows_ns:
        windows = windows.observed(SYNC, window_ns)
    return windows


def test_what_was_announced_holds_until_one_was_seen() -> None:
    assert Windows().expected(SYNC) == Window(0.0)
    assert Windows().expected(SYNC, 7e6) == Window(7e6)
    assert Windows().expected(SYNC, -1.0) == Window(0.0)
    assert seen(5e6).expected(SYNC, 7e6) == Window(5e6, 1)


def test_transitions_are_apart_and_values_stay() -> None:
    before = seen(5e6)
    after = before.observed(("sync", "generate"), 9e6)
    assert before.expected(("sync", "generate")) == Window(0.0)
    assert after.expected(SYNC).ns == 5e6
    assert after.expected(("sync", "generate")).ns == 9e6


@pytest.mark.parametrize("times", [10.0, 0.1])
def test_a_window_announced_ten_times_wrong_is_right_after_one(times: float) -> None:
    assert seen(5e6).expected(SYNC, 5e6 * times).ns == 5e6


@pytest.mark.parametrize("times", [10.0, 0.1])
@given(jitter=st.lists(st.floats(0.8, 1.2), min_size=RECENT + TURN, max_size=RECENT + TURN))
def test_windows_that_become_ten_times_others_are_right_after_a_few(
    times: float, jitter: list[float]
) -> None:
    before, after = jitter[:RECENT], jitter[RECENT:]
    found = seen(*(5e6 * j for j in before), *(5e6 * times * j for j in after))
    assert 0.8 <= found.expected(SYNC).ns / (5e6 * times) <= 1.2


def test_one_odd_window_changes_little() -> None:
    usual = [10e6, 11e6, 9e6, 10e6, 12e6, 10e6, 11e6, 9.5e6]
    for odd in (0.0, 1e9):
        assert 9e6 <= seen(*usual, odd).expected(SYNC).ns <= 11e6


@given(windows_ns=some_ns)
def test_the_estimate_is_low_of_what_was_seen_lately(windows_ns: list[float]) -> None:
    expected = seen(*windows_ns).expected(SYNC, 1.0)
    lately = sorted(windows_ns[-RECENT:])
    assert lately[0] <= expected.ns <= lately[-1]
    assert 1 <= expected.seen <= RECENT
    longer = sum(window >= expected.ns for window in windows_ns[-expected.seen :])
    assert longer >= 0.8 * expected.seen


@given(windows_ns=some_ns, times=st.sampled_from([0.25, 2.0, 1024.0]))
def test_units_do_not_matter(windows_ns: list[float], times: float) -> None:
    here = seen(*windows_ns).expected(SYNC)
    there = seen(*(times * window for window in windows_ns)).expected(SYNC)
    assert there == Window(times * here.ns, here.seen)
