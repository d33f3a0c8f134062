"""What circuits that follow the work came to, for a reader: times, decisions, changes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from harness.model.documents import Metric, RunSummary
from harness.model.metrics import metric_name
from harness.record.fabric_samples import (
    PHASES,
    CircuitDecision,
    FabricLoop,
    PartEvent,
    way_of,
)
from harness.record.figures import DASH, figure, with_interval
from harness.record.section import Section

Metrics = Mapping[str, Metric]
Labels = Mapping[str, object]

TIMES = ("policy", "n", *PHASES)
TIME_UNITS = (
    "s, mean over n steps of all repeats ± half of the 95 % confidence interval (Student's t).",
    "gather: the trainer writes its weights; sync: they are on the wire; load: engines take them.",
)
COMPARED = ("train", "gather", "sync", "step")
GAINS = ("policy", "over", "n", *COMPARED)
GAIN_UNITS = (
    "over electrical: how many times faster; over ideal: which share of its speed, %. Ratios of",
    "times step by step, n pairs, geometric mean ± half of the 95 % confidence interval.",
)
DECISIONS = (
    *("policy", "at", "for", "action", "times", "MB", "as it is", "planned", "electrical"),
    *("circuits", "why"),
)
DECISION_UNITS = (
    "at: s since the loop's first step began, of the first of so many times; figures and why: of",
    "the last. MB: payload between ToRs that it is about. as it is, planned, electrical: predicted",
    "ms, over the circuits that are up, over those planned with their change, and without any.",
    "circuits: how many join which ToRs then.",
)
CHANGES = (
    *("policy", "n", "total", "p95", "device", "p95", "degraded", "failed"),
    *("kept", "dropped", "broken", "solving"),
)
CHANGE_UNITS = (
    "total: ms from the decision to the last route, median; device: of it, switches and light.",
    "degraded: part of it stayed electrical. kept, dropped: decisions to change nothing, and those",
    "whose window was over. broken: parts. solving: ms, the controller's own time for a decision.",
)
PARTS = ("policy", "at", "part", "state", "why")
PART_UNITS = ("at: s since the loop's first step began.",)
TRAFFIC = ("policy", "kind", "n", "took", "announced", "measured", "circuits", "off %")
TRAFFIC_UNITS = (
    "took: ms, with the work in it. announced: MB of payload between ToRs; measured: % of that, by",
    "the counters of the ToRs' ports; circuits: % of it over them. off: of the predicted time, in",
    "the median, where a decision was about this kind alone.",
)
NAMED = 4
"""Pairs of ToRs that are named; the rest are counted."""
BESIDE = {"electrical": ("electrical",), "ideal": ("electrical", "ideal")}
"""With which fabric others are compared, and which are not: itself, and what it is gained over."""
SAID = re.compile(r"^(changed|kept|electrical|dropped): ")
"""How a reason begins: with its action, which has a column of its own."""


def fabric_sections(summary: RunSummary) -> Iterator[Section]:
    """Yield the parts of the report that are about circuits; none where loops have no network."""
    metrics = summary.metrics
    loops = [loop for loop in summary.loops if isinstance(loop, FabricLoop)]
    for step in dict.fromkeys(loop.step for loop in loops):
        arms = [loop for loop in loops if loop.step == step]
        yield _times(metrics, step, arms)
        parts = (
            (f"Gain of each fabric, RL step {step}", GAIN_UNITS, GAINS, _gains(metrics, arms)),
            ("Circuits: what was decided", DECISION_UNITS, DECISIONS, _decisions(arms)),
            ("Circuits: changes, all repeats", CHANGE_UNITS, CHANGES, _changes(metrics, arms)),
            ("Parts of the fabric that broke, or are back", PART_UNITS, PARTS, _parts(arms)),
            ("Traffic: as announced, and as it was", TRAFFIC_UNITS, TRAFFIC, _all(metrics, arms)),
        )
        for title, units, columns, found in parts:
            if rows := list(found):
                yield Section(title, units, columns, rows, _text(columns))


def _text(columns: Sequence[str]) -> tuple[int, ...]:
    """Return which columns hold words."""
    words = ("policy", "over", "for", "action", "circuits", "why", "part", "state", "kind")
    numbers = "circuits" if columns is TRAFFIC else ""
    return tuple(i for i, name in enumerate(columns) if name in words and name != numbers)


def _labels(loop: FabricLoop, **more: object) -> dict[str, object]:
    return {"step": loop.step, "policy": loop.policy, **more}


def _get(metrics: Metrics, base: str, labels: Labels) -> Metric | None:
    return metrics.get(metric_name(f"fabric.{base}", labels))


def _value(metrics: Metrics, base: str, labels: Labels, times: float = 1.0) -> str:
    """Write a metric's value, with its confidence interval if it has one."""
    metric = _get(metrics, base, labels)
    if metric is None:
        return DASH
    wide = None if metric.plus_minus is None else metric.plus_minus * times
    return with_interval(metric.value * times, wide)


