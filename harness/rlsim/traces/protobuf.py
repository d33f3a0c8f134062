"""Protocol buffers as they are on the wire, as far as a reader needs them: fields by number.

https://protobuf.dev/programming-guides/encoding: a field is a varint, its number and its wire type,
and then its value. What is not protobuf raises `ValueError`. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types; 3 and 4 are groups, which no schema has used for long."""
SIGN = 1 << 63


class Field(NamedTuple):
    """A number from 0 on, or bytes, as its wire type says."""

    number: int
    kind: int
    value: int | bytes

    def whole(self) -> int:
        """Return a whole number; raises `ValueError` where it is none."""
        if self.kind != VARINT or not isinstance(self.value, int):
            raise ValueError(f"field {self.number} is no whole number")
        return self.value

    def content(self) -> bytes:
        """Return what has a length; raises `ValueError` where it is a number."""
        if not isinstance(self.value, bytes):
            raise ValueError(f"field {self.number} is neither text nor a message")  # noqa: TRY004 - of the data, not the program
        return self.value

    def text(self) -> str:
        """Return text; raises `ValueError` where it is none."""
        return self.content().decode()

    def wholes(self) -> list[int]:
        """Return what one field of repeated whole numbers holds: several if packed, else one."""
        return list(packed(self.value)) if isinstance(self.value, bytes) else [self.whole()]


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at `at`, below 2^64, and where it ends."""
    found = shift = 0
    while True:
        if at >= len(data):
            raise ValueError("it ends in the middle of a number")
        byte = data[at]
        found |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return found & (2 * SIGN - 1), at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def fields(data: bytes) -> Iterator[Field]:
    """Yield the fields of a message, in their order."""
    at, size = 0, len(data)
    while at < size:
        key, at = varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, at = varint(data, at)
            yield Field(number, kind, value)
            continue
        if kind == BYTES:
            length, at = varint(data, at)
        elif kind in (FIXED32, FIXED64):
            length = 8 if kind == FIXED64 else 4
        else:
            raise ValueError(f"wire type {kind} is not known")
        if at + length > size:
            raise ValueError("it ends in the middle of a field")
        yield Field(number, kind, data[at : at + length])
        at += length


def messages(data: bytes) -> Iterator[bytes]:
    """Yield messages that stand one after another, each after its length."""
    at = 0
    while at < len(data):
        length, at = varint(data, at)
        if at + length > len(data):
            raise ValueError("it ends in the middle of a message")
        yield data[at : at + length]
        at += length


def packed(data: bytes) -> Iterator[int]:
    """Yield whole numbers that stand one after another."""
    at = 0
    while at < len(data):
        value, at = varint(data, at)
        yield value


def signed(value: int) -> int:
    """Return a number of int32 or int64, whose negative ones are written in 64 bits."""
    return value - 2 * SIGN if value >= SIGN else value


def zigzag(value: int) -> int:
    """Return a number of sint32 or sint64."""
    return (value >> 1) ^ -(value & 1)


def fixed(code: str, data: bytes) -> float:
    """Return a number of fixed size; `code` is its letter in `struct`."""
    if len(data) != struct.calcsize(f"<{code}"):
        raise ValueError(f"a number of {len(data)} bytes")
    found: float = struct.unpack(f"<{code}", data)[0]
    return found
