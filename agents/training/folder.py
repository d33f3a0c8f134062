"""Published weights in a node's memory: a folder of this agent's own, which outlives no next one.

Its name has the agent's pid and start time. Whoever makes one deletes those whose agent is gone.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from harness.processes import start_ticks

MEMORY = Path("/dev/shm")  # noqa: S108 - the folder in it has a random name and mode 0700
_NAME = re.compile(r"harness-trained-(\d+)-(\d+)-\w+", re.ASCII)
_KEPT = 2


class Folder:
    """One, made by the first `place` and deleted by `remove`; mode 0700."""

    def __init__(self, memory: Path = MEMORY) -> None:
        self._memory = memory
        self._path: Path | None = None

    def place(self, version: int) -> Path:
        """Return where the file of a version belongs."""
        if self._path is None:
            sweep(self._memory)
            prefix = f"harness-trained-{os.getpid()}-{start_ticks(os.getpid())}-"
            self._path = Path(tempfile.mkdtemp(prefix=prefix, dir=self._memory))
        return self._path / f"{version}.safetensors"

    def forget_older(self, version: int) -> None:
        """Delete the files of all versions but `version` and the latest one before it."""
        assert self._path is not None
        others = {int(path.stem): path for path in self._path.glob("*.safetensors")}
        others.pop(version, None)
        for old in sorted(others)[: len(others) - _KEPT + 1]:
            others[old].unlink()

    def remove(self) -> None:
        """Delete it, with all in it."""
        if self._path:
            shutil.rmtree(self._path, ignore_errors=True)
            self._path = None


def sweep(memory: Path = MEMORY) -> None:
    """Delete what agents that are gone have left."""
    for path in memory.glob("harness-trained-*"):
        found = _NAME.fullmatch(path.name)
        if found and start_ticks(int(found[1])) != int(found[2]):
            shutil.rmtree(path, ignore_errors=True)
