"""Children of an agent: each leads its own session, is known by pid and start time, dies with us.

A child's whole process group is killed, and only that: never by name, and never a pid whose start
time is not the recorded one. The leader is reaped after its group was killed, so the number cannot
have passed to a stranger meanwhile. `Unkillable` names what outlives SIGKILL (a process stuck in
the kernel).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import IO

from harness.clock import NS_PER_S
from harness.errors import InfrastructureError
from harness.processes import start_ticks, stat

KILL_LIMIT_NS = 5 * NS_PER_S
_POLL_S = 0.005
_PR_SET_PDEATHSIG = 1


class Unkillable(InfrastructureError):
    """Processes that are still there after SIGKILL; the message names their pids."""


def group_members(group: int) -> list[int]:
    """Return the pids in a process group (of a session of its own), zombies left out."""
    members = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := stat(int(entry))):
            state, _, found, session = fields[:4]
            if int(found) == int(session) == group and state != "Z":
                members.append(int(entry))
    return members


def die_with(parent: int) -> None:
    """Make this process die when `parent`, which started it, does; leave at once if it has.

    Called first thing in a child. The kernel sends the signal when the *thread* that started the
    child ends, so children are started from the agent's main thread.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)


def describe_exit(status: int) -> str:
    """Say in words how a process ended, from `subprocess`'s return code."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


class Child:
    """One child and its process group, alive or not."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self.pid = popen.pid
        self.started = start_ticks(popen.pid)
        self.pidfd = os.pidfd_open(popen.pid)
        """Readable once the child has ended."""

    def kill(self) -> None:
        """Send SIGKILL to the whole group. Harmless when it is gone; callable from any thread."""
        if self.started is None or start_ticks(self.pid) != self.started:
            return  # reaped: the number may be another's by now
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def reap(self) -> int | None:
        """Kill what is left of an ended child's group, and return its status; None: it lives."""
        if self._popen.returncode is None:
            ended = os.waitid(
                os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT
            )  # seen, not reaped: the group's number stays ours
            if ended is None:
                return None
            self.kill()
        return self._popen.wait()

    async def end(self, limit_ns: int = KILL_LIMIT_NS) -> int:
        """Kill the group, reap the child, see the group gone; return the child's status.

        Raises `Unkillable` after `limit_ns`.
        """
        deadline_ns = time.monotonic_ns() + limit_ns
        self.kill()
        while (status := self.reap()) is None or group_members(self.pid):
            if time.monotonic_ns() > deadline_ns:
                left = group_members(self.pid) or [self.pid]
                raise Unkillable(
                    f"still there {limit_ns / NS_PER_S:g} s after SIGKILL: processes {left}"
                )
            await asyncio.sleep(_POLL_S)
        return status

    def close(self) -> None:
        """Release the handle; after `end`."""
        os.close(self.pidfd)


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    pass_fds: Sequence[int] = (),
    output: IO[bytes] | None = None,
) -> Child:
    """Start a child in a session (and process group) of its own.

    `output` takes its standard output and error; None: inherited. Standard input is empty. The
    child itself calls `die_with`, before anything that takes time.
    """
    return Child(
        subprocess.Popen(
            list(argv),
            env=dict(env),
            pass_fds=tuple(pass_fds),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    )
