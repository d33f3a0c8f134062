"""What a run that generated tells: as it happens, in metrics, and in the report."""

from __future__ import annotations

import io

import pytest

from harness.cli.progress import Progress
from harness.model.documents import SCHEMA, Event, Start
from harness.model.streams import STREAMS, SWITCH_STAGES
from harness.record.generation import generation_sections
from harness.record.samples import metrics_of
from harness.record.summary import summarise
from harness.record.verdict import broken_promises

STAGES = {
    "prepare": 2.0,
    "stop_admitting": 1.0,
    "drain": None,
    "migrate": None,
    "withdraw": 7.0,
    "teardown": 40.0,
    "processes": None,
    "groups": 100.0,
    "weights": 20.0,
    "kv_cache": 5.0,
    "resubmit": 3.0,
    "first_token": 15.0,
    "steady": 30.0,
}
SWITCH: dict[str, object] = {
    "index": 0,
    "step": 1,
    "layout_from": "4xTP1",
    "layout_to": "2xTP2",
    "strategy": "rebuild",
    "requests": "abort",
    "order": "at_once",
    "nodes": ["g0", "g1"],
    "stages": STAGES,
    "residual_ms": 7.0,
    "total_ms": 230.0,
    "blackout_ms": 190.0,
    "carried": 64,
    "recomputed_tokens": 9000,
    "before_tokens_per_s": 3900.0,
    "during_tokens_per_s": 450.0,
    "after_tokens_per_s": 4200.0,
    "outcome": "switched",
    "error": "",
}
MOVE: dict[str, object] = {
    "step": 2,
    "request": "0-3-1",
    "source": "g0:0",
    "target": "g1:1",
    "by": "kv",
    "context_tokens": 200,
    "sent_bytes": 40_000_000,
    "cached_tokens": 199,
    "send_ms": 20.0,
    "total_ms": 45.0,
    "expected_ms": 40.0,
    "outcome": "moved",
    "error": "",
}
GENERATED: dict[str, object] = {
    "step": 1,
    "layout": "2xTP2",
    "requests": 133,
    "finished": 130,
    "refused": 3,
    "tokens": 26_000,
    "lost": 0,
    "doubled": 0,
    "took_s": 8.0,
    "tokens_per_s": 3250.0,
    "preemptions": 2,
    "digest": "ab",
    "responses_digest": "cd",
}
PROGRESS: dict[str, object] = {
    "instance": "g0:0-1",
    "t0_ns": 0,
    "t1_ns": 500_000_000,
    "generated_tokens": 1000,
    "running": 32,
    "waiting": 3,
    "kv_use_pct": 40.0,
    "preemptions": 0,
}


def event(stream: str, row: dict[str, object], **changes: object) -> Event:
    assert row.keys() == STREAMS[stream].keys()
    return Event(stream=stream, seq=0, t_ns=0, data=row | changes)


def run() -> list[Event]:
    back = {"layout_from": "2xTP2", "layout_to": "4xTP1", "blackout_ms": 90.0}
    return [
        event("parallelism", SWITCH),
        event("parallelism", SWITCH, **back),
        event("parallelism", SWITCH, outcome="rolled_back", error="groups: g1 died"),
        event("migration", MOVE),
        event("migration", MOVE, by="recompute", sent_bytes=0, send_ms=None, total_ms=60.0),
        event("migration", MOVE, outcome="ended", total_ms=None),
        event("migration", MOVE, outcome="elsewhere", error="g1:1 is gone"),
        event("generated", GENERATED),
        event("generated", GENERATED, step=2, tokens_per_s=4000.0),
        event("progress", PROGRESS),
        event("progress", PROGRESS, generated_tokens=3000, waiting=1),
    ]


def told(stream: str, row: dict[str, object], **changes: object) -> str:
    out = io.StringIO()
    Progress(out)(event(stream, row, **changes))
    return out.getvalue().rstrip("\n").partition(" s  ")[2]


def test_a_switch_of_layouts_is_one_line() -> None:
    assert told("parallelism", SWITCH) == (
        "parallelism #1 4xTP1 -> 2xTP2 by rebuild: blackout 190, total 230 ms (groups 100,"
        " teardown 40); 64 carried; 3,900 > 450 > 4,200 tokens/s"
    )
    undone = told("parallelism", SWITCH, outcome="rolled_back", error="groups: g1 died")
    assert undone.endswith("by rebuild: rolled back, groups: g1 died")


def test_a_step_says_what_became_of_its_requests_and_tokens() -> None:
    assert told("generated", GENERATED) == (
        "generated   130 of 133 requests, 3 refused, 26,000 tokens in 8.0 s: 3,250 tokens/s,"
        " now 2xTP2; 0 lost, 0 doubled"
    )
    row = {"instance": "g0:0", "reason": "rank 0 died", "requests": 12}
    assert told("given_up", row).endswith("g0:0: rank 0 died; 12 requests go elsewhere")


def test_what_there_are_thousands_of_is_told_only_where_it_went_wrong() -> None:
    assert told("migration", MOVE) == told("progress", PROGRESS) == ""
    assert told("migration", MOVE, outcome="elsewhere", error="g1:1 is gone") == (
        "migration   0-3-1 g0:0 -> g1:1 by kv: it goes on elsewhere, g1:1 is gone"
    )


