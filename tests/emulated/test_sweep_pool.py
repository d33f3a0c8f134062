"""Points made by real processes: what dies, hangs or grows loses itself alone; sweeps go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType

import msgspec
import pytest
import sweep_measures as misbehaving
import sweep_study as study

from harness.clock import RealClock
from harness.errors import InfrastructureError
from harness.sweeps import slurm
from harness.sweeps.cluster import DaskCluster
from harness.sweeps.grid import cells_of, points_of
from harness.sweeps.measure import measure
from harness.sweeps.point import Measure, Point, Row
from harness.sweeps.pool import LocalPool
from harness.sweeps.store import Folder

COMMAND = Path(__file__).with_name("sweep_command.py")
WAIT_S = 60.0


def points(folder: Path, seeds: int, **limits: float) -> list[Point]:
    """Return one point of each seed, all of the same network."""
    (cell, *_) = cells_of(study.study(folder))
    return [msgspec.structs.replace(point, **limits) for point in cell.points[:seeds]]


def made(folder: Path, measure: Measure, asked: list[Point], jobs: int = 2) -> dict[int, Row]:
    """Return rows by seed."""
    pool = LocalPool(measure, jobs, RealClock(), folder / "workers.log")
    return {row.seed: row for row in pool.made(asked)}


def test_workers_make_what_is_made_here(tmp_path: Path) -> None:
    asked = points_of(cells_of(study.study(tmp_path)))
    pool = LocalPool(study.measure, 2, RealClock(), tmp_path / "workers.log")
    coming = list(pool.made(asked))
    rows = {row.key: row for row in coming}
    assert len(coming) == len(rows) == 24
    assert {key: row.measured for key, row in rows.items()} == {
        point.key: study.measure(point) for point in asked
    }
    assert all(row.peak_mb > 5 for row in rows.values())


def test_a_worker_that_is_killed_loses_its_point_alone(tmp_path: Path) -> None:
    rows = made(tmp_path, misbehaving.dies_at_seed_2, points(tmp_path, 3), jobs=1)
    assert rows[2].error.startswith("its process was killed by SIGKILL")
    assert rows[2].measured is None
    assert [rows[seed].error for seed in (1, 3)] == ["", ""]


def test_a_point_that_never_ends_is_ended_by_its_limit(tmp_path: Path) -> None:
    asked = points(tmp_path, 3, timeout_s=1.0)
    rows = made(tmp_path, misbehaving.never_ends_at_seed_2, asked, jobs=1)
    assert rows[2].error == "took more than 1 s (timeout_s)"
    assert [rows[seed].error for seed in (1, 3)] == ["", ""]


def test_a_point_that_wants_too_much_memory_is_told_so(tmp_path: Path) -> None:
    asked = points(tmp_path, 3, memory_gb=1.0)
    rows = made(tmp_path, misbehaving.takes_too_much_at_seed_2, asked, jobs=1)
    assert rows[2].error == "needs more than 1 GB of memory (memory_gb)"
    assert 500 < rows[2].peak_mb < 1100
    assert [rows[seed].error for seed in (1, 3)] == ["", ""]
    assert rows[3].peak_mb < 400, "a peak is a point's own, not its worker's"


def test_a_bug_is_a_failed_point_with_its_place_and_its_traceback_in_the_log(
    tmp_path: Path,
) -> None:
    rows = made(tmp_path, misbehaving.has_a_bug, points(tmp_path, 2))
    assert rows[1].error.startswith("a bug of ours: ZeroDivisionError: seed 1 (sweep_measures.py:")
    log = (tmp_path / "workers.log").read_text()
    assert "Traceback" in log
    assert "a measure may print" in log


def test_files_that_changed_meanwhile_make_no_result(tmp_path: Path) -> None:
    (point,) = points(tmp_path, 1)
    other = tmp_path / "other.toml"
    other.write_text("other")
    changed = msgspec.structs.replace(point, files={str(other): "0" * 64})
    rows = made(tmp_path, study.measure, [changed])
    assert "other.toml: not the file that was asked for" in rows[1].error


def test_a_measure_that_cannot_be_imported_ends_the_sweep_at_once(tmp_path: Path) -> None:
    nowhere: Callable[[Point], object] = FunctionType((lambda _: None).__code__, {})
    nowhere.__module__, nowhere.__qualname__ = "no_such_module", "measure"
    with pytest.raises(InfrastructureError, match=r"did not start: exited with status 1.*no_such"):
        made(tmp_path, nowhere, points(tmp_path, 3))  # type: ignore[arg-type]  # as it is meant


def test_leaving_off_ends_every_worker(tmp_path: Path) -> None:
    pool = LocalPool(misbehaving.takes_a_while, 2, RealClock(), tmp_path / "workers.log")
    coming = pool.made(points_of(cells_of(study.study(tmp_path))))
    next(coming)
    coming.close()
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children]
    assert not [line for line in lines if b"harness.sweeps.worker" in line]


def test_a_point_is_simulated_to_the_same_result_each_time(tmp_path: Path) -> None:
    """By the measure itself, in two processes, on the smallest bench that the scenario fills."""
    sweep = study.study(tmp_path, ("gpus = 64", "gpus = 32"))
    asked = [cell.points[0] for cell in cells_of(sweep)[:2]]
    refused = msgspec.structs.replace(asked[0], values={**asked[0].values, "gpus": 12}, seed=9)
    first, second = (made_by_key(tmp_path, [*asked, refused]) for _ in range(2))
    assert {key: row.measured for key, row in first.items()} == {
        key: row.measured for key, row in second.items()
    }
    for point in asked:
        found = first[point.key].measured
        assert found, first[point.key].error
        assert found.metrics[f"rl.samples_per_s[step=0,policy={point.arm}]"].value > 0
        assert any("models on a clock that jumps" in note for note in found.notes)
    assert "bench of this point: generated.gpus: 12 " in first[refused.key].error


def made_by_key(folder: Path, asked: list[Point]) -> dict[str, Row]:
    pool = LocalPool(measure, 2, RealClock(), folder / "workers.log")
    return {row.key: row for row in pool.made(asked)}


# -- the command -----------------------------------------------------------------------------------


def command(measure: str, *arguments: str) -> list[str]:
    return [sys.executable, str(COMMAND), measure, "sweep", *arguments]


@contextmanager
def begun(folder: Path, measure: str, lines: int) -> Iterator[subprocess.Popen[str]]:
    """Begin a sweep and wait until so many points are there; kill it in the end."""
    path = study.written(folder)
    argv = command(measure, str(path), "--out", str(folder / "out"), "--jobs", "2")
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        try:
            until_s = time.monotonic() + WAIT_S
            while len(Folder(folder / "out").rows()) < lines:
                assert child.poll() is None, child.communicate()
                assert time.monotonic() < until_s, "no points"
                time.sleep(0.02)
            yield child
        finally:
            child.kill()


def finish(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run the sweep to its end."""
    path = str(folder / "study.toml")
    argv = command("measure", path, "--out", str(folder / "out"), "--jobs", "2", *more)
    return subprocess.run(argv, capture_output=True, text=True, timeout=WAIT_S, check=False)


