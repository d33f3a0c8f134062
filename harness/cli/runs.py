"""What commands about runs share: where these are kept, how one is told, and how it ends them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from harness.cli.output import print_json
from harness.errors import ExitCode
from harness.model.documents import RunSummary
from harness.record.report import print_report

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


def print_run(summary: RunSummary, runs: Path, *, as_json: bool) -> None:
    """Print a run that has just ended: its summary, or its report."""
    if as_json:
        print_json(summary)
    else:
        click.echo()
        print_report(summary, sys.stdout, runs / summary.id)


def exit_code_of(summary: RunSummary, *, strict: bool) -> ExitCode:
    """Return what a run ends its command with; `strict`: what is inconclusive is no pass."""
    code = ExitCode.BUG if summary.exit_code is None else ExitCode(summary.exit_code)
    if code is ExitCode.PASSED and summary.status == "inconclusive" and strict:
        return ExitCode.INCONCLUSIVE
    return code
