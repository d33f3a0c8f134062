"""Run folders on the command line: where they are kept, and which one is meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from harness.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])


def runs_option(function: F) -> F:
    """Give a command its ``--runs DIR``, passed as `runs`."""
    option = click.option(
        "--runs",
        type=click.Path(path_type=Path, file_okay=False),
        default=Path("runs"),
        show_default=True,
        envvar="HARNESS_RUNS",
        metavar="DIR",
        help="Where run folders are kept (or HARNESS_RUNS).",
    )
    return option(function)


def run_folder(run: str, runs: Path) -> Path:
    """Return the folder that `run` means: a path, or a name under `runs`.

    Raises `UsageError` naming both places that were looked at.
    """
    for folder in (Path(run), runs / run):
        if (folder / "journal.jsonl").is_file():
            return folder
    kept = sorted(
        path.parent.name for path in runs.glob("*/journal.jsonl") if not path.parent.is_symlink()
    )
    known = f"; the latest are {', '.join(kept[-3:])}" if kept else "; no run is kept there"
    raise UsageError(f"no run at {run} nor at {runs / run}{known}")
