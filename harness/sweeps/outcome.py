"""What is left of a sweep for a reader: tables, bills, conclusions and plots, in its folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness.errors import InfrastructureError
from harness.sweeps.costs import bills_text
from harness.sweeps.findings import conclusions
from harness.sweeps.plots import draw_all
from harness.sweeps.results import Result
from harness.sweeps.store import Folder
from harness.sweeps.sweep import Sweep
from harness.sweeps.table import csv_text, json_value, table_of


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """All of it, as ``--json`` shows it and ``table.json`` keeps it."""

    question: str
    baseline: str
    performance: str
    conclusions: tuple[str, ...]
    failed: tuple[str, ...]
    columns: list[dict[str, str]]
    rows: list[dict[str, Any]]


def outcome_of(sweep: Sweep, results: Sequence[Result]) -> Outcome:
    """Return what a sweep came to."""
    failed = (
        f"{result.design}, {told}: {error}"
        for result in results
        for error in result.errors
        if (told := ", ".join(f"{axis} {value}" for axis, value in result.place.items()))
    )
    return Outcome(
        question=sweep.question,
        baseline=sweep.baseline,
        performance=sweep.performance,
        conclusions=tuple(conclusions(sweep, results)),
        failed=tuple(failed),
        **json_value(table_of(sweep, results)),
    )


def write(sweep: Sweep, results: Sequence[Result], folder: Folder) -> tuple[Outcome, list[Path]]:
    """Write it all; return it, and the files. Raises `InfrastructureError`."""
    outcome = outcome_of(sweep, results)
    texts = {
        "table.csv": csv_text(table_of(sweep, results)),
        "table.json": msgspec.json.format(msgspec.json.encode(outcome), indent=2).decode() + "\n",
        "bills.txt": bills_text(results),
        "conclusions.txt": "\n".join(outcome.conclusions) + "\n",
    }
    try:
        for name, text in texts.items():
            (folder.path / name).write_text(text, encoding="utf-8")
        plots = draw_all(sweep, results, folder.path)
    except OSError as error:
        raise InfrastructureError(f"{error.filename}: {error.strerror}") from error
    return outcome, [*(folder.path / name for name in texts), *plots]
