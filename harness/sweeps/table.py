"""Results as a table: CSV, JSON and lines of text, a unit to every column. Pure.

A row is a design at a place. What has no value is null in JSON, empty in CSV and ``-`` in text.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

from harness.model.metrics import parse_metric, quantities
from harness.record.figures import DASH, bound_only, figure, with_interval
from harness.rlsim.economics import aligned
from harness.sweeps.results import Estimate, Result, at, by_place, ratio
from harness.sweeps.sweep import Sweep

Cell = str | int | float | bool | None
COUNT, NAME, RATIO, TEXT = "count", "name", "ratio", "text"
ENDINGS = {
    "gbit_per_s": "Gbit/s",
    "ns": "ns",
    "us": "us",
    "ms": "ms",
    "s": "s",
    "oversubscription": "ratio",
    "fabric": NAME,
    "circuits": NAME,
}
"""How the name of an axis ends, and the unit that says; any other is a count."""
MILLION, THOUSAND = 1e6, 1e3
SAME = 1e-9
"""A share of a value that is a matter of how numbers are rounded."""
FOUR_DIGITS = 1e-3
WORTH = {
    "per_network_usd": ("per_network_musd", "M$", MILLION),
    "per_usd": ("per_cluster_musd", "M$", MILLION),
    "per_network_w": ("per_network_kw", "kW", THOUSAND),
    "per_w": ("per_cluster_kw", "kW", THOUSAND),
}
"""Figure of `Worth` -> column, the divisor's unit there, and how many of its own that is."""


class Column(NamedTuple):
    """A column's name and unit."""

    name: str
    unit: str


class Table(NamedTuple):
    """Columns, and rows of as many cells."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


def unit_of(axis: str) -> str:
    """Return the unit of an axis, by its name."""
    fits = [ending for ending in ENDINGS if axis == ending or axis.endswith(f"_{ending}")]
    return ENDINGS[max(fits, key=len)] if fits else COUNT


def stem_of(axis: str) -> str:
    """Return the name of an axis without its unit, for a reader."""
    unit = unit_of(axis)
    fits = [f"_{ending}" for ending, of in ENDINGS.items() if of == unit]
    longest = max((end for end in fits if axis.endswith(end)), key=len, default="")
    return axis.removesuffix(longest).replace("_", " ")


def unit_of_metric(metric: str) -> str:
    """Return the unit of a metric."""
    return quantities()[parse_metric(metric)[0]].unit or RATIO


def table_of(sweep: Sweep, results: Sequence[Result]) -> Table:
    """Return all that was found."""
    rows = []
    for there in by_place(results):
        baseline = at(there, sweep.baseline)
        rows += [_row(sweep, result, baseline) for result in there]
    return Table(_columns(sweep), tuple(rows))


def _columns(sweep: Sweep) -> tuple[Column, ...]:
    unit = unit_of_metric(sweep.performance)
    metrics = [Column(name, unit_of_metric(name)) for name in sweep.metrics]
    return (
        Column("design", NAME),
        *(Column(axis, unit_of(axis)) for axis in sweep.axes),
        Column("seeds", COUNT),
        *_pair(sweep.performance, unit),
        *_pair("gain_over_baseline", RATIO),
        Column("network_usd", "$"),
        Column("cluster_usd", "$"),
        Column("network_w", "W"),
        Column("cluster_w", "W"),
        *(Column(name, f"{unit} per {of}") for name, of, _ in WORTH.values()),
        *(column for metric in metrics for column in _pair(*metric)),
        Column("cpu_s", "s"),
        Column("peak_mb", "MB"),
        Column("status", TEXT),
    )


def _pair(name: str, unit: str) -> tuple[Column, Column]:
    return Column(name, unit), Column(f"{name}_plus_minus", unit)


def _row(sweep: Sweep, result: Result, baseline: Result | None) -> tuple[Cell, ...]:
    gain = ratio(result, baseline) if baseline else None
    metrics = [result.metrics.get(name) for name in sweep.metrics]
    return (
        result.design,
        *(result.place[axis] for axis in sweep.axes),
        len(result.by_seed),
        *_both(result.performance),
        *_both(gain),
        *_divisors(result),
        *(_value(merit.times(by) if (merit := result.merit(name)) else None)
          for name, (_, _, by) in WORTH.items()),
        *(cell for metric in metrics for cell in _both(metric)),
        result.cpu_s,
        result.peak_mb,
        "; ".join((*result.errors, *result.doubts)) or "ok",
    )  # fmt: skip


def _both(estimate: Estimate | None) -> tuple[Cell, Cell]:
    return (None, None) if estimate is None else (estimate.value, estimate.plus_minus)


def _value(estimate: Estimate | None) -> Cell:
    return None if estimate is None else estimate.value


def _divisors(result: Result) -> tuple[Cell, ...]:
    """Return $ and W, each of the network and of it with its GPUs; as `Worth` divided by."""
    share = result.share
    return tuple(
        None if each is None else 1 / each
        for each in (share.per_network_usd, share.per_usd, share.per_network_w, share.per_w)
    )


# -- its forms -------------------------------------------------------------------------------------


def csv_text(table: Table) -> str:
    """Return it as CSV; a head such as ``switching_ms [ms]``."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(f"{name} [{unit}]" for name, unit in table.columns)
    writer.writerows(table.rows)
    return out.getvalue()


def json_value(table: Table) -> dict[str, Any]:
    """Return it as a value for JSON."""
    names = [column.name for column in table.columns]
    return {
        "columns": [column._asdict() for column in table.columns],
        "rows": [dict(zip(names, row, strict=True)) for row in table.rows],
    }


def text_lines(sweep: Sweep, results: Sequence[Result]) -> list[str]:
    """Return what matters of it as aligned lines: names, units, then a line a design and place."""
    unit = unit_of_metric(sweep.performance)
    columns = [
        Column("design", ""),
        *(Column(axis, unit_of(axis)) for axis in sweep.axes),
        Column(sweep.performance, unit),
        Column("gain", f"x {sweep.baseline}"),
        Column("network", "M$"),
        Column("with GPUs", "M$"),
        *(Column(f"{unit} per", f"network {of}" if "network" in name else f"{of} with GPUs")
          for name, of, _ in WORTH.values()),
        Column("", ""),
    ]  # fmt: skip
    rows = [tuple(column.name for column in columns), tuple(column.unit for column in columns)]
    for there in by_place(results):
        baseline = at(there, sweep.baseline)
        rows += [_text_row(sweep, result, baseline) for result in there]
    return aligned(rows)


def _text_row(sweep: Sweep, result: Result, baseline: Result | None) -> tuple[str, ...]:
    network, cluster, *_ = _divisors(result)
    merits = [
        merit.times(by) if (merit := result.merit(name)) else None
        for name, (_, _, by) in WORTH.items()
    ]
    return (
        result.design,
        *(str(result.place[axis]) for axis in sweep.axes),
        told(result.performance),
        told(ratio(result, baseline) if baseline else None),
        *(DASH if usd is None else figure(float(usd) / MILLION) for usd in (network, cluster)),
        *(DASH if merit is None else figure(merit.value) for merit in merits),
        "failed" if result.errors else "",
    )


def told(estimate: Estimate | None) -> str:
    """Write an estimate for a reader: never more than four digits, however small its spread."""
    if estimate is None:
        return DASH
    value, spread, _ = estimate
    if spread is not None and SAME * abs(value) < spread < FOUR_DIGITS * abs(value):
        return f"{figure(value)} ±{bound_only(spread)}"
    return with_interval(value, spread)
