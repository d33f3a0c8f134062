"""Deadlines for a non-blocking file descriptor: what the serial and the TCP line have in common.

One ``poll`` and one ``read`` or ``write`` a call, so that our share of an exchange stays in the
tens of microseconds.
"""

from __future__ import annotations

import os
import select
import time

from drivers.base import NS_PER_MS
from drivers.errors import DeadlineExpired, LinkLost

CHUNK_BYTES = 65536


class Descriptor:
    """Reads and writes `fd` until an absolute deadline (monotonic ns). Does not own `fd`.

    Raises `DeadlineExpired`, or `LinkLost` when the other end is gone.
    """

    def __init__(self, fd: int, name: str) -> None:
        self._fd, self._name = fd, name
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(fd, select.POLLIN)
        self._writable.register(fd, select.POLLOUT)

    def send(self, data: bytes, deadline_ns: int) -> None:
        """Write all of `data`."""
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:
                self._wait(self._writable, deadline_ns, f"{len(left)} bytes not taken")
            except OSError as error:
                raise LinkLost(f"{self._name}: line lost while sending: {error}") from error

    def receive(self, deadline_ns: int) -> bytes:
        """Return what is there, waiting for the first byte."""
        while True:
            self._wait(self._readable, deadline_ns, "nothing received")
            try:
                data = os.read(self._fd, CHUNK_BYTES)
            except BlockingIOError:
                continue
            except OSError as error:
                raise LinkLost(f"{self._name}: line lost while receiving: {error}") from error
            if not data:
                raise LinkLost(f"{self._name}: the device closed the line")
            return data

    def _wait(self, poll: select.poll, deadline_ns: int, why: str) -> None:
        left_ns = max(0, deadline_ns - time.monotonic_ns())
        if not poll.poll(left_ns / NS_PER_MS):
            raise DeadlineExpired(f"{self._name}: {why} in time")


def drain(descriptor: Descriptor, quiet_ns: int, deadline_ns: int) -> bytes:
    """Read and return what is under way, until nothing comes for `quiet_ns`.

    A flush at opening misses bytes that are still on the wire or in the adapter. Stops at
    `deadline_ns` with a line that is never quiet: what follows must tell answers from noise anyway.
    """
    seen = b""
    while (now_ns := time.monotonic_ns()) < deadline_ns:
        try:
            seen += descriptor.receive(min(now_ns + quiet_ns, deadline_ns))
        except DeadlineExpired:
            break
    return seen
