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
    """"" for a simulation: what was asked makes the same journal each time."""
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
    """Timing bound of the measurement, in `unit`; None where one clock measured both ends. Of what
    is compared over seeds, half of the 95 % confidence interval of `value`; None with one seed."""


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one check. A missing metric is `unknown`, never a pass."""

    text: str
    verdict: Literal["passed", "failed", "unknown"]
    found: float | None = None
    plus_minus: float | None = None
    """Timing bound of `found`; a limit that lies inside it decides nothing."""


class LoopStep(msgspec.Struct, frozen=True, kw_only=True):
    """One training step of a loop. ``_s``: since the loop's first step began; None: not known.

    `running` and `queued` are requests in all engines' seats and without one, in equal parts of the
    time from `begin_s` to `batch_end_s`; `staleness` counts samples by their age in versions.
    """

    index: int
    begin_s: float
    tail_begin_s: float | None
    """90 % of the batch had ended."""
    batch_end_s: float
    train_begin_s: float
    train_end_s: float
    sync_end_s: float
    step_s: float | None
    layouts: tuple[str, ...]
    """In turn, while the batch was generated."""
    running: tuple[int, ...]
    queued: tuple[int, ...]
    staleness: tuple[int, ...]
    reward: float | None


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """A better layout that the planner took or refused, `count` times in a row.

    Times are those of the last look: expected to the end of all requests as it is, after the change
    without its cost, and the cost.
    """

    at_s: float
    layout: str
    best: str
    outcome: str
    reason: str
    count: int
    stay_s: float | None
    change_s: float | None
    cost_s: float | None


class LoopSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What one policy did, step by step, in the last repeat of an rl step."""

    step: int
    """The rl step's place in the scenario."""
    policy: str
    repeat: int
    steps: tuple[LoopStep, ...]
    decisions: tuple[Decision, ...]
    stayed: int
    """Looks of the planner at which the layout in force was the best."""


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
    loops: tuple[LoopSummary, ...] = ()
    """Of rl steps, by policy in the order they ran."""
    coordinator: dict[str, int] = {}
    """pid and start time of the process that holds the run, while it runs."""
