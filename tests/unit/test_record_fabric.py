"""What circuits that follow the work tell: lines, metrics that checks can name, and the report."""

from __future__ import annotations

import io
import math

import msgspec
import numpy as np
import pytest

from harness.cli.progress import Progress
from harness.model.documents import SCHEMA, Event, Metric, RunSummary, Start
from harness.model.metrics import metric_problem
from harness.model.scenario import Check
from harness.model.streams import STREAMS
from harness.record.fabric import fabric_sections
from harness.record.intervals import half_width, ratio_half_width
from harness.record.report import text_report
from harness.record.samples import metrics_of
from harness.record.section import Section
from harness.record.summary import summarise
from harness.record.verdict import evaluate

S = 1_000_000_000
ARM = "static:4xTP2@rfabric"
WIRE_S = {
    "static:4xTP2@electrical": (2.0, 2.2, 1.8, 2.4),
    "static:4xTP2@rfabric": (0.8, 0.9, 0.7, 1.0),
    "static:4xTP2@ideal": (0.6, 0.7, 0.5, 0.8),
}
"""By arm, of two repeats of two steps: what a sync takes on the wire."""
OF = f"[step=0,policy={ARM}]"


def event(stream: str, t_s: float = 0.0, **data: object) -> Event:
    assert data.keys() <= STREAMS[stream].keys()
    row = dict.fromkeys(STREAMS[stream]) | data
    return Event(stream=stream, seq=0, t_ns=round(t_s * S), data=row)


def began(repeat: int = 0) -> Event:
    return event("step", index=repeat, repeat=repeat, do="rl", phase="begin")


def sync(arm: str, t_s: float, wire_s: float, *, number: int = 0, outcome: str = "synced") -> Event:
    return event(
        "sync", t_s, step=number, policy=arm, version=1, path="pairs", sources=1, receivers=1,
        attempt=0, bytes=10**6, buckets=1, gather_s=0.5, rpc_s=0.0, wire_s=wire_s, load_s=0.1,
        total_s=1.0, outcome=outcome, error="",
    )  # fmt: skip


def step(arm: str, t_s: float, index: int, *, number: int = 0, train_s: float = 3.0) -> Event:
    return event(
        "rl_step", t_s, step=number, policy=arm, repeat=number, index=index, version=index + 1,
        samples=8, tokens=800, begin_ns=0, batch_end_ns=S, train_begin_ns=S, train_end_ns=4 * S,
        sync_end_ns=round(t_s * S), batch_s=1.0, train_s=train_s, step_s=6.0, staleness=[8],
        mixed=0, reward=None, figures={},
    )  # fmt: skip


def decided(t_s: float, kind: str, action: str, **changes: object) -> Event:
    row: dict[str, object] = {
        "step": 0, "policy": ARM, "kind": kind, "action": action,
        "reason": "changed: saves 1.5 s of 2 s", "bytes": 100_000_000, "window_ms": None,
        "needed_ms": 36.0, "keep_ms": 2000.0, "change_ms": 500.0, "electrical_ms": 2000.0,
        "circuits": ["g0-t0@agg0+core0+agg2", "g0-t0@agg1+core0+agg3"], "unserved": [],
        "solve_ms": 2.0,
    }  # fmt: skip
    return event("fabric", t_s, **(row | changes))


def changed(t_s: float, kind: str, outcome: str = "changed", **changes: object) -> Event:
    row: dict[str, object] = {
        "step": 0, "policy": ARM, "kind": kind, "stages": {}, "device_ms": 50.0, "total_ms": 70.0,
        "moved": 2, "kept": 1, "lit": ["g0-t0@agg0+core0+agg2", "g0-t0@agg1+core0+agg3"],
        "outcome": outcome, "error": "",
    }  # fmt: skip
    return event("fabric_change", t_s, **(row | changes))


def crossed(t_s: float, kind: str, **changes: object) -> Event:
    row: dict[str, object] = {
        "step": 0, "policy": ARM, "kind": kind, "announced_bytes": 100_000_000,
        "measured_bytes": 102_000_000, "circuits_bytes": 51_000_000, "took_ms": 625.0,
    }  # fmt: skip
    return event("fabric_traffic", t_s, **(row | changes))


