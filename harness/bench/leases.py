"""Leases on devices: two controllers on one machine never hold the same port of a switch at once.

A lease is a file that its process keeps locked, so it ends with the process however that ends. It
covers ports, not the whole unit: who shares a switch has ports of his own. A ToR is leased whole:
whoever steers it takes away the routes of others that do. Other machines are not seen; a unit whose
line takes one session only refuses them itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

import msgspec

from drivers.address import SSH_PORT
from harness.errors import InfrastructureError
from harness.model.bench import Switch, Tor
from harness.model.ports import format_ports, parse_ports

FOLDERS = (Path("/run/lock"), Path("/tmp"))  # noqa: S108 - others' files there are only read
"""The first that can be written to: the same for every user of a machine, whatever his TMPDIR."""
READ = os.O_RDONLY | os.O_NOFOLLOW
"""Of a folder in which anybody may leave links to our files."""


class Lease(msgspec.Struct, frozen=True):
    """Who holds which ports of a unit; "" is all of it."""

    url: str
    ports: str
    holder: str
    pid: int


@contextmanager
def held(
    devices: Mapping[str, Switch | Tor], holder: str, folder: Path | None = None
) -> Iterator[None]:
    """Hold our ports of switches, and ToRs, while the body runs; `holder` is what others are told.

    Raises `InfrastructureError` where another process on this machine holds one of them.
    """
    folder = folder or next(path for path in FOLDERS if os.access(path, os.W_OK))
    with ExitStack() as stack:
        for name, device in devices.items():
            ports = device.ports if isinstance(device, Switch) else ""
            lease = Lease(device.url, ports, holder, os.getpid())
            stem = f"harness-{_key(device.url)}"
            with _one_at_a_time(folder / f"{stem}.lock"):
                if other := _overlapping(lease, folder):
                    raise InfrastructureError(
                        f"{name}: {_shared(other, lease)} held by {other.holder} (pid "
                        f"{other.pid}); wait until it has ended, or stop it"
                    )
                descriptor, path = tempfile.mkstemp(".lease", f"{stem}-", folder)
                kept = stack.enter_context(open(descriptor, "wb"))
                stack.callback(Path(path).unlink, missing_ok=True)
                fcntl.flock(kept, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _show(descriptor)
                _write(kept, lease)
        yield


def _key(url: str) -> str:
    """Return what names a device in files' names: whoever logs in, and however it is written."""
    scheme, _, rest = url.partition("?")[0].partition("://")
    place = rest.rpartition("@")[2]
    if scheme == "serial":
        place = os.path.realpath(place)
    elif scheme == "ssh" and not re.search(r":\d+$", place):
        place += f":{SSH_PORT}"
    return hashlib.sha256(f"{scheme}://{place}".encode()).hexdigest()[:16]


def _shared(a: Lease, b: Lease) -> str:
    """Say what both leases cover, as the subject of a sentence; "" where they share nothing."""
    if not (a.ports and b.ports):
        return "it is"
    ports = parse_ports(a.ports) & parse_ports(b.ports)
    return f"ports {format_ports(ports)} are" if ports else ""


def _show(descriptor: int) -> None:
    """Let every user read a file of ours, whatever our umask: they look who holds what."""
    with suppress(PermissionError):  # another user's, who did the same
        os.fchmod(descriptor, 0o644)


def _write(file: IO[bytes], lease: Lease) -> None:
    file.write(msgspec.json.encode(lease))
    file.flush()


def _overlapping(wanted: Lease, folder: Path) -> Lease | None:
    """Return a lease of another process that has one of the wanted ports; dead ones are deleted."""
    for path in sorted(folder.glob(f"harness-{_key(wanted.url)}-*.lease")):
        with suppress(FileNotFoundError), path.open("rb") as file:
            if not _is_held(file):
                with suppress(PermissionError):  # another user's: it holds nothing any more
                    path.unlink(missing_ok=True)
                continue
            found = msgspec.json.decode(file.read(), type=Lease)
            if found.pid != wanted.pid and _shared(found, wanted):
                return found
    return None


def _is_held(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Hold a lock that all users of the machine share, for as long as leases are compared."""
    descriptor = os.open(path, READ | (0 if path.exists() else os.O_CREAT), 0o644)
    try:
        _show(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
