"""The line between an agent and one rank: what is said on it (see `agents.frames`).

A rank answers in the wire's own messages, as if it were the only one; `merge` makes one answer of
the local ranks' answers. Pure: no socket is touched here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from agents.frames import Frame
from harness.wire.messages import (
    DestroyGroups,
    Done,
    EndTraffic,
    Failure,
    Held,
    Hold,
    MakeGroups,
    Message,
    Quiesced,
    RanksReady,
    Resume,
    Resumed,
    RunCollective,
    Samples,
    StartTraffic,
    StopAt,
    TrafficSoFar,
    TrafficTimes,
)


class WhereAreYou(Message, frozen=True, tag="where_are_you"):
    """Asked when a deadline has passed; the stacks of all threads go to the rank's log."""


class Position(Message, frozen=True, tag="position"):
    """`entered` counts collectives begun, `inside` whether one of them has not come back."""

    entered: int
    inside: bool


class Doing(Message, frozen=True, kw_only=True, tag="doing"):
    """Answer of a rank that does orders in turn: the one under way ("" none), and since when."""

    order: str
    since_ns: int


Body = (
    MakeGroups | DestroyGroups | RunCollective
    | StartTraffic | Hold | StopAt | Resume | TrafficSoFar | EndTraffic | WhereAreYou
    | Done | Failure | RanksReady | Samples | Held | Quiesced | Resumed | TrafficTimes | Position
)  # fmt: skip


FRAMES = msgspec.msgpack.Decoder(Frame[Body])


def merge(answers: Sequence[Message]) -> Message:
    """Return the one answer of several ranks: latest stamps, and dictionaries by rank united.

    All are of one type, as answers to one order are. `answers` is not empty.
    """
    first = answers[0]
    fields: dict[str, Any] = {}
    for name in first.__struct_fields__:
        values = [getattr(answer, name) for answer in answers]
        if isinstance(values[0], dict):
            fields[name] = {key: value for part in values for key, value in part.items()}
        elif isinstance(values[0], tuple):
            fields[name] = tuple(item for part in values for item in part)
        elif isinstance(values[0], int):
            fields[name] = max(values)
        else:
            fields[name] = values[0]
    return type(first)(**fields)
