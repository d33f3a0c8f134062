"""Processes known by pid *and* start time, and ended without ever hitting a stranger.

A pid alone may be somebody else's by now. A process is therefore recorded with its start time
(clock ticks since boot, field 22 of ``/proc/<pid>/stat``) and signalled through a pidfd, opened
first and compared after: what was compared is what is hit.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from harness.clock import NS_PER_MS

T = TypeVar("T")

GRACE_NS = 2_000 * NS_PER_MS


def stat(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/PID/stat`` from the state on; None when the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()  # the name in brackets may hold anything


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None when it is gone.

    A zombie still has its number, and so its start.
    """
    fields = stat(pid)
    return int(fields[19]) if fields else None


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One process of this machine, of this boot."""

    pid: int
    start_ticks: int
    name: str = ""

    @classmethod
    def of(cls, pid: int, name: str = "") -> Process:
        """Identify a running process; raise `ProcessLookupError` where there is none."""
        ticks = start_ticks(pid)
        if ticks is None:
            raise ProcessLookupError(f"no process {pid} ({name})")
        return cls(pid=pid, start_ticks=ticks, name=name)

    def is_alive(self) -> bool:
        """Whether this very process runs (a zombie does not)."""
        fields = stat(self.pid)
        return fields is not None and fields[0] not in "ZX" and int(fields[19]) == self.start_ticks


def end(processes: Iterable[Process], *, grace_ns: int = GRACE_NS) -> tuple[Process, ...]:
    """Ask all to end, wait `grace_ns` together, kill the rest; return those that still stand.

    A process that hangs in the kernel can outlive SIGKILL; it is returned after as long again.
    """
    handles = {}
    try:
        for process in processes:
            if (handle := _open(process)) is not None:
                handles[process] = handle
        for number in (signal.SIGTERM, signal.SIGKILL):
            for handle in handles.values():
                _signal(handle, number)
            _wait(handles, time.monotonic_ns() + grace_ns)
            if not handles:
                break
        return tuple(handles)
    finally:
        for handle in handles.values():
            os.close(handle)


def _open(process: Process) -> int | None:
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if process.is_alive():
        return handle
    os.close(handle)
    return None


def _signal(handle: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it ended by itself; the wait will see that
        signal.pidfd_send_signal(handle, number)


def _wait(handles: dict[Process, int], deadline_ns: int) -> None:
    """Close and remove the handles of processes that end by the deadline."""
    poll = select.poll()
    process_of = {handle: process for process, handle in handles.items()}
    for handle in process_of:
        poll.register(handle, select.POLLIN)
    while handles:
        left_ns = deadline_ns - time.monotonic_ns()
        if left_ns <= 0:
            return
        for handle, _ in poll.poll(left_ns / NS_PER_MS):
            poll.unregister(handle)
            os.close(handles.pop(process_of[handle]))


def ask_for_real_time() -> None:
    """Let this thread run before ordinary ones, where we may; what it starts does not inherit it.

    For threads that do little but must not wait for a processor: on a busy machine an ordinary
    thread waits for milliseconds.
    """
    with suppress(PermissionError):
        policy = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(0, policy, os.sched_param(1))


def is_real_time() -> bool:
    """Whether this thread runs before ordinary ones."""
    return os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK == os.SCHED_FIFO


async def think(work: Callable[[], T]) -> T:
    """Return what `work` comes to, in a thread that is as urgent as this one: the loop goes on.

    An ordinary thread would lose its processor while it holds Python's lock, and the loop with it.
    """
    urgent = is_real_time()

    def thinking() -> T:
        if urgent:
            ask_for_real_time()
        return work()

    return await asyncio.to_thread(thinking)


@contextmanager
def awake() -> Iterator[None]:
    """Keep this machine's processors out of deep idle states, where we may (PM QoS).

    Between two messages everybody sleeps, and waking a halted processor takes longer than the
    message. The request holds as long as the file is open: it ends with us, however we end.
    """
    try:
        latency = os.open("/dev/cpu_dma_latency", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:  # not there, or not ours to ask
        yield
        return
    try:
        os.write(latency, struct.pack("=i", 0))
        yield
    finally:
        os.close(latency)
