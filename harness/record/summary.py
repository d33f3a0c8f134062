"""``run.json``: everything about a run in one object, derived from its journal and nothing else.

Derived again and again: at the start, at every step's end and when the run is over, replaced in
one move each time, so a reader never sees half of one. An old journal gives the same summary.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import msgspec

from harness.errors import BadFile, ExitCode, HarnessError, InfrastructureError
from harness.fabric.topology import topology_of
from harness.model.documents import SCHEMA, Document, Event, Metric, RunSummary, Start, Stop
from harness.model.listing import few
from harness.model.load import load_bench
from harness.record.fabric_samples import summaries_of
from harness.record.journal import Journal, JournalReader, read_journal
from harness.record.picture import picture_of
from harness.record.pressure import short_of_cpu
from harness.record.samples import metrics_of
from harness.record.store import RunFolder
from harness.record.verdict import Ending, broken_promises, ending, evaluate

UNFINISHED = "unfinished"
PICTURE = "fabric.svg"
"""In a run's folder: the circuits that carried each kind of traffic."""
LOUD = ("warning", "error", "critical")
WARNINGS_MAX = 20
PARTS_MAX = 8
"""Of the fabric, that broke alike, told by name."""
FOR_US = ("clock",)
"""Facts of an agent that say nothing to a reader."""


def summarise(
    documents: Iterable[Document], coordinator: Mapping[str, int] | None = None
) -> RunSummary:
    """Derive the summary of a run, finished or not. Raises `ValueError` without a start document.

    `coordinator` tells who holds the run, while it runs.
    """
    start: Start | None = None
    stop: Stop | None = None
    events: list[Event] = []
    for document in documents:
        if isinstance(document, Start):
            start = start or document
        elif isinstance(document, Event):
            events.append(document)
        elif isinstance(document, Stop):
            stop = document
    if start is None:
        raise ValueError("the journal has no start document")
    metrics = metrics_of(events)
    counts = Counter(event.stream for event in events)
    return RunSummary(
        schema=SCHEMA,
        id=start.run,
        status=stop.status if stop else UNFINISHED,
        exit_code=stop.exit_code if stop else None,
        reason=stop.reason if stop else "the journal has no stop document",
        world=start.world,
        seed=start.seed,
        scenario=start.scenario,
        bench=start.bench,
        question=start.question,
        started=start.wall,
        stopped=stop.wall if stop else None,
        notes=(
            *start.notes,
            *_torn(documents),
            *_missing(stop, counts),
            *_to_know(events, metrics),
        ),
        metrics=metrics,
        checks=tuple(evaluate(check, metrics) for check in start.checks),
        counts=dict(sorted(counts.items())),
        restored=_restored(events),
        parts=_parts(events),
        loops=summaries_of(events),
        coordinator={} if stop else dict(coordinator or {}),
    )


def read_run(folder: RunFolder, coordinator: Mapping[str, int] | None = None) -> RunSummary:
    """Derive the summary of a run folder from its journal; a simulated one does not name its run.

    Raises `BadFile` where there is no journal, or one that tells nothing.
    """
    try:
        summary = summarise(read_journal(folder.journal), coordinator)
        return msgspec.structs.replace(summary, id=summary.id or folder.id)
    except ValueError as error:
        raise BadFile(str(folder.journal), [str(error)]) from error


def write_summary(folder: RunFolder, summary: RunSummary) -> None:
    """Replace ``run.json`` in one move, durably.

    Raises `InfrastructureError` where it cannot be written; the one before stays.
    """
    scratch = folder.summary.with_suffix(".tmp")
    try:
        with scratch.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(folder.summary)
    except OSError as error:
        text = f"{folder.summary}: cannot be written: {error.strerror}"
        raise InfrastructureError(text) from error


def refresh(folder: RunFolder, coordinator: Mapping[str, int]) -> RunSummary:
    """Derive and write the summary of a run that goes on."""
    summary = read_run(folder, coordinator)
    write_summary(folder, summary)
    return summary


def conclude(
    journal: Journal,
    folder: RunFolder,
    error: ExitCode = ExitCode.PASSED,
    reason: str = "",
    *,
    judged: bool = True,
) -> RunSummary:
    """Judge a run, close its journal and write its last summary.

    `error` and `reason` say what ended it, `PASSED` that it went through all its steps. A run that
    is not `judged` was only to measure: having come to its end is all it has to do.
    """
    so_far = read_run(folder)
    end = ending(so_far.checks, broken_promises(so_far.metrics), error, reason)
    if not judged and error is ExitCode.PASSED:
        end = Ending("passed", ExitCode.PASSED, "")
    journal.stop(end.status, end.exit_code, end.reason)
    summary = read_run(folder)
    write_summary(folder, summary)
    if "fabric_change" in summary.counts:
        _draw(folder)
    return summary


def _draw(folder: RunFolder) -> None:
    """Leave a picture of the circuits that were lit in the run's folder.

    It can be drawn anew at any time: what keeps it from being written ends no run.
    """
    with suppress(HarnessError, OSError):
        topology = topology_of(load_bench(folder.bench))
        events = (each for each in read_journal(folder.journal) if isinstance(each, Event))
        if picture := picture_of(topology, events):
            (folder.path / PICTURE).write_text(picture, encoding="utf-8")


