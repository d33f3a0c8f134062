"""What a run of the RL loop tells: metrics that checks can name, and a report a person can read."""

from __future__ import annotations

import io
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cli.progress import Progress
from harness.clock import NS_PER_S
from harness.model.documents import SCHEMA, Event, RunSummary, Start
from harness.model.metrics import metric_problem
from harness.model.scenario import Check
from harness.model.streams import STREAMS
from harness.record import rl_samples
from harness.record.figures import with_interval
from harness.record.intervals import half_width, ratio_half_width, shares, t_975
from harness.record.report import text_report
from harness.record.rl import bars, rl_sections
from harness.record.samples import metrics_of
from harness.record.section import Section
from harness.record.summary import summarise
from harness.record.verdict import evaluate

S = 1_000_000_000
MS = 1_000_000
NOTE = "generation is paced by the latency profile of Qwen2.5-14B on H800"
SPEEDS = {
    "static:8xTP1": (10.0, 20.0, 40.0),
    "best_static": (12.0, 24.0, 48.0),
    "orchestrl": (14.0, 29.0, 57.0),
    "oracle": (15.0, 30.0, 60.0),
}
"""Samples/s by policy, of three seeds whose workloads differ much."""


def event(stream: str, t_s: float = 0.0, **data: object) -> Event:
    assert data.keys() <= STREAMS[stream].keys()
    row = dict.fromkeys(STREAMS[stream]) | data
    return Event(stream=stream, seq=0, t_ns=round(t_s * S), data=row)


def loop_row(policy: str, number: int, repeat: int, speed: float) -> Event:
    return event(
        "rl", step=number, policy=policy, repeat=repeat, workload_seed=100 + repeat, steps=2,
        samples=64, tokens=64_000, took_s=64 / speed, samples_per_s=speed, switches_taken=1,
        switches_refused=2, switches_wasted=0, moves=3, generation_bubble_pct=20.0,
        training_bubble_pct=60.0, dropped=0, staleness_max=1, digest="ab",
    )  # fmt: skip


def step_row(policy: str, number: int, index: int, begin_s: float, **changes: object) -> Event:
    """A step whose batch takes 10 s, of which the last 10 % of samples take 4."""
    t_ns = round(begin_s * S)
    row: dict[str, object] = {
        "step": number, "policy": policy, "repeat": 0, "index": index, "version": index + 1,
        "samples": 32, "tokens": 32_000, "begin_ns": t_ns, "tail_begin_ns": t_ns + 6 * S,
        "batch_end_ns": t_ns + 10 * S, "train_begin_ns": t_ns + 10 * S,
        "train_end_ns": t_ns + 12 * S, "sync_end_ns": t_ns + 13 * S, "batch_s": 10.0,
        "train_s": 2.0, "step_s": 13.0, "staleness": [8, 24], "mixed": 5, "reward": None,
        "figures": {},
    }  # fmt: skip
    return event("rl_step", begin_s + 13, **(row | changes))


def pool_rows(policy: str, number: int, begin_s: float) -> list[Event]:
    """The pool once a second: it drains, and in the tail it is another layout."""
    return [
        event(
            "pool", begin_s + second, step=number, policy=policy, batch=0, waiting=0,
            layout="8xTP1" if second < 6 else "2xTP4", running=32 - 3 * second,
            queued=4 if second == 0 else 0, kv_use_pct=10.0, tokens=0,
        )
        for second in range(11)
    ]  # fmt: skip


def planned(policy: str, t_s: float, outcome: str, **changes: object) -> Event:
    row: dict[str, object] = {
        "step": 0, "policy": policy, "layout": "8xTP1", "best": "2xTP4", "outcome": outcome,
        "reason": "saves 1.0 s, costs 2.0 s", "open": 20, "stay_s": 9.0, "change_s": 8.0,
        "cost_s": 2.0, "solve_ms": 3.0,
    }  # fmt: skip
    return event("planned", t_s, **(row | changes))


def forecast(policy: str, total: int, true: int) -> Event:
    return event(
        "forecast", step=0, policy=policy, batch=0, at_s=1.0, open=20, past_batches=1,
        total_tokens=total, total_low_tokens=total - 100, total_high_tokens=total + 100,
        total_true_tokens=true, longest_tokens=500, longest_low_tokens=400,
        longest_high_tokens=900, longest_true_tokens=1000, covered_pct=75.0,
    )  # fmt: skip


