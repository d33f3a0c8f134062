"""Driver names and what they construct: the one table that a bench file's `driver` names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

from drivers.address import (
    NO_CREDENTIALS,
    Address,
    Credentials,
    SerialAddress,
    TcpAddress,
    parse,
)
from drivers.base import Delta, Ocs, Transport
from drivers.errors import Misuse
from drivers.ocs.line import Access
from drivers.ocs.polatis import PolatisScpi, PolatisTl1

OPEN_TIMEOUT_NS = 15_000_000_000
"""For connecting and logging in: key exchange with a small embedded processor takes seconds."""

DRIVERS: Mapping[str, type[PolatisScpi | PolatisTl1]] = MappingProxyType(
    {
        "polatis-scpi": PolatisScpi,
        "polatis-tl1": PolatisTl1,
    }
)


def open_ocs(
    driver: str,
    url: str,
    *,
    name: str,
    credentials: Credentials = NO_CREDENTIALS,
    exchange_timeout_ns: int,
    open_timeout_ns: int = OPEN_TIMEOUT_NS,
    transcript: Path | None = None,
) -> Ocs:
    """Open a switch and identify it.

    `name` stands in messages; every exchange has `exchange_timeout_ns`; `transcript` is a file to
    which all that passes the line is appended, secrets masked. Raises `Misuse` (unknown driver),
    `BadAddress`, or what opening the line raises: `Unreachable`, `Untrusted`, `AccessDenied`,
    `DeadlineExpired`, `LinkLost`, `Garbled`.
    """
    construct = driver_class(driver)
    address = parse(url)
    opener = partial(open_line, address, credentials, transcript=transcript)
    return construct(
        Access(name, address, opener, exchange_timeout_ns, open_timeout_ns, credentials)
    )


def preview(driver: str, delta: Delta) -> list[str]:
    """Return the exact command lines that `driver` would send for `delta`; opens nothing."""
    return driver_class(driver).preview(delta)


def driver_class(driver: str) -> type[PolatisScpi | PolatisTl1]:
    """Return the class of a driver; raise `Misuse` listing those there are."""
    if driver not in DRIVERS:
        raise Misuse(f"no driver {driver!r}; there are {', '.join(sorted(DRIVERS))}")
    return DRIVERS[driver]


def open_line(
    address: Address,
    credentials: Credentials,
    deadline_ns: int,
    *,
    transcript: Path | None = None,
) -> Transport:
    """Open the transport that `address` names, written down in `transcript` where given."""
    line: Transport
    if isinstance(address, TcpAddress):
        from drivers.transports.tcp import TcpTransport  # noqa: PLC0415

        line = TcpTransport(address, deadline_ns)
    elif isinstance(address, SerialAddress):
        from drivers.transports.serial_port import SerialTransport  # noqa: PLC0415

        line = SerialTransport(address, deadline_ns)
    else:
        # paramiko takes a tenth of a second to import: only whoever uses SSH pays for it.
        from drivers.transports.ssh import SshTransport  # noqa: PLC0415

        line = SshTransport(address, credentials, deadline_ns)
    if transcript is None:
        return line
    from drivers.transports.transcript import Transcript  # noqa: PLC0415

    return Transcript(line, transcript, credentials.secrets())
