"""``harness sweep``: one scenario simulated at many points; tables, plots, and what follows."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import click

from harness.cli.output import best_effort, json_option, print_json
from harness.clock import RealClock
from harness.errors import ExitCode, UsageError
from harness.record.figures import figure
from harness.sweeps import measure, slurm
from harness.sweeps.cluster import DaskCluster
from harness.sweeps.conduct import Standing, make_points
from harness.sweeps.costs import price_by
from harness.sweeps.findings import DETAIL, spoken
from harness.sweeps.grid import Cell, cells_of
from harness.sweeps.outcome import write
from harness.sweeps.point import Row
from harness.sweeps.pool import Executor, LocalPool
from harness.sweeps.results import Result, results_of, shown
from harness.sweeps.store import Folder, Shard
from harness.sweeps.sweep import Sweep, load_sweep
from harness.sweeps.table import text_lines

FILE = click.Path(path_type=Path)
HOME = Path("sweeps")
FAILURES_SHOWN = 20


def shard_of(_: click.Context, __: click.Parameter, text: str | None) -> Shard:
    """Read ``--shard I/N``."""
    try:
        return Shard.parse(text) if text else Shard()
    except ValueError as error:
        raise UsageError(f"--shard {error}") from error


@click.command()
@click.argument("file", type=FILE)
@click.option("--out", type=FILE, metavar="DIR", help="Its folder; none: sweeps/NAME-OF-FILE.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Points at once on this machine; none: as many as it has processors.",
)
@click.option(
    "--on",
    metavar="URL",
    help="Who makes points: dask://HOST:PORT, or slurm://PARTITION?tasks=N&cpus=N&time=T.",
)
@click.option("--shard", callback=shard_of, metavar="I/N", help="Make every N-th point only.")
@click.option("--retry-failed", is_flag=True, help="Make points again that failed.")
@json_option
def sweep(
    *,
    file: Path,
    out: Path | None,
    jobs: int | None,
    on: str | None,
    shard: Shard,
    retry_failed: bool,
    as_json: bool,
) -> int:
    """Simulate a scenario at all points of FILE, and tell what follows from them.

    Points that are there are not made again, so the same command goes on with a sweep that was
    stopped or killed. A point that fails does not stop the rest.

    \b
    harness sweep scenarios/sweeps/quick.toml
    harness sweep scenarios/sweeps/performance-cost.toml --out study --jobs 2
    harness sweep scenarios/sweeps/performance-cost.toml --on dask://10.0.0.5:8786
    harness sweep scenarios/sweeps/performance-cost.toml --on 'slurm://cpu?tasks=32'
    """
    asked, folder = load_sweep(file), Folder(out or HOME / file.stem)
    cells, price = cells_of(asked, file), price_by(asked.prices, asked.power)
    if on is not None and on.startswith("slurm://"):
        return _submit(file, folder, on, asked, shard)
    executor = _executor(on, jobs, folder)
    with interruptible(), Telling(asked, cells, sys.stderr if as_json else sys.stdout) as telling:
        made = make_points(
            cells,
            folder,
            executor,
            telling,
            shard=shard,
            asked=file.read_bytes(),
            retry_failed=retry_failed,
            go_on=shlex.join(["harness", *sys.argv[1:]]),
        )
    if not shard.is_all:
        return ExitCode.FAILED if made.standing.failed else ExitCode.PASSED
    return _tell(asked, results_of(asked, cells, made.rows, price), folder, as_json=as_json)


def _executor(on: str | None, jobs: int | None, folder: Folder) -> Executor:
    """Return who makes points; raises `UsageError`."""
    if on is None:
        return LocalPool(measure.measure, jobs or _processors(), RealClock(), folder.log)
    parts = urlsplit(on)
    if parts.scheme != "dask" or not parts.netloc or parts.path or parts.query:
        raise UsageError(f"--on {on}: expected dask://HOST:PORT or slurm://PARTITION")
    if jobs is not None:
        raise UsageError("--jobs is for this machine alone; leave it out with --on")
    return DaskCluster(measure.measure, parts.netloc)


def _processors() -> int:
    """Return how many processors this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _submit(file: Path, folder: Folder, on: str, asked: Sweep, shard: Shard) -> int:
    """Submit the sweep to Slurm, and say how to go on."""
    if not shard.is_all:
        raise UsageError("--shard is what tasks of a job get; leave it out with --on")
    array = slurm.Array.parse(on)
    out = folder.path.resolve()
    command = [sys.executable, "-m", "harness", "sweep", str(file.resolve()), "--out", str(out)]
    job, finish = slurm.submit(array, out, command, asked.memory_gb)
    click.echo(
        f"submitted: job {job}, {array.tasks} tasks, and job {finish}, which tells what came of"
        f" them\nresults will be in {out}; the same command without --on makes what is missing"
    )
    return ExitCode.PASSED


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM and a closed terminal end a sweep in order, as Ctrl-C does."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, rule in before.items():
        if rule != signal.SIG_IGN:  # nohup
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, rule in before.items():
            signal.signal(number, rule)


