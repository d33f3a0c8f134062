"""Bulk bytes between ranks, over TCP on the data network.

A sender connects to a rank's `Landing` and streams pieces: a header, then so many bytes, each
piece answered by "" or by why it was not taken. A piece that is cut short, that fails its checksum
or for which there is no room is dropped, and the sender told. What arrived is claimed by transfer
and request; what nobody claims within a minute is dropped, so nothing leaks when a coordinator
dies between sending and submitting.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from zlib import crc32

import msgspec

from harness.clock import NS_PER_S

KEEP_NS = 60 * NS_PER_S
"""How long what has arrived waits to be claimed."""
SEND_NS = 20 * NS_PER_S
"""How long a sender tries, in all, to give one rank its pieces."""
_LOOK_S = 0.5
_IDLE_S = 10.0
_HEADER_MOST_BYTES = 65536
_DROP_BYTES = 1 << 20
"""Bytes for which there is no room are read so many at a time, and forgotten."""
_LENGTH = struct.Struct("!I")


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Part of a request's KV: `tokens` tokens, of layers and heads from..to (exclusive)."""

    transfer: str
    request: str
    tokens: int
    layers: tuple[int, int]
    heads: tuple[int, int]
    size_bytes: int
    crc: int


_encode = msgspec.msgpack.Encoder().encode
_piece = msgspec.msgpack.Decoder(Piece)
_reason = msgspec.msgpack.Decoder(str)


class Cut(ConnectionError):
    """The other end closed the line, or nothing came in time."""


def send(
    peer: str, pieces: Iterable[tuple[Piece, memoryview]], limit_ns: int = SEND_NS
) -> list[tuple[Piece, str]]:
    """Send pieces to the rank at ``HOST:PORT``; return those tried, each with "" or why not.

    Ends at the first that the line, or the time, did not let through.
    """
    deadline_ns = time.monotonic_ns() + limit_ns
    host, _, port = peer.rpartition(":")
    tried: list[tuple[Piece, str]] = []
    line: socket.socket | None = None
    try:
        for piece, data in pieces:
            tried.append((piece, ""))
            if line is None:
                line = socket.create_connection((host, int(port)), _left_s(deadline_ns))
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line.settimeout(_left_s(deadline_ns))
            header = _encode(piece)
            line.sendall(_LENGTH.pack(len(header)) + header)
            line.sendall(data)
            tried[-1] = (piece, _reason.decode(_frame(line)))
    except (OSError, ValueError) as error:  # OSError: also a passed deadline
        if tried:
            tried[-1] = (tried[-1][0], f"{peer}: {error}")
    finally:
        if line is not None:
            line.close()
    return tried


