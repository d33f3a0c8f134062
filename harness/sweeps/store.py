"""The folder of a sweep: who is at work in it, and every result, good after ``kill -9``.

::

    sweeps/performance-cost/
        points.jsonl              a line a point, made durable one by one
        points.3-of-32.jsonl      the same of a shard
        sweep.toml                copy of what was asked
        lock   workers.log        held by who is at work; what workers said
        table.csv   table.json   conclusions.txt   *.svg   *.png

A line that a dying process left torn is skipped, and its point is made again. Points of an earlier
form of the sweep file stay: those that still fit are kept, the others are not shown.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from harness.errors import InfrastructureError, UsageError
from harness.sweeps.point import Row

_row = msgspec.json.Decoder(Row)


@dataclass(frozen=True)
class Shard:
    """Every `of`-th point, from the `index`-th on; 1/1 is all."""

    index: int = 1
    of: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read ``3/32``. Raises `ValueError`."""
        index, slash, of = text.partition("/")
        if not (slash and index.isascii() and index.isdigit() and of.isascii() and of.isdigit()):
            raise ValueError(f"{text!r}: expected I/N, such as 1/8")
        if not 1 <= int(index) <= int(of):
            raise ValueError(f"{text!r}: expected 1 to {int(of)} of {int(of)}")
        return cls(int(index), int(of))

    @property
    def is_all(self) -> bool:
        """Whether it is no shard, but the sweep."""
        return self.of == 1


@dataclass(frozen=True)
class Folder:
    """Where a sweep's results are."""

    path: Path

    @property
    def lock(self) -> Path:
        """Held by who is at work: alone, or together with other shards."""
        return self.path / "lock"

    @property
    def log(self) -> Path:
        """What workers wrote to their standard error."""
        return self.path / "workers.log"

    def points(self, shard: Shard) -> Path:
        """Return the file that a shard writes."""
        name = "" if shard.is_all else f".{shard.index}-of-{shard.of}"
        return self.path / f"points{name}.jsonl"

    def rows(self) -> dict[str, Row]:
        """Return every result by key: the last one, and a good one rather than a failure."""
        rows: dict[str, Row] = {}
        for path in sorted(self.path.glob("points*.jsonl")):
            for row in _whole(path):
                kept = rows.get(row.key)
                if kept is None or row.measured is not None or kept.measured is None:
                    rows[row.key] = row
        return rows


def _whole(path: Path) -> Iterator[Row]:
    """Yield the lines that are whole."""
    with path.open("rb") as file:
        for line in file:
            try:
                yield _row.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue


class Points:
    """The file that a shard writes, open for appending."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def add(self, row: Row) -> None:
        """Write one result durably. Raises `InfrastructureError` where that cannot be."""
        try:
            self._file.write(msgspec.json.encode(row) + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise InfrastructureError(
                f"{self._file.name}: cannot be written: {error.strerror}"
            ) from error


@contextmanager
def at_work(folder: Folder, shard: Shard) -> Iterator[Points]:
    """Make the folder where it is not there, and hold it as long as the body lasts.

    The locks are the kernel's, so they end with their process, however that ends. Raises
    `UsageError` where somebody else is at work on the same points, or no folder can be made.
    """
    with ExitStack() as stack:
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(folder.lock.open("ab"))
            file = stack.enter_context(folder.points(shard).open("a+b"))
        except OSError as error:
            raise UsageError(f"{error.filename}: {error.strerror}") from error
        try:
            kind = fcntl.LOCK_EX if shard.is_all else fcntl.LOCK_SH
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                f"{folder.path}: another sweep is at work here: wait for it or stop it (Ctrl-C), or"
                " name another folder (--out DIR)"
            ) from error
        _end_torn_line(file)
        yield Points(file)


def _end_torn_line(file: IO[bytes]) -> None:
    if file.seek(0, os.SEEK_END):
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
