"""The forecast of remaining work, as a scheduler sees it: errors, intervals, siblings, drift.

Batches are drawn here by the laws of the shipped archetypes (heads of scenarios/workloads), seeded,
and decode in step: at some moment a share of them has ended, all others have produced as much.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.model.percentiles import Law
from harness.scheduling.forecast import Forecast, forecast
from harness.scheduling.view import Finished, Ints, Requests, View


class Archetype(NamedTuple):
    law: dict[str, float]
    cap: int
    prompts: int
    correlation: float


HEAVY = Archetype(
    {"p1": 13, "p5": 95, "p20": 270, "p50": 465, "p90": 1041, "p99": 2711}, 20480, 64, 0.07
)
SATURATED = Archetype(
    {"p1": 520, "p10": 2400, "p25": 5600, "p50": 9900, "p85": 16000}, 16000, 32, 0.92
)
TIGHT = Archetype(
    {"p2": 75, "p10": 113, "p50": 159, "p90": 227, "p99": 315, "p99.9": 400, "p99.93": 16000},
    16000,
    64,
    0.09,
)
ARCHETYPES = {"heavy": HEAVY, "saturated": SATURATED, "tight": TIGHT}
SAMPLES = 8


def draw(of: Archetype, batches: int, seed: int, growth: float = 0.0) -> list[Finished]:
    chance = np.random.default_rng(seed)
    law = Law.of(of.law)
    drawn = []
    for step in range(batches):
        shared = np.repeat(chance.standard_normal(of.prompts), SAMPLES)
        own = chance.standard_normal(len(shared))
        scores = np.sqrt(of.correlation) * shared + np.sqrt(1 - of.correlation) * own
        tokens = np.array([law.tokens(score) for score in scores]) * (1 + growth) ** step
        length = np.clip(np.rint(tokens), 1, of.cap).astype(np.int64)
        drawn.append(
            Finished(step, np.repeat(np.arange(of.prompts), SAMPLES) + 1000 * step, length)
        )
    return drawn


def seen(past: list[Finished], now: Finished, cap: int, produced: int | Ints) -> tuple[View, Ints]:
    """The view when requests have produced so much, those that are not longer ended; the truth."""
    reached = np.broadcast_to(produced, now.length.shape)
    left = now.length > reached
    ended = Finished(now.batch, now.group[~left], now.length[~left])
    view = view_of((*past, ended), now.group[left], reached[left], cap, now.batch)
    return view, now.length[left] - reached[left]


def view_of(
    history: tuple[Finished, ...], group: Ints, produced: Ints, cap: int, batch: int | Ints = 0
) -> View:
    nowhere = np.full(len(group), -1)
    requests = Requests(
        ids=tuple(str(row) for row in range(len(group))),
        group=group,
        produced=produced,
        context=produced,
        at=nowhere,
        running=nowhere < 0,
        batch=np.broadcast_to(batch, nowhere.shape),
    )
    return View(0.0, (), requests, history, {}, cap)


def moment(batch: Finished, share: float) -> int:
    """Tokens after which this share has ended."""
    return int(np.quantile(batch.length, share, method="inverted_cdf")) if share else 0


def same(one: Forecast, other: Forecast) -> bool:
    return (
        np.array_equal(one.expected, other.expected)
        and np.array_equal(one.spread, other.spread)
        and (one.total, one.longest) == (other.total, other.longest)
    )


@pytest.mark.parametrize("growth", [0.0, 0.1])
@pytest.mark.parametrize("name", ARCHETYPES)
def test_four_of_five_truths_lie_within_their_intervals(name: str, growth: float) -> None:
    """Of 80 %, over 25 batches at 4 moments: 65 to 95 %; more only where the cap decides."""
    of = ARCHETYPES[name]
    total, longest, sure = [], [], 0
    for seed in range(25):
        *past, now = draw(of, 7, seed, growth)
        for share in (0.0, 0.25, 0.5, 0.9):
            view, truth = seen(past, now, of.cap, moment(now, share))
            if not len(truth):
                continue
            found = forecast(view)
            total.append(found.total.low <= truth.sum() <= found.total.high)
            longest.append(found.longest.low <= truth.max() <= found.longest.high)
            sure += found.longest.low == found.longest.high
    assert 0.65 <= np.mean(total) <= 0.95
    assert np.mean(longest) >= 0.7
    assert np.mean(longest) <= 0.95 or sure > len(longest) / 2


def test_growth_of_a_tenth_a_step_is_followed() -> None:
    *past, now = draw(HEAVY, 9, seed=3, growth=0.1)
    view, truth = seen(past, now, HEAVY.cap, 0)
    mean_before = np.mean([batch.length.mean() for batch in past])
    assert mean_before < 0.75 * truth.mean()
    assert forecast(view).expected.mean() == pytest.approx(truth.mean(), rel=0.12)


def test_a_batch_longer_than_history_is_noticed_in_its_course() -> None:
    *past, _ = draw(HEAVY, 7, seed=4)
    now = draw(HEAVY, 1, seed=5)[0]
    now = Finished(99, now.group + 90_000, np.minimum(2 * now.length, HEAVY.cap))
    errors = []
    for share in (0.0, 0.1, 0.3):
        view, truth = seen(past, now, HEAVY.cap, moment(now, share))
        errors.append(abs(forecast(view).expected.sum() / truth.sum() - 1))
    assert errors[0] > 0.3
    assert errors[2] < 0.15


def errors_of_requests(of: Archetype, siblings_known: bool) -> float:
    """Mean error of single requests when half of each group has ended."""
    errors = []
    for seed in range(6):
        *past, now = draw(of, 6, seed)
        if not siblings_known:
            shuffled = np.random.default_rng(seed).permutation(now.group)
            now = Finished(now.batch, shuffled, now.length)
        first = np.arange(len(now.length)) % SAMPLES < SAMPLES // 2
        view, truth = seen(past, now, of.cap, np.where(first, of.cap, 0))
        errors.append(np.abs(forecast(view).expected - truth).mean() / truth.mean())
    return float(np.mean(errors))


def test_siblings_that_are_alike_sharpen_the_forecast_and_others_do_not() -> None:
    alike = errors_of_requests(SATURATED, True) / errors_of_requests(SATURATED, False)
    strangers = errors_of_requests(HEAVY, True) / errors_of_requests(HEAVY, False)
    assert alike < 0.5
    assert strangers == pytest.approx(1.0, abs=0.1)


def test_one_who_lives_long_has_longer_to_go_where_the_tail_is_heavy() -> None:
    past = draw(HEAVY, 6, seed=1)
    produced = np.array([500, 1000, 2000, 4000])
    found = forecast(view_of(tuple(past), np.arange(4) + 9000, produced, HEAVY.cap, batch=9))
    assert np.all(np.diff(found.expected) > 0)


def test_the_error_shrinks_as_work_gets_done() -> None:
    wrong = {0.0: [], 0.5: [], 0.9: []}
    for seed in range(12):
        *past, now = draw(HEAVY, 5, seed)
        for share, errors in wrong.items():
            view, truth = seen(past, now, HEAVY.cap, moment(now, share))
            errors.append(abs(forecast(view).total.mid - truth.sum()))
    means = [np.mean(errors) for errors in wrong.values()]
    assert means[1] < means[0] * 1.2
    assert means[2] < means[0]


@pytest.mark.parametrize("of", ARCHETYPES.values(), ids=ARCHETYPES)
def test_the_spread_is_distributed_as_the_truth_turns_out(of: Archetype) -> None:
    *past, now = draw(of, 9, seed=2)
    view, truth = seen(past, now, of.cap, 0)
    found = forecast(view)
    ranks = np.arange(0.1, 0.91, 0.1)
    expected, real = np.quantile(found.spread, ranks), np.quantile(truth, ranks)
    assert expected == pytest.approx(real, rel=0.35)
    assert found.spread.sum() == pytest.approx(found.expected.sum(), rel=0.05)


def test_runaways_are_kept_as_a_chance_to_run_to_the_cap() -> None:
    past = draw(TIGHT, 8, seed=11)
    rate = np.mean(np.concatenate([batch.length for batch in past]) == TIGHT.cap)
    assert rate > 0
    found = forecast(view_of(tuple(past), np.arange(2) + 9000, np.array([0, 3000]), TIGHT.cap, 9))
    fresh, runaway = found.quantiles([0.5, 1 - rate / 3])
    assert fresh[0] < 200
    assert fresh[1] == pytest.approx(TIGHT.cap, rel=0.05)
    assert runaway[0] > 0.9 * (TIGHT.cap - 3000)


def test_quantiles_rise_and_agree_with_the_mean() -> None:
    *past, now = draw(HEAVY, 4, seed=6)
    view, _ = seen(past, now, HEAVY.cap, 300)
    found = forecast(view)
    table = found.quantiles((np.arange(200) + 0.5) / 200)
    assert table.shape == (len(found.expected), 200)
    assert np.all(np.diff(table, axis=1) >= 0)
    assert table.mean(axis=1) == pytest.approx(found.expected, rel=0.05)


def test_without_history_it_says_so_and_learns_from_the_batch() -> None:
    now = draw(HEAVY, 1, seed=8)[0]
    errors = []
    for share in (0.0, 0.5, 0.9):
        view, truth = seen([], now, HEAVY.cap, moment(now, share))
        found = forecast(view)
        assert found.past_batches == 0
        assert found.total.low <= truth.sum() <= found.total.high
        errors.append(abs(np.log(found.total.mid / truth.sum())))
    assert errors[2] < errors[1] < errors[0]


def test_two_batches_in_flight_are_forecast_each_by_its_own_progress() -> None:
    *past, old, new = draw(HEAVY, 7, seed=9, growth=0.1)
    view, truth = seen(past, old, HEAVY.cap, moment(old, 0.9))
    fresh = len(new.length)
    both = view_of(
        view.history,
        np.concatenate([view.requests.group, new.group]),
        np.concatenate([view.requests.produced, np.zeros(fresh, np.int64)]),
        HEAVY.cap,
        np.concatenate([view.requests.batch, np.full(fresh, new.batch)]),
    )
    found = forecast(both)
    assert found.expected[: len(truth)] == pytest.approx(forecast(view).expected)
    assert found.total.low <= truth.sum() + new.length.sum() <= found.total.high
    assert found.past_batches == len(past)


def test_nothing_open_is_nothing_left() -> None:
    past = draw(HEAVY, 2, seed=0)
    none = np.zeros(0, np.int64)
    for history in ((), tuple(past)):
        found = forecast(view_of(history, none, none, HEAVY.cap))
        assert found.expected.shape == found.spread.shape == (0,)
        assert found.total == found.longest == (0.0, 0.0, 0.0)
        assert found.quantiles([0.5]).shape == (0, 1)
        assert found.past_batches == len(history)


def test_one_that_never_ends_has_what_the_cap_leaves() -> None:
    past = draw(HEAVY, 3, seed=0)
    for produced in (HEAVY.cap - 1, HEAVY.cap):
        one = view_of(tuple(past), np.array([7777]), np.array([produced]), HEAVY.cap, 9)
        found = forecast(one)
        assert found.expected.tolist() == found.spread.tolist() == [1.0]
        assert found.total == found.longest == (1.0, 1.0, 1.0)


def test_the_oracle_knows() -> None:
    truth = np.array([3, 1, 40])
    found = Forecast.certain(truth)
    assert found.expected.tolist() == found.spread.tolist() == [3.0, 1.0, 40.0]
    assert found.total == (44.0, 44.0, 44.0)
    assert found.longest == (40.0, 40.0, 40.0)
    assert found.quantiles([0.1, 0.9]).tolist() == [[3.0, 3.0], [1.0, 1.0], [40.0, 40.0]]
    assert Forecast.certain(truth[:0]).total == (0.0, 0.0, 0.0)


lengths = st.lists(st.integers(0, 700), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(past=st.lists(lengths, max_size=3), ended=lengths, open_=lengths, groups=st.integers(1, 5))
def test_any_view_gives_lengths_that_are_possible(
    past: list[list[int]], ended: list[int], open_: list[int], groups: int
) -> None:
    """Whatever is seen (caps exceeded, all alike, one request): within bounds, and repeatable.

    Nor does numpy warn of anything.
    """
    cap = 500
    history = [
        Finished(step, np.arange(len(batch)) % groups + 10 * step, np.array(batch))
        for step, batch in enumerate([*past, ended])
    ]
    group = np.arange(len(open_)) % groups + 10 * len(past)
    view = view_of(tuple(history), group, np.array(open_), cap, len(past))
    with np.errstate(all="raise", under="ignore"):
        found = forecast(view)
    bound = max(cap, *open_, *ended, *(length for batch in past for length in batch))
    most = np.maximum(1, bound - np.array(open_))
    for each in (found.expected, found.spread, *found.quantiles([0.01, 0.99]).T):
        assert np.all(each >= 1)
        assert np.all(each <= most + 1e-6)
    for low, mid, high in (found.total, found.longest):
        assert 1 <= low <= mid <= high
    assert found.total.high <= most.sum()
    assert found.longest.high <= most.max()
    assert same(found, forecast(view))


@pytest.mark.parametrize("samples", [1, 4])
def test_at_the_edge_of_the_cap_nothing_is_divided_by_nothing(samples: int) -> None:
    """Siblings that are tied, all of them at the cap or just below: no warning of numpy either."""
    past = draw(SATURATED, 3, seed=2)
    for below in (0, 1, 2, 50):
        produced = np.full(4, SATURATED.cap - below)
        group = 9000 + np.arange(4) // samples
        with np.errstate(all="raise", under="ignore"):
            found = forecast(view_of(tuple(past), group, produced, SATURATED.cap, 9))
        assert np.all(found.expected <= max(1, below))


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("of", [HEAVY, TIGHT], ids=["heavy", "tight"])
def test_a_first_batch_is_not_expected_to_run_to_the_cap(of: Archetype, share: float) -> None:
    """Without history, once some have ended: far from what 'any length' would say."""
    for seed in range(3):
        now = draw(of, 1, seed)[0]
        now = Finished(now.batch, now.group, np.where(now.length < of.cap, now.length, 300))
        view, truth = seen([], now, of.cap, moment(now, share))
        found = forecast(view)
        assert found.spread.max() == pytest.approx(found.longest.mid, rel=0.4)
        assert found.spread.sum() < 6 * truth.sum()
        if share == 0.6:
            assert truth.max() / 3 < found.longest.mid < 3 * truth.max()


@pytest.mark.parametrize("name", ARCHETYPES)
def test_sets_of_lengths_are_what_may_come_and_every_request_is_long_in_some(name: str) -> None:
    of = ARCHETYPES[name]
    *past, now = draw(of, 5, seed=3)
    view, _ = seen(past, now, of.cap, int(np.quantile(now.length, 0.1)))
    found = forecast(view)
    sets = np.array(found.sets())
    totals, longest = np.sort(sets.sum(axis=1)), np.sort(sets.max(axis=1))
    assert found.total.low * 0.9 < totals[2] < found.total.high * 1.1
    assert longest[0] <= found.longest.mid <= longest[-1]
    assert np.mean(sets.max(axis=0) > sets.min(axis=0)) > 0.95
    assert sets.min() >= 1
    assert (view.requests.produced + sets).max() <= of.cap