class Landing:
    """Where a rank takes pieces: a listener and its threads, until `close`.

    It holds `most_bytes` at once.
    """

    def __init__(
        self,
        address: str,
        most_bytes: int,
        *,
        keep_ns: int = KEEP_NS,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._most_bytes, self._keep_ns, self._now_ns = most_bytes, keep_ns, now_ns
        self._lock = threading.Lock()
        self._landed: dict[tuple[str, str], list[tuple[int, Piece, bytes]]] = {}
        self._held_bytes = 0
        self._lines: set[socket.socket] = set()
        self._closed = False
        self._listener = socket.create_server((address, 0), backlog=64)
        self._listener.settimeout(_LOOK_S)
        self.peer = f"{address}:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._listen, name="landing", daemon=True)]
        self._threads[0].start()

    @property
    def held_bytes(self) -> int:
        """Bytes that have arrived and are not claimed."""
        return self._held_bytes

    def claim(self, transfer: str, request: str) -> list[tuple[Piece, bytes]]:
        """Take what has arrived of a request's KV by this transfer."""
        with self._lock:
            found = self._landed.pop((transfer, request), [])
            self._held_bytes -= sum(piece.size_bytes for _, piece, _ in found)
        return [(piece, data) for _, piece, data in found]

    def sweep(self) -> None:
        """Drop what nobody claimed in time."""
        with self._lock:
            before_ns = self._now_ns() - self._keep_ns
            stale = [key for key, rows in self._landed.items() if rows[-1][0] < before_ns]
        for transfer, request in stale:
            self.claim(transfer, request)
            _log(f"KV of {request}, sent by transfer {transfer}, was never claimed: dropped")

    def close(self) -> None:
        """Stop listening, cut all lines, drop what has arrived, see the threads ended."""
        with self._lock:
            self._closed = True
            for line in self._lines:
                with suppress(OSError):  # it may have ended by itself
                    line.shutdown(socket.SHUT_RDWR)
            self._landed.clear()
            self._held_bytes = 0
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    # -- its threads -----------------------------------------------------------------------------

    def _listen(self) -> None:
        while not self._closed:
            self.sweep()
            try:
                line, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                if self._closed:
                    return
                raise
            thread = threading.Thread(target=self._take, args=(line,), daemon=True)
            with self._lock:
                if self._closed:
                    line.close()
                    return
                self._lines.add(line)
                self._threads = [one for one in self._threads if one.is_alive()] + [thread]
            thread.start()

    def _take(self, line: socket.socket) -> None:
        line.settimeout(_IDLE_S)
        try:
            with line:
                while header := _frame(line, at_end=b""):
                    piece = _piece.decode(header)
                    line.sendall(_framed(_encode(self._land(piece, line))))
        except (OSError, msgspec.MsgspecError) as error:
            if not self._closed:
                _log(f"a transfer of KV was cut short and is dropped: {error}")
        finally:
            with self._lock:
                self._lines.discard(line)

    def _land(self, piece: Piece, line: socket.socket) -> str:
        """Take a piece's bytes; return "" or why they were dropped."""
        with self._lock:
            room = self._most_bytes - self._held_bytes
            taken = 0 <= piece.size_bytes <= room
            self._held_bytes += piece.size_bytes if taken else 0
        if not taken:
            if not 0 <= piece.size_bytes <= self._most_bytes:
                raise Cut(f"a piece of {piece.size_bytes} bytes; a rank takes {self._most_bytes}")
            for offset in range(0, piece.size_bytes, _DROP_BYTES):
                _receive(line, min(_DROP_BYTES, piece.size_bytes - offset))
            return f"no room for {piece.size_bytes} bytes: {room} of {self._most_bytes} are free"
        landed = False
        try:
            data = _receive(line, piece.size_bytes)
            if crc32(data) != piece.crc:
                return f"{piece.request}: corrupt on arrival"
            with self._lock:
                if not self._closed:
                    row = (self._now_ns(), piece, data)
                    self._landed.setdefault((piece.transfer, piece.request), []).append(row)
                    landed = True
            return ""
        finally:
            if not landed:
                with self._lock:
                    self._held_bytes -= piece.size_bytes


def _receive(line: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        count = line.recv_into(view[got:])
        if not count:
            raise Cut(f"the line ended after {got} of {size} bytes")
        got += count
    return bytes(data)


def _frame(line: socket.socket, at_end: bytes | None = None) -> bytes:
    """Read a length and so many bytes; at the end of the line return `at_end`, or raise."""
    first = line.recv(1)
    if not first:
        if at_end is not None:
            return at_end
        raise Cut("the other end closed the line")
    (size,) = _LENGTH.unpack(first + _receive(line, _LENGTH.size - 1))
    if size > _HEADER_MOST_BYTES:
        raise Cut(f"a header of {size} bytes: this is no transfer of KV")
    return _receive(line, size)


def _framed(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _left_s(deadline_ns: int) -> float:
    left_ns = deadline_ns - time.monotonic_ns()
    if left_ns <= 0:
        raise TimeoutError("the time for sending has passed")
    return left_ns / NS_PER_S


def _log(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
