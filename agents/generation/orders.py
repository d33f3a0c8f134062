"""The line between an agent and a rank of generation: orders, answers, and what is told unasked.

Orders are done one at a time, in turn. Every rank of an instance gets the same ones in the same
sequence. Where the wire has a message for it (`Submit`, `Withdraw`, `Admission`, `UpdateWeights`,
`MeasureSteps`), that is the order, and a rank answers as if it were the instance. `Told` is
unasked, from rank 0 alone, and always before the answer to the order that it precedes. Pure.
"""

from __future__ import annotations

import msgspec

from agents.frames import Frame
from agents.pipe import Doing, WhereAreYou
from harness.model.placement import Instance
from harness.wire.generation import (
    Admission,
    Capacity,
    EngineSpec,
    MeasureSteps,
    Output,
    Span,
    Stats,
    StepTimes,
    Submit,
    Submitted,
    Torn,
    UpdateWeights,
    WeightsUpdated,
    Withdraw,
    Withdrawn,
)
from harness.wire.messages import Done, Failure, Message


class Start(Message, frozen=True, kw_only=True, tag="start"):
    """The first order: import and make the engine. Answer: `Ready`."""

    spec: EngineSpec


class Ready(Message, frozen=True, kw_only=True, tag="ready"):
    """The engine's facts and warnings, and whether it takes steps only as told."""

    facts: dict[str, str]
    warnings: tuple[str, ...]
    lockstep: bool


class Sit(Message, frozen=True, kw_only=True, tag="build"):
    """Build: fields of `agents.generation.base.Seat`, its ports as first and count."""

    instance: Instance
    rank: int
    gpu: int
    address: str
    meeting: str
    port: int
    ports: int
    version: int
    source: str = ""


class Seated(Message, frozen=True, kw_only=True, tag="seated"):
    """Built. `capacity.weights_bytes` is what this rank holds."""

    capacity: Capacity
    kv_peer: str
    spans: tuple[Span, ...]


class Leave(Message, frozen=True, kw_only=True, tag="tear_down"):
    """Tear the engine down. Answer: `Torn`. With `ends` the process is gone after it."""

    ends: bool = False


class Sleep(Message, frozen=True, kw_only=True, tag="sleep"):
    """Go to sleep. Answer: `Slept`, or a `Failure` of an engine that cannot."""


class Slept(Message, frozen=True, kw_only=True, tag="slept"):
    """Asleep; `kept_bytes` of this rank's memory stay taken."""

    kept_bytes: int


class Wake(Message, frozen=True, kw_only=True, tag="wake"):
    """Wake up at weights `version`, from `source`. Answer: `Woken`."""

    version: int
    source: str = ""


class Woken(Message, frozen=True, kw_only=True, tag="woken"):
    """Awake again, with nothing in it."""

    spans: tuple[Span, ...]


class Steps(Message, frozen=True, kw_only=True, tag="steps"):
    """Lockstep: take up to `steps` steps, fewer where nothing is left to do. Answer: `Stepped`."""

    steps: int


class Stepped(Message, frozen=True, kw_only=True, tag="stepped"):
    """How many it took, in how long, and whether there is more to step for."""

    steps: int
    elapsed_ns: int
    more: bool


class FindMemory(Message, frozen=True, kw_only=True, tag="find_memory"):
    """Ask the device how much of its memory is free. Answer: `MemoryFound`."""


class MemoryFound(Message, frozen=True, kw_only=True, tag="memory_found"):
    """As the accelerator tells it; both 0 where there is none."""

    free_bytes: int
    total_bytes: int


class Told(Message, frozen=True, kw_only=True, tag="told"):
    """Outputs since the last, and where the instance stands now."""

    outputs: tuple[Output, ...]
    stats: Stats


Body = (
    Start | Ready | Sit | Seated | Leave | Torn | Sleep | Slept | Wake | Woken
    | Steps | Stepped | FindMemory | MemoryFound | WhereAreYou | Doing | Told
    | Submit | Submitted | Admission | Withdraw | Withdrawn
    | UpdateWeights | WeightsUpdated | MeasureSteps | StepTimes | Done | Failure
)  # fmt: skip

FRAMES = msgspec.msgpack.Decoder(Frame[Body])
