"""The report of a run, for a reader: derived from its summary, in plain lines or rich tables.

What the results depend on (emulation, missing rights, a journal cut short) stands in the first
lines. The plain form is stable and aligned; the rich one is for terminals. Both show the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

from harness.model.documents import CheckResult, Metric, RunSummary
from harness.model.listing import few
from harness.model.metrics import metric_name, parse_metric
from harness.model.scenario_rules import ELECTRICAL
from harness.model.streams import STAGES
from harness.record.fabric import fabric_sections
from harness.record.figures import DASH, bound_only, figure, size, with_bound
from harness.record.generation import generation_sections
from harness.record.pressure import cpu_waited
from harness.record.rl import rl_sections
from harness.record.section import Section

COLLECTIVES = (
    "mean, slowest: time of an iteration, us, over all ranks and of the slowest one. algbw: GB/s,",
    "size over mean time. busbw: GB/s, algbw scaled by what the operation must move, as nccl-tests",
    "does, so that it compares with the rate of one link whatever the ranks. wrong: elements.",
)
COLOURS = {"passed": "green", "failed": "red", "unknown": "yellow"}
ROW = ("op", "path", "size", "ranks", "n", "mean", "slowest", "algbw", "busbw", "wrong")
ACCOUNTS = (
    ("dark", "last good to first good packet on a circuit that moves"),
    ("cost", "intent to steady; the sum of the four below"),
    ("device", "switches and their light"),
    ("link", "from light to the expected far end"),
    ("communicator", "the traffic's own time"),
    ("overhead", "ours"),
)


def text_report(summary: RunSummary, folder: Path | None = None) -> str:
    """Return the report as plain lines, without a line end."""
    parts = []
    for section in sections(summary, folder):
        lines = [section.title, *(f"  {line}" for line in section.lines)]
        parts.append("\n".join([*lines, *_aligned(section)]))
    return "\n\n".join(parts)


def print_report(summary: RunSummary, stream: IO[str], folder: Path | None = None) -> None:
    """Write the report: rich tables where `stream` is a terminal, plain lines elsewhere."""
    if not stream.isatty():
        stream.write(text_report(summary, folder) + "\n")
        return
    # Imported here: whoever asks for plain text does not wait for it.
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    console = Console(file=stream, highlight=False, markup=False)
    for section in sections(summary, folder):
        console.print(section.title, style="bold")
        for line in section.lines:
            console.print(f"  {line}", soft_wrap=True)
        if section.rows:
            table = Table(box=None, padding=(0, 1, 0, 1), collapse_padding=True, header_style="dim")
            for i, column in enumerate(section.columns):
                if i in section.text:
                    table.add_column(column, overflow="fold")
                else:  # half a number is a wrong number
                    table.add_column(column, justify="right", no_wrap=True, min_width=len(column))
            for row in section.rows:
                table.add_row(*row, style=COLOURS.get(row[0]))
            console.print(table)
        console.print()


def sections(summary: RunSummary, folder: Path | None = None) -> Iterator[Section]:
    """Yield the parts of the report, in order; empty ones are left out."""
    yield _head(summary)
    if summary.parts:
        lines, parts = cpu_waited(summary.metrics), list(_parts(summary))
        yield Section(_bench_title(summary), lines, ("part", "what"), parts, (0, 1))
    if rows := list(_collectives(summary)):
        yield Section("Collectives", COLLECTIVES, ROW, rows, (0, 1))
    yield from _reconfigurations(summary)
    yield from rl_sections(summary)
    yield from fabric_sections(summary)
    yield from generation_sections(summary.metrics)
    if summary.checks:
        found = [(check.verdict, check.text, _found(check)) for check in summary.checks]
        yield Section("Checks", (), ("verdict", "check", "found"), found, (0, 1))
    yield from _end(summary, folder)


def _found(check: CheckResult) -> str:
    """Write what a check found: a count as one, anything else with its bound."""
    if check.found is not None and check.found.is_integer() and not check.plus_minus:
        return f"{check.found:,.0f}"
    return with_bound(check.found, check.plus_minus)


def _head(summary: RunSummary) -> Section:
    lines = [f"note: {note}" for note in summary.notes]
    lines.append(f"question: {summary.question}" if summary.question else "")
    when = "in simulated time" if summary.world == "simulated" else f"started {summary.started}"
    lines.append(f"scenario {summary.scenario}, seed {summary.seed}, {when}")
    reason = f": {summary.reason}" if summary.reason else ""
    code = "" if summary.exit_code is None else f" (exit code {summary.exit_code})"
    lines.append(f"{summary.status}{code}{reason}")
    return Section(f"Run {summary.id}", [line for line in lines if line])


def _bench_title(summary: RunSummary) -> str:
    title = f"Bench {summary.bench} ({summary.world})"
    bound = summary.metrics.get("clock.bound_us")
    if bound is None or not bound.max:  # on a simulated bench all go by one clock
        return title
    return f"{title}, clocks within ±{bound_only(bound.max)} us of the coordinator's"


def _parts(summary: RunSummary) -> Iterator[tuple[str, str]]:
    """Yield each switch, and agents that are alike in one row."""
    alike: dict[str, list[str]] = {}
    for name, what in sorted(summary.parts.items()):
        alike.setdefault(what, []).append(name)
    for what, names in alike.items():
        yield few(names, 8), what


# -- collectives -------------------------------------------------------------------------------


def _collectives(summary: RunSummary) -> Iterator[tuple[str, ...]]:
    """One row for each operation, path, size and group, in that order."""
    found = []
    for name in summary.metrics:
        base, labels = parse_metric(name)
        if base.startswith("collective.") and base.endswith(".time_us"):
            found.append((base.split(".")[1], labels))
    found.sort(key=lambda row: (row[0], int(row[1]["size"]), *_path_order(row[1])))
    for op, labels in found:

        def metric(name: str, op: str = op, labels: dict[str, str] = labels) -> Metric | None:
            return summary.metrics.get(metric_name(f"collective.{op}.{name}", labels))

        time_us = metric("time_us")
        wrong = metric("wrong")
        group = f" ({labels['group']})" if "group" in labels else ""
        yield (
            op,
            labels["path"],
            size(int(labels["size"])),
            labels["ranks"] + group,
            str(time_us.n) if time_us else DASH,
            _value(time_us),
            _value(metric("time_max_us")),
            _value(metric("algbw_gb_per_s")),
            _value(metric("busbw_gb_per_s")),
            f"{wrong.value:.0f}" if wrong else DASH,
        )


def _path_order(labels: dict[str, str]) -> tuple[bool, str, str]:
    """Sort the electrical path first: it is what the others are compared with."""
    return labels["path"] != ELECTRICAL, labels["path"], labels.get("group", "")


def _value(metric: Metric | None) -> str:
    return figure(metric.value) if metric else DASH


# -- reconfigurations --------------------------------------------------------------------------


def _reconfigurations(summary: RunSummary) -> Iterator[Section]:
    """Yield what changes of circuits cost, and where each spent its time."""
    metrics = summary.metrics
    clock = metrics.get("clock.bound_us")
    stamps_ms = clock.max / 1000 if clock else None

    def row(name: str, labels: dict[str, object]) -> list[str] | None:
        metric = metrics.get(metric_name(f"reconfigure.{name}_ms", labels))
        return _spread(metric, stamps_ms) if metric else None

    steps = sorted(
        int(parse_metric(name)[1]["step"])
        for name in metrics
        if name.startswith("reconfigure.refused[")
    )
    if not steps:
        return
    rows = [[name, *found, text] for name, text in ACCOUNTS if (found := row(name, {}))]
    for step in steps if len(steps) > 1 else ():
        parts = ((name, row(name, {"step": step})) for name, _ in ACCOUNTS)
        rows += [[f"step {step} {name}", *found, ""] for name, found in parts if found]
    columns = ("ms", "n", "p50", "p95", "max", "what")
    yield Section("Reconfigurations", list(_counts(metrics)), columns, rows, (0, 5))
    stages = [[stage, *found] for stage in STAGES if (found := row(f"stage.{stage}", {}))]
    if stages:
        title = "Stages: ms since the stage before"
        title += f", stamps within ±{bound_only(stamps_ms)} ms" if stamps_ms else ""
        yield Section(title, (), columns[:-1], stages)


def _counts(metrics: dict[str, Metric]) -> Iterator[str]:
    refused = metrics["reconfigure.refused"]
    yield f"{refused.n - round(refused.value)} made, {refused.value:.0f} not made"
    if kept := metrics.get("reconfigure.kept_lost"):
        yield f"{kept.value:.0f} packets lost on circuits that stayed"


def _spread(metric: Metric, stamps_ms: float | None) -> list[str]:
    """Return n, p50, p95 and max; digits as the metric's own bound, or that of stamps, allows."""
    own = metric.plus_minus
    return [
        str(metric.n),
        with_bound(metric.p50, own) if own else figure(metric.p50, stamps_ms),
        figure(metric.p95, own or stamps_ms),
        figure(metric.max, own or stamps_ms),
    ]


# -- the end -----------------------------------------------------------------------------------


def _end(summary: RunSummary, folder: Path | None) -> Iterator[Section]:
    if summary.restored:
        left: dict[str, list[str]] = {}
        for switch, how in summary.restored.items():
            left.setdefault(how, []).append(switch)
        rows = [(few(switches, 8), how) for how, switches in sorted(left.items())]
        yield Section("Switches", (), ("switch", "left as"), rows, (0, 1))
    if folder is not None:
        yield Section(f"Run folder: {folder}")


def _aligned(section: Section) -> Iterator[str]:
    """Lay a table out in columns of spaces, numbers to the right."""
    if not section.rows:
        return
    table = [tuple(section.columns), *map(tuple, section.rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(section.columns))]
    for row in table:
        cells = [
            cell.ljust(width) if i in section.text else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()
