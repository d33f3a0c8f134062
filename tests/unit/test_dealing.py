"""Few requests dealt side by side go where one after another would have gone, in the same time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from harness.model.layout import Layout
from harness.scheduling.compute import Compute
from harness.scheduling.dealing import Dealer, Instances
from harness.scheduling.pooled import Open
from harness.scheduling.view import Floats, Ints
from tests.unit.dealing_plainly import PlainDealer
from tests.unit.planner_milp import profile

LAYOUTS = [Layout(1, tp=tp) for tp in (1, 2, 4, 8)]


@dataclass
class Mix:
    """Instances of some layouts, in any order; which request stays where."""

    kind: Ints
    delay_s: Floats
    stays: Ints

    @property
    def layouts(self) -> list[Layout]:
        return [LAYOUTS[kind] for kind in self.kind]


def drawn(rng: np.random.Generator, rows: int) -> Open:
    """Requests of which some are alike, and some have no KV anywhere."""
    remaining = np.ceil(rng.lognormal(5.5, 1.0, rows)).clip(5, 2500)
    context = rng.integers(20, 1500, rows).astype(float)
    if rng.random() < 0.3:
        remaining[:], context[:] = remaining[0], context[0]
    expected = remaining * rng.uniform(0.5, 1.5, rows) if rng.random() < 0.5 else remaining
    computes = np.where(rng.random(rows) < 0.5, context, 0.0)
    later = np.where(rng.random(rows) < 0.2, 3000.0, 0.0)
    return Open(remaining, expected, context, computes, np.ones(rows), later)


def mix(rng: np.random.Generator, rows: int) -> Mix:
    count = int(rng.integers(1, 40))
    kind = rng.choice(rng.choice(len(LAYOUTS), 2), count)
    delay_s = np.where(rng.random(count) < 0.5, float(rng.choice([0.0, 2.0])), 0.0)
    stays = np.where(rng.random(rows) < 0.5, rng.integers(0, count, rows), -1)
    return Mix(kind, delay_s, stays)


@limits(deadline=None, max_examples=40)
@given(
    st.integers(0, 10_000),
    st.integers(1, 20),
    st.sampled_from([0, 4_100, 9_000]),
    st.sampled_from([2, 256]),
)
def test_deals_side_by_side_are_those_of_one_after_another(
    seed: int, rows: int, kv: int, seats: int
) -> None:
    """Also where KV is short or seats are, and of instances that the plain way does not leave out.

    The order of kinds and the numbers of all instances count: equals go to the first.
    """
    rng = np.random.default_rng(seed)
    compute = Compute.of(profile(), sequences_max=seats, kv_max_tokens=kv)
    work = drawn(rng, rows)
    mixes = [mix(rng, rows) for _ in range(4)]
    instances = [Instances.of(each.kind, each.delay_s, each.stays) for each in mixes]
    dealer = Dealer(work, compute, LAYOUTS)
    deals = dealer.deals(instances)
    times = dealer.timed(instances, deals)
    for each, there, deal, time in zip(mixes, instances, deals, times, strict=True):
        plain = PlainDealer(work, compute, each.layouts, each.stays, each.delay_s)
        at = plain.deal()
        assert there.number[deal].tolist() == at.tolist()
        told = plain.timed(at)
        assert (time.work_s, time.total_s) == (told.work_s, told.total_s)
        assert there.number[dealer.improved(there, deal)].tolist() == plain.improved(at).tolist()


def test_a_thousand_empty_instances_are_as_many_as_there_are_requests() -> None:
    kind = np.repeat([0, 3], [1000, 24])
    there = Instances.of(kind, np.zeros(1024), np.array([700, -1, -1]))
    assert there.number.tolist() == [0, 1, 2, 700, 1000, 1001, 1002]
    assert there.stays.tolist() == [3, -1, -1]
    assert there.kind.tolist() == [0, 0, 0, 0, 3, 3, 3]


def test_an_improvement_is_one() -> None:
    """Dealt to one of two that are alike, two requests part."""
    rows = np.full(2, 500.0)
    work = Open(rows, rows, rows, rows, np.ones(2), np.zeros(2))
    there = Instances.of(np.zeros(2, np.int64), np.zeros(2), np.full(2, -1))
    dealer = Dealer(work, Compute.of(profile(), sequences_max=8), LAYOUTS)
    assert sorted(dealer.improved(there, np.zeros(2, np.int64))) == [0, 1]
