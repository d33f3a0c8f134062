"""An RS-232 or USB serial line to a device.

The port is held exclusively, so that a second program is refused instead of stealing bytes, and is
read until quiet at opening: bytes of an earlier session would answer our first question. Whoever
speaks over it still begins with a query whose answer is known.
"""

from __future__ import annotations

import errno
import time

import serial

from drivers.address import SerialAddress
from drivers.base import NS_PER_S
from drivers.errors import LinkLost, Unreachable
from drivers.transports.bounded import bounded
from drivers.transports.descriptor import Descriptor, drain

QUIET_NS = 30_000_000
"""No byte for this long means quiet: longer than a USB adapter's latency timer (16 ms)."""
QUIET_BYTES = 20
"""... and longer than this many byte times, for slow lines."""
DRAIN_NS = 1_000_000_000
"""Reading of stale bytes ends here even if the line is never quiet."""
BITS_PER_BYTE = 10


class SerialTransport:
    """An open serial port; opening it raises `Unreachable` or `DeadlineExpired`."""

    def __init__(self, address: SerialAddress, deadline_ns: int) -> None:
        self.name = str(address)
        self._port: serial.SerialBase | None = bounded(
            lambda: _open_port(address, self.name),
            deadline_ns,
            what=f"{self.name}: open",
            dispose=lambda port: port.close(),
        )
        self._line = Descriptor(self._port.fileno(), self.name)
        quiet_ns = max(QUIET_NS, QUIET_BYTES * BITS_PER_BYTE * NS_PER_S // address.baud)
        try:
            drain(self._line, quiet_ns, min(deadline_ns, time.monotonic_ns() + DRAIN_NS))
        except LinkLost:
            self.close()
            raise

    def send(self, data: bytes, deadline_ns: int) -> None:
        """Hand all of `data` to the line."""
        self._open().send(data, deadline_ns)

    def receive(self, deadline_ns: int) -> bytes:
        """Return at least one byte."""
        return self._open().receive(deadline_ns)

    def close(self) -> None:
        """Close the port and give up the lock."""
        if self._port is not None:
            self._port.close()
            self._port = None

    def _open(self) -> Descriptor:
        if self._port is None:
            raise LinkLost(f"{self.name}: used after it was closed")
        return self._line


def _open_port(address: SerialAddress, name: str) -> serial.SerialBase:
    try:
        return serial.serial_for_url(
            address.path,
            baudrate=address.baud,
            bytesize=address.bytesize,
            parity=address.parity,
            stopbits=float(address.stopbits),
            timeout=0,
            exclusive=True,
        )
    except (OSError, ValueError) as error:  # pyserial's own errors are OSErrors
        code = getattr(error, "errno", None)
        raise Unreachable(f"{name}: {_reason(address.path, code, error)}") from error


def _reason(path: str, code: int | None, error: Exception) -> str:
    if code == errno.ENOENT:
        return f"no serial device {path}: is the adapter plugged in? (ls /dev/serial/by-id)"
    if code in (errno.EAGAIN, errno.EBUSY):
        return f"{path} is held by another process (fuser {path} names it)"
    if code == errno.EACCES:
        return f"no permission to open {path}: join the group that owns it (usually dialout)"
    return f"cannot open {path}: {error}"
