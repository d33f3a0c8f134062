"""What a user would notice of the planner: which layout it takes, when, and what it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from harness.model.layout import Layout, parse_mix
from harness.model.load import load_profile
from harness.model.placement import place
from harness.scheduling.compute import Compute
from harness.scheduling.forecast import Forecast
from harness.scheduling.planner import plan
from harness.scheduling.view import Finished, Instance, Plan, Requests, Settings, View
from tests.unit.planner_milp import optimum_s, planned_s, random_case

PROFILE = load_profile(
    Path(__file__).parents[2] / "scenarios" / "profiles" / "qwen2.5-14b-h800.toml"
)
COMPUTE = Compute.of(PROFILE, sequences_max=256)
SETTINGS = Settings(gain_min=0.05, switch_s=4.5, rest_s=2.0)
FREE = replace(SETTINGS, switch_s=0.0)


def pool(
    remaining: Sequence[float] | np.ndarray,
    layout: str = "",
    *,
    gpus_of: dict[str, int] | None = None,
    context: int = 300,
    compute: Compute = COMPUTE,
    **more: object,
) -> tuple[View, Forecast]:
    """A pool that runs these requests, dealt in turn; queued where there is no instance."""
    gpus_of = gpus_of or {"g0": 8}
    placed = place(parse_mix(layout), gpus_of) if layout else {}
    instances = tuple(
        Instance(
            name=each.name,
            node=node,
            layout=each.layout,
            accepting=True,
            sequences_max=compute.sequences_max,
            kv_capacity_tokens=compute.kv_capacity_tokens(each.layout),
            kv_used_tokens=0,
            running=0,
            waiting=0,
        )
        for node, several in placed.items()
        for each in several
    )
    count = len(remaining)
    at = np.arange(count) % len(instances) if instances else np.full(count, -1)
    requests = Requests(
        ids=tuple(f"r{row}" for row in range(count)),
        group=np.arange(count) // 8,
        produced=np.zeros(count, np.int64),
        context=np.full(count, context),
        at=at,
        running=at >= 0,
        batch=np.zeros(count, np.int64),
    )
    view = View(
        now_s=100.0,
        instances=instances,
        requests=requests,
        history=(),
        gpus_of=gpus_of,
        cap_tokens=20_480,
        layout=parse_mix(layout) if layout else None,
    )
    return replace(view, **more), Forecast.certain(np.asarray(remaining))  # type: ignore[arg-type]


def decide(remaining: Sequence[float] | np.ndarray, layout: str = "", **more: object) -> Plan:
    view, forecast = pool(remaining, layout, **more)  # type: ignore[arg-type]
    return plan(view, forecast, COMPUTE, SETTINGS)


def heavy_tail(count: int, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.minimum(np.ceil(rng.lognormal(6.1, 1.0, count)), 20_000)


# -- which layout ----------------------------------------------------------------------------------


def test_many_short_requests_want_a_low_tp() -> None:
    decided = decide(np.full(4000, 150))
    assert str(decided.wanted) == "8xTP1", decided.reason


def test_a_few_long_requests_want_the_highest_tp() -> None:
    decided = decide(np.full(4, 8000), "8xTP1")
    assert str(decided.wanted) == "1xTP8", decided.reason
    assert decided.change_s + decided.cost_s < decided.stay_s


def test_few_long_ones_among_many_short_are_served_apart_by_a_higher_tp() -> None:
    remaining = np.concatenate([np.full(900, 200), np.full(4, 6000)])
    decided = decide(remaining)
    assert decided.wanted is not None
    assert len(decided.wanted) == 2, decided.reason
    fast = max(decided.wanted, key=lambda layout: layout.tp)
    placed = place(decided.wanted, {"g0": 8})["g0"]
    fast_names = {each.name for each in placed if each.tp == fast.tp}
    assert {decided.assignment[f"r{row}"] for row in range(900, 904)} <= fast_names
    assert set(decided.assignment.values()) == {each.name for each in placed}


def test_uniform_instances_leave_the_place_of_requests_open() -> None:
    assert decide(np.full(4000, 150)).assignment == {}


def test_instances_too_small_for_a_request_are_not_considered() -> None:
    compute = Compute.of(PROFILE, sequences_max=256)
    held = compute.kv_capacity_tokens(Layout(1, tp=1))
    remaining = np.array([*[100] * 2000, held])  # with its prompt, one token too many for TP1
    view, forecast = pool(remaining, cap_tokens=2 * held)
    decided = plan(view, forecast, compute, SETTINGS, layouts=[Layout(1, tp=1), Layout(1, tp=2)])
    assert decided.wanted is not None
    assert str(decided.wanted) != "8xTP1"
    placed = {each.name: each for each in place(decided.wanted, {"g0": 8})["g0"]}
    if decided.assignment:
        assert placed[decided.assignment["r2000"]].tp > 1
    alone = plan(view, forecast, compute, SETTINGS, layouts=[Layout(1, tp=1)])
    assert alone.wanted is None
    assert "no instance holds" in alone.reason


def test_short_kv_drives_many_requests_to_a_higher_tp() -> None:
    """Long contexts: TP1 holds so few that they wait for each other, and sharing weights pays."""
    rows = 64
    view, forecast = pool(np.full(rows, 1500), context=30_000, cap_tokens=40_000)
    roomy = plan(*pool(np.full(rows, 1500), context=300), COMPUTE, FREE, must=True)
    short = plan(view, forecast, COMPUTE, FREE, must=True)
    assert short.wanted is not None
    assert roomy.wanted is not None
    per_tp1 = COMPUTE.kv_capacity_tokens(Layout(1, tp=1)) // 31_500
    assert per_tp1 * 8 < rows, "the case is not short of KV"
    assert str(short.wanted) != "8xTP1"


@limits(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from([3_000, 10_000, 40_000]), st.integers(1, 300))
def test_every_request_fits_the_kv_of_where_it_goes(seed: int, kv: int, count: int) -> None:
    compute = Compute.of(PROFILE, sequences_max=16, kv_max_tokens=kv)
    rng = np.random.default_rng(seed)
    remaining = np.minimum(rng.lognormal(6.5, 1.2, count), kv - 400).astype(np.int64) + 1
    decided = plan(*pool(remaining), compute, SETTINGS, must=True)
    assert decided.wanted is not None, decided.reason
    placed = {each.name: each.layout for each in place(decided.wanted, {"g0": 8})["g0"]}
    for row, name in decided.assignment.items():
        held = compute.kv_capacity_tokens(placed[name])
        assert remaining[int(row[1:])] + 300 <= held
    for layout in decided.wanted:
        assert compute.kv_capacity_tokens(layout) >= 300 + remaining.min()


# -- whether it pays -------------------------------------------------------------------------------


def test_a_switch_that_does_not_pay_is_refused_with_its_figures() -> None:
    decided = decide(np.full(4, 500), "8xTP1")
    assert decided.wanted is None
    assert str(decided.best) == "1xTP8"
    assert f"would end in {decided.change_s:.1f} s" in decided.reason
    assert f"against {decided.stay_s:.1f} s as it is" in decided.reason
    assert f"not worth a switch of {decided.cost_s:.1f} s and a margin of 5 %" in decided.reason
    assert decided.cost_s >= 4.5


def test_the_gate_is_gain_beyond_cost_and_margin() -> None:
    view, forecast = pool(np.full(4, 8000), "8xTP1")
    free = plan(view, forecast, COMPUTE, SETTINGS)
    gain = (free.stay_s - free.change_s - free.cost_s) / free.stay_s
    below = plan(view, forecast, COMPUTE, replace(SETTINGS, gain_min=gain - 0.01))
    above = plan(view, forecast, COMPUTE, replace(SETTINGS, gain_min=gain + 0.01))
    assert below.wanted is not None
    assert above.wanted is None


def test_where_a_batch_begins_only_the_cost_counts() -> None:
    view, forecast = pool(np.full(4, 900), "8xTP1")
    wide = replace(SETTINGS, gain_min=0.9, switch_s=1.0)
    assert plan(view, forecast, COMPUTE, wide).wanted is None
    assert str(plan(view, forecast, COMPUTE, wide, must=True).wanted) == "1xTP8"
    dear = replace(SETTINGS, switch_s=500.0)
    assert plan(view, forecast, COMPUTE, dear, must=True).wanted is None


def test_nothing_open_stays() -> None:
    assert decide([], "8xTP1") == Plan(None, "nothing is open", 0.0)


def test_a_switch_under_way_is_left_to_end() -> None:
    decided = decide(np.full(4, 8000), "8xTP1", changing=True)
    assert (decided.wanted, decided.reason) == (None, "a switch is under way")


def test_it_rests_after_a_switch() -> None:
    soon = decide(np.full(4, 8000), "8xTP1", switched_s=99.0)
    assert soon.wanted is None
    assert "the last switch ended 1.0 s ago" in soon.reason
    assert decide(np.full(4, 8000), "8xTP1", switched_s=97.0).wanted is not None


def test_instances_that_are_kept_pay_nothing() -> None:
    """One long request moves to a TP4 on the GPUs of four TP1; the other four go on."""
    remaining = np.array([*[300] * 400, *[9000]])
    view, forecast = pool(remaining, "8xTP1")
    decided = plan(view, forecast, COMPUTE, SETTINGS)
    assert decided.wanted is not None, decided.reason
    kept = {i.name for i in view.instances} & {
        each.name for each in place(decided.wanted, view.gpus_of)["g0"]
    }
    if kept:
        stays = [row for row, name in decided.assignment.items() if name in kept]
        assert stays, "nobody stays on what is kept"


def test_who_lags_behind_a_balancer_is_no_reason_to_switch() -> None:
    """Requests crowd on one of four instances; a fast loop spreads them, without it they stay."""
    view, forecast = pool(np.full(64, 1000), "4xTP2")
    crowded = replace(view, requests=replace(view.requests, at=np.zeros(64, np.int64)))
    swift = replace(SETTINGS, moves_per_s_max=100.0)
    without = replace(SETTINGS, moves_per_s_max=0.0)
    eased, stuck = (plan(crowded, forecast, COMPUTE, each) for each in (swift, without))
    even = plan(view, forecast, COMPUTE, swift)
    assert eased.stay_s == pytest.approx(even.stay_s, rel=0.02)
    assert stuck.stay_s > even.stay_s


# -- the pool --------------------------------------------------------------------------------------


def test_a_node_that_is_not_usable_gets_no_instance() -> None:
    view, forecast = pool(heavy_tail(300), "16xTP1", gpus_of={"g0": 8, "g1": 8})
    lost = replace(view, gpus_of={"g1": 8})
    decided = plan(lost, forecast, COMPUTE, FREE)
    assert decided.wanted is not None, decided.reason
    names = {each.name for each in place(decided.wanted, lost.gpus_of)["g1"]}
    assert decided.wanted.gpus <= 8
    assert set(decided.assignment.values()) <= names
    view, forecast = pool(np.full(3000, 400), "16xTP1", gpus_of={"g0": 8, "g1": 8})
    whole, halved = (
        plan(each, forecast, COMPUTE, FREE) for each in (view, replace(view, gpus_of={"g1": 8}))
    )
    assert halved.stay_s > 1.3 * whole.stay_s, "what was on the lost node is still open"


def test_no_usable_node_is_told() -> None:
    decided = decide(np.full(4, 100), gpus_of={"g0": 0})
    assert decided.wanted is None
    assert "g0 has 0 GPUs" in decided.reason


def test_a_change_for_the_last_ones_also_pays_for_how_the_next_batch_begins() -> None:
    """Three that are left would end sooner in 1xTP8; 4,000 short ones then need a switch back."""
    past = Finished(-1, np.arange(4000), np.full(4000, 150))
    last = np.full(3, 900)
    assert str(decide(last, "8xTP1", history=(past,)).wanted) == "1xTP8"
    followed = decide(last, "8xTP1", history=(past,), coming=4000)
    assert followed.wanted is None
    assert "of the next batch" in followed.reason
    assert str(decide(np.full(3, 9000), "8xTP1", history=(past,), coming=4000).wanted) == "1xTP8"


def test_a_change_that_the_next_batch_wants_too_does_not_pay_for_a_way_back() -> None:
    past = Finished(-1, np.arange(4), np.full(4, 9000))
    assert str(decide(np.full(3, 900), "8xTP1", history=(past,), coming=4).wanted) == "1xTP8"


def test_what_many_batches_want_is_changed_as_one_begins_though_one_would_not_pay_for_it() -> None:
    lengths = np.full(4, 900)
    past = (Finished(-1, np.arange(4), lengths),)
    settings = replace(SETTINGS, switch_s=12.0)

    def begun(batches: int, *, must: bool) -> str:
        more = {"history": past, "coming": 4 if batches else 0, "coming_batches": batches}
        view, forecast = pool(lengths, "8xTP1", **more)  # type: ignore[arg-type]
        return str(plan(view, forecast, COMPUTE, settings, must=must).wanted)

    assert begun(0, must=True) == "None"
    assert begun(10, must=True) == "1xTP8"
    assert begun(10, must=False) == "None", "that is decided as the next one begins"


def test_every_further_switch_within_a_batch_must_save_twice_as_much() -> None:
    last = np.full(3, 1500)
    needed = []
    for switches in range(6):
        decided = decide(last, "8xTP1", switches=switches)
        saved = (decided.stay_s - decided.change_s - decided.cost_s) / decided.stay_s
        needed.append(0.05 * 2**switches)
        assert (decided.wanted is not None) == (saved > needed[-1]), decided.reason
    assert needed[0] < saved < needed[-1]


def test_contexts_of_later_turns_are_work_that_a_higher_tp_does_not_spare() -> None:
    """Each of 64 short answers computes 40,000 tokens of context more: it takes that longer."""
    none = np.zeros(64, np.int64)
    alone = decide(np.full(64, 100), "8xTP1")
    turns = decide(np.full(64, 100), "8xTP1", truth=none + 100, truth_recomputes=none + 40_000)
    needed_s = 8 * COMPUTE.costs(Layout(1)).prefill_s(np.array(40_000.0), np.array(300.0))
    assert turns.stay_s == pytest.approx(alone.stay_s + float(needed_s), rel=0.05)


def test_where_nothing_is_open_the_next_batch_is_planned_for() -> None:
    past = Finished(0, np.zeros(100, np.int64), np.full(100, 150))
    view, forecast = pool(np.zeros(0), history=(past,), coming=4000)
    decided = plan(view, forecast, COMPUTE, SETTINGS, must=True)
    assert str(decided.wanted) == "8xTP1", decided.reason
    long_ones = Finished(0, np.zeros(4, np.int64), np.full(4, 9000))
    view, forecast = pool(np.zeros(0), history=(long_ones,), coming=4)
    assert str(plan(view, forecast, COMPUTE, SETTINGS, must=True).wanted) == "1xTP8"


def test_layouts_to_choose_from_can_be_given() -> None:
    view, forecast = pool(np.full(4, 8000), "8xTP1")
    decided = plan(view, forecast, COMPUTE, SETTINGS, layouts=[Layout(1, tp=1), Layout(1, tp=2)])
    assert str(decided.wanted) == "4xTP2"


# -- over time -------------------------------------------------------------------------------------


@limits(deadline=None, max_examples=30)
@given(st.integers(0, 10_000), st.integers(2, 200))
def test_a_forecast_that_wavers_does_not_switch_back(seed: int, count: int) -> None:
    """After a switch, a forecast that is a few per cent off does not undo it."""
    rng = np.random.default_rng(seed)
    remaining = heavy_tail(count, seed)
    first = decide(remaining, "8xTP1")
    if first.wanted is None:
        return
    for _ in range(3):
        wavering = np.maximum(1, remaining * rng.normal(1.0, 0.05, count))
        again = decide(wavering, str(first.wanted), switched_s=0.0)
        assert str(again.wanted) != "8xTP1", again.reason


def test_it_waits_for_the_moment_that_is_best() -> None:
    """A bulk that TP1 does best, then a tail for TP8: one switch, about when it pays most."""
    remaining = np.concatenate([np.full(1200, 700), heavy_tail(60) + 3000])
    kinds = [Layout(1, tp=1), Layout(1, tp=8)]
    settings = replace(SETTINGS, gain_min=0.02)
    moments = np.linspace(0.5, 30.0, 60)
    drains = [COMPUTE.drain(kinds[0], remaining[i::8], np.full(len(remaining[i::8]), 300.0))
              for i in range(8)]  # fmt: skip

    def later(at_s: float) -> tuple[np.ndarray, np.ndarray]:
        left = np.zeros(len(remaining))
        for i, drain in enumerate(drains):
            left[i::8] = drain.left(at_s)
        return left, remaining - left

    def ends_s(at_s: float) -> float:
        """When all would have ended with a switch to TP8 at this moment."""
        left, produced = later(at_s)
        rows = left > 0
        context = 300.0 + produced[rows]
        rest_s = COMPUTE.makespan_s(kinds[1], left[rows], context, context)
        return at_s + settings.switch_s + rest_s

    taken = None
    for at_s in moments:
        left, produced = later(float(at_s))
        rows = np.flatnonzero(left >= 1)
        view, forecast = pool(left[rows], "8xTP1")
        requests = replace(
            view.requests, at=rows % 8, context=(300 + produced[rows]).astype(np.int64)
        )
        decided = plan(replace(view, requests=requests), forecast, COMPUTE, settings, layouts=kinds)
        if decided.wanted is not None:
            taken = float(at_s)
            break
    assert taken is not None
    best = min(ends_s(float(at_s)) for at_s in moments)
    never = max(drain.lasts_s for drain in drains)
    assert best < 0.95 * never, "there is nothing to gain in this case"
    assert ends_s(taken) < best + 0.15 * (never - best), (taken, ends_s(taken), best, never)


# -- against the optimum ---------------------------------------------------------------------------


def test_it_comes_within_a_few_per_cent_of_the_exact_optimum() -> None:
    over = [planned_s(case) / optimum_s(case) - 1 for case in map(random_case, range(0, 180, 6))]
    assert min(over) > -1e-6, "better than the optimum: the oracle is wrong"
    assert max(over) < 0.05, over
