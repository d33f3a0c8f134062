r"""A transport that plays a recorded dialogue and insists on both sides of it; for tests.

A dialogue file is plain text: ``> `` begins what we must send, ``< `` what the device then answers,
``#`` a comment. Line ends are part of the dialogue and stand as ``\r`` and ``\n``; consecutive
lines of one direction are one message.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from drivers.errors import DeadlineExpired, LinkLost

Dialogue = list[tuple[bytes, bytes]]
"""(sent, received) in order; either may be empty."""


def load_dialogue(path: Path) -> Dialogue:
    """Read a dialogue file; raise ValueError naming the line that is not of it."""
    dialogue: Dialogue = []
    for number, line in enumerate(path.read_text(encoding="ascii").splitlines(), 1):
        mark, text = line[:2], line[2:].encode("ascii").decode("unicode_escape").encode("latin-1")
        if not line.strip() or line.startswith("#"):
            continue
        if mark not in ("> ", "< "):
            raise ValueError(f"{path}:{number}: begin with '> ', '< ' or '#'")
        sent, received = dialogue.pop() if dialogue else (b"", b"")
        if mark == "< ":
            dialogue.append((sent, received + text))
        elif received:
            dialogue += [(sent, received), (text, b"")]
        else:
            dialogue.append((sent + text, b""))
    return dialogue


class Replay:
    """Plays `dialogue`; anything else that is sent, or read, is an AssertionError or silence."""

    def __init__(self, dialogue: Iterable[tuple[bytes, bytes]], name: str = "replay://") -> None:
        self.name = name
        self._left = list(dialogue)
        self._sent = b""
        self._pending = b""
        self._closed = False

    def send(self, data: bytes, deadline_ns: int) -> None:
        """Check `data` against what must be sent now."""
        del deadline_ns
        self._must_be_open()
        assert self._left, f"the dialogue is over, yet {data!r} was sent"
        self._sent += data
        wanted, reply = self._left[0]
        assert wanted.startswith(self._sent), f"sent {self._sent!r}, the dialogue has {wanted!r}"
        if self._sent == wanted:
            del self._left[0]
            self._sent = b""
            self._pending += reply

    def receive(self, deadline_ns: int) -> bytes:
        """Return the device's words; when it has none, its silence is over at once."""
        del deadline_ns
        self._must_be_open()
        if self._left and self._left[0][0] == b"" and not self._pending:
            self._pending = self._left.pop(0)[1]
        if not self._pending:
            raise DeadlineExpired(f"{self.name}: nothing received in time")
        data, self._pending = self._pending, b""
        return data

    def close(self) -> None:
        """Close."""
        self._closed = True

    def finish(self) -> None:
        """Assert that the whole dialogue took place."""
        assert not self._pending, f"never read: {self._pending!r}"
        assert not self._left, f"never sent: {self._left[0][0]!r}"

    def _must_be_open(self) -> None:
        if self._closed:
            raise LinkLost(f"{self.name}: used after it was closed")