def compared() -> list[Event]:
    """Two repeats of one rl step of two training steps, over three networks each."""
    found = []
    for repeat in range(2):
        found.append(began(repeat))
        for arm, wires_s in WIRE_S.items():
            for index in range(2):
                t_s = 10.0 * (index + 1)
                found.append(sync(arm, t_s - 1, 9.9, number=repeat, outcome="failed"))
                found.append(sync(arm, t_s, wires_s[2 * repeat + index], number=repeat))
                found.append(step(arm, t_s, index, number=repeat))
    return found


def told() -> list[Event]:
    """One arm, with all that its circuits did."""
    broke = "no light for 400 ms"
    return [
        began(),
        decided(1.0, "train", "change", bytes=300_000_000, change_ms=900.0),
        changed(1.1, "train"),
        crossed(3.0, "train", took_ms=3000.0),
        decided(3.1, "sync", "change"),
        changed(3.2, "sync", "degraded", error="t1:u1 has no light", total_ms=90.0),
        event("fabric_part", 3.3, step=0, policy=ARM, part="t1:u1", state="broken", reason=broke),
        crossed(4.0, "sync"),
        decided(5.0, "sync", "dropped", reason="dropped: the window is over: saves nothing"),
        decided(6.0, "sync", "change", bytes=90_000_000, change_ms=450.0),
        changed(6.1, "sync", "failed", device_ms=None, error="t0 refused"),
        crossed(7.0, "sync", took_ms=500.0),
        decided(7.5, "train", "keep", keep_ms=900.0, change_ms=900.0, reason="kept: as planned"),
        sync(ARM, 8.0, 0.5),
        step(ARM, 8.0, 0),
        changed(9.0, "end", total_ms=5.0),
    ]


def summary(events: list[Event]) -> RunSummary:
    start = Start(
        schema=SCHEMA, run="r", t_ns=0, wall="now", world="emulated", scenario="rl", bench="b",
        seed=0, versions={}, notes=("emulated bench",),
    )  # fmt: skip
    return summarise([start, *events])


def sections(events: list[Event]) -> dict[str, Section]:
    return {section.title: section for section in fabric_sections(summary(events))}


def line(one: Event) -> str:
    out = io.StringIO()
    Progress(out)(one)
    return out.getvalue().rstrip("\n").partition(" s  ")[2]


# -- as it happens -----------------------------------------------------------------------------


def test_decisions_changes_parts_and_traffic_are_one_line_each() -> None:
    assert line(decided(1.0, "sync", "change")) == (
        f"fabric      {ARM}, sync: changed: saves 1.5 s of 2 s"
    )
    assert line(changed(1.0, "sync")) == (
        f"change      {ARM}, sync: in 70.0 ms (device 50.0), 2 moved, 1 kept; up: 2 g0-t0"
    )
    failed = changed(1.0, "sync", "failed", device_ms=None, lit=[], error="t0 refused")
    assert line(failed).endswith("in 70.0 ms, 2 moved, 1 kept; up: none; failed: t0 refused")
    assert line(told()[6]) == f"part        {ARM}: t1:u1 broken: no light for 400 ms"
    assert line(crossed(1.0, "sync")) == (
        f"traffic     {ARM}, sync: 102.0 MB, 50 % by circuits, 0.625 s"
    )
    nobody_counts = crossed(1.0, "sync", measured_bytes=None, circuits_bytes=None)
    assert line(nobody_counts).endswith("sync: 100.0 MB announced, 0.625 s")
    beacons_alone = crossed(1.0, "sync", announced_bytes=0, measured_bytes=9, circuits_bytes=9)
    assert line(beacons_alone).endswith("sync: 0.0 MB announced, 0.625 s")


def test_what_is_kept_as_planned_is_not_told() -> None:
    assert line(decided(1.0, "train", "keep", keep_ms=900.0, change_ms=900.0)) == ""
    refused = decided(1.0, "train", "keep", change_ms=1990.0, reason="kept: saves too little")
    assert line(refused).endswith("train: kept: saves too little")


# -- metrics -----------------------------------------------------------------------------------


def found_of(arm: str, phase: str, over: str) -> Metric:
    name = f"fabric.gain[step=0,policy={arm},phase={phase},over={over}]"
    return metrics_of(compared())[name]