def test_a_killed_sweep_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    with begun(tmp_path, "takes_a_while", 4) as child:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    there = Folder(tmp_path / "out").rows()
    assert 4 <= len(there) < 24
    done = finish(tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    assert f"{len(there)} of 24 points are there already" in done.stderr
    lines = (tmp_path / "out/points.jsonl").read_text().splitlines()
    keys = [json.loads(line)["key"] for line in lines if line.endswith("}")]
    assert len(keys) == len(set(keys)) == 24, "no point was made twice"
    table = json.loads(done.stdout)
    assert len(table["rows"]) == 12
    assert not table["failed"]
    assert table["conclusions"][2] == (
        "Simulated: 12 of 12 combinations have a result, of 3 seeds."
    )
    assert (tmp_path / "out/gain-by-switching.svg").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_sweep_ends_in_order_and_says_how_to_go_on(
    tmp_path: Path, number: signal.Signals
) -> None:
    with begun(tmp_path, "takes_a_while", 2) as child:
        os.kill(child.pid, number)
        _, told = child.communicate(timeout=WAIT_S)
        assert child.returncode == 4
    kept = len(Folder(tmp_path / "out").rows())
    assert f"stopped; {kept} of 24 points are kept" in told
    assert "Go on with: harness sweep" in told
    assert "Traceback" not in told
    assert finish(tmp_path).returncode == 0


def test_two_sweeps_at_once_in_one_folder_are_refused(tmp_path: Path) -> None:
    with begun(tmp_path, "takes_a_while", 1):
        second = finish(tmp_path)
    assert second.returncode == 2
    assert "another sweep is at work here" in second.stderr


# -- many machines ---------------------------------------------------------------------------------


@contextmanager
def scheduler() -> Iterator[str]:
    """Run a cluster of two worker processes; yield its address, HOST:PORT."""
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    ) as cluster:
        yield cluster.scheduler_address.removeprefix("tcp://")


