"""The fast loop: what it moves, what it leaves, and that it neither swings nor goes on for ever."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from harness.model.layout import Layout
from harness.scheduling.balancer import MARGIN, balance, moves_allowed
from harness.scheduling.compute import Compute, Costs
from harness.scheduling.forecast import Forecast, Interval
from harness.scheduling.view import Instance, Moved, Requests, Settings, View

FIXED_S = {1: 0.012, 2: 0.008, 4: 0.005, 8: 0.004}
SETTINGS = Settings(moves_per_s_max=100.0, move_rest_s=5.0)


def costs(layout: Layout) -> Costs:
    """Return step times like those of a 14B model, by TP."""
    batch = np.arange(65, dtype=np.float64)
    fixed = FIXED_S[layout.tp] + 3e-5 * batch
    return Costs(fixed, np.full(65, 8e-8 / layout.tp), 1e-4, 0.0, 200_000)


COMPUTE = Compute(costs, lambda _: (), 64)


def move_s(source: str, target: str, context: int) -> float:
    return 0.01 + context * 1e-6


def pool(
    remaining: list[list[int]], tps: list[int] | None = None, *, seats: int = 64
) -> tuple[View, Forecast]:
    """Return instances with requests of so many tokens left, which are known."""
    at = np.array([k for k, here in enumerate(remaining) for _ in here], dtype=np.int64)
    tokens = np.array([length for here in remaining for length in here], dtype=np.int64)
    place = np.arange(len(at)) - np.searchsorted(at, at)
    return view_of(tokens, at, place < seats, tps or [1] * len(remaining), seats)


def view_of(
    tokens: np.ndarray,
    at: np.ndarray,
    running: np.ndarray,
    tps: list[int],
    seats: int,
    *,
    context: int = 500,
) -> tuple[View, Forecast]:
    rows = len(tokens)
    instances = tuple(
        Instance(
            name=f"n:{k}",
            node="n",
            layout=Layout(1, tp),
            accepting=True,
            sequences_max=seats,
            kv_capacity_tokens=200_000,
            kv_used_tokens=int(np.sum((at == k) & running)) * context,
            running=int(np.sum((at == k) & running)),
            waiting=int(np.sum((at == k) & ~running)),
        )
        for k, tp in enumerate(tps)
    )
    requests = Requests(
        ids=tuple(f"r{row}" for row in range(rows)),
        group=np.zeros(rows, dtype=np.int64),
        produced=np.full(rows, 100),
        context=np.full(rows, context),
        at=at,
        running=running,
        batch=np.zeros(rows, dtype=np.int64),
    )
    seen = View(10.0, instances, requests, (), {"n": 8}, cap_tokens=20_000)
    return seen, Forecast.certain(tokens)


def decided(view: View, forecast: Forecast, settings: Settings = SETTINGS) -> list[tuple[str, str]]:
    return [
        (move.source, move.target) for move in balance(view, forecast, COMPUTE, settings, move_s)
    ]


# -- what it moves -------------------------------------------------------------------------------


def test_a_straggler_goes_to_the_faster_instance_that_is_free() -> None:
    view, forecast = pool([[3000], [50], []], [1, 1, 4])
    moves = balance(view, forecast, COMPUTE, SETTINGS, move_s)
    assert [(move.id, move.source, move.target) for move in moves] == [("r0", "n:0", "n:2")]
    assert moves[0].saves_s == pytest.approx(3000 * (0.012 - 0.005), rel=0.2)


def test_of_several_that_are_equally_long_the_first_go_though_one_alone_gains_nothing() -> None:
    view, forecast = pool([[3000, 3000, 3000], []], [1, 4])
    assert decided(view, forecast, replace(SETTINGS, moves_per_s_max=2.0)) == [("n:0", "n:1")] * 2


def test_waiting_requests_go_where_a_seat_is_free() -> None:
    view, forecast = pool([[1000] * 12, [1000] * 2], seats=4)
    moves = balance(view, forecast, COMPUTE, SETTINGS, move_s)
    assert {(move.source, move.target) for move in moves} == {("n:0", "n:1")}
    assert len(moves) == 2  # two seats are free
    assert all(not view.requests.running[int(move.id[1:])] for move in moves)


def test_an_instance_that_yields_too_little_is_relieved() -> None:
    view, forecast = pool([[2000] * 8, [2000] * 8, []])
    even = decided(view, forecast)
    slow = replace(view.instances[0], tokens_per_s=8 / 0.012 / 4)
    relieved = decided(replace(view, instances=(slow, *view.instances[1:])), forecast)
    assert {source for source, _ in relieved} == {"n:0"}
    assert len(relieved) > len(even)


def test_an_instance_that_may_just_have_computed_prompts_is_not_taken_for_slow() -> None:
    view, forecast = pool([[2000] * 8, [2000] * 8, []])
    slow = replace(view.instances[0], tokens_per_s=8 / 0.012 / 4)
    there = replace(view, instances=(slow, *view.instances[1:]))
    turns = replace(view.requests, recomputed=np.full(16, 3000))
    lately = replace(view.requests, produced=np.full(16, 50))
    for requests in (turns, lately):
        seen = replace(there, requests=requests)
        even = decided(replace(view, requests=requests), forecast)
        assert decided(seen, forecast) == even


def test_contexts_that_later_turns_compute_are_work() -> None:
    """The one with the longest answer ends first: the other computes 400,000 tokens yet."""
    view, forecast = pool([[1500, 1400, 1400], [100] * 8], [1, 4])
    assert {source for source, _ in decided(view, forecast)} == {"n:0"}
    later = np.array([0] * 3 + [50_000] * 8)
    turns = replace(view, truth=forecast.expected.astype(np.int64), truth_recomputes=later)
    assert {source for source, _ in decided(turns, forecast)} <= {"n:1"}


# -- what it leaves ------------------------------------------------------------------------------


def test_an_even_pool_is_left_alone() -> None:
    assert decided(*pool([[1000] * 8] * 4)) == []


def test_a_move_must_pay_what_it_costs_and_a_margin() -> None:
    view, forecast = pool([[1000], []], [1, 4])
    saves_s = balance(view, forecast, COMPUTE, SETTINGS, lambda *_: 0.0)[0].saves_s
    margin_s = MARGIN * 1000 * 0.0121
    for cost_s, moves in ((saves_s - 1.5 * margin_s, 1), (saves_s - 0.5 * margin_s, 0)):
        assert len(balance(view, forecast, COMPUTE, SETTINGS, lambda *_, s=cost_s: s)) == moves


@pytest.mark.parametrize(
    "hindrance",
    [
        {"accepting": False}, {"running": 64}, {"kv_used_tokens": 197_000},
        {"length_max_tokens": 16_000},
    ],
)  # fmt: skip
def test_a_target_must_have_room_at_once(hindrance: dict[str, int]) -> None:
    view, forecast = pool([[3000], []], [1, 4])
    hindered = replace(view.instances[1], **hindrance)  # type: ignore[arg-type]
    assert decided(view, forecast)
    assert decided(replace(view, instances=(view.instances[0], hindered)), forecast) == []


def test_a_shift_takes_no_more_than_the_room_there_is() -> None:
    view, forecast = pool([[3000, 2000, 1000, 500], []], [1, 4])
    tight = replace(view.instances[1], sequences_max=2)
    assert len(decided(replace(view, instances=(view.instances[0], tight)), forecast)) <= 2


def test_what_was_moved_rests_and_does_not_return() -> None:
    view, forecast = pool([[3000], []], [1, 4])
    just_came = Moved("r0", "n:9", "n:0", view.now_s - 1)
    assert decided(replace(view, moved=(just_came,)), forecast) == []
    rested = just_came._replace(at_s=view.now_s - 6)
    assert decided(replace(view, moved=(rested,)), forecast) == [("n:0", "n:1")]
    left = Moved("r0", "n:1", "n:0", view.now_s - 1000)
    assert decided(replace(view, moved=(left,)), forecast) == []


def test_nothing_moves_while_the_layout_changes_or_where_nothing_is() -> None:
    view, forecast = pool([[3000], []], [1, 4])
    assert decided(replace(view, changing=True), forecast) == []
    assert decided(*pool([[], []])) == []
    assert decided(*pool([[3000, 10]])) == []


@pytest.mark.parametrize(
    ("rate", "ago_s", "allowed"),
    [(2.0, [], 2), (2.0, [0.5], 1), (2.0, [0.2, 0.5, 1.5], 0), (0.5, [], 1), (0.5, [1.5], 0)],
)
def test_the_rate_is_bounded(rate: float, ago_s: list[float], allowed: int) -> None:
    view, _ = pool([[3000], []])
    moved = tuple(Moved(f"x{ago}", "a", "b", view.now_s - ago) for ago in ago_s)
    assert moves_allowed(replace(view, moved=moved), Settings(moves_per_s_max=rate)) == allowed


# -- over and over -------------------------------------------------------------------------------


def noisy(remaining: np.ndarray, chance: np.random.Generator, sigma: float) -> Forecast:
    """Return a forecast that is off by a factor, another one at every look."""
    expected = remaining * chance.lognormal(0, sigma, len(remaining))
    longest = float(expected.max() * chance.uniform(1, 3))
    total = float(expected.sum())
    return Forecast(expected, expected, Interval(*3 * [total]), Interval(*3 * [longest]), 0)


def followed(seed: int, sigma: float) -> tuple[list[Moved], View, np.ndarray]:
    """Look at a random pool that stands still, again and again, and do what is decided.

    It ends when five looks on end decided nothing. Returns the moves, the pool, what remains.
    """
    chance = np.random.default_rng(seed)
    instances, rows = int(chance.integers(2, 9)), int(chance.integers(1, 60))
    tps = chance.choice([1, 2, 4], instances).tolist()
    remaining = chance.lognormal(6, 1, rows).astype(np.int64) + 1
    at = chance.integers(0, instances, rows)
    seats = int(chance.choice([4, 16, 64]))
    order = np.argsort(at, kind="stable")
    place = np.empty(rows, dtype=np.int64)
    place[order] = np.arange(rows) - np.searchsorted(at[order], at[order])
    settings = Settings(moves_per_s_max=4.0, move_rest_s=float(chance.choice([0.0, 0.5, 3.0])))
    moved: list[Moved] = []
    idle = 0
    view, _ = view_of(remaining, at, place < seats, tps, seats)
    while idle < 5:
        forecast = noisy(remaining, chance, sigma) if sigma else Forecast.certain(remaining)
        moves = balance(view, forecast, COMPUTE, settings, move_s)
        assert len(moves) <= 4
        idle = 0 if moves else idle + 1
        at = at.copy()
        for move in moves:
            row = int(move.id[1:])
            assert view.instances[at[row]].name == move.source != move.target
            at[row] = int(move.target[2:])
            moved.append(Moved(move.id, move.source, move.target, view.now_s))
        running = view.requests.running | np.isin(np.arange(rows), [int(m.id[1:]) for m in moves])
        now_s = view.now_s + 0.25
        seen, _ = view_of(remaining, at, running, tps, seats)
        view = replace(seen, now_s=now_s, moved=tuple(moved))
        assert all(each.running <= seats for each in view.instances)
    return moved, view, remaining


@pytest.mark.parametrize("sigma", [0.0, 0.3, 1.0])
def test_over_a_thousand_pools_no_request_returns_and_moves_come_to_an_end(sigma: float) -> None:
    total = 0
    for seed in range(350):
        moved, _, _ = followed(seed, sigma)
        visited: dict[str, set[str]] = {}
        for move in moved:
            left = visited.setdefault(move.id, set())
            left.add(move.source)
            assert move.target not in left, f"seed {seed}: {move.id} returned to {move.target}"
        total += len(moved)
    assert total > 350  # it is not that nothing ever moves


def test_where_lengths_are_known_moves_never_make_the_end_later() -> None:
    for seed in range(100):
        moved, after, remaining = followed(seed, 0.0)
        before = after.requests.at.copy()
        for move in reversed(moved):
            before[int(move.id[1:])] = int(move.source[2:])
        ended_s, would_end_s = (ends_s(after, at, remaining) for at in (after.requests.at, before))
        assert ended_s <= would_end_s


def ends_s(view: View, at: np.ndarray, remaining: np.ndarray) -> float:
    """Return when the last instance ends, by the cost model of the slow loop."""
    context = view.requests.context.astype(np.float64)
    left = remaining.astype(np.float64)
    return max(
        COMPUTE.makespan_s(instance.layout, left[at == k], context[at == k])
        for k, instance in enumerate(view.instances)
    )
