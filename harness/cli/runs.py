"""Where run folders are kept: the option that every command about runs has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

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
