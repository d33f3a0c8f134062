"""Where a vLLM engine's weights of each version come from: its model, a directory, or a file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agents.generation.tiny_model import model_of_file, write_model
from harness.errors import UsageError
from harness.wire.generation import EngineSpec


class Sources:
    """Of one rank process. Version 0 is the model itself; the tiny one has every version."""

    def __init__(self, spec: EngineSpec) -> None:
        self._model, self._seed = spec.model, spec.seed
        self._named: dict[int, str] = {}

    def name(self, version: int, source: str) -> None:
        """Say where a version is; "" is the model's own."""
        self._named[version] = source

    def file(self, version: int) -> str:
        """Return the file of a version; "" where it is none."""
        source = self._named.get(version, "")
        return source if Path(source).is_file() else ""

    def check(self, version: int) -> None:
        """Raise `UsageError` unless this version was named, or is the model's own."""
        if version and version not in self._named and self._model:
            raise UsageError(f"{self._model} has no weights of version {version}: update them")

    @contextmanager
    def folder(self, version: int) -> Iterator[str]:
        """Give a model directory with these weights, while it is read. Raises `BadFile`."""
        source = self._named.get(version, "")
        if Path(source or self._model or "/dev/null").is_dir():
            yield source or self._model
            return
        with tempfile.TemporaryDirectory(prefix="tiny-model-") as made:
            if source:
                model_of_file(Path(made), source, self._model)
            else:
                write_model(Path(made), self._seed, version)
            yield made
