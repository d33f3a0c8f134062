"""Numbered packets between uplinks, in processes of their own: who sends, who hears, what was lost.

``python -m tests.benchmarks.numbered send|hear FILE INTERVAL_NS NAMESPACE...`` works until its
standard input ends and then leaves its log in FILE, 64-bit integers in rows of three: stream,
number, stamp (ns, CLOCK_REALTIME, which is what the kernel stamps arrivals with). Stream k is what
the k-th sending namespace sends out of its first uplink, by multicast: it needs no route and tells
whoever is at the other end of the circuit.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from drivers.netlink import run_in

DEVICE = "u1"
GROUP, PORT = "239.255.77.1", 7701
SO_TIMESTAMPNS = 35
SO_RCVBUFFORCE, RECEIVE_BYTES = 33, 1 << 25
PACKET = struct.Struct("=qq")
TIMESPEC = struct.Struct("=qq")
NS_PER_S = 1_000_000_000
Row = tuple[int, int, int]


def main(role: str, path: Path, interval_ns: int, namespaces: list[str]) -> None:
    # Ahead of other work on a busy machine: what is to be measured is the light, not our turn.
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    log = array.array("q")
    if role == "send":
        send([run_in(name, sender) for name in namespaces], interval_ns, log)
    else:
        hear([run_in(name, hearer) for name in namespaces], log)
    path.write_bytes(log.tobytes())


def sender() -> socket.socket:
    found = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    index = socket.if_nametoindex(DEVICE)
    leave_by = struct.pack("=4s4si", bytes(4), bytes(4), index)
    found.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, leave_by)
    return found


def hearer() -> socket.socket:
    found = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    index = socket.if_nametoindex(DEVICE)
    join = struct.pack("=4s4si", socket.inet_aton(GROUP), bytes(4), index)
    found.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, join)
    found.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BYTES)
    found.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    found.bind((GROUP, PORT))
    found.setblocking(False)
    return found


def send(sockets: list[socket.socket], interval_ns: int, log: array.array[int]) -> None:
    """Send one packet on every stream each `interval_ns`; a late turn is not made up for."""
    number, due_ns = 0, time.monotonic_ns()
    _say_ready()
    while not select.select([sys.stdin], [], [], 0)[0]:
        for stream, found in enumerate(sockets):
            log.extend((stream, number, time.time_ns()))
            found.sendto(PACKET.pack(stream, number), (GROUP, PORT))
        number += 1
        due_ns = max(due_ns + interval_ns, time.monotonic_ns())
        time.sleep((due_ns - time.monotonic_ns()) / NS_PER_S if due_ns > time.monotonic_ns() else 0)


def hear(sockets: list[socket.socket], log: array.array[int]) -> None:
    poll = select.poll()
    by_fd = {found.fileno(): found for found in sockets}
    for fd in (*by_fd, sys.stdin.fileno()):
        poll.register(fd, select.POLLIN)
    _say_ready()
    while True:
        ready = [fd for fd, _ in poll.poll()]
        for fd in ready:
            if fd in by_fd:
                _drain(by_fd[fd], log)
        if ready == [sys.stdin.fileno()]:
            return


def _say_ready() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()


def _drain(found: socket.socket, log: array.array[int]) -> None:
    with suppress(BlockingIOError):
        while True:
            data, stamps, _, _ = found.recvmsg(64, socket.CMSG_SPACE(TIMESPEC.size))
            seconds, rest_ns = TIMESPEC.unpack(stamps[0][2][: TIMESPEC.size])
            log.extend((*PACKET.unpack(data), seconds * NS_PER_S + rest_ns))


# -- reading the logs ----------------------------------------------------------------------------


def read(path: Path) -> Iterator[Row]:
    """Yield the rows of a log."""
    log = array.array("q")
    log.frombytes(path.read_bytes())
    for at in range(0, len(log), 3):
        yield log[at], log[at + 1], log[at + 2]


def lost_runs(sent: dict[int, int], heard: set[int]) -> Iterator[tuple[int, int]]:
    """Yield (longest, shortest) duration in ns of each darkness that the lost numbers allow.

    `sent` maps numbers to send stamps. Between the last packet that passed and the first one lost
    the light went; between the last one lost and the first that passed it came back.
    """
    numbers = sorted(sent)
    first_lost: int | None = None
    for at, number in enumerate(numbers):
        if number not in heard:
            first_lost = at if first_lost is None else first_lost
        elif first_lost is not None:
            if first_lost > 0:
                before, after = numbers[first_lost - 1], number
                longest = sent[after] - sent[before]
                yield longest, sent[numbers[at - 1]] - sent[numbers[first_lost]]
            first_lost = None


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
