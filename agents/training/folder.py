"""Published weights in a node's memory: the files of the last two versions."""

from __future__ import annotations

from pathlib import Path

from harness import memory

_KEPT = 2


class Folder:
    """The folder of published weights, made by the first `place` and deleted by `remove`."""

    def __init__(self, there: Path = memory.MEMORY) -> None:
        self._folder = memory.Folder("trained", there)

    def place(self, version: int) -> Path:
        """Return where the file of a version belongs."""
        return self._folder.path / f"{version}.safetensors"

    def forget_older(self, version: int) -> None:
        """Delete the files of all versions but `version` and the latest one before it."""
        others = {int(path.stem): path for path in self._folder.path.glob("*.safetensors")}
        others.pop(version, None)
        for old in sorted(others)[: len(others) - _KEPT + 1]:
            others[old].unlink()

    def remove(self) -> None:
        """Delete it, with all in it."""
        self._folder.remove()
