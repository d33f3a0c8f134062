"""``harness report``: what a run found, read from its journal alone."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from harness.cli.output import json_option, print_json
from harness.cli.runs import runs_option
from harness.record.report import print_report
from harness.record.store import find
from harness.record.summary import read_run


@click.command()
@click.argument("run", default="latest")
@runs_option
@json_option
def report(run: str, runs: Path, as_json: bool) -> None:
    """Tell what RUN found: a run folder, its name, the start of its name, or `latest`.

    Everything is derived from the journal anew, so it works on a run that was killed, too.

    \b
    harness report
    harness report runs/latest --json
    """
    folder = find(runs, run)
    summary = read_run(folder)
    if as_json:
        print_json(summary)
    else:
        print_report(summary, sys.stdout, folder.path)
