r"""TL1, the framed text language of optical switches: commands out, frames in; no I/O.

A command is ``VERB::AID:CTAG:GENERAL:PARAMETERS;``. What comes back is a stream of frames::

    \r\n\n   SID 26-01-31 12:00:00\r\n      (SID may be quoted, ``( nil )`` or empty)
    M  7 COMPLD\r\n                          (answers the command with ctag 7)
       "1,17"\r\n                            (rows; a DENY has a code, then a text)
    ;                                        (end; a prompt may follow)

Autonomous messages have the same shape, with ``*C``, ``**``, ``*`` or ``A`` in the place of ``M``,
and may come at any time. An answer is known by its ctag alone, so no ctag is ever used twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from drivers.errors import Misuse

COMPLETED, DENIED, PARTIAL, DELAYED, RETRIEVED = "COMPLD", "DENY", "PRTL", "DELAY", "RTRV"
COMPLETION_CODES = (COMPLETED, DENIED, PARTIAL, DELAYED, RETRIEVED)
"""Done; refused; partly done; accepted for later (`DELAY`) and more to come (`RTRV`), both followed
by a frame of the same ctag."""

_HEADER = re.compile(
    r"""^[<>\s]*(?P<sid>"[^"]*"|\(\ nil\ \)|[^\s"].*?|)\s*(?<=\s)
        (?P<stamp>\d\d(?:\d\d)?-\d\d-\d\d\s+\d\d:\d\d:\d\d)\s*$""",
    re.VERBOSE,
)
_ANSWER = re.compile(rf"^M\s+(?P<ctag>\S+)\s+(?P<code>{'|'.join(COMPLETION_CODES)})\s*$")
_AUTONOMOUS = re.compile(r"^(?P<severity>\*C|\*\*|\*|A)\s+(?P<atag>\S+)\s+(?P<what>.*?)\s*$")
_ERROR_CODE = re.compile(r"^[A-Z]{4}$")
_PROMPTS = re.compile(r"^(?:agent)?[<>]\s*")
_SPECIAL = re.compile(r'[\s:;,&"]')


@dataclass(frozen=True)
class Response:
    """The answer to the command that carried `ctag`.

    `rows` are without their quotes; `error` is the four-letter code of a denial; `text` is what
    else the body says, comments included.
    """

    ctag: str
    code: str
    rows: tuple[str, ...] = ()
    error: str = ""
    text: str = ""
    sid: str = ""
    stamp: str = ""

    @property
    def final(self) -> bool:
        """Whether no further frame of this ctag follows."""
        return self.code not in (DELAYED, RETRIEVED)


@dataclass(frozen=True)
class Event:
    """An autonomous message: an alarm or a report that nobody asked for."""

    severity: str
    """``*C`` critical, ``**`` major, ``*`` minor, ``A`` report."""
    atag: str
    what: str
    """Such as ``REPT ALM OCH``."""
    rows: tuple[str, ...] = ()
    text: str = ""
    sid: str = ""
    stamp: str = ""


@dataclass(frozen=True)
class Stray:
    """A line outside of all frames: a banner, an echo, or an answer without a frame."""

    text: str


Frame = Response | Event | Stray


# -- commands -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """A command that lacks only its ctag. `blocks` follow the ctag: general block, parameters."""

    verb: str
    aid: str = ""
    blocks: tuple[str, ...] = field(default=("",))

    def command(self, ctag: str) -> str:
        """Write the command with its ctag."""
        return f"{self.verb}::{self.aid}:{ctag}:{':'.join(self.blocks)};"


def quote(value: str) -> str:
    """Quote a value that holds separators; raise `Misuse` for one that no quoting can carry."""
    if '"' in value or not value.isascii() or not value.isprintable():
        raise Misuse('TL1 cannot carry a value with quotes (") or unprintable characters')
    return f'"{value}"' if _SPECIAL.search(value) else value


def aid(ports: Sequence[int]) -> str:
    """Write ports as an AID: ``5``, a range ``1&&8`` when they are consecutive, else ``1&4&2``."""
    if _consecutive(ports) and len(ports) > 2:
        return f"{ports[0]}&&{ports[-1]}"
    return "&".join(map(str, ports))


def pair_aid(circuits: Sequence[tuple[int, int]]) -> str:
    """Write circuits as an AID, ``1&2,193&194``; as ranges when both sides are consecutive."""
    sides = [[a for a, _ in circuits], [b for _, b in circuits]]
    if all(map(_consecutive, sides)):
        return ",".join(map(aid, sides))
    return ",".join("&".join(map(str, side)) for side in sides)


def _consecutive(ports: Sequence[int]) -> bool:
    return list(ports) == list(range(ports[0], ports[0] + len(ports)))


# -- frames ---------------------------------------------------------------------------------------


class FrameParser:
    """Cuts received bytes into frames; the same frames come out however the bytes are chunked.

    The final ``;`` ends a frame at once, whether or not a line end follows.
    """

    def __init__(self) -> None:
        self._line = ""
        self._header: re.Match[str] | None = None
        self._frame: _Body | None = None

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that `data` completes."""
        frames: list[Frame] = []
        for piece in _pieces(data.decode("latin-1")):
            if piece in "\r\n":
                frames += self._end_of_line()
            else:
                self._line += piece
            body = self._frame
            if body is not None and self._line.lstrip(" ") == ";" and not body.in_comment:
                frames.append(body.finish())
                self._frame, self._line = None, ""
        return frames

    @property
    def partial(self) -> str:
        """What has come of a line that is not complete."""
        return self._line

    def clear(self) -> None:
        """Forget all that is incomplete."""
        self._line, self._header, self._frame = "", None, None

    def _end_of_line(self) -> Iterator[Frame]:
        line, self._line = self._line.rstrip(), ""
        if self._frame is not None:
            self._frame.add(line)
            return
        if not line.strip():
            return
        if self._header is not None:
            header, self._header = self._header, None
            if found := _ANSWER.match(line) or _AUTONOMOUS.match(line):
                self._frame = _Body(header, found)
                return
            yield Stray(header.string.strip())
        self._header = _HEADER.match(line)
        if self._header is None and (text := _PROMPTS.sub("", line.strip())):
            yield Stray(text)


