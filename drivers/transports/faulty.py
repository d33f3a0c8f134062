"""A transport that misbehaves on purpose: the line faults that drivers must survive; for tests."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable

from drivers.base import Transport
from drivers.errors import DeadlineExpired, LinkLost


class Faulty:
    """Passes everything to `inner`, with these faults.

    `chunks`: sizes (bytes) in which what is received arrives, repeated for ever. `cut_after`: the
    line is lost after so many bytes received. `delay_ns`: before each receive. `drop`: numbers of
    the sends (from 1) whose answer is lost. `garble`: changes what is received.
    """

    def __init__(
        self,
        inner: Transport,
        *,
        chunks: Iterable[int] = (),
        cut_after: int | None = None,
        delay_ns: int = 0,
        drop: Iterable[int] = (),
        garble: Callable[[bytes], bytes] = bytes,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.name = inner.name
        self._inner = inner
        self._sizes = itertools.cycle(tuple(chunks) or (1 << 30,))
        self._left_bytes = cut_after
        self._delay_ns = delay_ns
        self._drop = frozenset(drop)
        self._garble, self._sleep = garble, sleep
        self._sends = 0
        self._buffer = b""

    def send(self, data: bytes, deadline_ns: int) -> None:
        """Send."""
        self._sends += 1
        self._inner.send(data, deadline_ns)

    def receive(self, deadline_ns: int) -> bytes:
        """Receive, faults included."""
        if self._left_bytes == 0:
            self.close()
            raise LinkLost(f"{self.name}: line cut (injected)")
        if self._delay_ns:
            self._sleep(self._delay_ns / 1e9)
            if time.monotonic_ns() > deadline_ns:
                raise DeadlineExpired(f"{self.name}: delayed too long (injected)")
        while not self._buffer:
            data = self._inner.receive(deadline_ns)
            if self._sends not in self._drop:
                self._buffer = self._garble(data)
        size = next(self._sizes)
        if self._left_bytes is not None:
            size = min(size, self._left_bytes)
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        if self._left_bytes is not None:
            self._left_bytes -= len(data)
        return data

    def close(self) -> None:
        """Close."""
        self._inner.close()