def sync(outcome: str = "synced", **changes: object) -> Event:
    row: dict[str, object] = {
        "step": 0, "policy": "orchestrl", "version": 1, "path": "chain", "sources": 1,
        "receivers": 2, "attempt": 0, "bytes": 3 * 10**9, "buckets": 8, "gather_s": 0.2,
        "rpc_s": 0.01, "wire_s": 2.0, "load_s": 0.3, "total_s": 2.51, "outcome": outcome,
        "error": "",
    }  # fmt: skip
    return event("sync", **(row | changes))


def phase(
    node: str, version: int, begin_ms: int, expected_gap_ms: float | None, *, index: int = 0
) -> Event:
    return event(
        "phase", step=0, node=node, version=version, index=index, name="layer 3 backward",
        op="reduce_scatter", axis="dp", bytes=10**6, expected_gap_ms=expected_gap_ms,
        begin_ns=begin_ms * MS, end_ns=(begin_ms + 2) * MS,
    )  # fmt: skip


def compared() -> list[Event]:
    """Three repeats of one rl step, under four policies each."""
    found = []
    for repeat in range(3):
        found.append(event("step", index=repeat, repeat=repeat, do="rl", phase="begin"))
        for policy, speeds in SPEEDS.items():
            found.append(step_row(policy, repeat, 0, 0.0))
            found.append(step_row(policy, repeat, 1, 13.0, step_s=11.0))
            found.append(loop_row(policy, repeat, repeat, speeds[repeat]))
    return found


def told() -> list[Event]:
    """One policy, with all that it did."""
    return [
        event("step", index=0, repeat=0, do="rl", phase="begin"),
        *pool_rows("orchestrl", 0, 100.0),
        planned("orchestrl", 101.0, "stayed", best="8xTP1"),
        planned("orchestrl", 102.0, "refused", stay_s=9.0),
        planned("orchestrl", 104.0, "refused", stay_s=7.0),
        planned("orchestrl", 106.0, "taken", reason="saves 4.0 s, costs 2.0 s"),
        forecast("orchestrl", 1100, 1000),
        forecast("orchestrl", 1300, 1000),
        sync("failed", error="g1 did not answer"),
        sync(),
        phase("t0", 0, 100, 5.0),
        phase("t1", 0, 100, 5.0),
        phase("t0", 0, 112, 8.0, index=1),  # 10 ms after the end of the one before
        phase("t0", 1, 200, 8.0),  # another step: what was before it is no gap
        step_row("orchestrl", 0, 0, 100.0, reward=0.1),
        step_row("orchestrl", 0, 1, 113.0, reward=0.9, tail_begin_ns=None),
        loop_row("orchestrl", 0, 0, 5.0),
    ]


def summary(events: list[Event]) -> RunSummary:
    start = Start(
        schema=SCHEMA, run="r", t_ns=0, wall="now", world="emulated", scenario="rl", bench="b",
        seed=0, versions={}, notes=(NOTE,),
    )  # fmt: skip
    return summarise([start, *events])


def sections(events: list[Event]) -> dict[str, Section]:
    return {section.title: section for section in rl_sections(summary(events))}


def line(one: Event) -> str:
    out = io.StringIO()
    Progress(out)(one)
    return out.getvalue().rstrip("\n").partition(" s  ")[2]


# -- as it happens -----------------------------------------------------------------------------


def test_steps_loops_and_syncs_are_one_line_each() -> None:
    assert line(step_row("orchestrl", 0, 3, 0.0, reward=0.25)) == (
        "rl_step     orchestrl #4: 32 samples, 32,000 tokens in 13.0 s (batch 10.0, trained in"
        " 2.0), by age 8/24, reward 0.250"
    )
    assert line(loop_row("orchestrl", 0, 0, 4.0)) == (
        "rl          orchestrl: 64 samples in 16.0 s: 4 samples/s; switches: 1 taken, 2 refused,"
        " 0 wasted; 3 moves"
    )
    assert line(sync()) == (
        "sync        weights 1 to 2 nodes by chain: 3,000.0 MB in 2.510 s (gather 0.200, rpc 0.010,"
        " wire 2.000, load 0.300)"
    )
    assert line(sync("failed", error="g1 is gone")).endswith("chain: attempt 1 failed, g1 is gone")
    assert line(sync("noop")).endswith("never loaded: a fault that was asked for")


def test_of_what_is_seen_again_and_again_only_changes_are_told() -> None:
    assert line(planned("orchestrl", 1.0, "taken")) == (
        "planned     8xTP1 -> 2xTP4: taken, saves 1.0 s, costs 2.0 s"
    )
    for quiet in (
        planned("orchestrl", 1.0, "refused"),
        forecast("orchestrl", 1, 1),
        phase("t0", 0, 100, 5.0),
        pool_rows("orchestrl", 0, 0.0)[0],
    ):
        assert line(quiet) == ""


