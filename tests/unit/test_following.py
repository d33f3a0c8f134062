"""Instances followed side by side go as each does alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from harness.model.layout import Layout
from harness.scheduling.compute import Compute, Drain
from harness.scheduling.following import follow, left
from harness.scheduling.pooled import Open
from harness.scheduling.view import Ints
from tests.unit.planner_milp import profile

LAYOUTS = [Layout(1, tp=1), Layout(1, tp=4)]


def drawn(seed: int, rows: int) -> Open:
    rng = np.random.default_rng(seed)
    remaining = np.ceil(rng.lognormal(5.5, 1.0, rows)).clip(1, 2000)
    context = rng.integers(20, 2000, rows).astype(float)
    computes = np.where(rng.random(rows) < 0.5, context, 0.0)
    later = np.where(rng.random(rows) < 0.3, 500.0, 0.0)
    return Open(remaining, remaining, context, computes, np.ones(rows), later)


@limits(deadline=None, max_examples=40)
@given(
    st.integers(0, 10_000),
    st.integers(1, 60),
    st.sampled_from([0, 5_000]),
    st.sampled_from([3, 256]),
)
def test_each_goes_as_alone(seed: int, rows: int, kv: int, seats: int) -> None:
    """Also where KV or seats are short; what is left is told instance after instance."""
    compute = Compute.of(profile(), sequences_max=seats, kv_max_tokens=kv)
    work, rng = drawn(seed, rows), np.random.default_rng(seed)
    at = np.sort(rng.integers(0, 12, rows))
    sets = [(LAYOUTS[number % 2], np.flatnonzero(at == number)) for number in range(12)]
    alone = [_alone(work, *each, compute) for each in sets]
    followed = follow(work, sets, compute, 1.5)
    assert sum(len(each.number) for each in followed) == sum(len(mine) > 0 for _, mine in sets)
    assert max(each.lasts_s for each in followed) == max(drain.lasts_s for drain in alone)
    for each in followed:
        for number, ends_s in zip(each.number.tolist(), each.ends_s, strict=True):
            drain = alone[number]
            assert ends_s.tolist() == (1.5 + np.interp(drain.ends, *_curve(drain))).tolist()
    for moment in 1.5 + np.linspace(0, 1.1, 5) * max(drain.lasts_s for drain in alone):
        tokens = np.concatenate([drain.left(moment - 1.5) for drain in alone])
        seen = left(followed, moment)
        assert seen.remaining.tolist() == tokens[tokens > 0].tolist()
        held = work.context + work.remaining
        assert (seen.context + seen.remaining).tolist() == pytest.approx(held[tokens > 0].tolist())
        assert set(seen.computes[seen.remaining < work.remaining[tokens > 0]]) <= {0.0}


def _alone(work: Open, layout: Layout, rows: Ints, compute: Compute) -> Drain:
    columns = (work.remaining, work.context, work.computes, work.later)
    return compute.drain(layout, *(column[rows] for column in columns))


def _curve(drain: Drain) -> tuple[np.ndarray, np.ndarray]:
    return drain.steps, drain.time_s


@given(st.integers(0, 10_000), st.integers(1, 30), st.floats(-1.0, 60.0))
def test_what_is_left_follows_the_curve(seed: int, rows: int, at_s: float) -> None:
    compute = Compute.of(profile(), sequences_max=8)
    drain = _alone(drawn(seed, rows), LAYOUTS[0], np.arange(rows), compute)
    step = np.interp(at_s, drain.time_s, drain.steps)
    assert (
        drain.left(at_s).tolist() == (drain.ends - np.clip(step, drain.starts, drain.ends)).tolist()
    )
