"""A serial line to the unit: a pseudo-terminal that behaves like an adapter with a UART behind it.

The kernel enforces neither speed nor framing on a pty, so this does: bytes take their time both
ways, and where the client has set another speed than the unit's, both sides read garbage. A client
may close and open the line as it likes (we keep the far end open, or the first close would hang the
line up). A cut line is an adapter that was pulled: its pty is gone, and a new one takes the link.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import struct
import termios
import time
import tty

from drivers.emulators.config import Face
from drivers.emulators.servers import Address, SessionMaker
from drivers.emulators.servers.wire import byte_ns, received
from drivers.emulators.unit import Unit
from drivers.errors import Misuse

TCGETS2 = 0x802C542A
TERMIOS2 = struct.Struct("=4I20s2I")
READ_MAX = 256
"""Bytes taken from the client at once; what is not on the wire yet waits with the client."""
SLICE_NS = 2_000_000
"""Replies leave in pieces of this length of wire time."""


class SerialServer:
    """Keeps an adapter plugged in, under a stable link where the face names one."""

    def __init__(self, face: Face, unit: Unit, session: SessionMaker) -> None:
        if face.baud <= 0 or not hasattr(termios, f"B{face.baud}"):
            raise Misuse(f"baud {face.baud} is not a speed that serial ports have")
        self._baud, self._link = face.baud, face.link
        self._unit, self._make_session = unit, session
        self._line = self._plug_in()
        self._task = asyncio.create_task(self._run())
        self.address = Address(f"serial://{self._link or self._line.path}?baud={self._baud}")

    async def close(self) -> None:
        """Remove the pty and the link, if that is still ours."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._pull_out()

    async def _run(self) -> None:
        while True:
            await self._line.carry()
            self._pull_out()
            self._line = self._plug_in()

    def _plug_in(self) -> SerialLine:
        line = SerialLine(self._baud, self._unit, self._make_session)
        if self._link:
            try:
                _point(self._link, line.path)
            except (OSError, Misuse):
                line.pull_out()
                raise
        return line

    def _pull_out(self) -> None:
        if self._link:
            with contextlib.suppress(OSError):
                if os.readlink(self._link) == self._line.path:
                    os.unlink(self._link)
        self._line.pull_out()


class SerialLine:
    """One pty and the bytes on it."""

    ends_with_the_unit = False

    def __init__(self, baud: int, unit: Unit, session: SessionMaker) -> None:
        self._master, self._slave = os.openpty()
        tty.setraw(self._slave)
        attributes = termios.tcgetattr(self._slave)
        attributes[4] = attributes[5] = getattr(termios, f"B{baud}")
        termios.tcsetattr(self._slave, termios.TCSANOW, attributes)
        os.set_blocking(self._master, False)
        self.path = os.ttyname(self._slave)
        self.byte_ns = byte_ns(baud)
        self._baud, self._unit = baud, unit
        self._out: asyncio.Queue[bytes | None] = asyncio.Queue()
        dialogue = session()
        self._ends = dialogue.ends
        self._dialogue = unit.connect(dialogue, self)

    def write(self, data: bytes) -> None:
        """Send at the speed of the line."""
        self._out.put_nowait(data)

    def close(self) -> None:
        """End `carry` once everything written has left."""
        self._out.put_nowait(None)

    def pull_out(self) -> None:
        """Make the pty vanish; a client that has it open reads an error."""
        self._unit.disconnect(self._dialogue)
        os.close(self._master)
        os.close(self._slave)

    async def carry(self) -> None:
        """Carry bytes both ways until the line is closed."""
        async with asyncio.TaskGroup() as group:
            receiving = group.create_task(self._receive())
            await self._transmit()
            receiving.cancel()

    async def _receive(self) -> None:
        free_ns = 0
        while True:
            await self._readable()
            data = os.read(self._master, READ_MAX)
            client = self._client_baud()
            free_ns = max(free_ns, time.monotonic_ns())
            pieces = split_after(data, self._ends) if client == self._baud else [data]
            for piece in pieces:
                free_ns += len(piece) * byte_ns(client)
                await _until(free_ns)
                self._dialogue.feed(received(piece, client, self._baud))

    async def _transmit(self) -> None:
        step = max(1, SLICE_NS // self.byte_ns)
        free_ns = 0
        while (data := await self._out.get()) is not None:
            data = received(data, self._baud, self._client_baud())
            free_ns = max(free_ns, time.monotonic_ns())
            for start in range(0, len(data), step):
                piece = data[start : start + step]
                free_ns += len(piece) * self.byte_ns
                await _until(free_ns)
                # Nobody reads and the buffer is full: without flow control a UART overruns.
                with contextlib.suppress(BlockingIOError):
                    os.write(self._master, piece)

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(self._master, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._master)

    def _client_baud(self) -> int:
        """Read the speed the client has set; it is one setting for both ends of a pty."""
        raw = fcntl.ioctl(self._master, TCGETS2, bytes(TERMIOS2.size))
        speed: int = TERMIOS2.unpack(raw)[-1]
        return speed or self._baud


def _point(link: str, path: str) -> None:
    """Make `link` point to `path`; whoever looks sees the old adapter or the new one."""
    if os.path.lexists(link) and not os.path.islink(link):
        raise Misuse(f"{link} exists and is not a link to a pty")
    aside = f"{link}.{os.getpid()}"
    os.symlink(path, aside)
    os.replace(aside, link)


def split_after(data: bytes, ends: bytes) -> list[bytes]:
    """Split after each end of a command, so that each is obeyed when its last byte has arrived."""
    parts = [part + ends for part in data.split(ends)]
    parts[-1] = parts[-1][: -len(ends)]
    return [part for part in parts if part]


async def _until(at_ns: int) -> None:
    """Sleep until a monotonic instant."""
    await asyncio.sleep(max(0, at_ns - time.monotonic_ns()) / 1e9)
