"""Folders in a machine's memory (``/dev/shm``), which are of no use once their process is gone.

Who makes one holds a file in it locked for as long as it lives, however it ends. So anyone can tell
which folders are nobody's any more, across namespaces of processes too, and deletes those.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

MEMORY = Path("/dev/shm")  # noqa: S108 - folders in it have random names and mode 0700
_PREFIX, LOCK = "harness-", "lock"


class Folder:
    """One, made when its path is first asked for and deleted by `remove`; mode 0700.

    `kind` is a part of its name. Where the machine has no such memory, it lies on the disk.
    """

    def __init__(self, kind: str, memory: Path = MEMORY) -> None:
        self._kind = kind
        self._memory = memory if memory.is_dir() else Path(tempfile.gettempdir())
        self._path: Path | None = None
        self._lock: IO[str] | None = None

    @property
    def path(self) -> Path:
        """Where it is. What dead processes left is deleted before it is made."""
        if self._path is None:
            sweep(self._memory)
            self._path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{self._kind}-", dir=self._memory))
            self._lock = _locked(self._path)
        return self._path

    def remove(self) -> None:
        """Delete it, with all in it."""
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
            self._path = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def sweep(memory: Path = MEMORY) -> tuple[str, ...]:
    """Delete the folders that no process holds any longer; return their names."""
    swept = []
    for folder in sorted(memory.glob(f"{_PREFIX}*")):
        with suppress(OSError), (folder / LOCK).open("r+") as lock:
            # Fails where it is in use, or another user's, or gone by now.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            swept.append(folder.name)
    return tuple(swept)


def _locked(folder: Path) -> IO[str]:
    """Make the folder's lock and hold it; it gets its name only when it is held."""
    fresh = folder / f"{LOCK}.new"
    lock = fresh.open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    fresh.rename(folder / LOCK)
    return lock
