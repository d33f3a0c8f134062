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
    SshAddress,
    TcpAddress,
    parse,
)
from drivers.base import Delta, Ocs, Transport
from drivers.errors import BadAddress, Misuse
from drivers.ocs.line import Access
from drivers.ocs.polatis import PolatisScpi, PolatisTl1
from drivers.tor import remote
from drivers.tor.base import Tor
from drivers.tor.frr import FrrTor
from drivers.tor.linux import LinuxTor
from drivers.tor.netlink import NetlinkTor
from drivers.transports.commands import Commands

OPEN_TIMEOUT_NS = 15_000_000_000
"""For connecting and logging in: key exchange with a small embedded processor takes seconds."""

DRIVERS: Mapping[str, type[PolatisScpi | PolatisTl1]] = MappingProxyType(
    {
        "polatis-scpi": PolatisScpi,
        "polatis-tl1": PolatisTl1,
    }
)

TORS: Mapping[str, type[NetlinkTor | LinuxTor | FrrTor]] = MappingProxyType(
    {
        "netlink": NetlinkTor,
        "linux-ssh": LinuxTor,
        "frr-ssh": FrrTor,
    }
)
"""Those whose name ends in ``-ssh`` are reached by a URL."""
NETNS = "netns://"


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


def open_tor(
    driver: str,
    url: str,
    *,
    name: str,
    credentials: Credentials = NO_CREDENTIALS,
    exchange_timeout_ns: int,
    open_timeout_ns: int = OPEN_TIMEOUT_NS,
) -> Tor:
    """Open a steerable ToR: by SSH (``ssh://admin@10.0.0.5:22``) or here (``netns://NAME``).

    ``netns://`` alone is the network namespace that we are in. Each exchange has
    `exchange_timeout_ns`. Raises `Misuse` (unknown driver), `BadAddress`, or what opening raises:
    `Unreachable`, `Untrusted`, `AccessDenied`, `DeadlineExpired`, `LinkLost`.
    """
    if driver not in TORS:
        raise Misuse(f"no ToR driver {driver!r}; there are {', '.join(sorted(TORS))}")
    construct = TORS[driver]
    if issubclass(construct, NetlinkTor):
        if not url.startswith(NETNS):
            raise BadAddress(f"ToR {name}: url {url!r}: use {NETNS}NAME, a network namespace here")
        return construct(name, url.removeprefix(NETNS))
    address = parse(url)
    if not isinstance(address, SshAddress):
        raise BadAddress(f"ToR {name}: url {url!r}: use ssh://admin@10.0.0.5:22")
    opener = partial(open_commands, address, credentials)
    return construct(remote.Access(name, address, opener, exchange_timeout_ns, open_timeout_ns))


def open_commands(address: SshAddress, credentials: Credentials, deadline_ns: int) -> Commands:
    """Log in to a device on which commands are run."""
    from drivers.transports.ssh_exec import SshCommands  # noqa: PLC0415

    return SshCommands(address, credentials, deadline_ns)


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
