"""`harness compare` as it is typed: whole names, a verdict, and refusals in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_agreement import syncs

from harness.cli import main
from harness.model.documents import SCHEMA, Event, Start
from harness.model.streams import STREAMS
from harness.record.journal import Journal
from harness.virtual import VirtualClock

NAME = "sync.wire_ms[step=0,policy=orchestrl@rfabric]"


def run(runs: Path, name: str, world: str, events: list[Event], question: str = "?") -> str:
    folder = runs / name
    folder.mkdir(parents=True)
    with Journal.create(folder / "journal.jsonl", VirtualClock()) as journal:
        journal.start(
            Start(
                schema=SCHEMA, run=name, t_ns=0, wall="", world=world, scenario="s", bench="b",
                seed=0, versions={}, question=question,
            )
        )  # fmt: skip
        for stream, fields in STREAMS.items():
            journal.describe(stream, fields)
        for event in events:
            journal.event(event.stream, event.data)
        journal.stop("passed", 0, "")
    return name


def compared(runs: Path, *names: str) -> int:
    return main(["compare", *names, "--runs", str(runs)])


def test_names_are_whole_and_what_is_beyond_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = run(tmp_path, "1-sim", "simulated", syncs(1.3))
    theirs = run(tmp_path, "2-emu", "emulated", syncs(1.0, 1.01, 0.99))
    assert compared(tmp_path, ours, theirs) == 1
    out = capsys.readouterr().out
    assert NAME in out
    assert "communication: off by 30.0 % on average" in out
    assert compared(tmp_path, ours, theirs, "--json") == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert next(row for row in rows if row["metric"] == NAME)["verdict"] == "beyond"


def test_a_measured_run_that_was_short_of_cpu_is_told_so_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"step": 0, "policy": "", "duration_s": 1.0, "cpu_waited_pct": 61.0}
    short = Event(stream="pressure", seq=9, t_ns=9, data=row)
    ours = run(tmp_path, "1-sim", "simulated", syncs(1.01))
    theirs = run(tmp_path, "2-emu", "emulated", [*syncs(1.0), short])
    assert compared(tmp_path, ours, theirs) == 0
    out = capsys.readouterr().out
    assert out.startswith("note: 2-emu: a task waited for a CPU in 61 % of step 0")
    assert "cpu_waited" not in out, "it is no metric that a simulation could have"
    assert compared(tmp_path, ours, theirs, "--json") == 0
    (note,) = json.loads(capsys.readouterr().out)["notes"]
    assert "61 % of step 0" in note


def test_what_agrees_passes(tmp_path: Path) -> None:
    ours = run(tmp_path, "1-sim", "simulated", syncs(1.01))
    assert compared(tmp_path, ours, run(tmp_path, "2-emu", "emulated", syncs(1.0))) == 0


def test_runs_that_are_no_pair_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = run(tmp_path, "1-sim", "simulated", syncs(1.0))
    theirs = run(tmp_path, "2-emu", "emulated", syncs(1.0))
    other = run(tmp_path, "3-emu", "emulated", syncs(1.0), question="another?")
    empty = run(tmp_path, "4-emu", "emulated", [])
    for pair, told in (
        ((theirs, ours), "expected a simulated run and a measured one"),
        ((ours, other), "runs of different scenarios"),
        ((ours, empty), "no metric in common"),
        ((ours, "nowhere"), "no run"),
    ):
        assert compared(tmp_path, *pair) == 2
        assert told in " ".join(capsys.readouterr().err.split())
