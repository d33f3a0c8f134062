"""The line between an agent and one rank: length-prefixed msgpack over a Unix socket pair.

A rank answers in the wire's own messages, as if it were the only one; `merge` makes one answer of
the local ranks' answers. Deadlines are absolute on the node's monotonic clock, which agent and
ranks share. Pure: no socket is touched here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

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


Body = (
    MakeGroups | DestroyGroups | RunCollective
    | StartTraffic | Hold | StopAt | Resume | TrafficSoFar | EndTraffic | WhereAreYou
    | Done | Failure | RanksReady | Samples | Held | Quiesced | Resumed | TrafficTimes | Position
)  # fmt: skip


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """`seq` pairs an answer with its order; 0 is news that nobody asked for."""

    seq: int
    deadline_ns: int
    body: Body


_LENGTH = struct.Struct("!I")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def pack(seq: int, deadline_ns: int, body: Message) -> bytes:
    """Return the bytes of a `Frame`; `body` is of one of its types."""
    frame = _encoder.encode((seq, deadline_ns, body))
    return _LENGTH.pack(len(frame)) + frame


class Unpacker:
    """Frames out of a stream of bytes."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that `data` completes."""
        self._rest += data
        while len(self._rest) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._rest)
            end = _LENGTH.size + length
            if len(self._rest) < end:
                return
            frame = _decoder.decode(memoryview(self._rest)[_LENGTH.size : end])
            del self._rest[:end]
            yield frame


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
