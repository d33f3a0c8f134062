"""Length-prefixed msgpack over the socket pair of an agent and its child: bodies, and no socket.

Which bodies there are is said by each line's own module (`agents.pipe`, `agents.generation.orders`)
with a decoder. Deadlines are absolute on the node's monotonic clock, which both ends share.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from harness.wire.messages import Message

Body = TypeVar("Body")


class Frame(msgspec.Struct, Generic[Body], frozen=True, array_like=True):
    """`seq` pairs an answer with its order; 0 is news that nobody asked for."""

    seq: int
    deadline_ns: int
    body: Body


_LENGTH = struct.Struct("!I")
_encoder = msgspec.msgpack.Encoder()


def pack(seq: int, deadline_ns: int, body: Message) -> bytes:
    """Return the bytes of a `Frame`; `body` is of one of the line's types."""
    frame = _encoder.encode((seq, deadline_ns, body))
    return _LENGTH.pack(len(frame)) + frame


class Unpacker(Generic[Body]):
    """Frames out of a stream of bytes."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Frame[Body]]) -> None:
        self._decoder = decoder
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame[Body]]:
        """Yield the frames that `data` completes."""
        self._rest += data
        while len(self._rest) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._rest)
            end = _LENGTH.size + length
            if len(self._rest) < end:
                return
            frame = self._decoder.decode(memoryview(self._rest)[_LENGTH.size : end])
            del self._rest[:end]
            yield frame
