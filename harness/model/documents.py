"""The documents of a journal: start, descriptor, event, stop. Everything derived reads only these.

A descriptor declares, once per stream, what each field of its events means; events then carry
values, a monotonic stamp and a sequence number. The stop document counts the events of every
stream, so a journal that was cut short can be told from a whole one.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from harness.model.scenario import Check

SCHEMA = "1.0"


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """The meaning of one field of a stream's events."""

    unit: str = ""
    dtype: Literal["number", "integer", "string", "boolean", "object"] = "number"
    shape: tuple[int | str, ...] = ()
    """() for a scalar; names for axes of free length, such as ("ranks", "iterations")."""
    source: str = ""
    """Who measured it: coordinator, agent, rank, device, emulator, model."""


class Start(msgspec.Struct, frozen=True, kw_only=True, tag_field="doc", tag="start"):
    """Opens a run."""

    schema: str
    run: str
    t_ns: int
    wall: str
    world: str
    scenario: str
    bench: str
    seed: int
    versions: dict[str, str]
    question: str = ""
    checks: tuple[Check, ...] = ()
    """The scenario's, so that the journal alone gives the verdict."""
    notes: tuple[str, ...] = ()
    """What a reader must know first: control plane only, paced engine, emulated switches."""


class Descriptor(msgspec.Struct, frozen=True, kw_only=True, tag_field="doc", tag="descriptor"):
    """Declares a stream before its first event."""

    stream: str
    fields: dict[str, Field]


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="doc", tag="event"):
    """One thing that happened; `t_ns` on the coordinator's monotonic clock."""

    stream: str
    seq: int
    t_ns: int
    data: dict[str, Any]


Status = Literal["passed", "failed", "inconclusive", "infrastructure", "interrupted", "bug"]
"""How a run ended."""


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag_field="doc", tag="stop"):
    """Closes a run."""

    t_ns: int
    wall: str
    status: Status
    exit_code: int
    reason: str
    counts: dict[str, int]


Document = Start | Descriptor | Event | Stop


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One number of `run.json`; `harness.model.metrics` says which statistic `value` is."""

    value: float
    unit: str
    n: int
    min: float
    p50: float
    p95: float
    p99: float
    max: float
    plus_minus: float | None = None
    """Timing bound of the measurement, in `unit`; None where one clock measured both ends."""


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one check. A missing metric is `unknown`, never a pass."""

    text: str
    verdict: Literal["passed", "failed", "unknown"]
    found: float | None = None
    plus_minus: float | None = None
    """Timing bound of `found`; a limit that lies inside it decides nothing."""


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """`run.json`: derived from the journal, replaced atomically."""

    schema: str
    id: str
    status: str
    exit_code: int | None
    reason: str
    world: str
    seed: int
    scenario: str
    bench: str
    question: str
    started: str
    stopped: str | None
    notes: tuple[str, ...]
    metrics: dict[str, Metric]
    checks: tuple[CheckResult, ...]
    counts: dict[str, int]
    restored: dict[str, str]
    """Per switch: "restored", "unchanged", or the exact difference that remains."""
    parts: dict[str, str] = {}
    """Who took part: agents and switches by name, each described in one line."""
    coordinator: dict[str, int] = {}
    """pid and start time of the process that holds the run, while it runs."""
