"""Run folders: made once, found by any name a person would use, and known to be held or not."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from harness.clock import RealClock
from harness.errors import ExitCode, UsageError
from harness.model.documents import SCHEMA, Start
from harness.processes import start_ticks
from harness.record import store, summary
from harness.record.journal import Journal
from harness.record.store import RunFolder


class Frozen(RealClock):
    """A wall clock that stands still."""

    def wall(self) -> datetime:
        return datetime(2026, 11, 29, 18, 35, 4, 123_000, tzinfo=UTC)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    scenario, bench = tmp_path / "s.toml", tmp_path / "b.toml"
    scenario.write_text("question = 'x'\n")
    bench.write_text("name = 'y'\n")
    return scenario, bench


def make(root: Path, files: tuple[Path, Path], seed: int = 0) -> RunFolder:
    return store.create(root, Frozen(), random.Random(seed), scenario=files[0], bench=files[1])


def begin(folder: RunFolder) -> Journal:
    journal = Journal.create(folder.journal, Frozen())
    journal.start(
        Start(
            schema=SCHEMA,
            run=folder.id,
            t_ns=1,
            wall="2026-11-29T18:35:04+00:00",
            world="emulated",
            scenario="s",
            bench="b",
            seed=0,
            versions={},
        )
    )
    return journal


def test_a_run_folder_holds_what_was_asked(tmp_path: Path, files: tuple[Path, Path]) -> None:
    folder = make(tmp_path / "new" / "runs", files)
    assert folder.id.startswith("20261129-183504-123-")
    assert folder.scenario.read_text() == "question = 'x'\n"
    assert folder.bench.read_text() == "name = 'y'\n"
    assert folder.snapshots.is_dir()
    assert folder.logs.is_dir()
    assert folder.transcripts.is_dir()


def test_ids_of_the_same_moment_differ_and_latest_points_at_the_last(
    tmp_path: Path, files: tuple[Path, Path]
) -> None:
    rng = random.Random(1)
    folders = [
        store.create(tmp_path, Frozen(), rng, scenario=files[0], bench=files[1]) for _ in range(5)
    ]
    assert len({folder.id for folder in folders}) == 5
    assert (tmp_path / "latest").resolve() == folders[-1].path
    assert RunFolder(tmp_path / "latest").id == folders[-1].id
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".latest")]


def test_a_folder_that_cannot_be_made_is_a_plain_message(
    tmp_path: Path, files: tuple[Path, Path]
) -> None:
    with pytest.raises(UsageError, match=r"s\.toml: File exists") as caught:
        make(files[0], files)
    assert caught.value.exit_code is ExitCode.USAGE
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "mine").touch()
    with pytest.raises(UsageError, match="latest"):
        make(tmp_path, files)


def test_a_run_is_found_by_path_id_prefix_and_latest(
    tmp_path: Path, files: tuple[Path, Path]
) -> None:
    first, second = make(tmp_path, files, 1), make(tmp_path, files, 2)
    begin(first).close()
    begin(second).close()
    assert [folder.id for folder in store.runs(tmp_path)] == sorted([first.id, second.id])
    assert store.find(tmp_path, "latest").id == second.id
    assert store.find(tmp_path, first.id).path == first.path
    assert store.find(tmp_path, first.path).path == first.path
    assert store.find(tmp_path, first.id[:-1]).id == first.id
    with pytest.raises(UsageError, match="begins the id of 2 runs"):
        store.find(tmp_path, "2026")
    with pytest.raises(UsageError, match=f"no run 'nope'; the latest are .*{second.id}"):
        store.find(tmp_path, "nope")
    with pytest.raises(UsageError, match="none is kept in"):
        store.find(tmp_path / "empty", "latest")


def test_an_unfinished_run_says_whether_its_coordinator_lives(
    tmp_path: Path, files: tuple[Path, Path]
) -> None:
    done, held, left = (make(tmp_path, files, seed) for seed in (1, 2, 3))
    with begin(done) as journal:
        summary.refresh(done, store.coordinator_now())
        summary.conclude(journal, done)
    begin(held).close()
    summary.refresh(held, store.coordinator_now())
    begin(left).close()
    summary.refresh(left, {"pid": os.getpid(), "start_ticks": 1})  # a number used again
    assert {folder.id for folder in store.unfinished(tmp_path)} == {held.id, left.id}
    assert store.is_held(held)
    assert not store.is_held(left)
    assert not store.is_held(done)


def test_a_process_that_is_gone_holds_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        ticks = start_ticks(child.pid)
        assert ticks
        coordinator = {"pid": child.pid, "start_ticks": ticks}
        assert store.is_alive(coordinator)
        child.kill()
    assert not store.is_alive(coordinator)
    assert not store.is_alive({})


def test_half_a_summary_is_never_seen(tmp_path: Path, files: tuple[Path, Path]) -> None:
    folder = make(tmp_path, files)
    assert store.read_summary(folder) is None
    with begin(folder):
        told = summary.refresh(folder, store.coordinator_now())
    assert store.read_summary(folder) == told
    assert told.status == "unfinished"
    assert told.coordinator["pid"] == os.getpid()
    assert [path.name for path in folder.path.glob("run.*")] == ["run.json"]
    folder.summary.write_bytes(msgspec.json.encode({"schema": "9"}))
    assert store.read_summary(folder) is None
