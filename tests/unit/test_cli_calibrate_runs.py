"""``harness calibrate RUN`` as a user meets it: what it writes, tells and refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from fitted_runs import QUICK, SCENARIOS, SWITCHES, measured, true_calibration

from harness.cli import main
from harness.model.load import load_calibration
from harness.record.store import RunFolder


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the quickstart, and the calibration ``true.toml`` beside it."""
    return measured(tmp_path_factory.mktemp("quick"), QUICK).path


@pytest.fixture
def kept(quick: Path, tmp_path: Path) -> Path:
    """A copy of that run, to be tampered with."""
    copy = tmp_path / "runs" / quick.name
    shutil.copytree(quick, copy)
    shutil.copy(quick.parent / "true.toml", tmp_path)
    return copy


def calibrate(*words: str | Path) -> int:
    return main(["calibrate", *map(str, words)])


def tampered(run: Path, before: str, after: str) -> None:
    journal = RunFolder(run).journal
    text = journal.read_text()
    assert before in text
    journal.write_text(text.replace(before, after))


# -- what is written -------------------------------------------------------------------------------


def test_a_first_word_that_is_no_command_is_a_run(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "lab.toml"
    assert calibrate(kept, "--out", out, "--base", tmp_path / "true.toml") == 0
    told = capsys.readouterr().out
    assert "control.serial_ms" in told
    assert "Not fitted:" in told
    assert "Off on what it was not fitted to" in told
    found, text = load_calibration(out), out.read_text()
    assert found.name == "lab"
    assert found.runs == (kept.name,)
    assert text.startswith("# Fitted by harness calibrate, to runs of these scenarios:\n#   ")
    assert f"{kept.name}: What do optical circuits gain" in text
    assert "#   collective.all_reduce" in text
    assert "no run speaks of it: as in true" in text


def test_options_may_come_first_and_the_command_may_be_named(kept: Path, tmp_path: Path) -> None:
    base = tmp_path / "true.toml"
    assert calibrate("--out", tmp_path / "a.toml", "--base", base, kept) == 0
    words = ("--name", "x", "--out", tmp_path / "b.toml", "--base", base, kept)
    assert calibrate("run", *words) == 0
    assert calibrate("generation", "--help") == 0
    first, second = (load_calibration(tmp_path / f"{name}.toml") for name in "ab")
    assert (first.name, second.name) == ("a", "x")
    assert first.control == second.control


def test_json_tells_figures_and_how_far_they_are_off(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "true.toml"
    assert calibrate(kept, "--out", tmp_path / "o.toml", "--base", base, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    true = true_calibration(tmp_path)
    assert told["figures"]["control.steer_us"]["value"] == true.control.steer_us.value
    assert told["held"]["generation.kv_cache_s"] == "no run speaks of it: as in true"
    (steer,) = (row for row in told["residuals"] if row["kind"] == "steer")
    assert steer["n"] == 1
    assert steer["worst_pct"] < 1


def test_a_run_that_was_cut_short_counts_and_is_told(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = RunFolder(kept).journal
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:-1]))
    out = tmp_path / "cut.toml"
    assert calibrate(kept, "--out", out, "--base", tmp_path / "true.toml") == 0
    assert f"{kept.name}: was not closed; what it has counts" in capsys.readouterr().out
    assert "#   " + kept.name + ": was not closed" in out.read_text()


# -- what is refused -------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert calibrate(*words) == 2
    return capsys.readouterr().err


def test_what_no_run_tells_is_named_where_there_is_no_base(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(capsys, kept, "--out", tmp_path / "o.toml")
    assert "training.step_fixed_s: an rl step with a paced trainer" in told
    assert not (tmp_path / "o.toml").exists()


def test_a_simulated_run_measures_nothing(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tampered(kept, '"world":"emulated"', '"world":"simulated"')
    told = refused(capsys, kept, "--out", tmp_path / "o.toml")
    assert f"{kept.name} is a simulated run" in told


def test_a_run_of_another_schema_is_refused(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tampered(kept, '"schema":"1.0"', '"schema":"2.0"')
    told = refused(capsys, kept, "--out", tmp_path / "o.toml")
    assert "a journal of schema 2.0; this version reads 1.x" in told


def test_a_run_without_a_row_that_tells_anything_is_refused(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = RunFolder(kept).journal
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(line for line in lines if '"doc":"event"' not in line))
    told = refused(capsys, kept, "--out", tmp_path / "o.toml")
    assert f"{kept.name}: nothing in there tells a figure of a simulated bench" in told


def test_runs_of_different_benches_are_mixed_only_where_that_is_said(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = measured(tmp_path / "runs", SWITCHES).path
    words = (kept, other, "--out", tmp_path / "o.toml", "--base", tmp_path / "true.toml")
    told = refused(capsys, *words)
    assert f"emulated-4 at 1000 Mbit/s: {kept.name}" in told
    assert f"generation-2 at 1000 Mbit/s: {other.name}" in told
    assert calibrate(*words, "--mixed") == 0


def test_a_run_is_not_fitted_to_and_held_out(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(capsys, kept, "--hold-out", kept, "--out", tmp_path / "o.toml")
    assert f"{kept.name}: fitted to and held out" in told


def test_a_run_that_is_not_there_and_a_file_that_is_are_told(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(capsys, "genaration", "--runs", tmp_path, "--out", tmp_path / "o.toml")
    assert "no run 'genaration'" in told
    taken = refused(capsys, kept, "--out", tmp_path / "true.toml")
    assert "true.toml: exists; --force writes over it" in taken


# -- what ships ------------------------------------------------------------------------------------


def test_scenarios_for_it_open_with_their_question() -> None:
    shipped = sorted((SCENARIOS / "agreement").glob("*.toml"))
    assert len(shipped) >= 9
    for path in shipped:
        assert path.read_text().startswith('question = "')
        assert main(["check", str(path)]) == 0