class _Body:
    """The lines of one frame between its identification and its ``;``."""

    def __init__(self, header: re.Match[str], found: re.Match[str]) -> None:
        self._header, self._found = header, found
        self._rows: list[str] = []
        self._words: list[str] = []
        self._comment = ""

    @property
    def in_comment(self) -> bool:
        return bool(self._comment)

    def add(self, line: str) -> None:
        text = line.strip()
        if not text:
            return
        if self._comment:
            self._comment += " " + text
        elif text.startswith("/*"):
            self._comment = text
        elif len(text) >= 2 and text[0] == '"' and text.rstrip(",")[-1] == '"':
            self._rows.append(text.rstrip(",")[1:-1])
            return
        else:
            self._words.append(text)
            return
        if self._comment.endswith("*/"):
            self._words.append(self._comment[2:-2].strip())
            self._comment = ""

    def finish(self) -> Frame:
        words = list(self._words)
        shown = {"sid": _sid(self._header["sid"]), "stamp": self._header["stamp"]}
        rows = tuple(self._rows)
        if "ctag" not in self._found.groupdict():
            severity, atag, what = self._found["severity"], self._found["atag"], self._found["what"]
            return Event(severity, atag, what, rows, " ".join(words), **shown)
        error = ""
        refused = self._found["code"] in (DENIED, PARTIAL)
        if refused and words and _ERROR_CODE.match(words[0]):
            error = words.pop(0)
        if self._found["code"] == DENIED and not words:
            words = list(rows)  # some units quote the reason
        return Response(
            self._found["ctag"], self._found["code"], rows, error, " ".join(words), **shown
        )


def _pieces(text: str) -> Iterable[str]:
    """Split at line ends and semicolons, each a piece of its own."""
    return filter(None, re.split(r"([\r\n;])", text))


def _sid(text: str) -> str:
    """Return the SID as a name: without its quotes; ``( nil )`` is the empty one."""
    return "" if text == "( nil )" else text.strip('"')
