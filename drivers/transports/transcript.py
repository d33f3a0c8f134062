"""Writes down every exchange with a device, for whoever has to explain it the next morning.

One line for each chunk: the monotonic time in ns, ``>`` (sent) or ``<`` (received), and the bytes
with control characters escaped. The file is written line by line, so it is whole after a crash.
Known secrets are masked by value, wherever they stand and however they are cut into chunks.
A disk that is full costs lines, never an exchange: a switch can still be put back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from drivers.base import Transport

MASK = b"***"


class Transcript:
    """A transport that writes what passes through `inner` to `path` (appended)."""

    def __init__(self, inner: Transport, path: Path, secrets: Sequence[str] = ()) -> None:
        self.name = inner.name
        self._inner = inner
        self._mask = {">": Masking(secrets), "<": Masking(secrets)}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="ascii", buffering=1)
        self._write("#", f"open {self.name}".encode())

    def send(self, data: bytes, deadline_ns: int) -> None:
        """Send, and note it once the line has taken it (or as far as is known: all of it)."""
        try:
            self._inner.send(data, deadline_ns)
        finally:
            self._note(">", data)

    def receive(self, deadline_ns: int) -> bytes:
        """Receive, and note it."""
        data = self._inner.receive(deadline_ns)
        self._note("<", data)
        return data

    def close(self) -> None:
        """Close the line and the file."""
        if self._file.closed:
            return
        try:
            self._inner.close()
        finally:
            for direction, mask in self._mask.items():
                if rest := mask.rest():
                    self._write(direction, rest)
            self._write("#", b"close")
            with suppress(OSError):  # what could not be written is tried once more here
                self._file.close()

    def _note(self, direction: str, data: bytes) -> None:
        if shown := self._mask[direction].feed(data):
            self._write(direction, shown)

    def _write(self, direction: str, data: bytes) -> None:
        if not self._file.closed:
            shown = data.decode("latin-1").encode("unicode_escape").decode("ascii")
            with suppress(OSError):
                self._file.write(f"{time.monotonic_ns()} {direction} {shown}\n")


class Masking:
    """Replaces secrets in a stream of bytes, also where a secret is cut across chunks.

    The end of a chunk that could be the beginning of a secret is kept back until it is decided.
    """

    def __init__(self, secrets: Sequence[str]) -> None:
        longest_first = sorted({s.encode() for s in secrets if s}, key=len, reverse=True)
        self._secrets = longest_first
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Return what may be shown by now."""
        text = self._held + data
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        keep = max((_overlap(text, secret) for secret in self._secrets), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> bytes:
        """Return what stands for the bytes still kept back: they may be half a secret."""
        held, self._held = self._held, b""
        return MASK if held else b""


def _overlap(text: bytes, secret: bytes) -> int:
    """Length of the longest proper beginning of `secret` that `text` ends with."""
    longest = min(len(text), len(secret) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(secret[:n])), 0)
