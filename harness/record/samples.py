"""From events to metrics: which samples each event gives, and how samples become a `Metric`. Pure.

`harness.model.metrics` names the metrics and says which statistic is each one's headline value.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from harness.clock import NS_PER_MS, NS_PER_S, NS_PER_US
from harness.model.busbw import algbw_gb_per_s, busbw_gb_per_s, max_of_ranks_ns
from harness.model.documents import Event, Metric
from harness.model.metrics import Quantity, Statistic, metric_name, parse_metric, quantities
from harness.model.streams import STAGES, SWITCH_STAGES
from harness.record.intervals import half_width, ratio_half_width
from harness.record.pressure import pressure_samples
from harness.record.rl_samples import rl_samples

DURATIONS_MS = (
    "dark_ms",
    "cost_ms",
    "device_ms",
    "link_ms",
    "communicator_ms",
    "overhead_ms",
)
"""Fields of a reconfiguration that are metrics under their own name."""
SWITCH_FIELDS = (
    "total_ms",
    "blackout_ms",
    "residual_ms",
    "before_tokens_per_s",
    "during_tokens_per_s",
    "after_tokens_per_s",
    "carried",
    "recomputed_tokens",
)
"""The same, of a switch of layouts."""
OUTCOMES = ("switched", "refused", "rolled_back", "lost")


def metrics_of(events: Iterable[Event]) -> dict[str, Metric]:
    """Return every metric that the events give, by name, sorted."""
    return samples_of(events).metrics()


def samples_of(events: Iterable[Event]) -> Samples:
    """Return the samples of every metric that the events give."""
    samples, events = Samples(), list(events)
    for event in events:
        if take := TAKE.get(event.stream):
            take(samples, event.data)
    for base, labels, values in (*rl_samples(events), *pressure_samples(events)):
        samples.add(base, labels, values, total=False)
    return samples


class Samples:
    """Samples by metric name, and what is known of their timing bound."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._bounds: dict[tuple[str, str], list[float]] = defaultdict(list)

    def add(
        self,
        base: str,
        labels: Mapping[str, object],
        values: Iterable[float | None],
        *,
        total: bool = True,
        bound: float | None = None,
    ) -> None:
        """Add samples under their labels and, with `total`, to the metric over all labels.

        Null and NaN are no samples. `bound` is the timing bound of each, in the metric's unit.
        """
        for value in values:
            if value is None or math.isnan(value):
                continue
            for name in {metric_name(base, labels), base if total else metric_name(base, labels)}:
                self._values[base, name].append(value)
                if bound is not None:
                    self._bounds[base, name].append(bound)

    def values(self, name: str) -> list[float]:
        """Return the samples of a metric, in the order they came; none: there is none."""
        return list(self._values.get((parse_metric(name)[0], name), ()))

    def metrics(self) -> dict[str, Metric]:
        """Return all metrics, sorted by name."""
        known = quantities()
        return {
            name: _metric(values, known[base], self._bounds.get((base, name)))
            for (base, name), values in sorted(self._values.items())
        }


