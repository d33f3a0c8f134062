"""What changes of circuits say: messages, steering, switches and their light."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harness.clock import NS_PER_MS, NS_PER_S
from harness.rlsim.fits.lines import HAND, LIGHT, READ, Line, lines_of
from harness.rlsim.fits.measured import Measured
from harness.rlsim.fits.row import Figures, Model, Row

LATENCY, MESSAGE, STEER = "network.latency_us", "control.message_us", "control.steer_us"
OURS_SHARE = 0.5
"""What is ours of a reconfiguration is more than messages and steering: threads, and Python."""
ALIKE_S = 0.002
"""Traffic that left within so much left at the same time."""
Stamps = Mapping[str, int | None]
Lines = tuple[Line, ...]


def rows(measured: Measured) -> Iterator[Row]:
    """Yield the rows of clocks, reconfigurations and changes beside the traffic."""
    for row in measured.rows("clock"):
        yield _row(measured, "clock", None, row["delay_ns"] / NS_PER_S, _round_trip, LATENCY)
    for row in measured.rows("reconfigure"):
        if not row["refused_reason"] and not row["error"]:
            yield from _reconfigured(measured, row)
    yield from _changed(measured)


def _row(
    measured: Measured, kind: str, key: object, took_s: float, model: Model, *needs: str
) -> Row:
    return Row(kind, measured.name, key, took_s, needs, model)


def _round_trip(figures: Figures) -> float:
    return 2 * figures[LATENCY] / 1e6


def _took_s(stages: Stamps, first: str, last: str) -> float | None:
    begin_ns, end_ns = stages.get(first), stages.get(last)
    return None if begin_ns is None or end_ns is None else (end_ns - begin_ns) / NS_PER_S


# -- under traffic that stands still ---------------------------------------------------------------


def _reconfigured(measured: Measured, row: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the stages of one; where it drains, messages and steering are what is ours of it."""
    stages: Stamps = row["stages"]
    ends = measured.links_of.get(row["path_from"]), measured.links_of.get(row["path_to"])
    lines = lines_of(measured, measured.bench.switches, *ends)
    yield from _switching(measured, stages, lines, lit_before=row["path_from"] != "electrical")
    left_s = _took_s(stages, "intent", "steered_away")
    if row["mode"] != "drain" or left_s is None:
        return
    if row["groups"] == "keep":
        yield from _steered(measured, stages, "quiesced")
    sent_s = _took_s(stages, "intent", "command_sent")
    if sent_s and lines:
        yield _read(measured, lines, sent_s, left_s)
    changed = tuple(line for line in lines if line.changes)
    if row["overhead_ms"] and changed:
        yield _overhead(measured, changed, row["overhead_ms"] / 1e3)


def _overhead(measured: Measured, lines: Lines, took_s: float) -> Row:
    """Return what is ours of one: of several units the one that answers last counts."""
    needs = dict.fromkeys((MESSAGE, STEER, HAND, *(name for line in lines for name in line.needs)))

    def ours(figures: Figures) -> float:
        last = max(lines, key=lambda line: line.takes_s(figures))
        return (figures[MESSAGE] + 2 * figures[STEER]) / 1e6 + last.idles_s(figures)

    return Row("overhead", measured.name, lines, took_s, (*needs,), ours, OURS_SHARE)


def _steered(measured: Measured, stages: Stamps, begin: str) -> Iterator[Row]:
    """Yield how long it took to steer away and back; where ToRs answer late that is theirs."""
    away_s = _took_s(stages, begin, "steered_away")
    back_s = _took_s(stages, "path_verified", "steered")
    if any(tor.emulate.answer_ms for tor in measured.bench.tors.values()):
        return
    if away_s is not None and back_s is not None:

        def both(figures: Figures) -> float:
            return 2 * figures[STEER] / 1e6

        yield _row(measured, "steer", None, away_s + back_s, both, STEER)


def _read(measured: Measured, lines: Lines, sent_s: float, left_s: float) -> Row:
    """Return when a change was sent: maps are read while traffic leaves, and it waits for both."""

    def waited(figures: Figures) -> float:
        read_s = max(line.reads_s(figures) for line in lines)
        return max(left_s, read_s) + lines[0].hands_s(figures)

    longer = dict.fromkeys(line.longer for line in lines if line.longer)
    key = lines, round(left_s / ALIKE_S)
    return _row(measured, "read", key, sent_s, waited, READ, HAND, *longer)


def _switching(
    measured: Measured, stages: Stamps, lines: Lines, *, lit_before: bool
) -> Iterator[Row]:
    """Yield a command and its light; of several units the last answer and the last light count."""
    lines = tuple(line for line in lines if line.changes)
    needs = tuple(dict.fromkeys(name for line in lines for name in line.needs))
    taken_s = _took_s(stages, "command_sent", "device_acknowledged")
    lit_s = _took_s(stages, "device_acknowledged", "light")

    def taken(figures: Figures) -> float:
        return max(line.takes_s(figures) for line in lines)

    def lit(figures: Figures) -> float:
        told = (
            line.takes_s(figures) + line.lights_s(figures, lit_before=lit_before) for line in lines
        )
        return max(told) - taken(figures)

    if taken_s and lines:
        yield _row(measured, "switch", lines, taken_s, taken, *needs)
    if lit_s and lines:
        yield _row(measured, "light", (lines, lit_before), lit_s, lit, LIGHT, *needs)


# -- beside the traffic ----------------------------------------------------------------------------


def _changed(measured: Measured) -> Iterator[Row]:
    """Yield the stages of changes in which all did as they were told."""
    settle_s = measured.scenario.fabric.settle_ms / 1e3
    lit_of: dict[str, frozenset[str]] = {}
    for t_ns, row in measured.stamped("fabric_change"):
        before, lit = lit_of.get(row["policy"], frozenset()), frozenset(row["lit"])
        lit_of[row["policy"]] = lit
        if row["outcome"] != "changed":
            continue
        names = {name for link in before ^ lit for name in link.partition("@")[2].split("+")}
        lines = lines_of(measured, (name for name in measured.bench.switches if name in names))
        stages: dict[str, int | None] = dict(row["stages"])
        stages["begin"] = t_ns - round(row["total_ms"] * NS_PER_MS)
        yield from _switching(measured, stages, lines, lit_before=bool(before))
        yield from _steered(measured, stages, "begin")
        left_s = _took_s(stages, "begin", "steered_away")
        if lines and (sent_s := _took_s(stages, "begin", "command_sent")):
            leaves_s = 0.0 if left_s is None else left_s + settle_s
            yield _read(measured, lines, sent_s, leaves_s)
