"""What generation came to, for a reader: steps, instances, switches of layouts, migrations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from harness.model.documents import Metric
from harness.model.metrics import metric_name, parse_metric
from harness.model.streams import SWITCH_STAGES
from harness.record.figures import DASH, figure
from harness.record.section import Section

Metrics = Mapping[str, Metric]
Labels = dict[str, str]

STEPS = ("step", "requests", "refused", "tokens", "tokens/s", "lost", "doubled", "preempted")
INSTANCES = ("instance", "tokens/s", "KV %", "waiting")
SWITCHES = ("switch", "step", "n", "blackout", "max", "total", "before", "during", "after")
SWITCH_UNITS = (
    "blackout: ms, last token before to first token after, median and longest. total: mean ms,",
    "intent to steady. before, during, after: tokens/s, medians, over up to 2 s next to a switch.",
)
MIGRATIONS = ("step", "by", "n", "expected", "took", "p95", "sending", "GB/s")
MIGRATION_UNITS = (
    "took: ms, withdrawn to the first token at the target, median; expected: as it was forecast.",
    "sending, GB/s: KV on its way, and its rate.",
)


def generation_sections(metrics: Metrics) -> Iterator[Section]:
    """Yield the parts of the report that are about generation; none where nothing generated."""
    if steps := _labels(metrics, "generate.requests"):
        yield Section("Generation", (), STEPS, [_step(metrics, step) for step in steps], ())
    places = [labels for labels in _labels(metrics, "generate.waiting") if "instance" in labels]
    if places:
        rows = [_instance(metrics, labels) for labels in places]
        title = "Instances, means while each was up"
        yield Section(title, tuple(_given_up(metrics)), INSTANCES, rows)
    yield from _switches(metrics)
    if moved := _labels(metrics, "migration.ms"):
        lines = (_moves(metrics), *MIGRATION_UNITS)
        rows = [_migration(metrics, labels) for labels in moved]
        yield Section("Migrations", lines, MIGRATIONS, rows, (1,))


def _labels(metrics: Metrics, base: str) -> list[Labels]:
    """Return the labels of every metric of this base, by step."""
    parsed = (parse_metric(name) for name in metrics)
    found = [labels for other, labels in parsed if other == base and labels]
    return sorted(found, key=lambda labels: int(labels.get("step", 0)))


def _value(metrics: Metrics, base: str, labels: Mapping[str, object] | None = None) -> str:
    metric = metrics.get(metric_name(base, labels))
    return figure(metric.value) if metric else DASH


def _count(metrics: Metrics, base: str, labels: Mapping[str, object] | None = None) -> str:
    metric = metrics.get(metric_name(base, labels))
    return f"{metric.value:,.0f}" if metric else DASH


# -- steps and instances -----------------------------------------------------------------------


def _step(metrics: Metrics, labels: Labels) -> tuple[str, ...]:
    names = ("requests", "refused", "tokens", "tokens_per_s", "lost", "doubled", "preemptions")
    return labels["step"], *(_count(metrics, f"generate.{name}", labels) for name in names)


def _instance(metrics: Metrics, labels: Labels) -> tuple[str, ...]:
    return (
        labels["instance"],
        _count(metrics, "generate.tokens_per_s", labels),
        _value(metrics, "generate.kv_use_pct", labels),
        _value(metrics, "generate.waiting", labels),
    )


def _given_up(metrics: Metrics) -> Iterator[str]:
    if "generate.given_up" in metrics:
        count = _count(metrics, "generate.given_up")
        yield f"{count} given up: dead, or without a token for too long; its requests went on"


# -- switches of layouts -----------------------------------------------------------------------


def _switches(metrics: Metrics) -> Iterator[Section]:
    tried = _labels(metrics, "switch.switched")
    if not tried:
        return
    made = [labels for labels in tried if metric_name("switch.total_ms", labels) in metrics]
    rows = [_switch(metrics, labels) for labels in made]
    lines = (*_outcomes(metrics), *(SWITCH_UNITS if made else ()))
    yield Section("Switches of layouts", lines, SWITCHES, rows)
    if made:
        several = len({labels["step"] for labels in made}) > 1
        ways = (_way(labels) + f" step {labels['step']}" * several for labels in made)
        columns = ("ms", *ways)
        title = "Stages of switches: mean ms; with the residual (messages) they sum to the total"
        yield Section(title, (), columns, list(_stages(metrics, made)))


def _outcomes(metrics: Metrics) -> Iterator[str]:
    counts = {name: _count(metrics, f"switch.{name}") for name in ("switched", "refused", "lost")}
    text = f"{counts['switched']} made, {counts['refused']} refused"
    text += f", {_count(metrics, 'switch.rolled_back')} rolled back"
    yield text + f", {counts['lost']} not undone" * (counts["lost"] != "0")
    if "switch.carried" in metrics:
        carried, anew = (_count(metrics, f"switch.{n}") for n in ("carried", "recomputed_tokens"))
        yield f"{carried} requests carried over, {anew} tokens of their context computed anew"


def _way(labels: Labels) -> str:
    return f"{labels['from']} > {labels['to']} {labels['strategy']}"


def _switch(metrics: Metrics, labels: Labels) -> tuple[str, ...]:
    blackout = metrics.get(metric_name("switch.blackout_ms", labels))
    return (
        _way(labels),
        labels["step"],
        str(metrics[metric_name("switch.total_ms", labels)].n),
        figure(blackout.p50) if blackout else DASH,
        figure(blackout.max) if blackout else DASH,
        _value(metrics, "switch.total_ms", labels),
        *(
            _count(metrics, f"switch.{when}_tokens_per_s", labels)
            for when in ("before", "during", "after")
        ),
    )


def _stages(metrics: Metrics, made: list[Labels]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each stage that any of the switches had, then what no stage has, and all."""
    names = [*(f"stage.{stage}_ms" for stage in SWITCH_STAGES), "residual_ms", "total_ms"]
    for name in names:
        values = [_value(metrics, f"switch.{name}", labels) for labels in made]
        if any(value != DASH for value in values):
            yield name.removeprefix("stage.").removesuffix("_ms"), *values


# -- migrations --------------------------------------------------------------------------------


def _moves(metrics: Metrics) -> str:
    kv, anew, failed = (_count(metrics, f"migration.{n}") for n in ("kv", "recomputed", "failed"))
    return f"{kv} with their KV, {anew} computed anew, {failed} did not get to their target"


def _migration(metrics: Metrics, labels: Labels) -> tuple[str, ...]:
    took = metrics[metric_name("migration.ms", labels)]
    return (
        labels["step"],
        labels["by"],
        str(took.n),
        _value(metrics, "migration.expected_ms", labels),
        figure(took.p50),
        figure(took.p95),
        _value(metrics, "migration.send_ms", labels),
        _value(metrics, "migration.gb_per_s", labels),
    )