def _metric(values: list[float], quantity: Quantity, bounds: list[float] | None) -> Metric:
    ordered = sorted(values)
    plus_minus = max(bounds) if bounds else None
    if quantity.interval:
        of_a_ratio = quantity.value == "geometric"
        plus_minus = ratio_half_width(ordered) if of_a_ratio else half_width(ordered)
    return Metric(
        value=HEADLINE[quantity.value](ordered),
        unit=quantity.unit,
        n=len(ordered),
        min=ordered[0],
        p50=percentile(ordered, 50),
        p95=percentile(ordered, 95),
        p99=percentile(ordered, 99),
        max=ordered[-1],
        plus_minus=plus_minus,
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of sorted, non-empty values, interpolated linearly (numpy's default)."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


HEADLINE: Mapping[Statistic, Callable[[Sequence[float]], float]] = {
    "p50": lambda ordered: percentile(ordered, 50),
    "max": lambda ordered: ordered[-1],
    "sum": math.fsum,
    "mean": statistics.fmean,
    "rate": statistics.harmonic_mean,
    "geometric": statistics.geometric_mean,
}
"""How `value` comes from sorted samples. The harmonic mean of rates is size over mean time."""


# -- collectives -------------------------------------------------------------------------------


def _collective(samples: Samples, row: Mapping[str, Any]) -> None:
    """One row: per iteration the mean and the slowest of ranks; rates from the mean, as nccl-tests.

    `times_ns` has shape (ranks, iterations).
    """
    op, size_bytes, ranks = row["op"], row["size_bytes"], row["ranks"]
    labels = {"path": row["path"], "size": size_bytes, "ranks": ranks}
    if row["group"] != "all":
        labels["group"] = row["group"]
    samples.add("collective.wrong", {}, [row["wrong"]])
    mean_ns = [statistics.fmean(column) for column in zip(*row["times_ns"], strict=True)]
    columns = {
        "wrong": [row["wrong"]],
        "time_us": [t / NS_PER_US for t in mean_ns],
        "time_max_us": [t / NS_PER_US for t in max_of_ranks_ns(row["times_ns"])],
        "algbw_gb_per_s": [algbw_gb_per_s(size_bytes, t) for t in mean_ns if t],
        "busbw_gb_per_s": [busbw_gb_per_s(op, size_bytes, ranks, t) for t in mean_ns if t],
    }
    for name, values in columns.items():
        samples.add(f"collective.{op}.{name}", labels, values, total=False)


# -- reconfigurations --------------------------------------------------------------------------


def _reconfigure(samples: Samples, row: Mapping[str, Any]) -> None:
    labels = {"step": row["step"]}
    samples.add("reconfigure.refused", labels, [1 if row["refused_reason"] else 0])
    if row["refused_reason"]:
        return
    for name in DURATIONS_MS:
        bound = row["dark_plus_minus_ms"] if name == "dark_ms" else None
        samples.add(f"reconfigure.{name}", labels, [row[name]], bound=bound)
    samples.add("reconfigure.kept_lost", labels, [row["kept_lost"]])
    latest_ns: int | None = None
    for stage in STAGES:
        stamp_ns = row["stages"].get(stage)
        if stamp_ns is None:
            continue
        if latest_ns is not None:
            # A stamp of another node may be early by the clock bound: no stage takes less than 0.
            took_ns = max(0, stamp_ns - latest_ns)
            samples.add(f"reconfigure.stage.{stage}_ms", labels, [took_ns / NS_PER_MS])
        latest_ns = stamp_ns if latest_ns is None else max(latest_ns, stamp_ns)


# -- generation --------------------------------------------------------------------------------


def _parallelism(samples: Samples, row: Mapping[str, Any]) -> None:
    """One switch of layouts; only one that was made says what a switch takes."""
    labels = {
        "step": row["step"],
        "from": row["layout_from"],
        "to": row["layout_to"],
        "strategy": row["strategy"],
    }
    for outcome in OUTCOMES:
        samples.add(f"switch.{outcome}", labels, [row["outcome"] == outcome])
    if row["outcome"] != "switched":
        return
    for name in SWITCH_FIELDS:
        samples.add(f"switch.{name}", labels, [row[name]])
    for stage in SWITCH_STAGES:
        samples.add(f"switch.stage.{stage}_ms", labels, [row["stages"].get(stage)])


def _migration(samples: Samples, row: Mapping[str, Any]) -> None:
    step, by, send_ms = row["step"], row["by"], row["send_ms"]
    moved = row["outcome"] == "moved"
    samples.add("migration.kv", {"step": step}, [moved and by == "kv"])
    samples.add("migration.recomputed", {"step": step}, [moved and by == "recompute"])
    samples.add("migration.failed", {"step": step}, [row["outcome"] in ("elsewhere", "failed")])
    if not moved:
        return
    labels = {"step": step, "by": by}
    samples.add("migration.ms", labels, [row["total_ms"]])
    samples.add("migration.expected_ms", labels, [row["expected_ms"]])
    samples.add("migration.send_ms", labels, [send_ms])
    if row["sent_bytes"] and send_ms:
        rate = row["sent_bytes"] / (send_ms * NS_PER_MS)  # bytes per ns is GB/s
        samples.add("migration.gb_per_s", labels, [rate])


def _generated(samples: Samples, row: Mapping[str, Any]) -> None:
    labels = {"step": row["step"]}
    samples.add("generate.requests", labels, [row["finished"]])
    for name in ("refused", "tokens_per_s", "tokens", "lost", "doubled", "preemptions"):
        samples.add(f"generate.{name}", labels, [row[name]])


def _progress(samples: Samples, row: Mapping[str, Any]) -> None:
    labels = {"instance": row["instance"]}
    took_s = (row["t1_ns"] - row["t0_ns"]) / NS_PER_S
    if took_s > 0:
        rate = row["generated_tokens"] / took_s
        samples.add("generate.tokens_per_s", labels, [rate], total=False)
    samples.add("generate.kv_use_pct", labels, [row["kv_use_pct"]])
    samples.add("generate.waiting", labels, [row["waiting"]])


def _given_up(samples: Samples, row: Mapping[str, Any]) -> None:
    del row
    samples.add("generate.given_up", {}, [1])


# -- clocks ------------------------------------------------------------------------------------


def _clock(samples: Samples, row: Mapping[str, Any]) -> None:
    samples.add("clock.bound_us", {"agent": row["agent"]}, [row["bound_ns"] / NS_PER_US])


TAKE: Mapping[str, Callable[[Samples, Mapping[str, Any]], None]] = {
    "collective": _collective,
    "reconfigure": _reconfigure,
    "parallelism": _parallelism,
    "migration": _migration,
    "generated": _generated,
    "progress": _progress,
    "given_up": _given_up,
    "clock": _clock,
}
"""The streams whose events give samples one by one; others look at several together."""
