"""The ranks of one paced instance, joined: they meet when it is built, and agree on what is moved.

Rank 0 listens where the seat says, ``HOST:PORT``; the others connect. Every exchange involves all
ranks and has a deadline: a rank that died, or never comes, is named, and the instance fails instead
of waiting for ever.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Any

import msgspec

from harness.clock import NS_PER_S

LIMIT_NS = 30 * NS_PER_S
"""For ranks to meet, and for each exchange: what they do meanwhile is bounded by less."""
_RETRY_S = 0.005
_LENGTH = struct.Struct("!I")


class RanksApart(ConnectionError):
    """A rank of the instance is gone, or did not come in time; the message says which."""


class Group:
    """A star around rank 0. Close it when the engine ends."""

    def __init__(self, meeting: str, rank: int, size: int, limit_ns: int = LIMIT_NS) -> None:
        self.rank = rank
        self._limit_ns = limit_ns
        self._lines: dict[int, socket.socket] = {}
        deadline_ns = time.monotonic_ns() + limit_ns
        try:
            if rank == 0 and size > 1:
                self._listen(meeting, size, deadline_ns)
            elif rank:
                self._lines[0] = _connect(meeting, deadline_ns)
                self._send(0, rank, deadline_ns)
            self.barrier()
        except BaseException:
            self.close()
            raise

    def gather(self, mine: Any) -> list[Any]:
        """Return every rank's value, in rank order, on rank 0; nothing on the others."""
        deadline_ns = time.monotonic_ns() + self._limit_ns
        if self.rank:
            self._send(0, mine, deadline_ns)
            return []
        return [mine, *(self._receive(rank, deadline_ns) for rank in sorted(self._lines))]

    def broadcast(self, value: Any = None) -> Any:
        """Return rank 0's `value` on all ranks."""
        deadline_ns = time.monotonic_ns() + self._limit_ns
        if self.rank:
            return self._receive(0, deadline_ns)
        for rank in self._lines:
            self._send(rank, value, deadline_ns)
        return value

    def barrier(self) -> None:
        """Return when all ranks are here."""
        self.gather(None)
        self.broadcast()

    def close(self) -> None:
        """Leave; harmless twice."""
        for line in self._lines.values():
            line.close()
        self._lines.clear()

    def _listen(self, meeting: str, size: int, deadline_ns: int) -> None:
        with socket.create_server(_address(meeting), backlog=size) as listener:
            while len(self._lines) < size - 1:
                try:
                    listener.settimeout(_left_s(deadline_ns))
                    line, _ = listener.accept()
                except TimeoutError as error:
                    missing = sorted(set(range(1, size)) - self._lines.keys())
                    raise RanksApart(f"ranks {missing} did not come to {meeting}") from error
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._lines[size] = line  # owned from here on, whoever it is
                rank = self._receive(size, deadline_ns)
                self._lines[rank] = self._lines.pop(size)

    def _send(self, rank: int, value: Any, deadline_ns: int) -> None:
        data = msgspec.msgpack.encode(value)
        try:
            self._lines[rank].settimeout(_left_s(deadline_ns))
            self._lines[rank].sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise RanksApart(f"rank {rank} of the instance: {error}") from error

    def _receive(self, rank: int, deadline_ns: int) -> Any:
        try:
            (size,) = _LENGTH.unpack(self._exactly(rank, _LENGTH.size, deadline_ns))
            return msgspec.msgpack.decode(self._exactly(rank, size, deadline_ns))
        except OSError as error:
            raise RanksApart(f"rank {rank} of the instance: {error}") from error

    def _exactly(self, rank: int, size: int, deadline_ns: int) -> bytes:
        data, line = b"", self._lines[rank]
        while len(data) < size:
            line.settimeout(_left_s(deadline_ns))
            more = line.recv(size - len(data))
            if not more:
                raise ConnectionError("is gone")
            data += more
        return data


def _address(meeting: str) -> tuple[str, int]:
    host, _, port = meeting.rpartition(":")
    return host, int(port)


def _connect(meeting: str, deadline_ns: int) -> socket.socket:
    """Connect to rank 0, which may not listen yet."""
    while True:
        try:
            line = socket.create_connection(_address(meeting), _left_s(deadline_ns))
        except ConnectionRefusedError as error:
            if time.monotonic_ns() > deadline_ns:
                raise RanksApart(f"rank 0 does not listen at {meeting}") from error
            time.sleep(_RETRY_S)
        except OSError as error:
            raise RanksApart(f"rank 0 at {meeting}: {error}") from error
        else:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return line


def _left_s(deadline_ns: int) -> float:
    return max(0.001, (deadline_ns - time.monotonic_ns()) / NS_PER_S)
