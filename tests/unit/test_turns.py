"""Contexts that later turns compute: what past trajectories tell, and what nobody knows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from harness.scheduling.turns import fresh_tokens, later_tokens
from harness.scheduling.view import Finished, Floats, Ints, Requests, View

LENGTHS = np.arange(16, 1616, dtype=np.int64)


def view(produced: Ints, recomputed: Ints | None, past: Ints | None) -> View:
    none = np.zeros(len(produced), np.int64)
    requests = Requests(
        tuple(map(str, range(len(produced)))),
        none, produced, produced + 100, none - 1, none > 0, none + 1, recomputed,
    )  # fmt: skip
    finished = Finished(0, LENGTHS, LENGTHS, past)
    return View(0.0, (), requests, (finished,), {"g0": 8}, 4000)


def test_the_rest_of_what_trajectories_of_that_length_computed_is_expected() -> None:
    produced, done = np.array([0, 200, 500]), np.array([0, 450, 1200])
    remaining: Floats = np.array([400.0, 600.0, 100.0])
    found = later_tokens(view(produced, done, 3 * LENGTHS), remaining)
    assert found == pytest.approx(3 * (produced + remaining) - done, rel=0.02)
    fresh = fresh_tokens(view(produced, done, 3 * LENGTHS), remaining)
    assert fresh == pytest.approx(3 * remaining, rel=0.02)


def test_who_has_computed_more_than_is_usual_computes_no_less_than_nothing() -> None:
    found = later_tokens(view(np.array([500]), np.array([9000]), 3 * LENGTHS), np.array([10.0]))
    assert found.tolist() == [0.0]


@pytest.mark.parametrize(("done", "past"), [(None, 3 * LENGTHS), (np.zeros(1, np.int64), None)])
def test_nothing_is_expected_where_nobody_tells_of_turns(done: Ints | None, past: Ints) -> None:
    assert later_tokens(view(np.array([5]), done, past), np.array([10.0])).tolist() == [0.0]


def test_an_oracle_is_told() -> None:
    seen = view(np.array([5]), np.array([0]), 3 * LENGTHS)
    seen = replace(seen, truth=np.array([10]), truth_recomputes=np.array([77]))
    assert later_tokens(seen, np.array([10.0])).tolist() == [77.0]


def test_before_any_trajectory_has_ended_half_of_the_turns_that_it_may_have_are_expected() -> None:
    seen = view(np.array([0]), np.zeros(1, np.int64), None)
    assert later_tokens(seen, np.array([200.0])).tolist() == [0.0]
    found = later_tokens(replace(seen, turns_max=5), np.array([200.0]))
    assert found == pytest.approx([2 * (2 * 100 + 200 / 2)])  # twice, with half of what it becomes