def _count(metrics: Metrics, base: str, labels: Labels) -> str:
    metric = _get(metrics, base, labels)
    return f"{metric.value:,.0f}" if metric else DASH


# -- times, and what is gained ---------------------------------------------------------------------


def _times(metrics: Metrics, step: int, arms: Sequence[FabricLoop]) -> Section:
    rows = []
    for loop in arms:
        whole = _get(metrics, "phase_ms", _labels(loop, phase="step"))
        times = (_value(metrics, "phase_ms", _labels(loop, phase=p), 1e-3) for p in PHASES)
        rows.append((loop.policy, str(whole.n) if whole else "0", *times))
    return Section(f"Phases under each fabric, RL step {step}", TIME_UNITS, TIMES, rows)


def _gains(metrics: Metrics, arms: Sequence[FabricLoop]) -> Iterator[tuple[str, ...]]:
    """Yield how many times faster each arm is than electrical, then its share of ideal in %."""
    for (network, left_out), times in zip(BESIDE.items(), (1.0, 100.0), strict=True):
        for loop in arms:
            way = way_of(loop.policy)
            over = f"{way.policy}@{network}"
            whole = _get(metrics, "gain", _labels(loop, phase="step", over=over))
            if whole is None or way.network in left_out:
                continue
            found = (_labels(loop, phase=phase, over=over) for phase in COMPARED)
            ratios = (_value(metrics, "gain", labels, times) for labels in found)
            yield loop.policy, network, str(whole.n), *ratios


# -- decisions, changes, parts ---------------------------------------------------------------------


def _decisions(arms: Sequence[FabricLoop]) -> Iterator[tuple[str, ...]]:
    """Yield what was decided in each arm's last repeat; what was decided again is one row."""
    for loop in arms:
        yield from (_decision(loop.policy, one) for one in loop.circuits)


def _decision(policy: str, one: CircuitDecision) -> tuple[str, ...]:
    return (
        policy,
        f"{one.at_s:.1f}",
        one.kind,
        one.action,
        str(one.count),
        f"{one.bytes / 1e6:,.1f}",
        *(f"{ms:,.0f}" for ms in (one.keep_ms, one.change_ms, one.electrical_ms)),
        _joined(one.circuits),
        SAID.sub("", one.reason),
    )


def _joined(circuits: Mapping[str, int]) -> str:
    """Name pairs of ToRs that circuits join: ``2 t0-t1``; ``+ 7`` pairs where there are more."""
    named = [f"{count} {pair}" for pair, count in circuits.items()]
    more = f" + {len(named) - NAMED}" if len(named) > NAMED else ""
    return (", ".join(named[:NAMED]) or "none") + more


def _changes(metrics: Metrics, arms: Sequence[FabricLoop]) -> Iterator[tuple[str, ...]]:
    for loop in arms:
        labels = _labels(loop)
        if _get(metrics, "changes", labels) is None:
            continue
        totals = (_get(metrics, name, labels) for name in ("change_ms", "device_ms"))
        spread = ((figure(m.p50), figure(m.p95)) if m else (DASH, DASH) for m in totals)
        yield (
            loop.policy,
            _count(metrics, "changes", labels),
            *(cell for pair in spread for cell in pair),
            *(
                _count(metrics, name, labels)
                for name in ("degraded", "failed", "kept", "dropped", "broken")
            ),
            _value(metrics, "solve_ms", labels),
        )


def _parts(arms: Sequence[FabricLoop]) -> Iterator[tuple[str, ...]]:
    for loop in arms:
        yield from (_part(loop.policy, one) for one in loop.parts)


def _part(policy: str, one: PartEvent) -> tuple[str, ...]:
    return policy, f"{one.at_s:.1f}", one.part, one.state, one.reason


# -- traffic ---------------------------------------------------------------------------------------


def _all(metrics: Metrics, arms: Sequence[FabricLoop]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each arm and kind of traffic."""
    for loop in arms:
        for kind in ("train", "gather", "sync"):
            labels = _labels(loop, kind=kind)
            took = _get(metrics, "took_ms", labels)
            if took is None:
                continue
            announced = _get(metrics, "announced_bytes", labels)
            yield (
                loop.policy,
                kind,
                str(took.n),
                figure(took.value),
                f"{announced.value / 1e6:,.1f}" if announced else DASH,
                _value(metrics, "measured_over_announced", labels, 100),
                _share(metrics, labels),
                _value(metrics, "predicted_error_pct", labels),
            )


def _share(metrics: Metrics, labels: Labels) -> str:
    share = _get(metrics, "circuits_share_pct", labels)
    return f"{share.value:.1f}" if share else DASH