def _to_know(events: Sequence[Event], metrics: Mapping[str, Metric]) -> Iterator[str]:
    """Yield what a reader must know of a run before its numbers."""
    yield from _stayed_electrical(events)
    yield from _fabric_at_fault(events)
    yield from short_of_cpu(metrics)
    yield from _warnings(events)


def _missing(stop: Stop | None, counts: Mapping[str, int]) -> list[str]:
    """Say which streams have fewer events than the stop document counted."""
    told = stop.counts if stop else {}
    return [
        f"the journal is not whole: {n - counts[stream]} of {n} events of {stream} are missing"
        for stream, n in sorted(told.items())
        if n > counts[stream]
    ]


def _torn(documents: Iterable[Document]) -> list[str]:
    torn = documents.torn if isinstance(documents, JournalReader) else 0
    lines = "1 line was" if torn == 1 else f"{torn} lines were"
    return [f"the journal is not whole: {lines} cut short and left out"] if torn else []


def _stayed_electrical(events: Iterable[Event]) -> list[str]:
    """Say which circuits were asked for and not made, and why."""
    texts: Counter[str] = Counter()
    for event in events:
        data = event.data
        if event.stream == "shape" and data["unserved"]:
            edges = ", ".join(data["unserved"])
            texts[f"{data['shape']}: no switch can carry {edges}: electrical"] += 1
        elif event.stream == "reconfigure" and data["refused_reason"]:
            texts[f"a change to {data['path_to']} was not made: {data['refused_reason']}"] += 1
    return [f"{text} ({n} times)" if n > 1 else text for text, n in texts.items()]


def _fabric_at_fault(events: Iterable[Event]) -> list[str]:
    """Say what of the fabric broke while the run went on, and which changes were not whole.

    Parts that broke alike are told at once.
    """
    alike: dict[tuple[str, str], Counter[str]] = {}
    for event in events:
        data = event.data
        if event.stream == "fabric_part":
            why = (data["policy"], f"{data['state']}: {data['reason']}")
            alike.setdefault(why, Counter())[data["part"]] += 1
        elif event.stream == "fabric_change" and data["outcome"] != "changed":
            what = f"a change of circuits for {data['kind']}"
            why = (data["policy"], f"{data['outcome']}: {data['error']}")
            alike.setdefault(why, Counter())[what] += 1
    found = [_at_fault(policy, said, parts) for (policy, said), parts in alike.items()]
    more = f"{len(found) - WARNINGS_MAX} more faults of the fabric are in the journal"
    return [*found[:WARNINGS_MAX], *([more] if len(found) > WARNINGS_MAX else [])]


def _at_fault(policy: str, said: str, parts: Counter[str]) -> str:
    times = f" ({max(parts.values())} times)" if max(parts.values()) > 1 else ""
    return f"{policy}: {few(parts, PARTS_MAX)} {said}{times}"


def _warnings(events: Iterable[Event]) -> list[str]:
    """Return what was noted as a warning or worse, each once, in order."""
    texts = dict.fromkeys(
        f"{event.data['who']}: {event.data['text']}"
        for event in events
        if event.stream == "note" and event.data["level"] in LOUD
    )
    shown = list(texts)[:WARNINGS_MAX]
    more = len(texts) - len(shown)
    return [*shown, f"{more} more warnings are in the journal"] if more else shown


def _restored(events: Iterable[Event]) -> dict[str, str]:
    """Return how each switch was left, by what was told last."""
    return {
        event.data["switch"]: (
            event.data["difference"] or "failed"
            if event.data["outcome"] == "failed"
            else event.data["outcome"]
        )
        for event in events
        if event.stream == "restore"
    }


def _parts(events: Iterable[Event]) -> dict[str, str]:
    """Describe every agent, switch, steered ToR and engine in one line."""
    parts = {}
    for event in events:
        data = event.data
        if event.stream == "agent":
            told = sorted((data.get("facts") or {}).items())
            facts = ", ".join(f"{name} {what}" for name, what in told if name not in FOR_US)
            parts[data["agent"]] = f"agent on {data['host']}" + (f" ({facts})" if facts else "")
        elif event.stream == "switch":
            parts[data["switch"]] = (
                f"{data['vendor']} {data['model']}, serial {data['serial']}, "
                f"firmware {data['firmware']}, {data['url']}"
            )
        elif event.stream == "tor":  # it may have an agent, too
            parts[f"{data['tor']} routes"] = f"steered by {data['driver']} {data['url']}".rstrip()
        elif event.stream == "engine":
            kv_tokens = data["blocks"] * data["block_tokens"]
            parts[f"{data['instance']} {data['layout']}"] = (  # GPUs may see several layouts
                f"{data['engine']}, {data['version']}, on {data['device']}; "
                f"KV of {kv_tokens:,} tokens, {data['weights_bytes'] / 1e6:,.1f} MB of weights held"
            )
    return parts
