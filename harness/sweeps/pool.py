"""Points made on this machine: worker processes, each of which may fail without the others.

A worker that dies, or takes longer than its point may, loses that point alone, and another takes
its place. Workers are processes of their own, started afresh: what one point does to its process
(memory, threads, compiled code) cannot reach another machine's or another sweep's.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from harness.clock import NS_PER_MS, NS_PER_S, Clock
from harness.errors import InfrastructureError
from harness.sweeps.point import Measure, Point, Row, row_of
from harness.sweeps.worker import READY, name_of

START_LIMIT_S = 120.0
CHUNK = 2**16
ONE_THREAD = dict.fromkeys(
    ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
)


Rows = Generator[Row, None, None]


class Executor(Protocol):
    """What makes points."""

    def made(self, points: Sequence[Point]) -> Rows:
        """Yield a row for each point, as they come. Closing it ends all work on them.

        Raises `InfrastructureError` where points cannot be made at all.
        """


class LocalPool:
    """`jobs` workers of this machine. `log` takes what they write to standard error."""

    def __init__(self, measure: Measure, jobs: int, clock: Clock, log: Path) -> None:
        self._measure, self._jobs, self._clock, self._log = measure, jobs, clock, log

    def made(self, points: Sequence[Point]) -> Rows:
        """See `Executor`."""
        waiting = deque(points)
        workers: dict[int, _Worker] = {}
        poll = select.poll()

        def dismiss(worker: _Worker) -> None:
            poll.unregister(workers.pop(worker.descriptor).descriptor)
            worker.end()

        try:
            while waiting or workers:
                while waiting and len(workers) < self._jobs:
                    worker = _Worker(self._measure, self._clock, self._log)
                    workers[worker.descriptor] = worker
                    poll.register(worker.descriptor, select.POLLIN)
                    worker.give(waiting.popleft())
                until_ns = min(worker.deadline_ns for worker in workers.values())
                left_ms = (until_ns - self._clock.now_ns()) / NS_PER_MS
                for descriptor, _ in poll.poll(max(0.0, left_ms)):
                    worker = workers[descriptor]
                    if (row := worker.heard()) is None:
                        continue
                    yield row
                    if worker.is_gone or not waiting:
                        dismiss(worker)
                    else:
                        worker.give(waiting.popleft())
                for worker in [each for each in workers.values() if each.is_late]:
                    yield worker.late()
                    dismiss(worker)
        finally:
            for worker in list(workers.values()):
                dismiss(worker)


class _Worker:
    """One process, and the point that it is at."""

    def __init__(self, measure: Measure, clock: Clock, log: Path) -> None:
        self._clock, self._log = clock, log
        with log.open("ab") as file:
            self._log_begin = file.tell()
            self._child = subprocess.Popen(
                [sys.executable, "-m", "harness.sweeps.worker", str(os.getpid()), name_of(measure)],
                env=os.environ
                | ONE_THREAD
                | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,  # Ctrl-C is for the sweep, which ends its workers
            )
        assert self._child.stdout is not None
        self.descriptor = self._child.stdout.fileno()
        self.is_gone = False
        self._heard = bytearray()
        self._is_ready = False
        self._point: Point | None = None
        self.deadline_ns = 0

    def give(self, point: Point) -> None:
        """Let it make a point, once it is ready."""
        self._point = point
        self._limit(START_LIMIT_S)
        if self._is_ready:
            self._ask()

    def _ask(self) -> None:
        assert self._point is not None
        assert self._child.stdin is not None
        self._limit(self._point.timeout_s)
        try:
            self._child.stdin.write(msgspec.json.encode(self._point) + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            return  # it died; its output says so next

    def _limit(self, limit_s: float) -> None:
        self.deadline_ns = self._clock.now_ns() + round(limit_s * NS_PER_S)

    def heard(self) -> Row | None:
        """Take what it wrote; return the row of its point, or of its death."""
        chunk = os.read(self.descriptor, CHUNK)
        if not chunk:
            return self._dead()
        self._heard += chunk
        if not self._heard.endswith(b"\n"):
            return None
        line = bytes(self._heard)
        self._heard.clear()
        if line == READY:
            self._is_ready = True
            self._ask()
            return None
        return msgspec.json.decode(line, type=Row)

    def _dead(self) -> Row:
        how = describe_exit(self._child.wait())
        if not self._is_ready:
            raise InfrastructureError(f"a worker did not start: {how}: {self._last_words()}")
        self.is_gone = True
        return self._failed(f"its process {how}")

    @property
    def is_late(self) -> bool:
        """Whether its time is over."""
        return self._clock.now_ns() >= self.deadline_ns

    def late(self) -> Row:
        """Return the row of a point that took too long."""
        if not self._is_ready:
            raise InfrastructureError(f"a worker was not ready after {START_LIMIT_S:g} s")
        assert self._point is not None
        return self._failed(f"took more than {self._point.timeout_s:g} s (timeout_s)")

    def _failed(self, error: str) -> Row:
        assert self._point is not None
        return row_of(self._point, error=error)

    def _last_words(self) -> str:
        with self._log.open("rb") as file:
            file.seek(self._log_begin)
            lines = file.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it left no word"

    def end(self) -> None:
        """Kill it where it still runs, and reap it."""
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            pipe.close()


def describe_exit(status: int) -> str:
    """Say in words how a process ended, from `subprocess`'s return code."""
    if status >= 0:
        return f"exited with status {status}"
    known = {number.value: number.name for number in signal.Signals}
    told = known.get(-status, f"signal {-status}")
    hint = " (by hand, or because the machine ran out of memory)" if told == "SIGKILL" else ""
    return f"was killed by {told}{hint}"
