"""Beacons out of each device and from it: what is lit, and with whom, as packets see it.

Per device one UDP socket bound to it sends to, and listens on, a link-local multicast group (time
to live 1): no route is needed, and whoever is at the other end of the light hears. Arrivals carry
the kernel's receive stamps, so neither threads nor Python blur them. A sender that is late skips
the slots it missed; it never bunches.

Senders and receiver are threads of their own. While nobody waits for a far end the receiver looks
only every `IDLE_S`; with a waiter it wakes on each packet.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agents.beacons import Ledger, Stamper, parse
from agents.labour import Handler, Notify
from harness.clock import NS_PER_S, NS_PER_US
from harness.processes import ask_for_real_time
from harness.wire.messages import (
    Beacons,
    Counters,
    Done,
    Failure,
    Heard,
    Message,
    Note,
    ReadCounters,
    StartBeacons,
    StopBeacons,
)

GROUP, PORT = "224.0.0.150", 15150
INTERVAL_MIN_NS = 200 * NS_PER_US
IDLE_S = 0.01

_SO_RXQ_OVFL = 40
_SO_TIMESTAMPNS = 35
_SO_RCVBUFFORCE = 33
_BUFFER_BYTES = 4 * 2**20
_PRIORITY = 6  # before bulk traffic where the device's queue knows priorities; the highest allowed
_TIMESPEC = struct.Struct("@qq")
_ROOM = socket.CMSG_SPACE(_TIMESPEC.size) + socket.CMSG_SPACE(4)
_LIMIT_S = 5.0
_NET_DEV = Path("/proc/thread-self/net/dev")
_SIOCGIFFLAGS, _IFF_RUNNING = 0x8913, 0x40
_IFREQ = struct.Struct("16sH22x")  # struct ifreq: name, flags


@dataclass(frozen=True)
class _Waiter:
    """A `Heard` that is to be answered as soon as its far ends were heard."""

    expect: Mapping[str, str]
    since_ns: int
    loop: asyncio.AbstractEventLoop
    heard: asyncio.Future[None]


class Probe:
    """The labour of beacons; see `agents.labour`. `node` is the name that beacons carry."""

    def __init__(self, notify: Notify, *, node: str = "") -> None:
        self._notify = notify
        self._node = node or socket.gethostname()
        self._listening: _Listening | None = None

    def commands(self) -> dict[type[Message], Handler]:
        """Return who answers what."""
        return {
            StartBeacons: self._start,
            Heard: self._heard,
            StopBeacons: self._stop,
            ReadCounters: self._count,
        }

    async def close(self) -> None:
        """Stop sending and listening."""
        listening, self._listening = self._listening, None
        if listening:
            listening.dismiss()
            await asyncio.to_thread(listening.close)

    def kill_now(self) -> None:
        """Nothing to do: threads and sockets end with the process."""

    async def _start(self, asked: StartBeacons, _deadline_ns: int) -> Message:
        if self._listening:
            return Failure(error="Busy", text="beacons are sent already: stop them first")
        present = {name for _, name in socket.if_nameindex()}
        if missing := sorted(set(asked.devices) - present):
            text = f"no network device {', '.join(missing)} here; there are {sorted(present)}"
            return Failure(error="Refused", text=text)
        if asked.interval_ns < INTERVAL_MIN_NS:
            text = f"beacons every {asked.interval_ns} ns: {INTERVAL_MIN_NS} ns is the shortest"
            return Failure(error="Refused", text=text)
        try:
            self._listening = _Listening(self._notify, self._node, asked)
        except OSError as error:
            return Failure(error="Refused", text=f"beacons: {error}")
        return Done(t_ns=time.monotonic_ns())

    async def _heard(self, asked: Heard, deadline_ns: int) -> Message:
        listening = self._listening
        if listening is None:
            return Failure(error="NoBeacons", text="no beacons were started on this node")
        if missing := sorted(set(asked.expect) - set(listening.devices)):
            return Failure(error="Refused", text=f"no beacons on {', '.join(missing)}")
        if asked.expect:
            left_ns = deadline_ns - time.monotonic_ns() if deadline_ns else asked.wait_ns
            await listening.wait(asked, max(0, min(left_ns, asked.wait_ns)) / NS_PER_S)
        if listening is not self._listening:
            return Failure(error="NoBeacons", text="the beacons were stopped meanwhile")
        return listening.report(asked.since_ns)

    async def _count(self, _asked: ReadCounters, _deadline_ns: int) -> Message:
        received, sent = counters(_NET_DEV.read_text(encoding="ascii"))  # noqa: ASYNC240 - memory
        return Counters(
            sent_bytes=sent,
            received_bytes=received,
            t_ns=time.monotonic_ns(),
            down=without_link(sent),
        )

    async def _stop(self, _asked: StopBeacons, _deadline_ns: int) -> Message:
        if self._listening is None:
            return Failure(error="NoBeacons", text="no beacons were started on this node")
        found = self._listening.report(0)
        await self.close()
        return found


class _Listening:
    """Sockets and threads between a `StartBeacons` and its `StopBeacons`."""

    def __init__(self, notify: Notify, node: str, asked: StartBeacons) -> None:
        self._notify = notify
        self._interval_ns = asked.interval_ns
        self._lock = threading.Lock()  # over the ledger, the waiters and reading the sockets
        self._ledger = Ledger(node, asked.devices, asked.interval_ns)
        self._waiters: list[_Waiter] = []
        self._hurry = threading.Event()
        self._stopping = False
        self._overflowed: dict[str, int] = {}
        self._sockets: dict[str, socket.socket] = {}
        self._device_of: dict[int, str] = {}
        self._poll = select.epoll()
        try:
            for device in asked.devices:
                self._sockets[device] = opened = open_socket(device)
                self._poll.register(opened, select.EPOLLIN)
                self._device_of[opened.fileno()] = device
        except OSError:
            self._close_sockets()
            raise
        stream = random.SystemRandom().getrandbits(32)
        self._stampers = {name: Stamper(f"{node}:{name}", stream) for name in self._sockets}
        self._threads = [
            threading.Thread(target=self._send, name="beacons out", daemon=True),
            threading.Thread(target=self._receive, name="beacons in", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices."""
        return tuple(self._sockets)

    def report(self, since_ns: int) -> Beacons:
        """Take in what has arrived, and return what happened after `since_ns`."""
        with self._lock:
            self._drain(self._sockets)
            return self._ledger.report(since_ns)

    async def wait(self, asked: Heard, limit_s: float) -> None:
        """Return when the expected far ends were heard, or after `limit_s`."""
        loop = asyncio.get_running_loop()
        waiter = _Waiter(asked.expect, asked.since_ns, loop, loop.create_future())
        with self._lock:
            self._drain(self._sockets)
            if self._ledger.heard(asked.expect, asked.since_ns):
                return
            self._waiters.append(waiter)
            self._hurry.set()
        try:
            await asyncio.wait([waiter.heard], timeout=limit_s)
        finally:
            with self._lock:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
                if not self._waiters:
                    self._hurry.clear()

    def dismiss(self) -> None:
        """Let all waiters go."""
        with self._lock:
            for waiter in self._waiters:
                _let_go(waiter.heard)

    def close(self) -> None:
        """Stop both threads and close the sockets."""
        self._stopping = True
        self._hurry.set()
        for thread in self._threads:
            thread.join(_LIMIT_S)
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._poll.close()
        for opened in self._sockets.values():
            opened.close()

    # -- sending -------------------------------------------------------------------------------

    def _send(self) -> None:
        ask_for_real_time()  # a beacon that is sent late looks like a longer dark time
        sequence = dict.fromkeys(self._sockets, 0)
        due_ns = time.monotonic_ns()
        while not self._stopping:
            for device, opened in self._sockets.items():
                payload = self._stampers[device].payload(sequence[device])
                try:
                    opened.sendto(payload, (GROUP, PORT))
                except OSError as error:
                    if error.errno == errno.ENODEV:
                        self._notify(Note(level="error", text=f"beacons: {device} has gone"))
                        return
                    continue  # the link is down, or its queue full: that beacon was never sent
                sequence[device] += 1
            now_ns = time.monotonic_ns()
            due_ns += (1 + max(0, now_ns - due_ns) // self._interval_ns) * self._interval_ns
            time.sleep((due_ns - now_ns) / NS_PER_S)

    # -- receiving -----------------------------------------------------------------------------

    def _receive(self) -> None:
        ask_for_real_time()  # or it would keep Python's lock from the sender while it is preempted
        while not self._stopping:
            if self._hurry.is_set():
                ready = [self._device_of[number] for number, _ in self._poll.poll(IDLE_S)]
            else:
                self._hurry.wait(IDLE_S)
                ready = list(self._sockets)
            with self._lock:
                self._drain(ready)
                self._wake()

    def _drain(self, devices: Iterable[str]) -> None:
        """Read the sockets of `devices` dry; the lock is held."""
        offset_ns = realtime_offset_ns()
        for device in devices:
            opened = self._sockets[device]
            with suppress(BlockingIOError):
                while True:
                    self._take(device, opened, offset_ns)

    def _take(self, device: str, opened: socket.socket, offset_ns: int) -> None:
        payload, ancillary, _, _ = opened.recvmsg(256, _ROOM)
        at_ns = 0
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS:
                seconds, nanoseconds = _TIMESPEC.unpack(data)
                at_ns = seconds * NS_PER_S + nanoseconds - offset_ns
            elif level == socket.SOL_SOCKET and kind == _SO_RXQ_OVFL:
                self._tell_overflow(device, int.from_bytes(data, "little"))
        beacon = parse(payload)
        if beacon is not None:
            self._ledger.arrived(device, at_ns or time.monotonic_ns(), beacon)

    def _tell_overflow(self, device: str, total: int) -> None:
        if total != self._overflowed.get(device, 0):
            self._overflowed[device] = total
            text = f"beacons: {total} on {device} were lost in this node's own socket so far"
            self._notify(Note(level="warning", text=text))

    def _wake(self) -> None:
        """Let go the waiters whose far ends were heard; the lock is held."""
        for waiter in [w for w in self._waiters if self._ledger.heard(w.expect, w.since_ns)]:
            self._waiters.remove(waiter)
            with suppress(RuntimeError):  # the loop was closed meanwhile
                waiter.loop.call_soon_threadsafe(_let_go, waiter.heard)


def _let_go(heard: asyncio.Future[None]) -> None:
    if not heard.done():
        heard.set_result(None)


def counters(text: str) -> tuple[dict[str, int], dict[str, int]]:
    """Read ``/proc/net/dev``: bytes received and sent, by device (two lines of heading)."""
    rows = (line.rpartition(":") for line in text.splitlines()[2:])
    fields = {name.strip(): values.split() for name, _, values in rows}
    return (
        {name: int(values[0]) for name, values in fields.items()},
        {name: int(values[8]) for name, values in fields.items()},
    )


def without_link(devices: Iterable[str]) -> tuple[str, ...]:
    """Return those that are down, have no carrier, or are gone."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        return tuple(device for device in devices if not _has_link(asked, device))


def _has_link(asked: socket.socket, device: str) -> bool:
    try:
        answer = fcntl.ioctl(asked, _SIOCGIFFLAGS, _IFREQ.pack(device.encode(), 0))
    except OSError:
        return False
    return bool(_IFREQ.unpack(answer)[1] & _IFF_RUNNING)


def open_socket(device: str) -> socket.socket:
    """Return a non-blocking UDP socket in the beacons' group on one device; raises `OSError`."""
    opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    try:
        index = socket.if_nametoindex(device)
        membership = struct.pack("=4s4si", socket.inet_aton(GROUP), b"\0" * 4, index)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode() + b"\0")
        opened.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        opened.setsockopt(socket.SOL_SOCKET, _SO_RXQ_OVFL, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, _PRIORITY)
        _enlarge(opened)
        opened.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, membership)
        opened.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)
        opened.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 0)
        opened.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
        opened.bind((GROUP, PORT))
    except OSError as error:
        opened.close()
        raise OSError(error.errno, f"{device}: {os.strerror(error.errno or 0)}") from error
    return opened


def _enlarge(opened: socket.socket) -> None:
    """Ask for a large receive buffer: past the system's limit where we may, else up to it."""
    try:
        opened.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
    except PermissionError:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)


def realtime_offset_ns() -> int:
    """Return wall minus monotonic time now: the closest of three pairs.

    The kernel stamps packets with wall time; taken at each reading, the pair follows any step.
    """
    pairs = []
    for _ in range(3):
        before_ns = time.monotonic_ns()
        wall_ns = time.clock_gettime_ns(time.CLOCK_REALTIME)
        after_ns = time.monotonic_ns()
        pairs.append((after_ns - before_ns, wall_ns - (before_ns + after_ns) // 2))
    return min(pairs)[1]
