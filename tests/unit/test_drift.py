"""The level of the coming batch: what a trend, noise, a jump and few batches do to it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness.scheduling.drift import level_ahead

NOISE = 0.02
"""Standard deviation of the sampling of a batch's level, log tokens."""


def ahead(levels: list[float], steps: int = 1) -> tuple[float, float]:
    return level_ahead(levels, [NOISE**2] * len(levels), steps)


def test_a_steady_growth_is_followed_and_goes_on() -> None:
    growth = math.log(1.1)
    levels = [6 + growth * step for step in range(6)]
    assert ahead(levels)[0] == pytest.approx(6 + 6 * growth, abs=0.01)
    assert ahead(levels, steps=3)[0] == pytest.approx(6 + 8 * growth, abs=0.03)


def test_levels_without_trend_are_averaged() -> None:
    chance = np.random.default_rng(1)
    errors = []
    for _ in range(200):
        levels = (6 + NOISE * chance.standard_normal(10)).tolist()
        errors.append((abs(ahead(levels)[0] - 6), abs(levels[-1] - 6)))
    ours, last = np.mean(errors, axis=0)
    assert ours < 0.8 * last


def test_without_drift_it_is_about_as_good_as_the_mean_and_with_it_far_better() -> None:
    chance = np.random.default_rng(3)
    for growth, most in ((0.0, 1.2), (0.1, 0.25)):
        errors = []
        for count in 60 * [2, 4, 6, 8]:
            levels = 6 + growth * np.arange(count + 1) + NOISE * chance.standard_normal(count + 1)
            truth, past = 6 + growth * count, levels[:-1].tolist()
            errors.append((abs(ahead(past)[0] - truth), abs(np.mean(past) - truth)))
        ours, mean = np.mean(errors, axis=0)
        assert ours < most * mean


def test_a_turn_of_the_trend_is_followed_within_few_batches() -> None:
    levels = [6 + 0.1 * step for step in range(6)] + [6.5 - 0.1 * step for step in range(1, 6)]
    assert ahead(levels)[0] == pytest.approx(5.9, abs=0.05)


def test_one_batch_alone_promises_little() -> None:
    mean, sd = ahead([6.0])
    assert mean == 6.0
    assert sd > 3 * NOISE


def test_farther_ahead_is_less_certain() -> None:
    levels = [6.0, 6.1, 6.15, 6.3]
    sds = [ahead(levels, steps)[1] for steps in (1, 2, 4)]
    assert sds == sorted(sds)
    assert sds[2] > 1.5 * sds[0]


def test_who_was_surprised_promises_less() -> None:
    steady = ahead([6.0, 6.01, 5.99, 6.0, 6.01])[1]
    jumping = ahead([6.0, 7.0, 5.5, 6.8, 6.0])[1]
    assert jumping > 0.3 > 0.05 > steady


def test_a_batch_of_no_weight_changes_nothing() -> None:
    levels, variances = [6.0, 6.1, 6.2], [NOISE**2] * 3
    without = level_ahead(levels, variances, 2)
    unknown = level_ahead([*levels, 9.0], [*variances, 1e9], 1)
    assert unknown.mean == pytest.approx(without.mean, abs=0.01)


@pytest.mark.parametrize("drift", ["none", "steady", "wandering"])
def test_four_of_five_levels_lie_within_the_interval(drift: str) -> None:
    chance = np.random.default_rng(7)
    inside = []
    for _ in range(300):
        steps = chance.standard_normal(9)
        moves = {"none": 0 * steps, "steady": 0 * steps + 0.1, "wandering": 0.05 * steps}[drift]
        levels = 6 + np.cumsum(moves)
        mean, sd = ahead((levels + NOISE * chance.standard_normal(9)).tolist()[:8])
        inside.append(abs(levels[8] - mean) < 1.2816 * sd)
    assert 0.7 <= np.mean(inside) <= 0.98