# -- metrics -----------------------------------------------------------------------------------


def test_repeats_of_a_policy_are_pooled_with_a_confidence_interval() -> None:
    found = metrics_of(compared())
    speed = found["rl.samples_per_s[step=0,policy=oracle]"]
    assert (speed.n, speed.value) == (3, 35.0)
    assert speed.plus_minus == pytest.approx(4.303 * np.std([15, 30, 60], ddof=1) / math.sqrt(3))
    steps = found["rl.step_s[step=0,policy=oracle]"]
    assert (steps.n, steps.value, steps.plus_minus) == (6, 12.0, None)
    assert found["rl.tail_s[step=0,policy=oracle]"].value == 4.0
    assert found["rl.moves[step=0,policy=oracle]"].value == 9
    assert "rl.samples_per_s" not in found  # of several policies together it would mean nothing


def test_a_gain_is_paired_by_seed_so_that_what_seeds_do_cancels_out() -> None:
    found = metrics_of(compared())
    over_first = found["rl.gain[step=0,policy=orchestrl,over=static:8xTP1]"]
    ratios = [1.4, 1.45, 1.425]
    assert over_first.value == pytest.approx(np.exp(np.log(ratios).mean()))
    assert over_first.plus_minus == pytest.approx(ratio_half_width(ratios))
    assert over_first.plus_minus < 0.1  # though samples/s of the seeds are 4 times apart
    assert found["rl.gain[step=0,policy=oracle,over=best_static]"].value == pytest.approx(1.25)
    assert not any("policy=oracle,over=oracle" in name for name in found)


def test_runs_with_other_seeds_are_not_compared() -> None:
    other = loop_row("orchestrl", 0, 7, 50.0)
    found = metrics_of([loop_row("static:8xTP1", 0, 0, 10.0), other])
    assert not any(name.startswith("rl.gain") for name in found)


def test_a_seed_that_ran_twice_counts_once() -> None:
    again = [loop_row("oracle", 1, 0, 22.0), loop_row("static:8xTP1", 1, 0, 10.0)]
    found = metrics_of(
        [loop_row("static:8xTP1", 0, 0, 10.0), loop_row("oracle", 0, 0, 18.0), *again]
    )
    assert found["rl.gain[step=0,policy=oracle,over=static:8xTP1]"].n == 1


def test_the_share_of_the_oracles_gain() -> None:
    found = metrics_of(compared())
    gains = np.array([14 / 12, 29 / 24, 57 / 48]) - 1
    share = found["rl.oracle_share_pct[step=0,policy=orchestrl]"]
    assert share.value == pytest.approx(100 * gains.mean() / 0.25)
    assert share.plus_minus == pytest.approx(100 * (half_width(gains.tolist()) or 0) / 0.25)
    assert share.n == 3
    nothing = [e for e in compared() if e.data.get("policy") != "oracle"]
    nothing += [loop_row("oracle", r, r, SPEEDS["best_static"][r]) for r in range(3)]
    assert not any(name.startswith("rl.oracle_share") for name in metrics_of(nothing))


@given(st.lists(st.tuples(st.floats(-0.2, 0.6), st.floats(0.3, 0.6)), min_size=2, max_size=9))
def test_shares_average_to_the_ratio_of_the_means(pairs: list[tuple[float, float]]) -> None:
    parts, wholes = zip(*pairs, strict=True)
    if found := shares(parts, wholes):
        assert np.mean(found) == pytest.approx(np.mean(parts) / np.mean(wholes))


def test_intervals_hold_the_true_mean_as_often_as_they_say() -> None:
    chance = np.random.default_rng(4)
    draws = chance.normal(3.0, 2.0, size=(4000, 5)).tolist()
    held = sum(abs(np.mean(row) - 3.0) <= (half_width(row) or 0) for row in draws)
    assert 0.94 < held / 4000 < 0.96
    ratios = np.exp(chance.normal(0.3, 0.1, size=(4000, 5))).tolist()
    middle = math.exp(0.3)
    held = sum(
        abs(math.exp(np.log(row).mean()) - middle) <= (ratio_half_width(row) or 0) for row in ratios
    )
    assert 0.94 < held / 4000 < 0.97  # the wider of its two sides stands for both