def test_a_gain_is_paired_step_by_step_over_all_repeats() -> None:
    slow, own, ideal = WIRE_S.values()
    gain = found_of(ARM, "sync", "static:4xTP2@electrical")
    ratios = [a / b for a, b in zip(slow, own, strict=True)]
    assert gain.n == 4
    assert gain.value == pytest.approx(math.exp(np.log(ratios).mean()))
    assert gain.plus_minus == pytest.approx(ratio_half_width(ratios))
    share = found_of(ARM, "sync", "static:4xTP2@ideal")
    assert share.value == pytest.approx(
        math.exp(np.log([a / b for a, b in zip(ideal, own, strict=True)]).mean())
    )
    assert found_of(ARM, "train", "static:4xTP2@electrical").value == pytest.approx(1.0)


def test_phases_have_an_interval_over_steps_and_failed_syncs_are_none_of_them() -> None:
    found = metrics_of(compared())
    times_ms = [1e3 * s for s in WIRE_S[ARM]]
    sync_ms = found[f"fabric.phase_ms[step=0,policy={ARM},phase=sync]"]
    assert (sync_ms.n, sync_ms.max) == (4, pytest.approx(1000.0))
    assert sync_ms.value == pytest.approx(np.mean(times_ms))
    assert sync_ms.plus_minus == pytest.approx(half_width(times_ms))
    assert found[f"fabric.phase_ms[step=0,policy={ARM},phase=step]"].value == 6000.0
    assert not any(
        "phase=load" in name for name in found if name.startswith("fabric.gain")
    )  # engines load from their node's memory: no network is in it


def test_other_policies_and_steps_that_only_one_arm_has_are_not_compared() -> None:
    other = [began(), step("orchestrl@electrical", 1.0, 0), step(ARM, 1.0, 0)]
    assert not any(name.startswith("fabric.gain") for name in metrics_of(other))
    lone = [began(), step("static:4xTP2@electrical", 1.0, 0), step(ARM, 1.0, 1)]
    assert not any(name.startswith("fabric.gain") for name in metrics_of(lone))


def test_counts_of_changes_and_decisions_without_the_taking_down() -> None:
    found = metrics_of(told())
    assert found[f"fabric.changes{OF}"].value == 2
    assert (found[f"fabric.change_ms{OF}"].n, found[f"fabric.change_ms{OF}"].p50) == (2, 80.0)
    assert found[f"fabric.device_ms{OF}"].n == 2
    for name, count in (("degraded", 1), ("failed", 1), ("kept", 1), ("dropped", 1), ("broken", 1)):
        assert found[f"fabric.{name}{OF}"].value == count
    assert found[f"fabric.solve_ms{OF}"].n == 5


def test_where_nothing_went_wrong_that_is_a_0_which_a_check_can_rest_on() -> None:
    found = metrics_of([began(), step(ARM, 1.0, 0)])
    check = Check(metric=f"fabric.broken[policy={ARM}]", at_most=0)
    assert evaluate(check, found).verdict == "passed"
    electrical = metrics_of([began(), step("static:4xTP2@electrical", 1.0, 0)])
    assert not any(name.startswith("fabric.broken") for name in electrical)  # it has no circuits


def test_traffic_beside_what_was_announced_and_the_prediction_where_it_was_about_it_alone() -> None:
    found = metrics_of(told())
    of_sync, of_train = (f"[step=0,policy={ARM},kind={kind}]" for kind in ("sync", "train"))
    assert found[f"fabric.measured_over_announced{of_sync}"].value == pytest.approx(1.02)
    assert found[f"fabric.circuits_share_pct{of_sync}"].value == pytest.approx(50.0)
    assert found[f"fabric.took_ms{of_sync}"].value == pytest.approx(562.5)
    unannounced = crossed(1.0, "gather", announced_bytes=0, measured_bytes=9, circuits_bytes=9)
    found_then = metrics_of([*told(), unannounced])
    assert not any("share_pct" in name and "kind=gather" in name for name in found_then)
    off = found[f"fabric.predicted_error_pct{of_sync}"]
    assert (off.n, off.min, off.max) == (2, pytest.approx(10.0), pytest.approx(20.0))
    assert f"fabric.predicted_error_pct{of_train}" not in found  # it computes in between
    nobody_counts = crossed(1.0, "sync", measured_bytes=None, circuits_bytes=None)
    assert not any("measured" in name for name in metrics_of([began(), nobody_counts]))


