"""Runs as a user makes them: to the end, interrupted once and twice, killed and recovered."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.bench.pressure import waited_us
from tests.emulated.lab import Lab, lab

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Lab]:
    with lab(tmp_path) as made:
        yield made


def test_a_run_ends_with_its_circuits_restored_and_its_numbers_in_run_json(bench: Lab) -> None:
    bench.files()
    code, out = bench.run()
    assert code == 0, out
    summary = json.loads((bench.run_folder / "run.json").read_text())
    assert summary["restored"] == {"ocs": "unchanged"} or summary["restored"]["ocs"] == "restored"
    assert bench.snapshots() == {"ocs": True}
    dark = summary["metrics"]["reconfigure.dark_ms"]
    assert dark["unit"] == "ms"
    assert dark["n"] >= 1
    assert dark["min"] >= 9.0
    told = {name for name in summary["metrics"] if name.startswith("bench.cpu_waited_pct")}
    steps = {f"bench.cpu_waited_pct[step={step}]" for step in (0, 1)}
    assert told == (set() if waited_us() is None else steps), "as far as this kernel tells"


def test_every_nanosecond_of_a_reconfiguration_is_on_one_account(bench: Lab) -> None:
    bench.files(count=2)
    code, out = bench.run()
    assert code == 0, out
    for row in bench.events("reconfigure"):
        parts = ("device_ms", "link_ms", "communicator_ms", "overhead_ms")
        assert sum(row[part] for part in parts) == pytest.approx(row["cost_ms"])
        assert all(row[part] >= 0 for part in parts), row
        stamps = [stamp for stamp in row["stages"].values() if stamp is not None]
        assert stamps == sorted(stamps), row["stages"]


def test_rebuilding_the_communicators_and_riding_through_are_measured_too(bench: Lab) -> None:
    bench.files()
    path = bench.folder / "scenario.toml"
    text = path.read_text()
    step = "\n" + text[text.rindex("[[steps]]") :]
    path.write_text(text + step + 'groups = "rebuild"\n' + step + "ride_through = true\n")
    code, out = bench.run()
    assert code == 0, out
    rows = bench.events("reconfigure")
    rebuilt = [row for row in rows if row["groups"] == "rebuild"]
    assert len(rebuilt) == 2
    assert all(row["stages"]["groups_destroyed"] for row in rebuilt)
    assert all(row["stages"]["groups_ready"] for row in rebuilt)
    ridden = [row for row in rows if row["mode"] == "ride_through"]
    assert len(ridden) == 2
    assert all(row["stages"]["quiesced"] is None for row in ridden)


def test_a_switch_slower_than_the_window_is_not_used_and_the_run_says_so(bench: Lab) -> None:
    bench.files()
    path = bench.folder / "scenario.toml"
    path.write_text(path.read_text() + "window_ms = 1.0\n")
    code, out = bench.run()
    assert code == 0, out
    assert {row["mode"] for row in bench.events("reconfigure")} == {"refused"}
    assert "the window is 1 ms" in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=["ctrl_c", "hangup"])
def test_an_interrupt_restores_and_ends_with_4(bench: Lab, number: signal.Signals) -> None:
    bench.files(count=100)
    process = bench.start()
    bench.await_traffic(process)
    process.send_signal(number)
    code, out = bench.finish(process)
    assert code == 4, out
    assert bench.snapshots() == {"ocs": True}
    assert json.loads((bench.run_folder / "run.json").read_text())["status"] == "interrupted"


def test_ctrl_c_twice_leaves_at_once_and_recover_puts_it_right(bench: Lab) -> None:
    bench.files(count=100)
    process = bench.start()
    bench.await_traffic(process)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    code, out = bench.finish(process)
    if code == 4:
        pytest.skip("the restoration was faster than the second signal")
    assert code == 5, out
    told = re.search(r"run: harness (recover \S+)$", out, re.MULTILINE)
    assert told, out
    code, out = bench.harness(*told[1].split())
    assert code == 0, out
    assert bench.snapshots() == {"ocs": True}


def test_kill_9_of_the_coordinator_is_recovered_by_another_process(bench: Lab) -> None:
    bench.files(count=100)
    process = bench.start()
    bench.await_traffic(process)
    process.kill()
    process.communicate()
    assert bench.snapshots() == {"ocs": False}
    code, out = bench.harness("recover", "--runs", str(bench.runs))
    assert code == 0, out
    assert bench.snapshots() == {"ocs": True}
    assert "ocs: " in out


def test_a_killed_run_can_still_be_reported(bench: Lab) -> None:
    bench.files(count=100)
    process = bench.start()
    bench.await_traffic(process)
    process.kill()
    process.communicate()
    code, out = bench.harness("report", "--runs", str(bench.runs))
    assert code == 0, out
    assert "unfinished" in out
    bench.harness("recover", "--runs", str(bench.runs))


def test_recover_refuses_a_run_that_is_still_going(bench: Lab) -> None:
    bench.files(count=100)
    process = bench.start()
    bench.await_traffic(process)
    code, out = bench.harness("recover", "--runs", str(bench.runs))
    assert code == 2, out
    assert "still going" in out


def test_the_next_run_cleans_a_killed_one_away_and_recover_says_so(bench: Lab) -> None:
    bench.files(count=100)
    process = bench.start()
    bench.await_traffic(process)
    process.kill()
    process.communicate()
    killed = os.readlink(bench.run_folder)
    bench.files(count=1)
    code, out = bench.run()
    assert code == 0, out
    code, out = bench.harness("recover", killed, "--runs", str(bench.runs))
    assert code == 0, out
    assert "gone" in out


@pytest.mark.parametrize("light", ["mirred", "none"])
def test_lesser_lights_run_the_same_scenario_and_say_what_they_are(bench: Lab, light: str) -> None:
    bench.files()
    path = bench.folder / "bench.toml"
    path.write_text(path.read_text() + f'[links]\nlight = "{light}"\n')
    code, out = bench.run()
    assert code == 0, out
    notes = json.loads((bench.run_folder / "run.json").read_text())["notes"]
    assert notes[0].startswith("control plane only" if light == "none" else "emulated bench")
    assert notes[0] in out
    rows = bench.events("reconfigure")
    assert all((row["dark_ms"] is None) == (light == "none") for row in rows), rows


def test_a_killed_run_without_a_network_is_recovered_too(bench: Lab) -> None:
    bench.files(count=100)
    path = bench.folder / "bench.toml"
    path.write_text(path.read_text() + '[links]\nlight = "none"\n')
    process = bench.start()
    bench.await_traffic(process)
    process.kill()
    process.communicate()
    code, out = bench.harness("recover", "--runs", str(bench.runs))
    assert code == 0, out
    assert bench.snapshots() == {"ocs": True}