def test_students_t() -> None:
    assert t_975(1) == 12.706
    assert t_975(4) == 2.776  # five seeds
    assert t_975(40) == pytest.approx(2.0211, abs=0.003)
    assert t_975(10**6) == pytest.approx(1.96, abs=0.001)
    assert all(a > b for a, b in itertools.pairwise(map(t_975, range(1, 60))))
    assert half_width([3.0]) is None


def test_forecasts_plans_and_rewards() -> None:
    found = metrics_of(told())
    of = "[step=0,policy=orchestrl]"
    assert found[f"forecast.error_pct{of}"].value == pytest.approx(20.0)
    assert found[f"forecast.longest_error_pct{of}"].value == 50.0
    assert found[f"forecast.covered_pct{of}"].value == 75.0
    assert found[f"forecast.total_covered_pct{of}"].value == 50.0
    assert found[f"planner.solve_ms{of}"].n == 4
    assert found[f"rl.reward_last{of}"].value == 0.9
    assert found[f"rl.reward_rise{of}"].value == pytest.approx(0.8)
    assert found[f"rl.tail_s{of}"].n == 1
    assert "rl.reward_last[step=0,policy=oracle]" not in metrics_of(compared())


def test_a_sync_that_failed_says_nothing_of_what_syncs_take() -> None:
    found = metrics_of(told())
    of = "[step=0,policy=orchestrl]"
    assert found[f"sync.failed{of}"].value == 1
    assert (found[f"sync.s{of}"].n, found[f"sync.s{of}"].value) == (1, 2.51)
    assert found[f"sync.gb_per_s{of}"].value == pytest.approx(1.5)
    assert found[f"sync.load_ms{of}"].value == pytest.approx(300.0)


def test_gaps_between_communications_are_of_one_step_on_one_node() -> None:
    found = metrics_of(told())
    of = "[step=0,axis=dp,op=reduce_scatter]"
    assert found[f"train.phase_ms{of}"].n == 3
    assert found[f"train.phase_gb_per_s{of}"].value == pytest.approx(0.5)
    assert (found[f"train.gap_ms{of}"].n, found[f"train.gap_ms{of}"].value) == (1, 10.0)
    assert found[f"train.gap_error_pct{of}"].value == pytest.approx(25.0)


def test_a_communication_takes_from_its_last_rank_on_and_what_others_wait_for_is_skew() -> None:
    found = metrics_of([phase("t0", 0, 100, 5.0), phase("t1", 0, 130, 5.0)])
    of = "[step=0,axis=dp,op=reduce_scatter]"
    assert (found[f"train.phase_ms{of}"].n, found[f"train.phase_ms{of}"].value) == (1, 2.0)
    assert found[f"train.skew_ms{of}"].value == 30.0


def test_every_metric_of_a_loop_can_be_checked() -> None:
    found = metrics_of([*compared(), *told()])
    assert not [name for name in found if metric_problem(name)]
    check = Check(metric="rl.gain[policy=oracle,over=best_static]", at_least=1.2)
    assert evaluate(check, found).verdict == "passed"
    near = Check(metric="rl.gain[policy=orchestrl,over=static:8xTP1]", at_least=1.42)
    assert evaluate(near, found).verdict == "unknown"  # three seeds do not tell 1.42 from 1.425
    assert evaluate(Check(metric="rl.dropped", at_most=0), found).verdict == "passed"


# -- what a reader sees ------------------------------------------------------------------------


def test_policies_stand_side_by_side_in_the_order_they_ran() -> None:
    table = sections(compared())["RL step 0: policies"]
    assert [row[0] for row in table.rows] == list(SPEEDS)
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert rows["orchestrl"]["over static:8xTP1"] == "1.425 ±0.063"
    assert rows["orchestrl"]["over best_static"] == "1.187 ±0.053"
    assert rows["orchestrl"]["% of oracle's"] == "75 ±21"
    assert rows["static:8xTP1"]["over static:8xTP1"] == "-"
    assert rows["oracle"]["switches"] == "3/6/0"
    assert rows["oracle"]["idle"] == "20/60"


def test_a_policy_alone_is_compared_with_nothing() -> None:
    table = sections(told())["RL step 0: policies"]
    assert not [column for column in table.columns if column.startswith(("over", "%"))]
    assert dict(zip(table.columns, table.rows[0], strict=True))["forecast"] == "20.00 %"