def test_stages_and_residual_of_a_switch_sum_to_its_total() -> None:
    found = metrics_of(run())
    labels = "[step=1,from=4xTP1,to=2xTP2,strategy=rebuild]"
    parts = [found.get(f"switch.stage.{stage}_ms{labels}") for stage in SWITCH_STAGES]
    residual = found[f"switch.residual_ms{labels}"].value
    total = found[f"switch.total_ms{labels}"]
    assert sum(part.value for part in parts if part) + residual == pytest.approx(total.value)
    assert total.n == 1  # the one that was undone says nothing of what a switch takes
    counts = {name: found[f"switch.{name}"].value for name in ("switched", "rolled_back", "lost")}
    assert counts == {"switched": 2, "rolled_back": 1, "lost": 0}
    assert found["switch.carried"].value == 128


def test_a_migration_counts_by_how_it_was_made() -> None:
    found = metrics_of(run())
    assert found["migration.kv[step=2]"].value == 1
    assert found["migration.recomputed"].value == 1
    assert found["migration.failed"].value == 1  # one that finished first did not fail
    assert found["migration.ms[step=2,by=kv]"].p50 == 45.0
    assert found["migration.gb_per_s[step=2,by=kv]"].value == pytest.approx(2.0)
    assert "migration.gb_per_s[step=2,by=recompute]" not in found


def test_speed_is_told_by_step_and_by_instance() -> None:
    found = metrics_of(run())
    assert found["generate.tokens_per_s[step=2]"].value == 4000.0
    assert found["generate.tokens_per_s[instance=g0:0-1]"].value == pytest.approx(4000.0)
    assert found["generate.tokens_per_s"].n == 2  # of steps
    assert found["generate.waiting[instance=g0:0-1]"].max == 3


def test_lost_and_doubled_tokens_break_a_promise() -> None:
    rows = [event("generated", GENERATED, lost=3), event("generated", GENERATED, doubled=1)]
    assert broken_promises(metrics_of(rows)) == ["3 tokens lost", "1 tokens delivered twice"]
    assert broken_promises(metrics_of(run())) == []


def test_the_report_shows_steps_switches_stages_and_migrations() -> None:
    parts = {
        section.title.partition(":")[0]: section
        for section in generation_sections(metrics_of(run()))
    }
    assert list(parts) == [
        "Generation",
        "Instances, means while each was up",
        "Switches of layouts",
        "Stages of switches",
        "Migrations",
    ]
    assert parts["Generation"].rows[0] == ("1", "130", "3", "26,000", "3,250", "0", "0", "2")
    switches = parts["Switches of layouts"]
    assert list(switches.lines[:2]) == [
        "2 made, 0 refused, 1 rolled back",
        "128 requests carried over, 18,000 tokens of their context computed anew",
    ]
    assert switches.rows[1] == (
        *("4xTP1 > 2xTP2 rebuild", "1", "1", "190.0", "190.0", "230.0"),
        *("3,900", "450", "4,200"),
    )
    stages = {row[0]: row[1:] for row in parts["Stages of switches"].rows}
    assert stages["groups"] == ("100.0", "100.0")
    assert "drain" not in stages
    assert list(stages)[-2:] == ["residual", "total"]
    (kv, recompute) = parts["Migrations"].rows
    assert kv[:5] == ("2", "kv", "1", "40.00", "45.00")
    assert recompute[1:3] == ("recompute", "1")
    assert parts["Migrations"].lines[0].startswith("1 with their KV, 1 computed anew, 1 did not")


def test_stages_of_several_steps_are_told_apart() -> None:
    rows = [event("parallelism", SWITCH, step=number) for number in (1, 3)]
    stages = list(generation_sections(metrics_of(rows)))[-1]
    way = "4xTP1 > 2xTP2 rebuild"
    assert stages.columns == ("ms", f"{way} step 1", f"{way} step 3")


def test_what_was_given_up_is_told_and_units_only_where_figures_are() -> None:
    row = {"instance": "g0:0", "reason": "rank 0 died", "requests": 12}
    failed = event("parallelism", SWITCH, outcome="lost", error="g1 is out")
    parts = generation_sections(
        metrics_of([event("progress", PROGRESS), event("given_up", row), failed])
    )
    instances, switches = parts
    assert instances.lines == (
        "1 given up: dead, or without a token for too long; its requests went on",
    )
    assert switches.lines == ("0 made, 0 refused, 0 rolled back, 1 not undone",)


def test_a_run_that_did_not_generate_has_no_such_parts() -> None:
    assert list(generation_sections({})) == []


def test_engines_are_parts_of_the_bench() -> None:
    engine: dict[str, object] = {
        "instance": "g0:0-1",
        "node": "g0",
        "gpus": [0, 1],
        "layout": "TP2",
        "engine": "paced",
        "version": "profile of X on Y",
        "device": "an emulated Y",
        "blocks": 100,
        "block_tokens": 16,
        "weights_bytes": 2_000_000_000,
    }
    start = Start(
        schema=SCHEMA,
        run="r",
        t_ns=0,
        wall="",
        world="emulated",
        scenario="s",
        bench="b",
        seed=0,
        versions={},
    )
    parts = summarise([start, event("engine", engine), event("engine", engine, layout="EP2")]).parts
    assert list(parts) == ["g0:0-1 TP2", "g0:0-1 EP2"]
    said = parts["g0:0-1 TP2"]
    assert said.startswith("paced, profile of X on Y, on an emulated Y; KV of 1,600 tokens")
    assert said.endswith("2,000.0 MB of weights held")
