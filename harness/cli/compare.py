"""``harness compare``: how far a simulation is off what was measured."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Column, Table

from harness.cli.output import best_effort, json_option, print_json
from harness.cli.runs import runs_option
from harness.errors import ExitCode, UsageError
from harness.model.documents import Event, RunSummary
from harness.record import store
from harness.record.agreement import LIMITS_PCT, Agreement, Row, agreement
from harness.record.journal import read_journal
from harness.record.pressure import short_of_cpu
from harness.record.summary import read_run

PIPE_COLUMNS = 200


@click.command()
@click.argument("simulated")
@click.argument("measured")
@runs_option
@click.option("--strict", is_flag=True, help="End with 6 where a metric is undecided.")
@json_option
def compare(simulated: str, measured: str, *, runs: Path, strict: bool, as_json: bool) -> int:
    """Compare run SIMULATED with run MEASURED, metric by metric, with error bars.

    Throughput may be off by 5 %, times of communication by 7 %, of switching by 5 %. Ends with 1
    where a metric is beyond its limit, whatever the spread of its samples allows.

    \b
    harness compare runs/20261130-101500-000-aaaa runs/20261130-100000-000-bbbb
    """
    ours, theirs = store.find(runs, simulated), store.find(runs, measured)
    first, second = read_run(ours), read_run(theirs)
    _refuse(first, second)
    found = agreement(_events(ours), _events(theirs))
    if not found.rows:
        raise UsageError(f"{ours.id} and {theirs.id} have no metric in common: nothing to compare")
    notes = short_of_cpu(second.metrics)
    with best_effort():
        if as_json:
            rows = [row._asdict() for row in found.rows]
            print_json(found._asdict() | {"rows": rows, "notes": notes})
        else:
            # Into a pipe every name is written whole; a terminal folds what is too long for it.
            width = None if sys.stdout.isatty() else PIPE_COLUMNS
            for warning in notes:
                click.echo(f"note: {second.id}: {warning}")
            Console(width=width, markup=False, highlight=False).print(_table(found))
            for line in _lines(found):
                click.echo(line)
    if any(row.verdict == "beyond" for row in found.rows):
        return ExitCode.FAILED
    if strict and any(row.verdict == "undecided" for row in found.rows):
        return ExitCode.INCONCLUSIVE
    return ExitCode.PASSED


def _refuse(ours: RunSummary, theirs: RunSummary) -> None:
    """Raise `UsageError` where these are not a simulated and a measured run of one scenario."""
    if ours.world != "simulated" or theirs.world == "simulated":
        raise UsageError(
            f"expected a simulated run and a measured one: {ours.id} is {ours.world}, "
            f"{theirs.id} is {theirs.world}"
        )
    if ours.question != theirs.question:
        raise UsageError(
            f"{ours.id} asks {ours.question!r}, {theirs.id} {theirs.question!r}: these are runs "
            "of different scenarios"
        )


def _events(folder: store.RunFolder) -> list[Event]:
    return [each for each in read_journal(folder.journal) if isinstance(each, Event)]


def _table(found: Agreement) -> Table:
    table = Table(
        Column("metric", overflow="fold"),
        "unit",
        "simulated",
        "measured",
        "n",
        "off, %",
        "+/-, %",
        "verdict",
    )
    for row in found.rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> tuple[str, ...]:
    spread = "-" if row.plus_minus_pct is None else f"{row.plus_minus_pct:.1f}"
    values = (f"{row.simulated:.4g}", f"{row.measured:.4g}", str(row.n))
    return (row.metric, row.unit, *values, f"{row.difference_pct:+.1f}", spread, row.verdict)


def _lines(found: Agreement) -> list[str]:
    """Return the worst of each kind, and what could not be compared."""
    told = []
    for kind, limit in LIMITS_PCT.items():
        worst, mean = found.worst_pct(kind), found.mean_pct(kind)
        if worst is not None and mean is not None:
            told.append(f"{kind}: off by {mean:.1f} % on average, {worst:.1f} % at most; {limit:g}")
    told = [f"{line} % is the limit" for line in told]
    for whose, names in (("simulated", found.only_simulated), ("measured", found.only_measured)):
        if names:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if names[5:] else "")
            told.append(f"only in the {whose} run: {shown}")
    return told