def test_the_timeline_shows_layouts_the_tail_and_what_came_when() -> None:
    table = sections(told())["Steps of orchestrl, repeat 1"]
    first, second = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    assert first["layout"] == "8xTP1 > 2xTP4"
    assert first["most"] == "32"
    assert first["queued"] == "4"
    assert (first["begun"], first["90 %"], first["100 %"]) == ("0.0", "6.0", "10.0")
    assert (first["trained"], first["synced"]) == ("10.0-12.0", "13.0")
    assert (first["age"], first["reward"]) == ("8/24", "0.1000")
    assert first["running"][0] == "█"
    assert first["running"][-1] == "▁"
    assert (second["begun"], second["90 %"]) == ("13.0", "-")


def test_only_the_last_repeat_is_told_step_by_step() -> None:
    loops = summary(compared()).loops
    assert [(loop.policy, loop.repeat) for loop in loops] == [(policy, 2) for policy in SPEEDS]


def test_decisions_that_are_alike_are_one_line_with_the_latest_reason() -> None:
    table = sections(told())["Switches taken and refused"]
    assert table.rows == [
        (
            *("orchestrl", "2.0", "8xTP1", "2xTP4", "refused", "2"),
            *("7.0", "8.0", "2.0", "saves 1.0 s, costs 2.0 s"),
        ),
        (
            *("orchestrl", "6.0", "8xTP1", "2xTP4", "taken", "1"),
            *("9.0", "8.0", "2.0", "saves 4.0 s, costs 2.0 s"),
        ),
    ]
    assert table.lines[-1].endswith("the layout in force was the best: orchestrl 1")


def test_weights_communications_and_rewards_have_their_tables() -> None:
    found = sections(told())
    (row,) = found["Weight syncs"].rows
    assert row == (
        *("orchestrl", "1", "1", "200.0", "10.00", "2000", "300.0", "2510", "1.500"),
        "0",
    )
    (row,) = found["Communications of training: as announced, and as they were"].rows
    assert row[:4] == ("dp", "reduce_scatter", "3", "1,000,000")
    assert row[-3:] == ("8.000", "10.00", "25.00")
    (row,) = found["Reward"].rows
    assert row == ("orchestrl", "1", "0.1000", "0.9000", "0.8000", "▁▇")


def test_the_first_lines_say_what_is_paced_and_the_loop_comes_before_its_parts() -> None:
    text = text_report(summary([*compared(), *told()]))
    assert text.splitlines()[1] == f"  note: {NOTE}"
    places = [text.index(word) for word in (NOTE, "RL step 0", "Steps of", "Weight syncs")]
    assert places == sorted(places)
    assert max(map(len, text.splitlines())) < 150


def test_a_loop_that_was_cut_short_is_told_as_far_as_it_came() -> None:
    cut = [e for e in told() if e.stream not in ("rl", "phase")][:-1]
    found = sections(cut)
    assert found["RL step 0: policies"].rows[0][:4] == ("orchestrl", "0", "-", "13.00")
    assert len(found["Steps of orchestrl, repeat 1"].rows) == 1
    begun = [e for e in cut if e.stream in ("step", "pool", "planned")]
    assert sections(begun) == {}


def test_a_run_that_did_not_train_has_no_such_parts() -> None:
    assert sections([]) == {}


@pytest.mark.parametrize(
    ("value", "half_width", "text"),
    [
        (1.42486, 0.0634, "1.425 ±0.063"),
        (35.0, 57.03, "35 ±57"),  # wider than the value, which is seen all the same
        (1234.5, 310.0, "1230 ±310"),
        (1.5, None, "1.500"),
        (1.5, 1e-16, "1.500"),
    ],
)
def test_an_interval_has_two_digits(value: float, half_width: float | None, text: str) -> None:
    assert with_interval(value, half_width) == text


def test_bars_show_whatever_is_not_nothing() -> None:
    assert bars([8, 4, 0.01, 0], 8) == "█▄▁"
    assert bars([0, 1], 1) == " █"
    assert bars([], 0) == bars([0, 0], 0) == "-"


@pytest.mark.parametrize(
    ("next_complete_ns", "seen_pct"),
    [(10 * NS_PER_S, 20.0), (13 * NS_PER_S, 10.0), (20 * NS_PER_S, 0.0)],
)
def test_a_sync_is_seen_only_while_the_next_samples_wait_for_it(
    next_complete_ns: int, seen_pct: float
) -> None:
    row = {"train_end_ns": 12 * NS_PER_S, "sync_end_ns": 14 * NS_PER_S, "step_s": 10.0}
    after = {"batch_end_ns": next_complete_ns}
    assert rl_samples.visible_pct(row, after) == seen_pct
