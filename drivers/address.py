"""Device URLs and credentials: where a device is, and what opens it.

Three kinds of line: ``serial:///dev/ttyUSB0?baud=38400`` (also ``bytesize``, ``parity``,
``stopbits``), ``ssh://user@host:port`` and ``tcp://[user@]host:port``. Secrets never stand in one.
Everything wrong with a URL raises `drivers.errors.BadAddress`, saying what would be right.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from drivers.errors import BadAddress

SSH_PORT = 22
EXAMPLES = "serial:///dev/ttyUSB0?baud=38400, ssh://admin@10.0.0.5:6252 or tcp://10.0.0.5:5025"

Parity = Literal["N", "E", "O", "M", "S"]
StopBits = Literal["1", "1.5", "2"]


@dataclass(frozen=True)
class SerialAddress:
    """An RS-232 or USB line; `baud` in bit/s, framing as printed on the unit (8N1)."""

    path: str
    baud: int = 38400
    bytesize: int = 8
    parity: Parity = "N"
    stopbits: StopBits = "1"

    def __str__(self) -> str:
        framing = ""
        if (self.bytesize, self.parity, self.stopbits) != (8, "N", "1"):
            framing = f"&bytesize={self.bytesize}&parity={self.parity}&stopbits={self.stopbits}"
        return f"serial://{self.path}?baud={self.baud}{framing}"


@dataclass(frozen=True)
class SshAddress:
    """A shell on an SSH server."""

    user: str
    host: str
    port: int = SSH_PORT

    def __str__(self) -> str:
        return f"ssh://{self.user}@{_bracketed(self.host)}:{self.port}"


@dataclass(frozen=True)
class TcpAddress:
    """A raw TCP socket; `user` is for dialects that log in by themselves (TL1)."""

    host: str
    port: int
    user: str | None = None

    def __str__(self) -> str:
        login = f"{self.user}@" if self.user else ""
        return f"tcp://{login}{_bracketed(self.host)}:{self.port}"


Address = SerialAddress | SshAddress | TcpAddress


@dataclass(frozen=True)
class Credentials:
    """What opens a device. The password is never printed.

    `user` logs in where the URL names none. `known_hosts` is the file of SSH host keys that are
    trusted; without it no SSH server is.
    """

    user: str | None = None
    password: str | None = field(default=None, repr=False)
    key_file: Path | None = None
    known_hosts: Path | None = None

    def secrets(self) -> tuple[str, ...]:
        """Return the values that must never reach a log."""
        return (self.password,) if self.password else ()


NO_CREDENTIALS = Credentials()


def parse(url: str) -> Address:
    """Parse a device URL; raise `BadAddress`. A refused password is not repeated in the message."""
    parts = urlsplit(url)
    if parts.password is not None:
        shown = url.replace(f":{parts.password}@", ":***@")
        raise BadAddress(
            f"device URL {shown!r} holds a password: take it out, and give it by environment"
            " variable, by a file of mode 0600, or use an SSH key"
        )
    if parts.fragment:
        raise _bad(url, "has a fragment (#), which means nothing here")
    if parts.scheme == "serial":
        return _serial(url, parts)
    if parts.scheme not in ("ssh", "tcp"):
        kind = f"has scheme {parts.scheme!r}" if parts.scheme else "has no scheme"
        raise _bad(url, f"{kind}: use {EXAMPLES}")
    return _socket(url, parts)


def baud_of(url: str) -> int | None:
    """Return the speed of a serial URL in bit/s, whether or not it names a device file; else None.

    An emulated unit's has none until the unit is there.
    """
    parts = urlsplit(url)
    if parts.scheme != "serial":
        return None
    return int(dict(parse_qsl(parts.query)).get("baud", SerialAddress.baud))


def _socket(url: str, parts: SplitResult) -> SshAddress | TcpAddress:
    try:
        port = parts.port
    except ValueError as error:
        raise _bad(url, "needs a port number from 1 to 65535") from error
    if not parts.hostname:
        raise _bad(url, f"names no host: use {EXAMPLES}")
    if parts.path not in ("", "/") or parts.query:
        raise _bad(url, "must end after the port")
    user = unquote(parts.username) if parts.username else None
    if parts.scheme == "ssh":
        if user is None:
            raise _bad(url, f"names no user: ssh://USER@{parts.netloc}")
        return SshAddress(user, parts.hostname, SSH_PORT if port is None else _port(url, port))
    if port is None:
        raise _bad(url, f"names no port: tcp://{parts.netloc}:PORT (SCPI 5025, TL1 3082)")
    return TcpAddress(parts.hostname, _port(url, port), user)


def _serial(url: str, parts: SplitResult) -> SerialAddress:
    if parts.netloc:
        raise _bad(url, f"needs three slashes: serial:///{parts.netloc}{parts.path}")
    if not parts.path.startswith("/") or parts.path == "/":
        raise _bad(url, "names no device file: serial:///dev/ttyUSB0?baud=38400")
    allowed = ("baud", "bytesize", "parity", "stopbits")
    settings: dict[str, str] = {}
    for key, value in parse_qsl(parts.query, keep_blank_values=True):
        if key not in allowed or key in settings:
            fault = "twice" if key in settings else f"which is not one of {', '.join(allowed)}"
            raise _bad(url, f"sets {key!r}, {fault}")
        settings[key] = value
    parity = settings.get("parity", "N").upper()
    stopbits = settings.get("stopbits", "1")
    bytesize = settings.get("bytesize", "8")
    baud = settings.get("baud", "38400")
    if not (baud.isascii() and baud.isdigit() and int(baud) > 0):
        raise _bad(url, f"has baud={baud!r}: use a positive number of bit/s, such as 38400")
    if bytesize not in ("5", "6", "7", "8"):
        raise _bad(url, f"has bytesize={bytesize!r}: use 5, 6, 7 or 8")
    for name, value, choices in (
        ("parity", parity, get_args(Parity)),
        ("stopbits", stopbits, get_args(StopBits)),
    ):
        if value not in choices:
            raise _bad(url, f"has {name}={value!r}: use one of {', '.join(choices)}")
    return SerialAddress(
        path=unquote(parts.path),
        baud=int(baud),
        bytesize=int(bytesize),
        parity=next(p for p in get_args(Parity) if p == parity),
        stopbits=next(s for s in get_args(StopBits) if s == stopbits),
    )


def _port(url: str, port: int) -> int:
    if port == 0:
        raise _bad(url, "needs a port number from 1 to 65535")
    return port


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _bad(url: str, why: str) -> BadAddress:
    return BadAddress(f"device URL {url!r} {why}")
