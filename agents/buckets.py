"""What porters say to each other: an offer, buckets with a header each, and a word back for each.

The sender connects and offers a transfer; then come its buckets in order. A bucket's header has
the CRC-32 of the *file* up to its end, so every bucket is verified on arrival and the last one's
is the file's. For each that is sound the receiver says how many it has; its last word says that
the file is whole, or why it is not. The data network is trusted as far as the KV's transfer trusts
it (`agents.generation.transfer`): who knows the random name of an expected transfer is its sender.
"""

from __future__ import annotations

import fcntl
import select
import socket
import struct
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, TypeVar

import msgspec

from harness.clock import NS_PER_MS, NS_PER_S

MAGIC = b"wgt1"
_HEAD = struct.Struct("!4sIII")
_LENGTH = struct.Struct("!I")
_FRAME_MOST_BYTES = 4096
_LOOK_NS = 50 * NS_PER_MS
_DISMISS_S = 1.0

Said = TypeVar("Said")


class Cut(ConnectionError):
    """The other end closed the line, or said what no porter says."""


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """A transfer: what it is, and for how long a line may stand still on the way."""

    magic: bytes
    transfer: str
    version: int
    size_bytes: int
    bucket_bytes: int
    stall_ns: int

    @property
    def buckets(self) -> int:
        """How many there are; the last may be shorter."""
        return -(-self.size_bytes // self.bucket_bytes)

    def span(self, bucket: int) -> tuple[int, int]:
        """Return where a bucket begins, and its length."""
        begins = bucket * self.bucket_bytes
        return begins, min(self.bucket_bytes, self.size_bytes - begins)


class Word(msgspec.Struct, frozen=True, array_like=True):
    """The receiver has so many buckets, all sound; whether that is its last word, and why."""

    buckets: int
    ends: bool = False
    problem: str = ""


class Head(NamedTuple):
    """A bucket's header; `crc` is of the file, up to this bucket's end."""

    magic: bytes
    bucket: int
    length: int
    crc: int


_encode = msgspec.msgpack.Encoder().encode
_offer = msgspec.msgpack.Decoder(Offer)
_word = msgspec.msgpack.Decoder(Word)


def say(line: socket.socket, said: Offer | Word) -> None:
    """Send an offer or a word."""
    data = _encode(said)
    line.sendall(_LENGTH.pack(len(data)) + data)


def hear_offer(line: socket.socket) -> Offer:
    """Return a sender's offer. Raises `Cut` for anything else, `OSError` when none comes."""
    offer = _decoded(_offer, line)
    if offer.magic != MAGIC or offer.size_bytes < 1 or offer.bucket_bytes < 1:
        raise Cut("this is no offer of weights")
    return offer


def hear_word(line: socket.socket) -> Word:
    """Return a receiver's next word. Raises `Cut`, `OSError`."""
    return _decoded(_word, line)


def send_head(line: socket.socket, bucket: int, length: int, crc: int) -> None:
    """Send the header of a bucket, whose bytes must follow."""
    line.sendall(_HEAD.pack(MAGIC, bucket, length, crc))


def receive_bucket(
    line: socket.socket, bucket: int, into: memoryview, goes_on: Callable[[], bool]
) -> int:
    """Receive the next bucket into its place; return the CRC that its header claims.

    Whenever the line's timeout passes, `goes_on` says whether to go on; else `TimeoutError`.
    """
    data = bytearray(_HEAD.size)
    _fill(line, memoryview(data), goes_on)
    head = Head(*_HEAD.unpack(data))
    if head[:3] != (MAGIC, bucket, len(into)):
        raise Cut(f"not the header of bucket {bucket}: {head}")
    _fill(line, into, goes_on)
    return head.crc


def dismiss(line: socket.socket, had: int, problem: str) -> None:
    """Say a last word and why, and close the line once it was read: earlier, it might be lost."""
    due_ns = time.monotonic_ns() + int(_DISMISS_S * NS_PER_S)
    with line, suppress(OSError):  # it may be gone already
        line.settimeout(_DISMISS_S)
        say(line, Word(had, ends=True, problem=problem))
        line.shutdown(socket.SHUT_WR)
        while line.recv(1 << 20) and time.monotonic_ns() < due_ns:
            pass


def await_word(line: socket.socket, stall_ns: int) -> Word:
    """Return the next word; `TimeoutError` when nothing has moved on the line for so long.

    What the kernel still has to send counts as moving while it becomes less: a last bucket may
    take long on a slow line, and no word comes before all of it is there.
    """
    left_bytes, moved_ns = _unsent(line), time.monotonic_ns()
    while True:
        readable, _, _ = select.select([line], [], [], _LOOK_NS / NS_PER_S)
        if readable:
            return hear_word(line)
        now_ns, unsent = time.monotonic_ns(), _unsent(line)
        if unsent != left_bytes:
            left_bytes, moved_ns = unsent, now_ns
        elif now_ns - moved_ns > stall_ns:
            raise TimeoutError(f"stood still for {stall_ns / NS_PER_S:.1f} s")


def words_so_far(line: socket.socket) -> list[Word]:
    """Return the words that lie ready, without waiting."""
    words = []
    while select.select([line], [], [], 0)[0]:
        words.append(hear_word(line))
        if words[-1].ends:
            break
    return words


def _receive(line: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    _fill(line, memoryview(data), lambda: False)
    return bytes(data)


def _fill(line: socket.socket, into: memoryview, goes_on: Callable[[], bool]) -> None:
    got = 0
    while got < len(into):
        try:
            count = line.recv_into(into[got:])
        except TimeoutError:
            if goes_on():
                continue
            raise
        if not count:
            raise Cut("the other end closed the line")
        got += count


def _decoded(decoder: msgspec.msgpack.Decoder[Said], line: socket.socket) -> Said:
    (size,) = _LENGTH.unpack(_receive(line, _LENGTH.size))
    if size > _FRAME_MOST_BYTES:
        raise Cut(f"a header of {size} bytes: this is no transfer of weights")
    try:
        return decoder.decode(_receive(line, size))
    except msgspec.MsgspecError as error:
        raise Cut(f"this is no transfer of weights: {error}") from error


def _unsent(line: socket.socket) -> int:
    """Return how many bytes the kernel holds that the other end has not acknowledged."""
    (left,) = struct.unpack("i", fcntl.ioctl(line.fileno(), termios.TIOCOUTQ, bytes(4)))
    return int(left)
