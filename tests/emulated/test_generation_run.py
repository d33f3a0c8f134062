"""Runs that generate, as a user makes them: switched, interrupted, and with a rank killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emulated.lab import Lab, lab

pytestmark = [pytest.mark.emulated, pytest.mark.root, pytest.mark.timeout(240)]

SCENARIOS = Path(__file__).parents[2] / "scenarios"
SCENARIO = f"""
question = "Does it end well?"
bench = "{SCENARIOS / "benches/generation-2.toml"}"
timeout_s = 80.0
[generation]
layout = "4xTP1"
workload = "{SCENARIOS / "workloads/short.toml"}"
profile = "{SCENARIOS / "profiles/qwen2.5-14b-h800.toml"}"
kv_max_tokens = 32768
"""
POOL = 'pool = ["4xTP1", "2xTP2"]\n'
STEP = """
[[steps]]
do = "generate"
requests_max = 32
"""
SWITCHES = 'layouts = ["2xTP2", "4xTP1"]\nrest_s = 0.3\n'


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Lab]:
    with lab(tmp_path) as made:
        yield made


def asked(bench: Lab, *steps: str, table: str = "") -> None:
    text = SCENARIO + table + "".join(STEP + step for step in steps)
    (bench.folder / "scenario.toml").write_text(text)


def rank_pids(bench: Lab) -> list[int]:
    """Return the resident rank processes of the run."""
    logs = str(bench.run_folder.resolve() / "logs").encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            if b"agents.generation.rank" in words and logs in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:  # it has just ended
            continue
    return found


def test_layouts_are_switched_in_every_way_and_no_token_is_lost(bench: Lab) -> None:
    asked(
        bench,
        SWITCHES + 'strategy = "pool"\nmigrations = 5\n',
        SWITCHES + 'requests = "migrate"\norder = "rolling"\nmigrate_by = "kv"\n',
        SWITCHES + 'strategy = "restart"\nrequests = "drain"\n',
        table=POOL,
    )
    code, out = bench.run()
    assert code == 0, out
    switches = bench.events("parallelism")
    assert [row["outcome"] for row in switches] == ["switched"] * 6, switches
    for row in switches:
        assert (row["stages"]["migrate"] is not None) == (row["requests"] == "migrate")
        stages = [ms for ms in row["stages"].values() if ms is not None]
        assert sum(stages) + row["residual_ms"] == pytest.approx(row["total_ms"])
        assert f"{row['layout_from']} -> {row['layout_to']} by {row['strategy']}" in out
    for row in bench.events("generated"):
        assert (row["lost"], row["doubled"]) == (0, 0)
        assert row["finished"] == row["requests"] >= 32
    moves = bench.events("migration")
    assert len([row for row in moves if row["step"] == 0]) == 5
    moved = [row for row in moves if row["step"] == 1 and row["outcome"] == "moved"]
    assert any(row["by"] == "kv" and row["sent_bytes"] for row in moved)
    assert all(row["source"][:2] != row["target"][:2] for row in moved)  # to another node
    notes = json.loads((bench.run_folder / "run.json").read_text())["notes"]
    assert any("generation is paced by the latency profile" in note for note in notes)
    assert "Stages of switches" in out
    assert rank_pids(bench) == []


def test_an_interrupted_run_leaves_no_engine_behind(bench: Lab) -> None:
    asked(bench, SWITCHES + "count = 100\n")
    process = bench.start()
    bench.await_event(process, "parallelism")
    assert len(rank_pids(bench)) == 4
    process.send_signal(signal.SIGINT)
    code, out = bench.finish(process)
    assert code == 4, out
    assert rank_pids(bench) == []


def test_left_at_once_where_no_switch_is_nobody_is_needed(bench: Lab) -> None:
    asked(bench, SWITCHES + "count = 100\n")
    process = bench.start()
    bench.await_event(process, "parallelism")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    code, out = bench.finish(process)
    assert code == 4, out
    assert "not restored" not in out
    code, out = bench.harness("recover", "--runs", str(bench.runs))
    assert code == 0, out


def test_a_killed_rank_costs_no_token(bench: Lab) -> None:
    asked(bench, "")
    process = bench.start()
    bench.await_event(process, "progress", lambda row: row["generated_tokens"] > 0)
    os.kill(rank_pids(bench)[0], signal.SIGKILL)
    bench.await_event(process, "given_up")
    code, out = bench.finish(process)
    assert code == 0, out
    (generated,) = bench.events("generated")
    assert (generated["lost"], generated["doubled"]) == (0, 0)
    assert generated["finished"] == generated["requests"]
