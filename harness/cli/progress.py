"""A run told as it happens: one line a document, in colour on a terminal and plain elsewhere.

It is fed the journal's own documents, so what a person sees is what is recorded. Times are seconds
since the start of the run, on the coordinator's clock. Nothing is animated: a thread that redraws
a terminal would take its share of the machine that measures.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import IO, Any

import click

from harness.clock import NS_PER_MS, NS_PER_S, NS_PER_US
from harness.model import busbw
from harness.model.documents import Descriptor, Document, Event, Start, Stop

CLOCK_WORTH_TELLING_NS = 100 * NS_PER_US
STAGES_TOLD = 2
"""The longest of a switch; the report has all of them."""
CROWDS: Mapping[str, str] = {"agent": "are up", "tor": "are up", "switch": "are up"} | {
    "restore": "are as they were found"
}
"""Streams of one line for each part of a bench, of which a large one has hundreds."""
CROWD_TOLD = 16
"""Of such lines in a row; of the others, how many, and what went wrong."""
Data = Mapping[str, Any]
Units = Mapping[str, str]


class Progress:
    """Writes documents to `stream` (standard output); call it with each one, in order."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._gone = False
        self._start_ns = 0
        self._units: dict[str, Units] = {}
        self._row: tuple[str, int] = "", 0

    def __call__(self, document: Document) -> None:
        """Tell one document, if it has something to tell."""
        match document:
            case Start():
                self._start_ns = document.t_ns
                run = f"run {document.run}" if document.run else "simulation"  # which has no name
                self._line(document.t_ns, f"{run} on bench {document.bench}", "cyan")
                for note in document.notes:
                    self._line(document.t_ns, note, "yellow")
            case Descriptor():
                units = {name: field.unit for name, field in document.fields.items()}
                self._units[document.stream] = units
            case Event():
                tell = TELL.get(document.stream, plainly)
                said = tell(document.data, self._units.get(document.stream, {}))
                if said and not self._crowded(document):
                    name = document.stream.removeprefix("fabric_")
                    self._line(document.t_ns, f"{name:<11} {said}")
            case Stop():
                self._end_row(document.t_ns)
                said = f"{document.status}{f': {document.reason}' if document.reason else ''}"
                self._line(document.t_ns, said, "green" if document.status == "passed" else "red")

    def _crowded(self, event: Event) -> bool:
        """Return whether an event is one of too many alike, which are counted instead."""
        stream, count = self._row
        if event.stream != stream:
            self._end_row(event.t_ns)
            stream, count = event.stream, 0
        if event.data.get("outcome", "unchanged") not in ("unchanged", "restored"):
            return False
        self._row = stream, count + 1
        return stream in CROWDS and count >= CROWD_TOLD

    def _end_row(self, t_ns: int) -> None:
        """Tell how many lines of a row were left out."""
        (stream, count), self._row = self._row, ("", 0)
        if stream in CROWDS and count > CROWD_TOLD:
            self._line(t_ns, f"{stream:<11} and {count - CROWD_TOLD:,} more {CROWDS[stream]}")

    def _line(self, t_ns: int, text: str, colour: str | None = None) -> None:
        """Write one line; colours reach terminals only."""
        stamp = f"{(t_ns - self._start_ns) / NS_PER_S:8.3f} s  "
        if self._gone:
            return
        try:
            click.echo(click.style(stamp, dim=True) + click.style(text, fg=colour), self._stream)
            self._stream.flush()
        except OSError:  # who watched has gone; the run goes on, and its journal tells it all
            self._gone = True


def plainly(data: Data, units: Units) -> str:
    """Tell an event of which nothing is known but its descriptor: ``rank 3, took_ms 1.25 ms``."""
    return ", ".join(
        f"{name} {number(value)}{f' {units[name]}' if units.get(name) else ''}"
        for name, value in data.items()
        if isinstance(value, str | int | float)
    )


