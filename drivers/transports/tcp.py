"""A raw TCP line to a device."""

from __future__ import annotations

import socket

from drivers.address import TcpAddress
from drivers.errors import LinkLost, Unreachable
from drivers.transports.bounded import bounded, remaining_s
from drivers.transports.descriptor import Descriptor


def dial(host: str, port: int, deadline_ns: int, name: str) -> socket.socket:
    """Connect to a TCP port, small writes sent at once; raise `Unreachable`.

    The name look-up inside has no timeout: call this through `bounded`.
    """
    try:
        connected = socket.create_connection((host, port), max(remaining_s(deadline_ns), 0.001))
    except (OSError, UnicodeError) as error:  # UnicodeError: a host name that cannot be encoded
        raise Unreachable(f"{name}: cannot connect to {host} port {port}: {error}") from error
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected


class TcpTransport:
    """A connected TCP socket; opening it raises `Unreachable` or `DeadlineExpired`."""

    def __init__(self, address: TcpAddress, deadline_ns: int) -> None:
        self.name = str(address)
        self._socket: socket.socket | None = bounded(
            lambda: dial(address.host, address.port, deadline_ns, self.name),
            deadline_ns,
            what=f"{self.name}: connect",
            dispose=socket.socket.close,
        )
        self._socket.setblocking(False)
        self._line = Descriptor(self._socket.fileno(), self.name)

    def send(self, data: bytes, deadline_ns: int) -> None:
        """Send all of `data`."""
        self._open().send(data, deadline_ns)

    def receive(self, deadline_ns: int) -> bytes:
        """Return at least one byte."""
        return self._open().receive(deadline_ns)

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _open(self) -> Descriptor:
        if self._socket is None:
            raise LinkLost(f"{self.name}: used after it was closed")
        return self._line
