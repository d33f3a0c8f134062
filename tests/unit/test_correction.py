"""What ports counted corrects what was announced."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.fabric.correction import corrected
from harness.fabric.demand import Demand, nothing
from tests.unit.fabric_bench import bench, demand, demands

FOUR = bench(4)


def totals(truth: Demand) -> tuple[np.ndarray, np.ndarray]:
    return truth.sent_bytes.sum(1), truth.sent_bytes.sum(0)


@given(truth=demands(FOUR))
def test_what_was_announced_rightly_stays(truth: Demand) -> None:
    found = corrected(truth, *totals(truth))
    assert np.allclose(found.sent_bytes, truth.sent_bytes, atol=1e-5 * truth.total_bytes)


@given(truth=demands(FOUR), times=st.floats(0.01, 100))
def test_a_wrong_scale_is_set_right(truth: Demand, times: float) -> None:
    found = corrected(truth * times, *totals(truth))
    assert np.allclose(found.sent_bytes, truth.sent_bytes, atol=1e-5 * truth.total_bytes)


@given(announced=demands(FOUR), truth=demands(FOUR))
def test_totals_are_met_whatever_was_announced(announced: Demand, truth: Demand) -> None:
    found = corrected(announced, *totals(truth))
    near = 0.01 * truth.total_bytes
    for axis in (0, 1):
        assert np.abs(found.sent_bytes.sum(axis) - truth.sent_bytes.sum(axis)).sum() <= near


@given(announced=demands(FOUR), truth=demands(FOUR))
def test_who_sent_nothing_sends_nothing(announced: Demand, truth: Demand) -> None:
    found = corrected(announced, *totals(truth))
    silent, deaf = truth.sent_bytes.sum(1) == 0, truth.sent_bytes.sum(0) == 0
    assert not found.sent_bytes[silent].any()
    assert not found.sent_bytes[:, deaf].any()


def test_unannounced_traffic_spreads_by_gravity() -> None:
    """Two ToRs send 30 and 10 to two others that get 24 and 16: products of both ends' shares."""
    truth = demand(FOUR, t0_t2=24.0, t0_t3=6.0, t1_t3=10.0)
    found = corrected(nothing(FOUR), *totals(truth))
    assert np.allclose(
        found.sent_bytes, demand(FOUR, t0_t2=18, t0_t3=12, t1_t2=6, t1_t3=4).sent_bytes
    )


def test_announced_pairs_keep_their_part_beside_one_that_was_not() -> None:
    announced = demand(FOUR, t0_t1=100.0, t1_t0=100.0)
    truth = announced + demand(FOUR, t2_t3=5.0)
    found = corrected(announced, *totals(truth))
    assert np.allclose(found.sent_bytes, truth.sent_bytes, atol=6)
    assert np.allclose(found.sent_bytes[0, 1], 100, atol=6)


def test_a_hub_that_takes_part_in_everything_is_found_exactly() -> None:
    truth = demand(FOUR, t0_t1=9.0, t0_t2=6.0, t3_t0=4.0)
    found = corrected(demand(FOUR, t1_t2=3.0), *totals(truth))
    assert np.allclose(found.sent_bytes, truth.sent_bytes, atol=1e-4)


def test_both_sides_counters_may_differ_a_little() -> None:
    announced = demand(FOUR, t0_t1=100.0, t2_t3=50.0)
    found = corrected(announced, np.array([102.0, 0, 51, 0]), np.array([0, 98.0, 0, 49]))
    assert np.allclose(found.sent_bytes, announced.sent_bytes, rtol=0.01)


@given(
    announced=demands(FOUR),
    truth=demands(FOUR),
    order=st.permutations(["t0", "t1", "t2", "t3"]),
)
def test_permuting_tors_permutes_the_result(
    announced: Demand, truth: Demand, order: list[str]
) -> None:
    at = [announced.tors.index(tor) for tor in order]
    turned = Demand("turned", tuple(order), announced.sent_bytes[np.ix_(at, at)])
    out, in_ = totals(truth)
    there, here = corrected(turned, out[at], in_[at]), corrected(announced, out, in_)
    near = 1e-4 * truth.total_bytes + 1e-9
    assert np.allclose(there.sent_bytes, here.sent_bytes[np.ix_(at, at)], atol=near)


def test_totals_that_are_none_are_refused() -> None:
    for wrong in (np.zeros(3), np.array([-1.0, 0, 0, 0])):
        with pytest.raises(ValueError, match="one total from 0 on"):
            corrected(nothing(FOUR), wrong, np.zeros(4))
