"""Ranges of TCP ports on a node, each in one pair of hands: no two engines ever get the same.

A range is held by a lock that the kernel keeps (an abstract Unix socket, which like the ports
belongs to the network namespace): agents that share a machine see each other's, and a dead one's
are free again. It lies below the ports that the kernel gives to others, and each port of it could
be bound when it was handed out.
"""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from harness.errors import InfrastructureError

PORTS = 32
"""In a range: where an instance's ranks meet, and listen."""
RANGES = 256

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_MIN = 10_240
_FIRST_USUAL = 20_000


class NoPorts(InfrastructureError):
    """Every range is taken, or the address is not of this node."""


class Range:
    """A range of ports that is one instance's alone until it is closed."""

    def __init__(self, ports: range, lock: socket.socket) -> None:
        self.ports = ports
        self._lock = lock

    def close(self) -> None:
        """Give it back."""
        self._lock.close()


class Ports:
    """A node's allocator. `address` is where the ports will be bound."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._first = first_port()
        self._next = os.getpid()  # agents on one machine begin at different places

    def take(self) -> Range:
        """Return a free range, as a rule one that was not used lately. Raises `NoPorts`."""
        for _ in range(RANGES):
            first = self._first + self._next % RANGES * PORTS
            self._next += 1
            if (lock := _locked(first)) is None:
                continue
            held = Range(range(first, first + PORTS), lock)
            try:
                if all(_bindable(self._address, port) for port in held.ports):
                    return held
            except NoPorts:
                held.close()
                raise
            held.close()
        last = self._first + RANGES * PORTS - 1
        raise NoPorts(
            f"no {PORTS} ports in a row are free on {self._address} in {self._first} to {last}"
        )


def first_port() -> int:
    """Return the first port of the first range: all lie below those that the kernel gives out."""
    lowest = int(_EPHEMERAL.read_text().split()[0])
    first = lowest - RANGES * PORTS
    return first if first >= _FIRST_MIN else _FIRST_USUAL


def _locked(first: int) -> socket.socket | None:
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(f"\0harness-ports-{first}")
    except OSError as error:
        lock.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return lock


def _bindable(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        try:
            trial.bind((address, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise NoPorts(f"no port can be taken on {address}: {error.strerror}") from error
            return False
    return True
