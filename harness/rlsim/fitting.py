"""A calibration of a simulated bench, fitted to what runs measured; and how far it is off. Pure.

Which figure follows from which stream is said row by row in `harness.rlsim.fits`; here rows become
figures, figures a calibration, and runs that were held out are predicted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

import msgspec

from harness.errors import UsageError
from harness.model.layout import parse_layout
from harness.model.simulation import LOADS, Backend, Calibration, Figure, Range, figures
from harness.rlsim.fits import control, engines, exchanges, syncs
from harness.rlsim.fits.measured import Measured
from harness.rlsim.fits.row import Pooled, Row, pooled
from harness.rlsim.fits.solver import Fit, fit

FOLDS = 5
"""Parts of the rows, each predicted by the others, where no run was held out."""
DIGITS = 4
NOTHING = 1e-9
OF_GLOO = ("collectives.step_us", "collectives.copy_ns_per_kb")
_RL = "an rl step"
MEASURED_BY: Mapping[str, str] = {
    "network.link_share": "collectives over circuits, or an rl step",
    "network.electrical_share": "collectives over the electrical path, or an rl step over it",
    "network.latency_us": "any run",
    "network.burst_kb": "collectives, which do not rest, and an rl step, which does",
    "control.message_us": "a reconfigure step, or a generate step with layouts",
    "control.steer_us": "a reconfigure step, or an rl step with the fabric rfabric",
    "control.read_ms": "a reconfigure step, or an rl step with the fabric rfabric",
    "control.hand_ms": "a reconfigure step, or an rl step with the fabric rfabric",
    "control.switch_ms": "a reconfigure step, or an rl step with the fabric rfabric",
    "control.light_ms": "a reconfigure step, or an rl step with the fabric rfabric",
    "control.serial_ms": "a reconfigure step, of a switch at a serial line",
    "control.ssh_ms": "a reconfigure step, of a switch behind SSH",
    "collectives.step_us": "collectives with gloo, of several sizes",
    "collectives.copy_ns_per_kb": "collectives with gloo, of several sizes",
    "generation.processes_s": 'a generate step with layouts and strategy = "restart"',
    "generation.teardown_s": "a generate step with layouts",
    "generation.groups_s": 'a generate step with layouts and strategy = "rebuild"',
    "generation.weights_fixed_s": "generate steps with layouts, of two values of bytes_scale",
    "generation.weights_gb_per_s": "generate steps with layouts, of two values of bytes_scale",
    "generation.kv_cache_s": "a generate step with layouts",
    "generation.kv_fixed_s": 'a generate step with migrations and migrate_by = "kv"',
    "generation.kv_gb_per_s": 'a generate step with migrations and migrate_by = "kv"',
    "generation.step_share": "a generate step with the paced engine, its profile at its place",
    "training.compute_share": f"{_RL} with a paced trainer",
    "training.phase_us": f"{_RL} with a paced trainer",
    "training.step_fixed_s": f"{_RL} with a paced trainer",
    "sync.gather_fixed_s": f"{_RL}, of two values of bytes_scale",
    "sync.gather_gb_per_s": f"{_RL}, of two values of bytes_scale",
    "sync.carry_fixed_s": f"{_RL} beside a reconfigure step, which tells it from messages",
    "sync.carry_gb_per_s": f"{_RL} with a fast network and few buckets",
    "sync.bucket_us": f"{_RL}s with many buckets and with few",
    "sync.load_fixed_s": f"{_RL}, of two values of bytes_scale",
    "sync.load_gb_per_s": f"{_RL}, of two values of bytes_scale",
}
"""What kind of run tells each figure."""
OPTIONAL = ("network.burst_kb", "control.serial_ms", "control.ssh_ms", "generation.kv_fixed_s")
"""Of what a bench may not have: none where no run speaks of it."""


class Off(NamedTuple):
    """How far predictions of a kind of rows are off, %; `n` rows, pooled."""

    kind: str
    n: int
    mean_pct: float
    """Signed: what is left of it is bias."""
    p50_pct: float
    """Of sizes, signs left out; as `worst_pct`."""
    worst_pct: float


@dataclass(frozen=True)
class Fitted:
    """A calibration, why figures of it are not fitted, and how well it predicts."""

    calibration: Calibration
    held: Mapping[str, str]
    """By figure: why it could not be told, and what stands in its place."""
    residuals: tuple[Off, ...]
    """On what it was fitted to."""
    predicted: tuple[Off, ...]
    """On what it was not."""
    predicted_on: str


def rows_of(measured: Measured) -> list[Row]:
    """Return all that a run says about figures."""
    parts = (control, exchanges, syncs, engines)
    return [row for part in parts for row in part.rows(measured)]


def calibrated(
    fitting: Sequence[Measured],
    held_out: Sequence[Measured],
    *,
    name: str,
    date: str,
    base: Calibration | None = None,
) -> Fitted:
    """Fit a calibration to runs, and predict others, or parts of the same rows.

    Raises `UsageError` where no run says anything, or where figures are missing: what no run tells
    is taken from `base`, and without one it is refused.
    """
    rows = pooled(row for run in fitting for row in rows_of(run))
    if not rows:
        names = ", ".join(run.name for run in fitting)
        raise UsageError(f"{names}: nothing in there tells a figure of a simulated bench")
    stated = {key: figure.value for key, figure in figures(base)} if base else {}
    found = fit(rows, stated)
    backend = _backend(fitting, base)
    tables, held = _tables(found, base, backend)
    calibration = msgspec.convert(
        {
            "name": name,
            "date": date,
            "runs": [run.name for run in fitting],
            "one_machine": any(run.one_machine for run in fitting),
            "fitted": _ranges(fitting),
            **_nested(tables, backend, base),
        },
        Calibration,
    )
    values = {key: figure.value for key, figure in figures(calibration)}
    if held_out:
        unseen = pooled(row for run in held_out for row in rows_of(run))
        predicted = _off((row, row.off_pct(values)) for row in unseen)
        told = f"runs held out: {', '.join(run.name for run in held_out)}"
    else:
        predicted, told = _off(_folded(rows, values)), f"{FOLDS} parts of the rows, in turn"
    residuals = _off((row, row.off_pct(values)) for row in rows)
    return Fitted(calibration, held, residuals, predicted, told)


# -- figures ---------------------------------------------------------------------------------------


def _tables(
    found: Fit, base: Calibration | None, backend: Backend
) -> tuple[dict[str, Figure], dict[str, str]]:
    """Return all figures by name, and why some are not fitted. Raises `UsageError`."""
    stated = dict(figures(base)) if base else {}
    told: dict[str, Figure] = {}
    held = {}
    for name in MEASURED_BY:
        fitted = found.values.get(name)
        if name in found.plus_minus and fitted is not None:
            source = f"fitted to {found.rows_of[name]} measurements"
            told[name] = _figure(fitted, found.plus_minus[name], source)
        elif name in found.held and fitted is not None:
            held[name] = found.held[name]
            told[name] = _figure(fitted, 0.0, f"held: {found.held[name]}")
        elif backend == "nccl" and name in OF_GLOO:
            told[name] = Figure(value=0.0, source="of gloo only")
        elif name in stated:
            assert base is not None
            held[name] = f"no run speaks of it: as in {base.name}"
            source = stated[name].source or "measured there"
            told[name] = msgspec.structs.replace(
                stated[name], source=f"not measured here, as in {base.name}: {source}"
            )
    _refuse_missing([name for name in MEASURED_BY if name not in told and name not in OPTIONAL])
    return told, held


def _refuse_missing(missing: Sequence[str]) -> None:
    """Raise `UsageError`, naming figures and what kind of scenario measures each."""
    if missing:
        raise UsageError(
            "no run speaks of these figures; add runs that do, or take them from a calibration "
            "with --base FILE:\n" + "\n".join(f"  {name}: {MEASURED_BY[name]}" for name in missing)
        )


def _figure(value: float, plus_minus: float, source: str) -> Figure:
    return Figure(value=_rounded(value), plus_minus=_rounded(plus_minus), source=source)


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}") if abs(value) > NOTHING else 0.0


def _nested(
    told: Mapping[str, Figure], backend: Backend, base: Calibration | None
) -> dict[str, dict[str, object]]:
    """Return figures by table and key; which GPUs NCCL joins, the base says."""
    gpu = base.collectives.gpu if base and backend == "nccl" else ""
    found: dict[str, dict[str, object]] = {"collectives": {"backend": backend, "gpu": gpu}}
    for name, figure in told.items():
        table, _, key = name.partition(".")
        found.setdefault(table, {})[key] = figure
    return found


def _backend(runs: Iterable[Measured], base: Calibration | None) -> Backend:
    """Return the collectives' library: what rows name, else the base's, else gloo."""
    told = {row["backend"] for run in runs for row in run.rows("collective")}
    if "nccl" in told:
        return "nccl"
    return base.collectives.backend if base is not None and not told else "gloo"


def _ranges(runs: Iterable[Measured]) -> dict[str, Range]:
    """Return the loads that runs had."""
    seen: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        seen["nodes"].append(len(run.bench.nodes))
        seen["link_mbit_per_s"].append(run.topology.rates.link_mbit_per_s)
        seen["ranks"] += [row["ranks"] for row in run.rows("collective")]
        seen["ranks"] += [parse_layout(f"1x{row['layout']}").gpus for row in run.rows("engine")]
        seen["ranks"] += [run.degrees.ranks] if run.degrees else []
        for stream, field in (
            ("collective", "size_bytes"),
            ("phase", "bytes"),
            ("sync", "bytes"),
            ("migration", "sent_bytes"),
        ):
            seen["size_bytes"] += [row[field] for row in run.rows(stream) if row[field]]
    return {
        load: Range(low=float(min(seen[load])), high=float(max(seen[load])))
        for load in LOADS
        if seen[load]
    }


# -- how well it predicts --------------------------------------------------------------------------


def _folded(rows: Sequence[Pooled], values: Mapping[str, float]) -> list[tuple[Pooled, float]]:
    """Return each row, predicted by a fit to the rows of all other parts."""
    found = []
    for part in range(FOLDS):
        others = [row for number, row in enumerate(rows) if number % FOLDS != part]
        guessed = {**values, **fit(others, values, starts=1).values}
        found += [(row, row.off_pct(guessed)) for row in rows[part::FOLDS]]
    return found


def _off(pairs: Iterable[tuple[Pooled, float]]) -> tuple[Off, ...]:
    """Return how far rows are off, by kind in the order they came."""
    by_kind: dict[str, list[float]] = defaultdict(list)
    for row, off_pct in pairs:
        by_kind[row.kind].append(off_pct)
    return tuple(
        Off(kind, len(found), fmean(found), median(map(abs, found)), max(map(abs, found)))
        for kind, found in by_kind.items()
    )
