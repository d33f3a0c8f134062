"""Processes that a bench starts and ends: emulators, agents, the store.

Each is recorded by pid and start time the moment it runs, so that whoever finds the record later
can end it; each writes to a log file of its own; all are ended together, then reaped.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from harness.bench import leftovers
from harness.clock import NS_PER_S
from harness.errors import InfrastructureError
from harness.processes import Process, end

FIRST_LINE_S = 20.0
TAIL_BYTES = 2000


class Children:
    """What one bench has started. `record` is the state file that knows them too, if any."""

    def __init__(self, logs: Path, record: Path | None, conceal: Sequence[str] = ()) -> None:
        self._logs, self._record = logs, record
        self._env = {name: text for name, text in os.environ.items() if name not in conceal}
        self._env["HARNESS_LOG_DIR"] = str(logs)
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self,
        name: str,
        argv: Sequence[str],
        *,
        follow: bool = False,
    ) -> subprocess.Popen[bytes]:
        """Start one process in its own session; with `follow` it has pipes for stdin and stdout.

        A child with `follow` sees its standard input close when we end, however we end.
        """
        with (self._logs / f"{name}.log").open("ab") as log:
            child = subprocess.Popen(
                list(argv),
                env=self._env,
                stdin=subprocess.PIPE if follow else subprocess.DEVNULL,
                stdout=subprocess.PIPE if follow else log,
                stderr=log,
                start_new_session=True,
            )
        self._running[name] = child
        if self._record is not None:
            leftovers.add_process(self._record, child.pid, name)
        return child

    async def first_line(self, name: str, limit_s: float = FIRST_LINE_S) -> str:
        """Return the first line that a followed child prints; raises `InfrastructureError`."""
        child = self._running[name]
        assert child.stdout is not None, f"{name} is not followed"
        try:
            async with asyncio.timeout(limit_s):
                line = await _line_of(child.stdout.fileno())
        except TimeoutError as error:
            raise InfrastructureError(f"{name}: not ready after {limit_s:g} s") from error
        if not line:
            await asyncio.to_thread(child.wait, 5)
            raise InfrastructureError(f"{name}: did not start: {self.last_words(name)}")
        return line

    def last_words(self, name: str) -> str:
        """Return the end of a child's log, for a message."""
        text = (self._logs / f"{name}.log").read_bytes()[-TAIL_BYTES:].decode(errors="replace")
        return text.strip() or "it left no word"

    async def watch(self) -> NoReturn:
        """Raise `InfrastructureError` once children have ended by themselves: who, and how."""
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        handles = [os.pidfd_open(child.pid) for child in self._running.values()]
        try:
            for handle in handles:
                loop.add_reader(handle, readable.set)
            await readable.wait()
        finally:
            for handle in handles:
                loop.remove_reader(handle)
                os.close(handle)
        ended = [name for name, child in self._running.items() if child.poll() is not None]
        told = (
            f"{name} ended early, {_how(self._running[name].returncode)}: {self.last_words(name)}"
            for name in ended
        )
        raise InfrastructureError("; ".join(told))

    def end(self, names: Sequence[str] | None = None, grace_s: float = 2.0) -> None:
        """End these (or all) together: SIGTERM, then SIGKILL; reap; raises what survives."""
        chosen = [self._running.pop(name) for name in names or list(self._running)]
        living = [child for child in chosen if child.poll() is None]
        processes = [process for child in living if (process := _identify(child.pid))]
        standing = end(processes, grace_ns=round(grace_s * NS_PER_S))
        for child in chosen:
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()
        if standing:
            pids = ", ".join(str(process.pid) for process in standing)
            raise InfrastructureError(f"processes {pids} survived SIGKILL")
        for child in chosen:
            child.wait(1)


def agent_argv(name: str, coordinator: str, keys_folder: Path) -> list[str]:
    """Return the arguments after ``python`` that start an agent."""
    keys = str(keys_folder)
    return ["-m", "agents", "--name", name, "--coordinator", coordinator, "--keys", keys]


def _how(status: int) -> str:
    """Say in words how a process ended, from `subprocess`'s return code."""
    if status >= 0:
        return f"with status {status}"
    known = {number.value: number.name for number in signal.Signals}
    return f"killed by {known.get(-status, f'signal {-status}')}"


def _identify(pid: int) -> Process | None:
    try:
        return Process.of(pid)
    except ProcessLookupError:
        return None


async def _line_of(descriptor: int) -> str:
    """Read one line without blocking the loop; "" at the end of the stream."""
    loop, collected = asyncio.get_running_loop(), bytearray()
    while not collected.endswith(b"\n"):
        readable = asyncio.Event()
        loop.add_reader(descriptor, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(descriptor)
        chunk = os.read(descriptor, 4096)
        if not chunk:
            return ""
        collected += chunk
    return collected.decode(errors="replace").strip()
