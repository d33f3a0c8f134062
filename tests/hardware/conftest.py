"""Real switches: those of the bench file given with ``--bench``, else a skip that says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.errors import UsageError
from harness.model.load import load_bench
from tests.hardware.racked import Racked, racked

HOW = (
    "needs real switches: give a live bench file, pytest tests/hardware --bench my-lab.toml;"
    " circuits of the ports that it calls ours are changed, and restored at the end"
)


RACK = pytest.StashKey[list[Racked]]()


def pytest_configure(config: pytest.Config) -> None:
    path: Path | None = config.getoption("--bench")
    if path is None:
        return
    try:
        bench = load_bench(path)
    except UsageError as error:
        raise pytest.UsageError(f"--bench: {error}") from error
    if bench.world != "live" or not bench.switches:
        raise pytest.UsageError(
            f"--bench {path}: must be a live bench with switches; its world is {bench.world!r}"
        )
    config.stash[RACK] = [Racked.of(name, spec, path) for name, spec in bench.switches.items()]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "switch" not in metafunc.fixturenames:
        return
    if found := metafunc.config.stash.get(RACK, None):
        metafunc.parametrize("switch", found, ids=[one.name for one in found], indirect=True)
    else:
        absent = pytest.param(None, marks=pytest.mark.skip(reason=HOW))
        metafunc.parametrize("switch", [absent], ids=["no bench"], indirect=True)


@pytest.fixture
def switch(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Racked]:
    """One switch of the bench file; afterwards its map is as it was found."""
    with racked(request.param, tmp_path) as found:
        yield found
