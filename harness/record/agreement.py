"""How far a simulated run is off a measured one, metric by metric, as far as spread tells. Pure.

A metric is compared where both runs have it, by its own statistic. The interval of a difference is
that of both runs' means: samples of the measured one scatter, those of the simulated one too where
requests differ from repeat to repeat. A limit that lies inside the interval decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from harness.model.documents import Event, Metric
from harness.model.metrics import parse_metric
from harness.record.intervals import half_width
from harness.record.samples import Samples, samples_of

Kind = Literal["throughput", "communication", "switching"]
Verdict = Literal["within", "beyond", "undecided"]

LIMITS_PCT: Mapping[Kind, float] = {"throughput": 5.0, "communication": 7.0, "switching": 5.0}
"""What a simulation may be off by."""
KINDS: Mapping[str, Kind] = {
    "rl.samples_per_s": "throughput",
    "rl.tokens_per_s": "throughput",
    "rl.step_s": "throughput",
    "rl.batch_s": "throughput",
    "rl.train_s": "throughput",
    "generate.tokens_per_s": "throughput",
    "sync.s": "communication",
    "sync.gather_ms": "communication",
    "sync.wire_ms": "communication",
    "sync.load_ms": "communication",
    "train.phase_ms": "communication",
    "fabric.took_ms": "communication",
    "migration.send_ms": "communication",
    "reconfigure.dark_ms": "switching",
    "reconfigure.cost_ms": "switching",
    "reconfigure.device_ms": "switching",
    "fabric.change_ms": "switching",
    "fabric.device_ms": "switching",
    "switch.total_ms": "switching",
    "switch.blackout_ms": "switching",
}
"""What is compared, and by which limit; times of collectives besides."""
OF_COLLECTIVES = ".time_us"


class Row(NamedTuple):
    """One metric of both runs; `plus_minus_pct` is half of the difference's 95 % interval."""

    metric: str
    unit: str
    kind: Kind
    simulated: float
    measured: float
    n: int
    """Samples of the measured run."""
    difference_pct: float
    plus_minus_pct: float | None
    """None where the measured run has one sample, which says nothing of its spread."""
    verdict: Verdict


class Agreement(NamedTuple):
    """All that both runs have, and what only one of them has."""

    rows: tuple[Row, ...]
    only_simulated: tuple[str, ...]
    only_measured: tuple[str, ...]

    def worst_pct(self, kind: Kind) -> float | None:
        """Return the largest difference of a kind; None where nothing of it was compared."""
        found = [abs(row.difference_pct) for row in self.rows if row.kind == kind]
        return max(found, default=None)

    def mean_pct(self, kind: Kind) -> float | None:
        """Return the mean difference of a kind, signs left out."""
        found = [abs(row.difference_pct) for row in self.rows if row.kind == kind]
        return sum(found) / len(found) if found else None


def agreement(
    simulated: Iterable[Event],
    measured: Iterable[Event],
    limits_pct: Mapping[Kind, float] = LIMITS_PCT,
) -> Agreement:
    """Compare two runs of one scenario."""
    ours, theirs = (_compared(samples_of(events)) for events in (simulated, measured))
    rows = (_row(name, ours[name], theirs[name], limits_pct) for name in ours if name in theirs)
    return Agreement(
        tuple(row for row in rows if row is not None),
        tuple(name for name in ours if name not in theirs),
        tuple(name for name in theirs if name not in ours),
    )


class _Sampled(NamedTuple):
    metric: Metric
    half_width: float | None
    """Of the 95 % interval of its samples' mean."""


def _compared(found: Samples) -> dict[str, _Sampled]:
    """Return the metrics of a run that are compared; of one instance's, only the whole.

    Where steps have theirs, all of them in one say nothing more.
    """
    metrics = found.metrics()
    named = {name: parse_metric(name) for name in metrics}
    in_parts = {base for base, labels in named.values() if "step" in labels}
    return {
        name: _Sampled(metrics[name], half_width(found.values(name)))
        for name, (base, labels) in named.items()
        if _kind(base) is not None
        and "instance" not in labels
        and ("step" in labels or base not in in_parts)
    }


def _kind(base: str) -> Kind | None:
    if base.startswith("collective.") and base.endswith(OF_COLLECTIVES):
        return "communication"
    return KINDS.get(base)


def _row(
    name: str, ours: _Sampled, theirs: _Sampled, limits_pct: Mapping[Kind, float]
) -> Row | None:
    """Return the row of a metric; None where the measured value is 0: no share of it means much."""
    kind = _kind(parse_metric(name)[0])
    assert kind is not None
    simulated, measured = ours.metric, theirs.metric
    if not measured.value:
        return None
    difference = 100 * (simulated.value / measured.value - 1)
    off = None
    if theirs.half_width is not None:
        off = 100 * math.hypot(theirs.half_width, ours.half_width or 0.0) / abs(measured.value)
    return Row(
        metric=name,
        unit=measured.unit,
        kind=kind,
        simulated=simulated.value,
        measured=measured.value,
        n=measured.n,
        difference_pct=difference,
        plus_minus_pct=off,
        verdict=_verdict(difference, off, limits_pct[kind]),
    )


def _verdict(difference_pct: float, plus_minus_pct: float | None, limit_pct: float) -> Verdict:
    """Judge by the interval; a single sample is judged by its value, as there is nothing else."""
    off, room = abs(difference_pct), plus_minus_pct or 0.0
    if off + room <= limit_pct:
        return "within"
    return "beyond" if off - room > limit_pct else "undecided"
