"""SCPI as optical switches speak it: port lists, maps, power lists, errors; no I/O.

A *set* command answers nothing, a query answers one line that ends in CR, LF or CRLF. Port lists
stand as ``(@1,2,3)``, a whole map as ``(@1,2,3),(@17,18,19)``. Text that is not of this language
raises `drivers.errors.Garbled`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from drivers.base import Circuit
from drivers.errors import Garbled

_PORT_LISTS = re.compile(r"\(@([\d,\s]*)\)\s*,\s*\(@([\d,\s]*)\)")
_LIST = re.compile(r"\(@?(.*)\)", re.DOTALL)
_ERROR = re.compile(r"([+-]?\d+)\s*(?:,\s*(.*))?", re.DOTALL)
_SIZE = re.compile(r"(\d+)\s*,\s*(\d+)")
_SHOWN = 80


class ReplyReader:
    """Cuts received bytes into reply lines, however they are chunked and terminated."""

    def __init__(self) -> None:
        self._partial = bytearray()

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that `data` completes. Empty lines (as between CR and LF) are none."""
        self._partial += data.replace(b"\r", b"\n")
        *lines, rest = self._partial.split(b"\n")
        self._partial = rest
        return [text for line in lines if (text := line.decode("latin-1").strip())]

    @property
    def partial(self) -> bytes:
        """What has come of a line that is not complete."""
        return bytes(self._partial)

    def clear(self) -> None:
        """Forget the incomplete line."""
        self._partial.clear()


@dataclass(frozen=True)
class ErrorEntry:
    """One entry of the unit's error queue; code 0 means that the queue is empty."""

    code: int
    text: str


def ports(numbers: Iterable[int]) -> str:
    """Write a port list: ``(@1,2,3)``."""
    return f"(@{','.join(map(str, numbers))})"


def pairs(circuits: Sequence[Circuit]) -> str:
    """Write circuits as two port lists, ingress first: ``(@1,2),(@17,18)``."""
    return f"{ports(a for a, _ in circuits)},{ports(b for _, b in circuits)}"


def parse_pairs(reply: str) -> list[Circuit]:
    """Read a map, ``(@1,2),(@18,17)``; ``(@),(@)`` is the empty one."""
    found = _PORT_LISTS.fullmatch(reply.strip())
    if found is None:
        raise _garbled("a map such as (@1,2),(@17,18)", reply)
    ingress, egress = ([int(n) for n in side.split(",") if n.strip()] for side in found.groups())
    if len(ingress) != len(egress):
        raise _garbled("two port lists of one length", reply)
    return list(zip(ingress, egress, strict=True))


def parse_list(reply: str) -> list[str]:
    """Read a bracketed list, ``(D,E,F)`` or ``(@1,2)``, into its items."""
    found = _LIST.fullmatch(reply.strip())
    if found is None:
        raise _garbled("a list in brackets", reply)
    return [item.strip() for item in found[1].split(",")] if found[1].strip() else []


def parse_powers(reply: str) -> list[float]:
    """Read powers in dBm, ``(-3.21,-60.00)``."""
    try:
        return [float(item) for item in parse_list(reply)]
    except ValueError as error:
        raise _garbled("powers in dBm such as (-3.21,-60.00)", reply) from error


def parse_error(reply: str) -> ErrorEntry:
    """Read one entry of the error queue, ``-222,"Data out of range"``."""
    found = _ERROR.fullmatch(reply.strip())
    if found is None:
        raise _garbled('an error entry such as 0,"No error"', reply)
    return ErrorEntry(int(found[1]), unquote(found[2] or ""))


def parse_identity(reply: str) -> tuple[str, str, str, str]:
    """Read an ``*IDN?`` answer: vendor, model, serial number, firmware."""
    fields = [field.strip() for field in reply.split(",")]
    if len(fields) != 4 or not fields[0][:1].isalpha() or not reply.isascii():
        raise _garbled("an identity of four fields", reply)
    return fields[0], fields[1], fields[2], fields[3]


def parse_size(reply: str) -> tuple[int, int]:
    """Read the numbers of ingress and egress ports, ``16,16``."""
    found = _SIZE.fullmatch(reply.strip())
    if found is None:
        raise _garbled("a size such as 16,16", reply)
    return int(found[1]), int(found[2])


def parse_peer(reply: str) -> int | None:
    """Read the peer of one port: ``"18"``, or ``""`` for a free port."""
    text = unquote(reply)
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise _garbled('a quoted port number such as "18"', reply)
    return int(text)


def unquote(text: str) -> str:
    """Take the quotes off a string reply; a doubled quote inside stands for one."""
    text = text.strip()
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1].replace(text[0] * 2, text[0])
    return text


def _garbled(wanted: str, reply: str) -> Garbled:
    shown = reply if len(reply) <= _SHOWN else reply[:_SHOWN] + "..."
    return Garbled(f"expected {wanted}, received {shown!r}")
