"""`harness sweep` at the prompt: what is told as points come and at the end, and its exit codes."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from sweep_study import TEXT, Here, measure, refuses_fast_links, written

from harness.cli import main
from harness.cli import sweep as command
from harness.errors import UsageError
from harness.sweeps.conduct import Standing
from harness.sweeps.grid import cells_of
from harness.sweeps.point import row_of
from harness.sweeps.slurm import Array, script
from harness.sweeps.store import Folder
from harness.sweeps.sweep import load_sweep

Sweeping = Callable[..., int]


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweeping:
    """Return the command, with points made here and now."""

    def run(
        *arguments: str, measure: object = measure, changes: tuple[tuple[str, str], ...] = ()
    ) -> int:
        monkeypatch.setattr(command, "LocalPool", lambda *_: Here(measure))
        path = written(tmp_path, TEXT, *changes)
        return main(["sweep", str(path), "--out", str(tmp_path / "out"), *arguments])

    return run


def test_a_sweep_tells_points_a_table_conclusions_and_files(
    sweep: Sweeping, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep() == 0
    told = capsys.readouterr().out
    lines = told.splitlines()
    assert lines[0].startswith("simulated: times are those of a calibration, /")
    assert lines[1] == (
        "   1/24  fat-tree: link 100 Gbit/s, seed 1: 68.17 1/s (1.0 s of CPU, 100 MB)"
    )
    assert lines[4].startswith("   4/24  RFabric: link 100 Gbit/s, switching 1 ms, seed 1: ")
    assert re.search(r"^design +link_gbit_per_s", told, re.MULTILINE)
    assert "RFabric leads at 2 of 4 places, by 8.9 % to 63.3 %." in lines
    assert "link 400 Gbit/s, switching 25 ms: fat-tree, 1.8" not in told, "details are in the file"
    assert "1.800 x RFabric" in (tmp_path / "out/conclusions.txt").read_text()
    for name in ("table.csv", "table.json", "bills.txt", "conclusions.txt", "worth-by-rate.svg"):
        assert str(tmp_path / "out" / name) in lines
        assert (tmp_path / "out" / name).stat().st_size > 100


def test_json_goes_to_standard_output_alone(
    sweep: Sweeping, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep("--json") == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == json.loads((tmp_path / "out/table.json").read_text())
    assert "24/24" in told.err


def test_the_second_time_nothing_is_made(
    sweep: Sweeping, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep() == 0
    first = capsys.readouterr().out
    assert sweep() == 0
    again = capsys.readouterr().out
    assert again.splitlines()[1] == "24 of 24 points are there already"
    assert again.splitlines()[2:] == first.splitlines()[25:], "and the same follows from them"


def test_failed_points_are_listed_and_end_it_with_1(
    sweep: Sweeping, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(measure=refuses_fast_links) == 1
    told = capsys.readouterr().out
    assert "failed: 18; --retry-failed makes them again" in told
    assert told.count("generated.link_gbit_per_s: 400 is too fast") == 12 + 18 + 3
    assert sweep() == 1, "they are not made again by themselves"
    assert "24 of 24 points are there already, 12 of them failed" in capsys.readouterr().out
    assert sweep("--retry-failed") == 0


def test_no_point_at_all_ends_with_7(sweep: Sweeping, capsys: pytest.CaptureFixture[str]) -> None:
    rule = "[[skip]]\nlink_gbit_per_s = [100, 400]\n[base]"
    assert sweep(changes=(("[base]", rule),)) == 7
    assert "leave no combination" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--shard", "0/3"), "--shard '0/3': expected 1 to 3 of 3"),
        (("--on", "ssh://host"), "--on ssh://host: expected dask://HOST:PORT or slurm://"),
        (("--on", "dask://"), "--on dask://: expected dask://HOST:PORT"),
        (("--on", "dask://h:1", "--jobs", "2"), "--jobs is for this machine alone"),
        (("--on", "slurm://cpu", "--shard", "1/2"), "--shard is what tasks of a job get"),
        (("--on", "slurm://cpu?task=2"), "no option 'task'; did you mean 'tasks'?"),
        (("--on", "slurm://cpu?tasks=many"), "tasks=many is no value of it"),
        (("--on", "slurm://"), "expected slurm://PARTITION"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    sweep: Sweeping, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str
) -> None:
    assert sweep(*arguments) == 2
    assert told in capsys.readouterr().err


def test_a_shard_makes_its_points_and_tells_no_table(
    sweep: Sweeping, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep("--shard", "2/3") == 0
    assert "8/8" in capsys.readouterr().out
    assert len(Folder(tmp_path / "out").rows()) == 8
    assert not (tmp_path / "out/table.csv").exists()


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_below_the_lines(tmp_path: Path) -> None:
    asked = load_sweep(written(tmp_path))
    cells, stream = cells_of(asked), Terminal()
    point = cells[0].points[0]
    with command.Telling(asked, cells, stream) as telling:
        telling(None, Standing(0, 24, 0))
        telling(row_of(point, measured=measure(point)), Standing(1, 24, 0))
        telling(row_of(point, error="[red]no markup"), Standing(2, 24, 1))
    told = stream.getvalue()
    assert "fat-tree: link 100 Gbit/s, seed 1: 68.17 1/s" in told
    assert "failed: [red]no markup" in told
    assert "2/24" in told


# -- Slurm -----------------------------------------------------------------------------------------


def test_a_batch_script_says_what_it_needs_and_runs_its_shard(tmp_path: Path) -> None:
    array = Array.parse("slurm://cpu?tasks=32&cpus=2&time=04:00:00&account=lab")
    command = ["python", "-m", "harness", "sweep", "/shared/a b.toml"]
    lines = script(array, tmp_path, command, 1.5).splitlines()
    assert lines[0] == "#!/bin/sh"
    for option in (
        *("partition=cpu", "cpus-per-task=2", "mem=3000M", "time=04:00:00", "account=lab"),
        f"output={tmp_path}/slurm-%j.log",
    ):
        assert f"#SBATCH --{option}" in lines
    assert not [line for line in lines if "qos" in line]
    run = "python -m harness sweep '/shared/a b.toml' --jobs 2"
    assert lines[-1] == f'exec {run} --shard "$SLURM_ARRAY_TASK_ID/32"'
    assert f"  exec {run}" in lines


def test_too_many_tasks_are_refused() -> None:
    with pytest.raises(UsageError, match="1000 at most"):
        Array.parse("slurm://cpu?tasks=1001")