def test_a_prediction_of_other_traffic_too_is_not_compared() -> None:
    of_all = [began(), decided(1.0, "sync", "change", bytes=300_000_000), crossed(2.0, "sync")]
    assert not any("predicted_error" in name for name in metrics_of(of_all))


@pytest.mark.parametrize("name", [*metrics_of(told()), *metrics_of(compared())])
def test_checks_may_name_every_metric(name: str) -> None:
    assert metric_problem(name) is None


def test_a_check_on_the_gain_of_a_sync() -> None:
    found = metrics_of(compared())
    name = f"fabric.gain[policy={ARM},phase=sync,over=static:4xTP2@electrical]"
    assert evaluate(Check(metric=name, at_least=2.0), found).verdict == "passed"
    assert evaluate(Check(metric=name, at_least=3.0), found).verdict == "failed"
    assert metric_problem(name.replace("phase=", "fase=")) is not None


# -- report ------------------------------------------------------------------------------------


def test_arms_are_side_by_side_with_what_each_gains() -> None:
    found = sections(compared())
    times = found["Phases under each fabric, RL step 0"]
    assert [row[0] for row in times.rows] == [*WIRE_S]
    assert dict(zip(times.columns, times.rows[1], strict=True))["sync"] == "0.85 ±0.21"
    gains = found["Gain of each fabric, RL step 0"]
    whose = [row[:3] for row in gains.rows]
    assert whose == [
        (ARM, "electrical", "4"),
        ("static:4xTP2@ideal", "electrical", "4"),
        (ARM, "ideal", "4"),
    ]
    by_column = dict(zip(gains.columns, gains.rows[2], strict=True))
    assert by_column["sync"].startswith("76.")  # % of ideal's speed


def test_decisions_that_are_alike_are_one_row_with_the_last_ones_figures() -> None:
    rows = sections(told())["Circuits: what was decided"].rows
    assert [(row[1], row[2], row[3], row[4]) for row in rows] == [
        ("1.0", "train", "change", "1"),
        ("3.1", "sync", "change", "2"),
        ("5.0", "sync", "dropped", "1"),
        ("7.5", "train", "keep", "1"),
    ]
    assert rows[1][5:] == ("90.0", "2,000", "450", "2,000", "2 g0-t0", "saves 1.5 s of 2 s")
    assert rows[2][-1] == "the window is over: saves nothing"


def test_changes_what_broke_and_traffic_are_told() -> None:
    found = sections(told())
    changes = found["Circuits: changes, all repeats"].rows[0]
    assert changes[:6] == (ARM, "2", "80.00", "89.00", "50.00", "50.00")
    parts = found["Parts of the fabric that broke, or are back"].rows
    assert [tuple(row) for row in parts] == [(ARM, "3.3", "t1:u1", "broken", "no light for 400 ms")]
    traffic = found["Traffic: as announced, and as it was"].rows
    assert traffic[1] == (ARM, "sync", "2", "562.5", "100.0", "102.0", "50.0", "15.00")


def test_the_first_lines_say_what_broke_in_any_repeat() -> None:
    notes = "\n".join(summary(told()).notes)
    assert f"{ARM}: t1:u1 broken: no light for 400 ms" in notes
    assert f"{ARM}: a change of circuits for sync degraded: t1:u1 has no light" in notes
    assert f"{ARM}: a change of circuits for sync failed: t0 refused" in notes


def test_the_whole_report_is_aligned_and_run_json_has_the_decisions() -> None:
    whole = summary(told())
    text = text_report(whole)
    assert "Phases under each fabric, RL step 0" in text
    assert max(len(one) for one in text.splitlines() if "Student" in one) <= 100
    loop = msgspec.json.decode(msgspec.json.encode(whole))["loops"][0]
    assert loop["circuits"][1]["circuits"] == {"g0-t0": 2}
    assert loop["parts"][0]["part"] == "t1:u1"


def test_loops_without_a_fabric_of_their_own_tell_nothing_of_circuits() -> None:
    plain = [began(), sync("orchestrl", 1.0, 1.0), step("orchestrl", 1.0, 0)]
    assert sections(plain) == {}
    assert not any(name.startswith("fabric.") for name in metrics_of(plain))
