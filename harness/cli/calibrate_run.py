"""``harness calibrate RUN``: what runs measured, as the figures of a simulated bench."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.cli.measured import read_measured
from harness.cli.output import best_effort, json_option, refuse_taken, show, write_new
from harness.cli.runs import runs_option
from harness.clock import RealClock
from harness.errors import ExitCode, UsageError
from harness.model.load import load_calibration
from harness.model.simulation import figures
from harness.model.simulation_text import calibration_text
from harness.record import store
from harness.rlsim.fits.measured import Measured

if TYPE_CHECKING:
    from harness.rlsim.fitting import Fitted, Off

FILE = click.Path(path_type=Path)


@click.command()
@click.argument("measured", metavar="RUN...", nargs=-1, required=True)
@click.option("--out", type=FILE, required=True, metavar="FILE", help="Calibration to write.")
@click.option("--force", is_flag=True, help="Write over a file that is there.")
@click.option(
    "--hold-out",
    multiple=True,
    metavar="RUN",
    help="Predict this run instead of fitting to it; may be given several times.",
)
@click.option(
    "--base",
    "base_path",
    type=FILE,
    metavar="FILE",
    help="Calibration that figures are taken from which no run tells.",
)
@click.option("--mixed", is_flag=True, help="Take runs of different benches or link rates.")
@click.option("--name", default="", help="What the calibration is called; none: as its file.")
@runs_option
@json_option
def run(
    *,
    measured: tuple[str, ...],
    out: Path,
    force: bool,
    hold_out: tuple[str, ...],
    base_path: Path | None,
    mixed: bool,
    name: str,
    runs: Path,
    as_json: bool,
) -> int:
    """Fit a calibration of a simulated bench to runs of an emulated or a live one.

    Figures are fitted by least squares to what the runs measured, with 95 % intervals, and written
    to a file that a simulated bench names. What could not be told is said, and held. Runs that are
    held out are predicted; where none is, parts of the measurements are, in turn.

    \b
    harness calibrate run latest --out bench.toml --base scenarios/calibrations/h800.toml
    harness calibrate run RUN RUN --hold-out RUN --out bench.toml
    """
    from harness.rlsim.fitting import calibrated  # noqa: PLC0415 - it takes a while to import

    refuse_taken(out, force=force)
    base = load_calibration(base_path) if base_path else None
    fitting, doubts = _read(measured, runs)
    unseen, more = _read(hold_out, runs)
    _refuse(fitting, unseen, mixed=mixed)
    date = RealClock().wall().date().isoformat()
    found = calibrated(fitting, unseen, name=name or out.stem, date=date, base=base)
    told = [*_doubts(doubts + more), *_told(found)]
    heading = ["Fitted by harness calibrate, to runs of these scenarios:", *_asked(fitting), *told]
    write_new(out, calibration_text(found.calibration, heading), force=force)
    with best_effort():
        text = "\n".join([*_figures(found), "", *told, "", f"written: {out}"])
        show(_as_json(found, out, doubts + more), text, as_json=as_json)
    return ExitCode.PASSED


def _read(names: Iterable[str], runs: Path) -> tuple[list[Measured], list[str]]:
    folders = {folder.id: folder for folder in (store.find(runs, name) for name in names)}
    readings = [read_measured(folder) for folder in folders.values()]
    return [one.run for one in readings], [doubt for one in readings for doubt in one.doubts]


def _refuse(fitting: Sequence[Measured], unseen: Sequence[Measured], *, mixed: bool) -> None:
    """Raise `UsageError` where runs can't be fitted together, or predict themselves."""
    if twice := sorted({run.name for run in fitting} & {run.name for run in unseen}):
        raise UsageError(f"{', '.join(twice)}: fitted to and held out; do one of both")
    worlds = {run.bench.world: run.name for run in (*fitting, *unseen)}
    if len(worlds) > 1:
        told = ", ".join(f"{name} is {world}" for world, name in worlds.items())
        raise UsageError(f"one calibration is of one world, but {told}")
    benches: dict[str, list[str]] = {}
    for one in fitting:
        rate = one.topology.rates.link_mbit_per_s
        benches.setdefault(f"{one.bench.name} at {rate:g} Mbit/s", []).append(one.name)
    if len(benches) > 1 and not mixed:
        told = "; ".join(f"{bench}: {', '.join(names)}" for bench, names in benches.items())
        raise UsageError(
            f"runs of different benches: {told}. Give those of one, or say --mixed where the "
            "figures are taken to be the same on all of them"
        )


# -- what is told ----------------------------------------------------------------------------------


def _asked(runs: Iterable[Measured]) -> Iterator[str]:
    return (f"  {one.name}: {one.scenario.question}" for one in runs)


def _doubts(doubts: Sequence[str]) -> list[str]:
    return ["", "Doubtful:", *(f"  {doubt}" for doubt in doubts)] if doubts else []


def _told(found: Fitted) -> Iterator[str]:
    """Yield what is not fitted, and how far predictions are off."""
    if found.held:
        yield from ("", "Not fitted:", *(f"  {name}: {why}" for name, why in found.held.items()))
    yield from ("", "Off on what it was fitted to:", *_rows(found.residuals))
    yield from ("", f"Off on what it was not fitted to ({found.predicted_on}):")
    yield from _rows(found.predicted)


def _rows(rows: Iterable[Off]) -> Iterator[str]:
    yield f"  {'kind':24}{'rows':>6}{'mean, %':>10}{'p50, %':>10}{'worst, %':>10}"
    for row in rows:
        off = f"{row.mean_pct:>+10.1f}{row.p50_pct:>10.1f}{row.worst_pct:>10.1f}"
        yield f"  {row.kind:24}{row.n:>6}{off}"


def _figures(found: Fitted) -> Iterator[str]:
    yield f"  {'figure':30}{'value':>12}{'+/-':>12}  from"
    for name, figure in figures(found.calibration):
        spread = f"{figure.plus_minus:.3g}" if figure.plus_minus else "-"
        yield f"  {name:30}{figure.value:>12.4g}{spread:>12}  {figure.source}"


def _as_json(found: Fitted, out: Path, doubts: Sequence[str]) -> dict[str, object]:
    return {
        "calibration": str(out),
        "figures": dict(figures(found.calibration)),
        "held": dict(found.held),
        "residuals": [row._asdict() for row in found.residuals],
        "predicted": [row._asdict() for row in found.predicted],
        "predicted_on": found.predicted_on,
        "doubts": list(doubts),
    }