def _tell(asked: Sweep, results: Sequence[Result], folder: Folder, *, as_json: bool) -> int:
    """Write and print what a sweep came to; failed points are listed, and end it with 1."""
    outcome, files = write(asked, results, folder)
    with best_effort():
        if as_json:
            print_json(outcome)
        else:
            plainly = _plainly(outcome.conclusions)
            written = ["written:", *map(str, files)]
            failed = _failed(outcome.failed)
            parts = ["", *text_lines(asked, results), "", *plainly, "", *failed, *written]
            click.echo("\n".join(parts))
    return ExitCode.FAILED if outcome.failed else ExitCode.PASSED


def _failed(failed: Sequence[str]) -> Iterator[str]:
    """Yield the first failures; ``table.json`` has all."""
    if failed:
        yield f"failed: {len(failed)}; --retry-failed makes them again"
        yield from failed[:FAILURES_SHOWN]
        if len(failed) > FAILURES_SHOWN:
            yield f"and {len(failed) - FAILURES_SHOWN} more"
        yield ""


def _plainly(conclusions: Sequence[str]) -> Iterator[str]:
    """Yield them without what is told place by place; the file has that, too."""
    before = ""
    for line in conclusions:
        if not line.startswith(DETAIL) and (line or before):
            yield line
            before = line


class Telling:
    """Tells points as they come: lines, and on a terminal a bar below them."""

    def __init__(self, asked: Sweep, cells: Sequence[Cell], stream: IO[str]) -> None:
        self._asked, self._stream = asked, stream
        self._cells = {point.key: cell for cell in reversed(cells) for point in cell.points}
        self._bar: Any = None

    def __enter__(self) -> Telling:
        if self._stream.isatty():
            self._bar = _bar(self._stream)
            self._bar.start()
            self._bar.add_task("points", total=None)
        times = self._asked.calibration or f"the one that {self._asked.bench} names"
        self._line(f"simulated: times are those of a calibration, {times}")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, row: Row | None, standing: Standing) -> None:
        """Tell how far the sweep is, and the row that has come."""
        if row is not None:
            self._line(f"{standing.done:>4}/{standing.total}  {self._told(row)}")
        elif standing.done:
            failed = f", {standing.failed} of them failed" if standing.failed else ""
            self._line(f"{standing.done} of {standing.total} points are there already{failed}")
        if self._bar is not None:
            self._bar.update(0, completed=standing.done, total=standing.total)

    def _told(self, row: Row) -> str:
        cell, found = self._cells[row.key], shown(self._asked, row)
        axes = {axis: value for axis, value in cell.place.items() if axis in row.values}
        where = f"{cell.design}: {spoken(axes)}, seed {row.seed}"
        if isinstance(found, str):
            return click.style(f"{where}: failed: {found}", fg="red")
        value = found[self._asked.performance]
        took = f"{row.cpu_s:.1f} s of CPU, {row.peak_mb:,.0f} MB"
        return f"{where}: {figure(value.value)} {value.unit} ({took})"

    def _line(self, text: str) -> None:
        """Write one line; who watches may go, and the sweep goes on."""
        with suppress(OSError):
            if self._bar is not None:
                self._bar.console.print(click.unstyle(text), markup=False, highlight=False)
            else:
                click.echo(text, self._stream)
                self._stream.flush()


def _bar(stream: IO[str]) -> Any:
    from rich import console, progress  # noqa: PLC0415

    return progress.Progress(
        "points",
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        console=console.Console(file=stream),
    )