def test_a_cluster_of_two_workers_makes_the_same_and_outlives_what_dies(tmp_path: Path) -> None:
    asked = points_of(cells_of(study.study(tmp_path)))[:6]
    with scheduler() as address:
        rows = {row.key: row for row in DaskCluster(study.measure, address).made(asked)}
        dead = {
            row.seed: row for row in DaskCluster(misbehaving.dies_at_seed_2, address).made(asked)
        }
    assert {key: row.measured for key, row in rows.items()} == {
        point.key: study.measure(point) for point in asked
    }
    assert dead[2].error.startswith("its process was killed by SIGKILL")
    assert dead[1].measured
    assert dead[3].measured


def test_a_scheduler_that_is_not_there_is_told(tmp_path: Path) -> None:
    path = study.written(tmp_path)
    argv = command(
        "measure", str(path), "--out", str(tmp_path / "out"), "--on", "dask://127.0.0.1:9"
    )
    done = subprocess.run(argv, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 3, done.stderr
    assert "dask://127.0.0.1:9: no scheduler answers" in done.stderr


SBATCH = """#!/bin/sh
echo "$@" >> {folder}/submitted
echo "$(wc -l < {folder}/submitted);cluster"
"""


def test_slurm_gets_an_array_whose_script_makes_all_points_and_tells_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch = tmp_path / "bin/sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(SBATCH.format(folder=tmp_path))
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    out, path = tmp_path / "out", study.written(tmp_path)
    array = slurm.Array.parse("slurm://cpu?tasks=3&cpus=2")
    ids = slurm.submit(array, out, command("measure", str(path), "--out", str(out)), 2.0)
    assert ids == ("1", "2")
    assert (tmp_path / "submitted").read_text().splitlines() == [
        f"--parsable --array=1-3 {out}/sweep.sbatch",
        f"--parsable --dependency=afterany:1 {out}/sweep.sbatch finish",
    ]
    for task in ("1", "2", "3"):
        environment = os.environ | {"SLURM_ARRAY_TASK_ID": task}
        done = subprocess.run(
            ["sh", str(out / "sweep.sbatch")], env=environment, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
    assert len(Folder(out).rows()) == 24
    assert not (out / "table.csv").exists()
    subprocess.run(["sh", str(out / "sweep.sbatch"), "finish"], capture_output=True, check=True)
    assert (out / "table.csv").exists()


def test_a_machine_without_slurm_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InfrastructureError, match="sbatch: not on this machine"):
        slurm.submit(slurm.Array("cpu"), tmp_path, ["true"], 1.0)
