"""Run folders: ``runs/<id>/`` and ``runs/latest``. Made, found, listed; never changed here.

    runs/20261129-183504-123-7f3a/
        journal.jsonl   the truth            run.json    derived from it
        scenario.toml   bench.toml           copies of what was asked, and of what it ran on
        fabric.svg      circuits by phase, where they followed the work
        snapshots/      logs/  transcripts/  what undoes the run; what agents and devices said

The id sorts by time (UTC, to the millisecond) and ends in four random digits. Finished runs are
queried in place: there is no index beside the folders.
"""

from __future__ import annotations

import os
import random
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from harness.clock import Clock
from harness.errors import UsageError
from harness.model.documents import RunSummary
from harness.processes import Process
from harness.record.journal import is_closed

LATEST = "latest"
FOLDERS = ("logs", "transcripts", "snapshots")
TRIES = 16


@dataclass(frozen=True)
class RunFolder:
    """Where the parts of one run are."""

    path: Path

    @property
    def id(self) -> str:
        """The run's id, which is the folder's name."""
        return self.path.resolve().name

    @property
    def recovery(self) -> str:
        """The command that puts back what the run changed, wherever runs are kept."""
        return f"harness recover {shlex.quote(str(self.path))}"

    @property
    def journal(self) -> Path:
        """The documents."""
        return self.path / "journal.jsonl"

    @property
    def summary(self) -> Path:
        """``run.json``."""
        return self.path / "run.json"

    @property
    def scenario(self) -> Path:
        """Copy of the scenario file."""
        return self.path / "scenario.toml"

    @property
    def bench(self) -> Path:
        """Copy of the bench file."""
        return self.path / "bench.toml"

    @property
    def logs(self) -> Path:
        """What agents and emulators wrote."""
        return self.path / "logs"

    @property
    def transcripts(self) -> Path:
        """Every byte to and from devices, secrets masked."""
        return self.path / "transcripts"

    @property
    def snapshots(self) -> Path:
        """The switches as they were found."""
        return self.path / "snapshots"


def create(
    root: Path, clock: Clock, rng: random.Random, *, scenario: Path | None, bench: Path | None
) -> RunFolder:
    """Make a run folder with copies of the files there are, and point ``latest`` at it.

    Raises `UsageError` where folders cannot be made under `root` or a file cannot be copied.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder = _new(root, clock, rng)
        for name in FOLDERS:
            (folder.path / name).mkdir()
        for file, copy in ((scenario, folder.scenario), (bench, folder.bench)):
            if file is not None:
                copy.write_bytes(file.read_bytes())
        _point(root / LATEST, folder.id)
    except OSError as error:
        raise UsageError(f"{error.filename or root}: {error.strerror}") from error
    return folder


def _new(root: Path, clock: Clock, rng: random.Random) -> RunFolder:
    for _ in range(TRIES):
        now = clock.wall()
        stamp = f"{now:%Y%m%d-%H%M%S}-{now.microsecond // 1000:03d}"
        path = root / f"{stamp}-{rng.randrange(2**16):04x}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return RunFolder(path)
    raise UsageError(f"{root}: no free run id after {TRIES} tries")


def _point(link: Path, target: str) -> None:
    """Replace a symbolic link in one step: it always points at a whole run."""
    scratch = link.with_name(f".{link.name}-{target}")
    scratch.symlink_to(target)
    try:
        scratch.replace(link)
    except OSError:
        scratch.unlink()
        raise


# -- finding -----------------------------------------------------------------------------------


def runs(root: Path) -> list[RunFolder]:
    """Return all runs under `root`, oldest first."""
    return [
        RunFolder(path.parent)
        for path in sorted(root.glob("*/journal.jsonl"))
        if not path.parent.is_symlink()
    ]


def find(root: Path, run: str | Path) -> RunFolder:
    """Return the run that `run` means: a folder's path, an id, the start of one, or ``latest``.

    Raises `UsageError` where it means none, or more than one.
    """
    for path in (Path(run), root / run):
        if (path / "journal.jsonl").is_file():
            return RunFolder(path)
    kept = runs(root)
    fits = [folder for folder in kept if folder.id.startswith(str(run))]
    if len(fits) == 1:
        return fits[0]
    if fits:
        shown = ", ".join(folder.id for folder in fits[:5])
        raise UsageError(f"{str(run)!r} begins the id of {len(fits)} runs: {shown}")
    known = ", ".join(folder.id for folder in kept[-3:])
    latest = f"; the latest are {known}" if known else f"; none is kept in {root}"
    raise UsageError(f"no run {str(run)!r}{latest}")


def read_summary(folder: RunFolder) -> RunSummary | None:
    """Return ``run.json`` as it stands, or None where there is none that can be read."""
    try:
        return msgspec.json.decode(folder.summary.read_bytes(), type=RunSummary)
    except (OSError, msgspec.DecodeError):
        return None


# -- whose run it is ---------------------------------------------------------------------------


def unfinished(root: Path) -> list[RunFolder]:
    """Return the runs whose journal was never closed, oldest first."""
    return [folder for folder in runs(root) if not is_closed(folder.journal)]


def is_held(folder: RunFolder) -> bool:
    """Tell whether the coordinator of an unfinished run still lives."""
    summary = read_summary(folder)
    return summary is not None and is_alive(summary.coordinator)


def coordinator_now() -> dict[str, int]:
    """Return what tells this process from any later one with its number."""
    ours = Process.of(os.getpid())
    return {"pid": ours.pid, "start_ticks": ours.start_ticks}


def is_alive(coordinator: Mapping[str, int]) -> bool:
    """Tell whether the very process of `coordinator_now` still runs (zombies do not)."""
    if not coordinator:
        return False
    return Process(pid=coordinator["pid"], start_ticks=coordinator["start_ticks"]).is_alive()