def number(value: object) -> str:
    """Write floats with four significant digits, everything else as it is."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _note(data: Data, _: Units) -> str:
    level = "" if data["level"] == "info" else f"{data['level']}: "
    return f"{data['who']}: {level}{data['text']}"


def _collective(data: Data, _: Units) -> str:
    mean_ns = busbw.mean_of_ranks_ns(data["times_ns"])
    rate = busbw.busbw_gb_per_s(data["op"], data["size_bytes"], data["ranks"], mean_ns)
    wrong = "" if data["wrong"] is None else f"  {data['wrong']} wrong"
    return (
        f"{data['op']:<14} {data['size_bytes']:>11,} B  {data['ranks']:>3} ranks {data['group']:<8}"
        f" {mean_ns / NS_PER_MS:>9.3f} ms  {rate:>7.4f} GB/s  {data['path']}{wrong}"
    )


def _shape(data: Data, _: Units) -> str:
    lit = ", ".join(data["lit"]) or "no circuit"
    unserved = f"; stays electrical: {', '.join(data['unserved'])}" if data["unserved"] else ""
    return f"{data['shape']}: {lit}{unserved}{_failures(data['failures'])}"


def _failures(by_device: Mapping[str, str]) -> str:
    return "".join(f"; {device}: {text}" for device, text in by_device.items())


def _reconfigure(data: Data, _: Units) -> str:
    way = f"#{data['index'] + 1} {data['path_from']} -> {data['path_to']}"
    if data["refused_reason"]:
        return f"{way}: not made, {data['refused_reason']}"
    parts = [
        f"{part} {data[f'{part}_ms']:.1f}"
        for part in ("dark", "cost", "device", "link", "communicator", "overhead")
        if data[f"{part}_ms"] is not None
    ]
    mode = "" if data["mode"] == "drain" else f" ({data['mode'].replace('_', ' ')})"
    error = f"; {data['error']}" if data["error"] else ""
    return f"{way}{mode}: {', '.join(parts)} ms; {data['moved']} moved, {data['kept']} kept{error}"


def _parallelism(data: Data, _: Units) -> str:
    way = f"#{data['index'] + 1} {data['layout_from']} -> {data['layout_to']} by {data['strategy']}"
    if data["outcome"] != "switched":
        return f"{way}: {data['outcome'].replace('_', ' ')}, {data['error']}"
    parts = [
        f"{part} {data[f'{part}_ms']:.0f}"
        for part in ("blackout", "total")
        if data[f"{part}_ms"] is not None
    ]
    stages = {name: ms for name, ms in data["stages"].items() if ms is not None}
    longest = sorted(stages, key=lambda name: stages[name], reverse=True)[:STAGES_TOLD]
    most = ", ".join(f"{name} {stages[name]:.0f}" for name in longest)
    speeds = [data[f"{when}_tokens_per_s"] for when in ("before", "during", "after")]
    pace = " > ".join("-" if speed is None else f"{speed:,.0f}" for speed in speeds)
    return f"{way}: {', '.join(parts)} ms ({most}); {data['carried']} carried; {pace} tokens/s"


def _migration(data: Data, _: Units) -> str:
    """Tell only what went wrong: there may be thousands; the report has their times."""
    if data["outcome"] in ("moved", "ended") and not data["error"]:
        return ""
    way = f"{data['request']} {data['source']} -> {data['target']} by {data['by']}"
    what = "it goes on elsewhere" if data["outcome"] == "elsewhere" else data["outcome"]
    return f"{way}: {what}" + f", {data['error']}" * bool(data["error"])


def _generated(data: Data, _: Units) -> str:
    refused = f", {data['refused']} refused" if data["refused"] else ""
    return (
        f"{data['finished']} of {data['requests']} requests{refused}, {data['tokens']:,} tokens in"
        f" {data['took_s']:.1f} s: {data['tokens_per_s']:,.0f} tokens/s, now {data['layout']};"
        f" {data['lost']} lost, {data['doubled']} doubled"
    )


def _given_up(data: Data, _: Units) -> str:
    return f"{data['instance']}: {data['reason']}; {data['requests']} requests go elsewhere"


def _rl_step(data: Data, _: Units) -> str:
    ages = "/".join(map(str, data["staleness"]))
    reward = "" if data["reward"] is None else f", reward {data['reward']:.3f}"
    return (
        f"{data['policy']} #{data['index'] + 1}: {data['samples']} samples, {data['tokens']:,}"
        f" tokens in {data['step_s']:.1f} s (batch {data['batch_s']:.1f}, trained in"
        f" {data['train_s']:.1f}), by age {ages}{reward}"
    )


def _rl(data: Data, _: Units) -> str:
    speed = data["samples_per_s"]
    switches = (f"{data[f'switches_{what}']} {what}" for what in ("taken", "refused", "wasted"))
    return (
        f"{data['policy']}: {data['samples']} samples in {data['took_s']:.1f} s:"
        f" {'-' if speed is None else f'{speed:.3g}'} samples/s; switches: {', '.join(switches)};"
        f" {data['moves']} moves"
    )


def _planned(data: Data, _: Units) -> str:
    """Tell what changes something; what was refused, and why, is in the report."""
    if data["outcome"] not in ("taken", "failed"):
        return ""
    return f"{data['layout']} -> {data['best']}: {data['outcome']}, {data['reason']}"


def _sync(data: Data, _: Units) -> str:
    way = f"weights {data['version']} to {data['receivers']} nodes by {data['path']}"
    if data["outcome"] == "failed":
        return f"{way}: attempt {data['attempt'] + 1} failed, {data['error']}"
    parts = [
        f"{part} {data[f'{part}_s']:.3f}"
        for part in ("gather", "rpc", "wire", "load")
        if data[f"{part}_s"] is not None
    ]
    noop = ", never loaded: a fault that was asked for" if data["outcome"] == "noop" else ""
    sent = f"{data['bytes'] / 1e6:,.1f} MB in {data['total_s']:.3f} s"
    return f"{way}: {sent} ({', '.join(parts)}){noop}"


def _fabric(data: Data, _: Units) -> str:
    """Tell what was decided; what is kept because it is as planned is in the report."""
    if data["action"] == "keep" and data["keep_ms"] == data["change_ms"]:
        return ""
    return f"{data['policy']}, {data['kind']}: {data['reason']}"


def _fabric_change(data: Data, _: Units) -> str:
    lit = Counter(circuit.partition("@")[0] for circuit in data["lit"])
    up = ", ".join(f"{count} {pair}" for pair, count in lit.items()) or "none"
    outcome = "" if data["outcome"] == "changed" else f"; {data['outcome']}: {data['error']}"
    device_ms = data["device_ms"]
    device = "" if device_ms is None else f" (device {device_ms:.1f})"
    return (
        f"{data['policy']}, {data['kind']}: in {data['total_ms']:.1f} ms{device},"
        f" {data['moved']} moved, {data['kept']} kept; up: {up}{outcome}"
    )


def _fabric_part(data: Data, _: Units) -> str:
    return f"{data['policy']}: {data['part']} {data['state']}: {data['reason']}"


def _fabric_traffic(data: Data, _: Units) -> str:
    measured, circuits = data["measured_bytes"], data["circuits_bytes"]
    crossed = f"{data['announced_bytes'] / 1e6:,.1f} MB announced"
    if measured and data["announced_bytes"]:  # else it is beacons, and what nobody waits for
        crossed = f"{measured / 1e6:,.1f} MB, {100 * circuits / measured:.0f} % by circuits"
    return f"{data['policy']}, {data['kind']}: {crossed}, {data['took_ms'] / 1e3:.3f} s"


def _untold(data: Data, units: Units) -> str:
    """Tell nothing: there are many of these, and the report has what they come to."""
    del data, units
    return ""


def _step(data: Data, _: Units) -> str:
    what = f"{data['index']}: {data['do']}" + (
        f" (repeat {data['repeat'] + 1})" * bool(data["repeat"])
    )
    if data["phase"] == "begin":
        return what
    return "" if data["ok"] else f"{what} failed: {data['error']}"


def _agent(data: Data, _: Units) -> str:
    pid = f", pid {data['pid']}" if data["pid"] else ""  # a model has none
    return f"{data['agent']} is up: {data['host']}{pid}"


def _tor(data: Data, _: Units) -> str:
    at = f", {data['url']}" if data["url"] else ""
    return f"{data['tor']} is up: steered by {data['driver']}{at}"


def _clock(data: Data, _: Units) -> str:
    """Tell a clock only where its bound could be seen in a result; the report has the worst."""
    if data["bound_ns"] < CLOCK_WORTH_TELLING_NS:
        return ""
    return f"{data['agent']}: known within ±{data['bound_ns'] / NS_PER_US:.1f} us"


def _switch(data: Data, _: Units) -> str:
    unit = f"{data['vendor']} {data['model']} {data['serial']}, firmware {data['firmware']}"
    return f"{data['switch']} is up: {unit}, {data['url']}"


def _calibration(data: Data, _: Units) -> str:
    point = f"batch {data['batch']:>3}, {data['context_tokens']:>6} tokens of context"
    if not data["batch"]:
        point = f"prompt of {data['prefill_tokens']} tokens"
    took = f"{data['step_us'] / 1000:>9.3f} ms"
    return f"{data['layout']:<8} {point:<34} {took}  (quartiles {data['spread_pct']:.0f} % apart)"


def _restore(data: Data, _: Units) -> str:
    return f"{data['switch']}: {data['outcome']}" + (
        f", {data['difference']}" * bool(data["difference"])
    )


TELL: Mapping[str, Callable[[Data, Units], str]] = {
    "agent": _agent,
    "clock": _clock,
    "tor": _tor,
    "switch": _switch,
    "step": _step,
    "calibration": _calibration,
    "restore": _restore,
    "note": _note,
    "pressure": _untold,
    "collective": _collective,
    "shape": _shape,
    "reconfigure": _reconfigure,
    "engine": _untold,
    "progress": _untold,
    "parallelism": _parallelism,
    "migration": _migration,
    "generated": _generated,
    "given_up": _given_up,
    "rl": _rl,
    "rl_step": _rl_step,
    "pool": _untold,
    "planned": _planned,
    "forecast": _untold,
    "sync": _sync,
    "phase": _untold,
    "fabric": _fabric,
    "fabric_change": _fabric_change,
    "fabric_part": _fabric_part,
    "fabric_traffic": _fabric_traffic,
}
"""How the events of a stream are told; streams that are not listed are told `plainly`."""
